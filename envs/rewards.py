"""Rewards as named terms: each looks at what the policy did, never at tool output as if the policy had written it."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from envs.answers import final_answer
from envs.grader import Grader
from envs.types import Stop, Task, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What a reward term may look at when an episode is over."""

    task: Task
    turns: tuple[str, ...]  # what the policy wrote, turn by turn
    calls: tuple[ToolCall, ...]  # every attempt
    succeeded: tuple[bool, ...]  # of the calls that ran, whether they did what they were for
    stop: Stop

    @property
    def answer(self) -> str | None:
        """The boxed answer of the last turn; an answer in an earlier turn, or printed by a tool, is none."""
        return final_answer(self.turns[-1]) if self.turns and self.stop == "answer" else None


Term = Callable[[Episode, Grader], Awaitable[float]]


async def correct(episode: Episode, grader: Grader) -> float:
    """1 when the final answer equals the gold answer."""
    if episode.answer is None or episode.task.answer is None:
        return 0.0
    return float(await grader.verdict(episode.task.answer, episode.answer) == "correct")


async def format_(episode: Episode, grader: Grader) -> float:
    """1 when the last turn holds a boxed answer."""
    return float(episode.answer is not None)


async def tool_use(episode: Episode, grader: Grader) -> float:
    """1 when at least one call did what it was for (its program ended well)."""
    return float(any(episode.succeeded))


TERMS: dict[str, Term] = {"correct": correct, "format": format_, "tool": tool_use}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rubric:
    """Weights of named terms; every term is computed and reported, a weight of 0 only reports it.

    Raises:
        ValueError: a name that is no term.
    """

    weights: Mapping[str, float]

    def __post_init__(self) -> None:
        for name in self.weights:
            if name not in TERMS:
                close = difflib.get_close_matches(name, TERMS, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(TERMS)}"
                raise ValueError(f"no reward term {name!r}: {hint}")

    async def score(self, episode: Episode, grader: Grader) -> tuple[float, dict[str, float]]:
        """The weighted sum and the terms. Raises ``GraderFailure``: the episode is then void, not worth 0."""
        terms = {name: await TERMS[name](episode, grader) for name in {**self.weights, "correct": 0.0}}
        return sum(self.weights.get(name, 0.0) * value for name, value in terms.items()), terms
