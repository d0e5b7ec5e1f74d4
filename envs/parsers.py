"""Model text to tool-call attempts, for each dialect: every attempt is kept, in order, with what was wrong with it.

Nothing inside reasoning runs. A turn that was cut by length runs nothing. Strict: what is not well-formed is reported
to the model, not guessed at.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol

from envs.tools import Tool
from envs.types import CallStatus, Message, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Dialect(Protocol):
    """How a family of models writes calls and reads results."""

    @property
    def name(self) -> str: ...

    def parse(self, text: str, finish: Literal["stop", "length"], tools: Mapping[str, Tool]) -> tuple[ToolCall, ...]:
        """Every attempt in the text, in order; never raises."""
        ...

    def system_text(self, schemas: Sequence[dict[str, Any]]) -> str:
        """How to call these tools, in words, for chat templates that cannot say it."""
        ...

    def result_message(self, name: str, text: str) -> Message:
        """One result as a chat message."""
        ...

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        """A call as a model would write it (for traces)."""
        ...


def outside_reasoning(text: str) -> str:
    """The text with everything inside think tags blanked out, so that positions stay.

    A closing tag without an opening one ends reasoning that the prompt opened; an opening one without end never ends.
    """
    blank: Callable[[re.Match[str]], str] = lambda match: " " * len(match.group())  # noqa: E731
    text = re.sub(r"<think>.*?</think>", blank, text, flags=re.DOTALL)
    text = re.sub(r"\A.*</think>", blank, text, flags=re.DOTALL)
    return re.sub(r"<think>.*\Z", blank, text, flags=re.DOTALL)


@dataclass(frozen=True, slots=True)
class Hermes:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes 2 Pro and Qwen2.5 write it."""

    name: str = "hermes"

    def parse(self, text: str, finish: Literal["stop", "length"], tools: Mapping[str, Tool]) -> tuple[ToolCall, ...]:
        visible = outside_reasoning(text)
        calls: list[ToolCall] = []
        start = visible.find(OPEN)
        while start >= 0:
            call, end = self._one(visible, start, tools)
            if finish == "length" and call.status == "ok":
                call = ToolCall(status="unclosed", error="the turn was cut off", span=call.span)
            calls.append(call)
            start = visible.find(OPEN, end)
        return tuple(calls)

    def _one(self, text: str, start: int, tools: Mapping[str, Tool]) -> tuple[ToolCall, int]:
        body = start + len(OPEN)
        while body < len(text) and text[body].isspace():
            body += 1
        try:
            value, end = _DECODER.raw_decode(text, body)
        except (ValueError, RecursionError) as error:
            close = text.find(CLOSE, body)
            if close < 0:
                return _unclosed(start, len(text))
            end = close + len(CLOSE)
            message = f"the text between {OPEN} and {CLOSE} is not valid JSON: {error}"
            return ToolCall(status="invalid_json", error=message, span=(start, end)), end
        rest = len(text) - len(text[end:].lstrip())
        if not text.startswith(CLOSE, rest):
            close = text.find(CLOSE, end)
            if close < 0:
                return _unclosed(start, len(text))
            end = close + len(CLOSE)
            message = f"there is more than one JSON object between {OPEN} and {CLOSE}"
            return ToolCall(status="invalid_json", error=message, span=(start, end)), end
        end = rest + len(CLOSE)
        return self._checked(value, tools, (start, end)), end

    def _checked(self, value: Any, tools: Mapping[str, Tool], span: tuple[int, int]) -> ToolCall:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or "arguments" not in value:
            message = 'a call is one JSON object with "name" and "arguments"'
            return ToolCall(status="malformed", error=message, span=span)
        return checked_call(value["name"], value["arguments"] or {}, tools, span)

    def system_text(self, schemas: Sequence[dict[str, Any]]) -> str:
        listed = "\n".join(json.dumps(schema) for schema in schemas)
        return (
            f"You can call tools:\n<tools>\n{listed}\n</tools>\n"
            f'To call one, write\n{OPEN}\n{{"name": <name>, "arguments": <object>}}\n{CLOSE}'
        )

    def result_message(self, name: str, text: str) -> Message:
        return {"role": "tool", "name": name, "content": text}

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        return f"{OPEN}\n{json.dumps({'name': name, 'arguments': arguments})}\n{CLOSE}"


@dataclass(frozen=True, slots=True)
class CodeFence:
    """A fenced block of Python is a call of the ``python`` tool; what follows the first block was written unseen."""

    name: str = "codefence"

    def parse(self, text: str, finish: Literal["stop", "length"], tools: Mapping[str, Tool]) -> tuple[ToolCall, ...]:
        visible = outside_reasoning(text)
        opening = re.search(r"^```(?:python|py)[ \t]*\n", visible, flags=re.MULTILINE)
        if opening is None:
            return ()
        closing = re.compile(r"^```[ \t]*$", flags=re.MULTILINE).search(visible, opening.end())
        if closing is None or finish == "length":
            return (_unclosed(opening.start(), len(visible))[0],)
        span = (opening.start(), closing.end())
        code = visible[opening.end() : closing.start()].rstrip("\n")
        try:
            compile(code, "main.py", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            message = f"the block is not a Python program: {error}"
            return (ToolCall(status="malformed", name="python", error=message, span=span),)
        return (checked_call("python", {"code": code}, tools, span),)

    def system_text(self, schemas: Sequence[dict[str, Any]]) -> str:
        return "To run Python, write one block\n```python\nprint(...)\n```\nand stop; you are then told what it prints."

    def result_message(self, name: str, text: str) -> Message:
        return {"role": "user", "content": f"```output\n{text}\n```"}

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        return f"```python\n{arguments['code']}\n```"


DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (Hermes(), CodeFence())}


def get_dialect(name: str) -> Dialect:
    """Raises ``ValueError`` naming the dialects that there are."""
    if name not in DIALECTS:
        close = difflib.get_close_matches(name, DIALECTS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(DIALECTS)}"
        raise ValueError(f"no tool-call dialect {name!r}: {hint}")
    return DIALECTS[name]


def checked_call(name: str, arguments: Any, tools: Mapping[str, Tool], span: tuple[int, int]) -> ToolCall:
    """An attempt whose form is right, judged by what the tools accept."""
    if name not in tools:
        message = f"there is no tool {name!r}; there are {', '.join(sorted(tools))}"
        return ToolCall(status="unknown_tool", name=name, error=message, span=span)
    fault = tools[name].fault(arguments) if isinstance(arguments, dict) else "arguments must be a JSON object"
    status: CallStatus = "invalid_args" if fault else "ok"
    return ToolCall(status=status, name=name, arguments=None if fault else arguments, error=fault, span=span)


def _unclosed(start: int, end: int) -> tuple[ToolCall, int]:
    return ToolCall(status="unclosed", error="the call has no end", span=(start, end)), end


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
