"""Dialects that write arguments as a JSON object: Hermes, Llama 3, Mistral, DeepSeek, Kimi."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.reading import (
    BadJson,
    DialectBase,
    Read,
    Scan,
    checked_call,
    decode_json,
    invalid_json,
    malformed,
    scan,
    unclosed,
)
from envs.tools import Tool
from envs.types import Message, ToolCall


@dataclass(frozen=True, slots=True)
class Hermes(DialectBase):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes 2 Pro and Qwen2.5 write it."""

    name: str = "hermes"

    def scan(self, text: str, tools: Mapping[str, Tool]) -> Scan:
        def read(text: str, match: re.Match[str], run: int) -> tuple[ToolCall, int]:
            start = match.start()
            try:
                value, end = decode_json(text, match.end())
            except BadJson as error:
                end = _after(text, HERMES_CLOSE, match.end())
                if end < 0:
                    return unclosed(start, len(text)), len(text)
                deep = re.match(r'\s*\{\s*"name"\s*:\s*"([\w-]+)"', text[match.end() : end])
                if "too deeply" in str(error) and deep and deep[1] in tools:
                    call = ToolCall(status="invalid_args", name=deep[1], error=str(error), span=(start, end))
                    return call, end
                message = f"the text between {HERMES_OPEN} and {HERMES_CLOSE} is not valid JSON: {error}"
                return invalid_json(message, start, end), end
            close = re.compile(r"\s*" + HERMES_CLOSE).match(text, end)
            if close is None:
                end = _after(text, HERMES_CLOSE, end)
                if end < 0:
                    return unclosed(start, len(text)), len(text)
                message = f"there is more than one JSON object between {HERMES_OPEN} and {HERMES_CLOSE}"
                return invalid_json(message, start, end), end
            return _named_call(value, ("arguments",), tools, start, close.end()), close.end()

        return scan(text, HERMES_OPEN, read)

    def system_text(self, schemas: Sequence[dict[str, Any]]) -> str:
        return (
            f"You can call tools:\n<tools>\n{_lines(schemas)}\n</tools>\n"
            f'To call one, write\n{HERMES_OPEN}\n{{"name": <name>, "arguments": <object>}}\n{HERMES_CLOSE}'
        )

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        return f"{HERMES_OPEN}\n{json.dumps({'name': name, 'arguments': arguments})}\n{HERMES_CLOSE}"


@dataclass(frozen=True, slots=True)
class Llama3Json(DialectBase):
    """The whole turn is ``{"name": ..., "parameters": {...}}``, several joined by ``;``, or follows ``<|python_tag|>``.

    JSON after prose is prose: "Sure: {...}" calls nothing.
    """

    name: str = "llama3_json"

    def scan(self, text: str, tools: Mapping[str, Tool]) -> Scan:
        def read(text: str, match: re.Match[str], run: int) -> tuple[ToolCall | None, int]:
            start, tagged = match.start(), match.group() == PYTHON_TAG
            lead = re.compile(r"[\s;]*").match(text, run)
            if not tagged and (lead is None or lead.end() != start):
                return None, match.end()
            if not tagged and not LLAMA_CALL.match(text, start):
                return None, match.end()  # JSON, but of something else
            try:
                value, end = decode_json(text, match.end() if tagged else start)
            except BadJson as error:
                if error.ran_out:
                    return unclosed(start, len(text)), len(text)
                return invalid_json(f"the call is not valid JSON: {error}", start, len(text)), len(text)
            if not tagged and not {"parameters", "arguments"} & set(value) and value.get("name") not in tools:
                return None, end
            return _named_call(value, ("parameters", "arguments"), tools, start, end), end

        return scan(text, re.escape(PYTHON_TAG) + r"|\{", read)

    def system_text(self, schemas: Sequence[dict[str, Any]]) -> str:
        return (
            "You can call functions. To call one, answer with nothing but\n"
            f'{{"name": <name>, "parameters": <object>}}\nThe functions:\n{_lines(schemas)}'
        )

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        return json.dumps({"name": name, "parameters": arguments})


@dataclass(frozen=True, slots=True)
class MistralV3(DialectBase):
    """``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]``, of tokenizers v3 to v7."""

    name: str = "mistral_v3"

    def scan(self, text: str, tools: Mapping[str, Tool]) -> Scan:
        # An item opens after the marker's bracket or after the comma that follows an item that was read.
        def read(text: str, match: re.Match[str], run: int) -> tuple[ToolCall | None, int]:
            start = match.start()
            if match["comma"] and (start != run or run not in items):
                return None, match.end()
            if not match["comma"] and (bracket := re.compile(r"\s*\[").match(text, match.end())) is None:
                if not text[match.end() :].strip():
                    return unclosed(start, len(text)), len(text)
                return malformed(
                    f"{MISTRAL_CALLS} is followed by a JSON array of calls", start, match.end()
                ), match.end()
            try:
                value, end = decode_json(text, match.end() if match["comma"] else bracket.end())  # type: ignore[union-attr]
            except BadJson as error:
                end = text.find(MISTRAL_CALLS, match.end())
                end = len(text) if end < 0 else end
                if error.ran_out:
                    return unclosed(start, end), end
                return invalid_json(f"the array of calls is not valid JSON: {error}", start, end), end
            after = re.compile(r"\s*(\]|(?=,)|\Z)").match(text, end)
            if after is None:
                return invalid_json("expected `,` or `]` after a call", start, len(text)), len(text)
            if after.end() == len(text) and after[1] != "]":
                return unclosed(start, len(text)), len(text)
            if after[1] != "]":
                items.add(after.end())
            return _named_call(value, ("arguments",), tools, start, after.end()), after.end()

        items: set[int] = set()
        return scan(text, rf"{re.escape(MISTRAL_CALLS)}|(?P<comma>,)", read)

    def system_text(self, schemas: Sequence[dict[str, Any]]) -> str:
        return (
            f"[AVAILABLE_TOOLS] {json.dumps(list(schemas))}[/AVAILABLE_TOOLS]\n"
            f'To call tools, write {MISTRAL_CALLS} [{{"name": <name>, "arguments": <object>}}]'
        )

    def result_message(self, name: str, text: str) -> Message:
        return {"role": "tool", "name": name, "content": text, "tool_call_id": MISTRAL_ID}

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        return f"{MISTRAL_CALLS} {json.dumps([{'name': name, 'arguments': arguments}])}"


@dataclass(frozen=True, slots=True)
class MistralV11(DialectBase):
    """``[TOOL_CALLS]name[ARGS]{...}``, repeated, of tokenizers v11 and later."""

    name: str = "mistral_v11"

    def scan(self, text: str, tools: Mapping[str, Tool]) -> Scan:
        head = re.compile(r"\s*([^\[\]{}\s]+)(?:\[CALL_ID\][^\[\]{}]*)?\[ARGS\]")
        read = _headed(head, r"", tools, f"write {MISTRAL_CALLS}name[ARGS]{{...}}", MISTRAL_CALLS)
        return scan(text, re.escape(MISTRAL_CALLS), read)

    def system_text(self, schemas: Sequence[dict[str, Any]]) -> str:
        return (
            f"[AVAILABLE_TOOLS]{json.dumps(list(schemas))}[/AVAILABLE_TOOLS]\n"
            f"To call a tool, write {MISTRAL_CALLS}<name>[ARGS]<object>"
        )

    def result_message(self, name: str, text: str) -> Message:
        return {"role": "tool", "name": name, "content": text, "tool_call_id": MISTRAL_ID}

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        return f"{MISTRAL_CALLS}{name}[ARGS]{json.dumps(arguments)}"


@dataclass(frozen=True, slots=True)
class DeepSeekV3(DialectBase):
    """A ``json`` fence between call tags, as DeepSeek V3 and R1 write it."""

    name: str = "deepseek_v3"

    def scan(self, text: str, tools: Mapping[str, Tool]) -> Scan:
        head = re.compile(rf"function{DEEPSEEK_SEP}\s*([^\n<`{{}}]+?)\s*\n```json\n")
        form = f"write {DEEPSEEK_CALL}function{DEEPSEEK_SEP}name, a fence of JSON, {DEEPSEEK_END}"
        read = _headed(head, rf"\s*```\s*{DEEPSEEK_END}", tools, form, DEEPSEEK_CALL, DEEPSEEK_END)
        return scan(text, DEEPSEEK_CALL, read)

    def system_text(self, schemas: Sequence[dict[str, Any]]) -> str:
        return f"You can call tools:\n{_lines(schemas)}\nTo call one, write\n{self._form('<name>', '<object>')}"

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        return self._form(name, json.dumps(arguments))

    def _form(self, name: str, arguments: str) -> str:
        call = f"{DEEPSEEK_CALL}function{DEEPSEEK_SEP}{name}\n```json\n{arguments}\n```{DEEPSEEK_END}"
        return f"{DEEPSEEK_CALLS}{call}{DEEPSEEK_CALLS_END}"


@dataclass(frozen=True, slots=True)
class DeepSeekV31(DialectBase):
    """``name``, a separator and the JSON between call tags, as DeepSeek V3.1 writes it."""

    name: str = "deepseek_v31"

    def scan(self, text: str, tools: Mapping[str, Tool]) -> Scan:
        head = re.compile(rf"\s*([^\n<{{}}]+?)\s*{DEEPSEEK_SEP}")
        form = f"write {DEEPSEEK_CALL}name{DEEPSEEK_SEP}{{...}}{DEEPSEEK_END}"
        read = _headed(head, rf"\s*{DEEPSEEK_END}", tools, form, DEEPSEEK_CALL, DEEPSEEK_END)
        return scan(text, DEEPSEEK_CALL, read)

    def system_text(self, schemas: Sequence[dict[str, Any]]) -> str:
        return f"You can call tools:\n{_lines(schemas)}\nTo call one, write\n{self._form('<name>', '<object>')}"

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        return self._form(name, json.dumps(arguments))

    def _form(self, name: str, arguments: str) -> str:
        return f"{DEEPSEEK_CALLS}{DEEPSEEK_CALL}{name}{DEEPSEEK_SEP}{arguments}{DEEPSEEK_END}{DEEPSEEK_CALLS_END}"


@dataclass(frozen=True, slots=True)
class KimiK2(DialectBase):
    """``functions.name:number`` and the JSON between call tags, as Kimi K2 writes it."""

    name: str = "kimi_k2"

    def scan(self, text: str, tools: Mapping[str, Tool]) -> Scan:
        head = re.compile(rf"\s*(?:functions\.)?([^\s<>:{{}}]+):\d+\s*{re.escape(KIMI_ARGUMENTS)}")
        form = f"write {KIMI_CALL}functions.name:0{KIMI_ARGUMENTS}{{...}}{KIMI_END}"
        read = _headed(head, rf"\s*{re.escape(KIMI_END)}", tools, form, KIMI_CALL, KIMI_END)
        return scan(text, re.escape(KIMI_CALL), read)

    def system_text(self, schemas: Sequence[dict[str, Any]]) -> str:
        return f"You can call tools:\n{_lines(schemas)}\nTo call one, write\n{self._form('<name>', '<object>')}"

    def result_message(self, name: str, text: str) -> Message:
        return {"role": "tool", "name": name, "content": text, "tool_call_id": f"functions.{name}:0"}

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        return self._form(name, json.dumps(arguments))

    def _form(self, name: str, arguments: str) -> str:
        call = f"{KIMI_CALL}functions.{name}:0{KIMI_ARGUMENTS}{arguments}{KIMI_END}"
        return f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"


HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
LLAMA_CALL = re.compile(r'\{\s*(?:"(?:name|type|parameters|arguments)"|"?[a-z]*\Z)')
MISTRAL_CALLS = "[TOOL_CALLS]"
MISTRAL_ID = "call00000"
"""Mistral's templates demand an id of nine characters; results stand in the order of the calls, so one will do."""
DEEPSEEK_CALLS, DEEPSEEK_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_SEP, DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
KIMI_CALL, KIMI_ARGUMENTS, KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def _headed(
    head: re.Pattern[str], close: str, tools: Mapping[str, Tool], form: str, opening: str, end_tag: str | None = None
) -> Read:
    """A reader of ``opening head {...} close``; a broken attempt ends at ``end_tag`` or before the next ``opening``."""

    def read(text: str, match: re.Match[str], run: int) -> tuple[ToolCall, int]:
        start = match.start()
        named = head.match(text, match.end())
        if named is None:
            end = _broken_end(text, match.end(), opening, end_tag)
            if end < 0:
                return unclosed(start, len(text)), len(text)
            return malformed(form, start, end), end
        try:
            arguments, end = decode_json(text, named.end())
        except BadJson as error:
            end = _broken_end(text, named.end(), opening, end_tag)
            if end < 0:
                if not error.ran_out and end_tag is None:
                    return invalid_json(f"the arguments are not valid JSON: {error}", start, len(text)), len(text)
                return unclosed(start, len(text)), len(text)
            return invalid_json(f"the arguments are not valid JSON: {error}", start, end), end
        closed = re.compile(close).match(text, end)
        if closed is None:
            end = _broken_end(text, end, opening, end_tag)
            if end < 0:
                return unclosed(start, len(text)), len(text)
            return invalid_json("there is more than the JSON of the arguments", start, end), end
        return checked_call(
            named[1], {} if arguments is None else arguments, tools, (start, closed.end())
        ), closed.end()

    return read


def _broken_end(text: str, position: int, opening: str, end_tag: str | None) -> int:
    """Where an attempt that cannot be read ends; -1 when nothing says so before the text ends."""
    following = text.find(opening, position)
    closing = _after(text, end_tag, position) if end_tag else -1
    return min((end for end in (following, closing) if end >= 0), default=-1)


def _named_call(value: Any, argument_keys: Sequence[str], tools: Mapping[str, Tool], start: int, end: int) -> ToolCall:
    """A call from an object with its name and its arguments; ``null`` arguments are none."""
    key = next((key for key in argument_keys if isinstance(value, dict) and key in value), None)
    if key is None or not isinstance(value.get("name"), str):
        return malformed(f'a call is one JSON object with "name" and "{argument_keys[0]}"', start, end)
    arguments = {} if value[key] is None else value[key]
    return checked_call(value["name"], arguments, tools, (start, end))


def _after(text: str, tag: str, position: int) -> int:
    found = text.find(tag, position)
    return -1 if found < 0 else found + len(tag)


def _lines(schemas: Sequence[dict[str, Any]]) -> str:
    return "\n".join(json.dumps(schema) for schema in schemas)
