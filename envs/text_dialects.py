"""Dialects that write arguments without JSON around them: code fences, ReTool, Python calls, tags of Qwen3 and GLM."""

from __future__ import annotations

import ast
import json
import re
import warnings
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.reading import DialectBase, Read, Scan, checked_call, malformed, scan, typed_by_schema, unclosed, unfit
from envs.tools import Tool
from envs.types import Message, ToolCall

MAX_PROGRAM = 65_536
"""Characters; longer ones are not tried by the compiler to find out where they end."""
ENDS_TRIED = 9
"""Marks that may end a program; those after them are not looked at."""


@dataclass(frozen=True, slots=True)
class CodeFence(DialectBase):
    """A fenced block of Python is a call of the ``python`` tool; what follows the first block was written unseen."""

    name: str = "codefence"

    def scan(self, text: str, tools: Mapping[str, Tool]) -> Scan:
        def read(text: str, match: re.Match[str], run: int) -> tuple[ToolCall | None, int]:
            first = bisect_left(closings, (match.end(), 0))
            following = closings[first : first + ENDS_TRIED]
            if match["lang"].lower() not in ("python", "py", "python3"):
                return None, following[0][1] if following else match.end()
            if not following:
                return unclosed(match.start(), len(text)), len(text)
            ends = [start for start, _ in following]
            call = _program(text, match.start(), match.end(), ends, following[0][1], tools)
            return call, following[0][1]

        closings = [closing.span() for closing in re.finditer(r"^```[ \t]*$", text, flags=re.MULTILINE)]
        return scan(text, r"(?<![^\n])```(?P<lang>[^`<\n]*?)[ \t]*\n", read, verbatim=True).first_call_only()

    def system_text(self, schemas: Sequence[dict[str, Any]]) -> str:
        return "To run Python, write one block\n```python\nprint(...)\n```\nand stop; you are then told what it prints."

    def result_message(self, name: str, text: str) -> Message:
        return {"role": "user", "content": f"```output\n{text}\n```"}

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        return f"```python\n{arguments['code']}\n```"


@dataclass(frozen=True, slots=True)
class ReTool(DialectBase):
    """``<code>program</code>``, with or without a fence inside, answered by ``<interpreter>``, as ReTool writes it."""

    name: str = "retool"

    def scan(self, text: str, tools: Mapping[str, Tool]) -> Scan:
        def read(text: str, match: re.Match[str], run: int) -> tuple[ToolCall, int]:
            first = bisect_left(closings, match.end())
            ends = closings[first : first + ENDS_TRIED]
            if not ends:
                return unclosed(match.start(), len(text)), len(text)
            end = ends[0] + len("</code>")
            return _program(text, match.start(), match.end(), ends, end, tools), end

        closings = [closing.start() for closing in re.finditer("</code>", text)]
        return scan(text, "<code>", read, verbatim=True).first_call_only()

    def system_text(self, schemas: Sequence[dict[str, Any]]) -> str:
        return (
            "To run Python, write the program between <code> and </code> and stop; "
            "what it prints is then shown between <interpreter> and </interpreter>."
        )

    def result_message(self, name: str, text: str) -> Message:
        return {"role": "user", "content": f"<interpreter>\n{text}\n</interpreter>"}

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        return f"<code>\n```python\n{arguments['code']}\n```\n</code>"


def _program(text: str, start: int, body: int, ends: Sequence[int], close: int, tools: Mapping[str, Tool]) -> ToolCall:
    """The call of ``python`` with what stands before the first end.

    Where that is no program but what stands before a later end is one, the end was inside a string: reported, not run.
    """
    code = _unfenced(text[body : ends[0]])
    if len(ends) > 1 and not _compiles(code) and any(_compiles(_unfenced(text[body:end])) for end in ends[1:]):
        message = "the end mark also stands inside the program, so it is not clear where that ends; avoid it there"
        return malformed(message, start, close, "python")
    return checked_call("python", {"code": code}, tools, (start, close))


def _unfenced(code: str) -> str:
    fenced = re.fullmatch(r"\s*```(?:python|py)?[ \t]*\n(.*?)\n?```\s*", code, flags=re.DOTALL)
    return (fenced[1] if fenced else code).strip("\n").rstrip()


def _compiles(code: str) -> bool:
    if len(code) > MAX_PROGRAM:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(code, "main.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class Pythonic(DialectBase):
    """The whole turn is a list of Python calls with literal keyword arguments: ``[add(a=1, b=2), now()]``."""

    name: str = "pythonic"

    def scan(self, text: str, tools: Mapping[str, Tool]) -> Scan:
        calls: list[ToolCall] = []  # of the list that was read last; `scan` takes one attempt at a time

        def read(text: str, match: re.Match[str], run: int) -> tuple[ToolCall | None, int]:
            if calls and match.start() == run:
                call = calls.pop(0)
                return call, call.span[1]
            if text[run : match.start()].strip() or not match["list"]:
                return None, match.end()
            end = _end_of_brackets(text, match.start())
            if end is None:
                return unclosed(match.start(), len(text)), len(text)
            calls[:] = _python_calls(text[match.start() : end], match.start(), tools)
            call = calls.pop(0)
            return call, call.span[1]

        return scan(text, r"(?P<list>\[(?=\s*[A-Za-z_][\w.]*\())|[,\]]", read)

    def system_text(self, schemas: Sequence[dict[str, Any]]) -> str:
        listed = "\n".join(json.dumps(schema) for schema in schemas)
        return (
            "You can call functions. To call some, answer with nothing but a list of calls with literal keyword "
            f"arguments, like\n[name(key=value), other(key=value)]\nThe functions:\n{listed}"
        )

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        return f"[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"


def _end_of_brackets(text: str, start: int) -> int | None:
    """Where the bracket at ``start`` is closed, strings skipped; None when it is not."""
    depth, position = 0, start
    while match := _BRACKET_OR_STRING.search(text, position):
        if match["quote"]:
            return None  # a string that does not end
        depth += {"[": 1, "(": 1, "{": 1, "]": -1, ")": -1, "}": -1}.get(match.group(), 0)
        position = match.end()
        if depth == 0:
            return position
    return None


_BRACKET_OR_STRING = re.compile(
    r"""\"{3}(?:[^\\]|\\.)*?\"{3}|'{3}(?:[^\\]|\\.)*?'{3}|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|[\[\](){}]|(?P<quote>["'])""",
    flags=re.DOTALL,
)


def _python_calls(source: str, offset: int, tools: Mapping[str, Tool]) -> list[ToolCall]:
    """At least one attempt; their spans cover the source."""
    whole = (offset, offset + len(source))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [malformed(f"this is not a list of Python calls: {error}", *whole)]
    nodes = tree.elts if isinstance(tree, ast.List) else []
    if not nodes or not all(isinstance(node, ast.Call) for node in nodes):
        return [malformed("everything in the list must be a call like name(key=value)", *whole)]
    lines = source.encode().splitlines(keepends=True)
    calls = []
    start = offset
    for node in nodes:
        assert isinstance(node, ast.Call)
        assert node.end_lineno is not None
        before = b"".join(lines[: node.end_lineno - 1]) + lines[node.end_lineno - 1][: node.end_col_offset]
        end = whole[1] if node is nodes[-1] else offset + len(before.decode())
        calls.append(_python_call(node, (start, end), tools))
        start = end
    return calls


def _python_call(node: ast.Call, span: tuple[int, int], tools: Mapping[str, Tool]) -> ToolCall:
    name = ast.unparse(node.func) if isinstance(node.func, (ast.Name, ast.Attribute)) else None
    if name is None or node.args or any(keyword.arg is None for keyword in node.keywords):
        return malformed("write a call as name(key=value), every argument with its name", *span, name)
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        assert keyword.arg is not None
        try:
            value = ast.literal_eval(keyword.value)
            fault = unfit(value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            fault = "only literals may be arguments"
        if fault:
            return malformed(f"{keyword.arg}: {fault}", *span, name)
        arguments[keyword.arg] = value
    return checked_call(name, arguments, tools, span)


@dataclass(frozen=True, slots=True)
class Qwen3Xml(DialectBase):
    """``<function=name>`` and ``<parameter=key>`` inside ``<tool_call>``, as Qwen3-Coder and Qwen3.5 write it."""

    name: str = "qwen3_xml"

    def scan(self, text: str, tools: Mapping[str, Tool]) -> Scan:
        read = _tagged(
            head=re.compile(r"\s*<function=([^>\n]+)>\s*"),
            item=re.compile(r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>\s*", flags=re.DOTALL),
            last=re.compile(r"</function>\s*</tool_call>"),
            tools=tools,
        )
        return scan(text, "<tool_call>", read, verbatim=True)

    def system_text(self, schemas: Sequence[dict[str, Any]]) -> str:
        listed = "\n".join(json.dumps(schema) for schema in schemas)
        return (
            f"You can call tools:\n<tools>\n{listed}\n</tools>\nTo call one, write\n<tool_call>\n<function=NAME>\n"
            "<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>"
        )

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        items = "".join(f"<parameter={key}>\n{_bare(value)}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{items}</function>\n</tool_call>"


@dataclass(frozen=True, slots=True)
class Glm45(DialectBase):
    """``<arg_key>`` and ``<arg_value>`` after the name inside ``<tool_call>``, as GLM-4.5 and later write it."""

    name: str = "glm45"

    def scan(self, text: str, tools: Mapping[str, Tool]) -> Scan:
        read = _tagged(
            head=re.compile(r"\s*([^\s<]+)\s*"),
            item=re.compile(
                r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>\s*", flags=re.DOTALL
            ),
            last=re.compile(r"</tool_call>"),
            tools=tools,
        )
        return scan(text, "<tool_call>", read, verbatim=True)

    def system_text(self, schemas: Sequence[dict[str, Any]]) -> str:
        listed = "\n".join(json.dumps(schema) for schema in schemas)
        return (
            f"You can call tools:\n<tools>\n{listed}\n</tools>\nTo call one, write\n<tool_call>NAME\n"
            "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>"
        )

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        items = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_bare(value)}</arg_value>\n" for key, value in arguments.items()
        )
        return f"<tool_call>{name}\n{items}</tool_call>"


def _tagged(*, head: re.Pattern[str], item: re.Pattern[str], last: re.Pattern[str], tools: Mapping[str, Tool]) -> Read:
    """A reader of ``<tool_call> head item* last``.

    A value that holds its own closing tag makes the next item unreadable: the attempt is malformed as a whole, because
    running the part before the tag would run a program that nobody wrote.
    """

    def read(text: str, match: re.Match[str], run: int) -> tuple[ToolCall, int]:
        start = match.start()
        named = head.match(text, match.end())
        position = named.end() if named else match.end()
        raw: dict[str, str] = {}
        repeated = False
        while named and (found := item.match(text, position)):
            repeated |= found["key"].strip() in raw
            raw[found["key"].strip()] = found["value"]
            position = found.end()
        closed = last.match(text, position) if named else None
        name = named[1].strip() if named else None
        if closed is None or repeated:
            end = text.find("</tool_call>", position)
            if end < 0:
                return unclosed(start, len(text)), len(text)
            end += len("</tool_call>")
            why = "a parameter stands there twice" if repeated else "the tags do not close one another"
            return malformed(f"the call cannot be read: {why}", start, end, name), end
        assert name is not None
        span = (start, closed.end())
        arguments = typed_by_schema(raw, tools.get(name))
        if isinstance(arguments, str):
            return ToolCall(status="invalid_args", name=name, error=arguments, span=span), span[1]
        return checked_call(name, arguments, tools, span), span[1]

    return read


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
