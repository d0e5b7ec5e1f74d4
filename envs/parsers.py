"""Model text to tool-call attempts, for each dialect: every attempt is kept, in order, with what was wrong with it.

Nothing inside reasoning is an attempt. A call that was cut by length has no end and is not ``ok``. Strict: what is not
well-formed is reported to the model, not guessed at.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from envs.json_dialects import DeepSeekV3, DeepSeekV31, Hermes, KimiK2, Llama3Json, MistralV3, MistralV11
from envs.reading import Scan, outside_reasoning
from envs.text_dialects import CodeFence, Glm45, Pythonic, Qwen3Xml, ReTool
from envs.tools import Tool
from envs.types import Finish, Message, ToolCall

__all__ = ["DIALECTS", "Dialect", "ParsedTurn", "get_dialect", "guess_dialect", "outside_reasoning", "parsed_turn"]


class Dialect(Protocol):
    """How a family of models writes calls and reads results."""

    @property
    def name(self) -> str: ...

    def scan(self, text: str, tools: Mapping[str, Tool]) -> Scan:
        """Every attempt in the text, in order, and the reasoning around them; never raises."""
        ...

    def parse(self, text: str, finish: Finish, tools: Mapping[str, Tool]) -> tuple[ToolCall, ...]:
        """Every attempt in the text, in order; never raises. One that the length limit cut off is ``unclosed``."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """One turn of a model, taken apart."""

    content: str  # what is neither reasoning nor a call, stripped
    calls: tuple[ToolCall, ...]  # every attempt, in order
    reasoning: tuple[tuple[int, int], ...]  # spans [start, end) of the text, tags included


def parsed_turn(dialect: Dialect, text: str, finish: Finish, tools: Mapping[str, Tool]) -> ParsedTurn:
    """Attempts, content and reasoning of a turn; never raises."""
    found = dialect.scan(text, tools)
    calls = dialect.parse(text, finish, tools)
    return ParsedTurn(content=found.content(text), calls=calls, reasoning=found.reasoning)


_ALL: tuple[Dialect, ...] = (
    Hermes(),
    CodeFence(),
    Qwen3Xml(),
    Llama3Json(),
    Pythonic(),
    MistralV3(),
    MistralV11(),
    DeepSeekV3(),
    DeepSeekV31(),
    Glm45(),
    KimiK2(),
    ReTool(),
)
DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in _ALL}

ALIASES = {
    "qwen2": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "qwen3_coder": "qwen3_xml",
    "llama3": "llama3_json",
    "mistral": "mistral_v3",
    "deepseek": "deepseek_v3",
    "deepseek_v3.1": "deepseek_v31",
    "glm": "glm45",
    "kimi": "kimi_k2",
}

TEMPLATE_MARKS = (
    ("[ARGS]", "mistral_v11"),
    ("[TOOL_CALLS]", "mistral_v3"),
    ("<|tool_call_argument_begin|>", "kimi_k2"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_xml"),
    ("```json", "deepseek_v3"),
    ("<｜tool▁call▁begin｜>", "deepseek_v31"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": ', "llama3_json"),
)
"""What gives a chat template's dialect away, the most telling first. A ``json`` fence counts beside DeepSeek's tags."""


def get_dialect(name: str) -> Dialect:
    """Raises ``ValueError`` naming the dialects that there are."""
    known = ALIASES.get(name, name)
    if known not in DIALECTS:
        close = difflib.get_close_matches(name, [*DIALECTS, *ALIASES], n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(DIALECTS)}"
        raise ValueError(f"no tool-call dialect {name!r}: {hint}")
    return DIALECTS[known]


def guess_dialect(chat_template: str) -> Dialect | None:
    """The dialect that a tokenizer's chat template writes calls in; None when it does not know calls."""
    for mark, name in TEMPLATE_MARKS:
        if mark in chat_template and (mark != "```json" or "<｜tool▁sep｜>" in chat_template):
            return DIALECTS[name]
    return None
