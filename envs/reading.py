"""What every dialect's reader is built from: the left-to-right scan around reasoning, strict JSON, the check of a call.

A reader gets the text and where an attempt opens; it returns the attempt and where it ends. Tags inside a well-formed
JSON string are text, so an attempt is read whole before the scan looks for the next tag.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from envs.tools import Tool
from envs.types import CallStatus, Finish, Message, ToolCall

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

Read = Callable[[str, re.Match[str], int], tuple[ToolCall | None, int]]
"""(text, opening match, start of the current run of plain text) -> (attempt or None for "this is text", its end)."""


class BadJson(ValueError):
    """Why a value could not be read; ``ran_out`` when the text ended inside it."""

    def __init__(self, message: str, *, ran_out: bool = False) -> None:
        super().__init__(message)
        self.ran_out = ran_out


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What is in a turn: attempts in order, and the spans ``[start, end)`` of reasoning."""

    calls: tuple[ToolCall, ...]
    reasoning: tuple[tuple[int, int], ...]
    end: int | None = None  # what follows was written without seeing a result it should have waited for

    def content(self, text: str) -> str:
        """The text without reasoning and attempts, stripped."""
        kept, end = [], 0
        for start, stop in sorted([*self.reasoning, *(call.span for call in self.calls)]):
            kept.append(text[end:start])
            end = max(end, stop)
        return "".join([*kept, text[end : self.end]]).strip()

    def first_call_only(self) -> Scan:
        """For dialects in which a call ends the turn: what was written after the first one counts for nothing."""
        return Scan(calls=self.calls[:1], reasoning=self.reasoning, end=self.calls[0].span[1]) if self.calls else self


class DialectBase:
    """What dialects share: results go back as messages of role ``tool``, which the chat template dresses."""

    def scan(self, text: str, tools: Mapping[str, Tool]) -> Scan:
        raise NotImplementedError

    def parse(self, text: str, finish: Finish, tools: Mapping[str, Tool]) -> tuple[ToolCall, ...]:
        """Every attempt in the text, in order; never raises. One that the length limit cut off is ``unclosed``."""
        calls = self.scan(text, tools).calls
        if finish == "length" and calls and calls[-1].status != "ok" and calls[-1].span[1] == len(text):
            calls = (*calls[:-1], unclosed(*calls[-1].span))
        return calls

    def result_message(self, name: str, text: str) -> Message:
        return {"role": "tool", "name": name, "content": text}


def scan(text: str, opening: str, read: Read, *, verbatim: bool = False) -> Scan:
    """Every attempt outside reasoning.

    A closing think tag without an opening one ends reasoning that the prompt opened: all before it is reasoning. An
    opening one without an end never ends.

    Args:
        opening: pattern that may open an attempt.
        read: reads one attempt.
        verbatim: the dialect does not quote values, so a closing think tag in an attempt cannot be told from the end
            of reasoning, and is taken for that.
    """
    tags = re.compile(f"(?P<open>{THINK_OPEN})|(?P<close>{THINK_CLOSE})|(?:{opening})")
    calls: list[ToolCall] = []
    reasoning: list[tuple[int, int]] = []
    position = run = 0
    while match := tags.search(text, position):
        if match["open"]:
            close = text.find(THINK_CLOSE, match.end())
            position = run = len(text) if close < 0 else close + len(THINK_CLOSE)
            reasoning.append((match.start(), position))
        elif match["close"]:
            position = run = match.end()
            calls, reasoning = [], [(0, position)]
        else:
            call, position = read(text, match, run)
            stray = text.find(THINK_CLOSE, match.end(), position)
            if stray >= 0 and (verbatim or call is None or call.status in ("unclosed", "invalid_json", "malformed")):
                position = stray  # a draft that was broken off; the tag itself is met next
            elif call is not None:
                calls.append(call)
                run = position
    return Scan(calls=tuple(calls), reasoning=tuple(reasoning))


def outside_reasoning(text: str) -> str:
    """The text with everything inside think tags blanked out, so that positions stay.

    ``"a <think>b</think> c"`` becomes ``"a                  c"``.
    """
    spans = scan(text, r"(?!)", _no_attempt).reasoning
    for start, end in spans:
        text = text[:start] + " " * (end - start) + text[end:]
    return text


def decode_json(text: str, start: int) -> tuple[Any, int]:
    """One JSON value from ``start`` (blanks skipped) and where it ends.

    Strict: no NaN, no infinity, no lone surrogate (no program or file could take it). Raises ``BadJson``.
    """
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        ran_out = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        raise BadJson(str(error), ran_out=ran_out) from None
    except RecursionError:
        raise BadJson("it is nested too deeply") from None
    except ValueError as error:
        raise BadJson(str(error)) from None
    if fault := unfit(value):
        raise BadJson(fault)
    return value, end


def unfit(value: Any) -> str:
    """Why a value cannot be an argument although it was read; empty when it can."""
    stack = [value]
    while stack:  # not recursive: the depth is the model's choice
        item = stack.pop()
        if isinstance(item, dict):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            stack += item
        elif isinstance(item, float) and not math.isfinite(item):
            return "a number is too large"
        elif isinstance(item, str) and re.search("[\ud800-\udfff]", item):
            return "a string holds half of a surrogate pair"
        elif item is not None and not isinstance(item, (str, int, float)):
            return f"a {type(item).__name__} is no JSON value"
    return ""


def checked_call(name: str, arguments: Any, tools: Mapping[str, Tool], span: tuple[int, int]) -> ToolCall:
    """An attempt whose form is right, judged by what the tools accept."""
    if name not in tools:
        message = f"there is no tool {name[:80]!r}; there are {', '.join(sorted(tools)) or 'none'}"
        return ToolCall(status="unknown_tool", name=name, error=message, span=span)
    fault = tools[name].fault(arguments) if isinstance(arguments, dict) else "arguments must be a JSON object"
    status: CallStatus = "invalid_args" if fault else "ok"
    return ToolCall(status=status, name=name, arguments=None if fault else arguments, error=fault, span=span)


def unclosed(start: int, end: int, name: str | None = None) -> ToolCall:
    return ToolCall(status="unclosed", name=name, error="the call has no end, so it was not run", span=(start, end))


def invalid_json(message: str, start: int, end: int) -> ToolCall:
    return ToolCall(status="invalid_json", error=message, span=(start, end))


def malformed(message: str, start: int, end: int, name: str | None = None) -> ToolCall:
    return ToolCall(status="malformed", name=name, error=message, span=(start, end))


def typed_by_schema(raw: Mapping[str, str], tool: Tool | None) -> dict[str, Any] | str:
    """Arguments that a dialect writes without quotes, read as the schema types them; words for the model on failure.

    Where the schema allows a string the text stays as it is (a zip code ``02134`` must not become a number);
    everything else is JSON. ``{"query": "02134", "k": "3"}`` becomes ``{"query": "02134", "k": 3}``.
    """
    properties = tool.schema["function"]["parameters"].get("properties", {}) if tool else {}
    arguments: dict[str, Any] = {}
    for key, value in raw.items():
        if _allows_string(properties.get(key, {"type": "string"})):
            arguments[key] = value
            continue
        try:
            arguments[key], end = decode_json(value, 0)
        except BadJson:
            return f"{key}: {value[:80]!r} is not JSON"
        if value[end:].strip():
            return f"{key}: {value[:80]!r} is more than one JSON value"
    return arguments


def _allows_string(schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type")
    options = schema.get("anyOf", [])
    return (
        kind == "string"
        or (isinstance(kind, list) and "string" in kind)
        or any(_allows_string(option) for option in options)
        or (kind is None and not options and all(isinstance(value, str) for value in schema.get("enum", [0])))
    )


def _no_attempt(text: str, match: re.Match[str], run: int) -> tuple[None, int]:
    raise AssertionError("the pattern never matches")


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
