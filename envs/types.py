"""Everything that crosses the border between an environment and who drives it: tasks, messages, turns, outcomes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Message = dict[str, Any]
"""A chat message: ``role`` (system, user, assistant, tool) and ``content`` (str); tool messages also carry ``name``."""

Stop = Literal["answer", "no_call", "max_turns", "max_tokens", "max_tool_calls", "time", "length", "failure"]
"""Why an episode ended: ``terminated`` for answer and no_call, ``truncated`` for limits; ``failure`` voids it."""

Finish = Literal["stop", "length"]
"""How a turn ended: by the model, or cut by the token limit."""

CallStatus = Literal["ok", "invalid_json", "malformed", "unknown_tool", "invalid_args", "unclosed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem: what is asked, what is right, and whatever the environment needs to know beside."""

    id: str
    prompt: str  # the question as the user would put it
    answer: str | None = None  # gold answer; None when the reward does not need one
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A solved problem to show before the question, for models that follow an example better than a rule."""

    prompt: str
    tool: str
    arguments: dict[str, Any]
    output: str  # what the tool answered
    answer: str  # the last turn


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTurn:
    """What the policy wrote in one turn, as text without the end-of-turn token."""

    text: str
    finish: Finish  # length: cut by the token limit, so nothing in it may run


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One attempt of the model to call a tool, in the order in which it was written."""

    status: CallStatus
    name: str | None = None  # None when it could not be read
    arguments: dict[str, Any] | None = None  # None unless status is ok
    error: str = ""  # for the model: what was wrong with the attempt; empty when ok
    span: tuple[int, int] = (0, 0)  # characters [start, end) of the attempt in the turn's text


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Our failure, typed: it voids the episode and is reported, never shown to the model."""

    kind: Literal["sandbox", "grader", "engine", "tool_bug", "time"]
    where: str  # e.g. "turn 2, tool python"
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What an episode starts with."""

    messages: tuple[Message, ...]  # system and user messages
    tools: tuple[dict[str, Any], ...]  # JSON schemas (OpenAI function form) of the tools on offer


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """What the environment answers to one ``ModelTurn``."""

    messages: tuple[Message, ...]  # new tool (or user) messages to append, in order; empty at the end
    reward: float | None  # None until the end of the episode, and when the episode is void
    terms: dict[str, float]  # weighted-in reward terms by name, before weights; empty until the end
    stop: Stop | None  # None: the episode goes on
    calls: tuple[ToolCall, ...]  # every attempt of this turn
    failure: Failure | None = None

    @property
    def terminated(self) -> bool:
        return self.stop in ("answer", "no_call")

    @property
    def truncated(self) -> bool:
        return self.stop is not None and not self.terminated
