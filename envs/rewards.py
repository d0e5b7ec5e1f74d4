"""Rewards as named terms: each looks at what the policy did, never at tool output as if the policy had written it."""

from __future__ import annotations

import asyncio
import difflib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envs.answers import final_answer
from envs.grader import Grader, GraderFailure
from envs.tools import HeldSandbox
from envs.types import Stop, Task, ToolCall
from sandboxes import SandboxFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What a reward term may look at when an episode is over."""

    task: Task
    turns: tuple[str, ...]  # what the policy wrote, turn by turn
    calls: tuple[ToolCall, ...]  # every attempt
    succeeded: tuple[bool, ...]  # of the calls that ran, whether they did what they were for
    stop: Stop
    submitted: str | None = None  # what the policy handed in by a tool that ends the episode
    state: Mapping[str, Any] = field(default_factory=dict)  # the tools' memory
    sandbox: HeldSandbox | None = None  # the episode's own sandbox, as the policy left it

    @property
    def answer(self) -> str | None:
        """What was handed in, or the boxed answer of the last turn.

        An answer in an earlier turn, or printed by a tool, is none.
        """
        if self.submitted is not None or self.stop != "answer":
            return self.submitted
        return final_answer(self.turns[-1]) if self.turns else None


Term = Callable[[Episode, Grader], Awaitable[float | None]]
"""A term's value; None when it cannot tell, which voids the episode instead of making it worth 0."""


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


async def void_turn(episode: Episode, grader: Grader) -> float:
    """1 when the policy wrote a turn with neither a call nor an answer.

    Such turns are what multi-turn training degenerates by (SimpleTIR, arXiv 2509.02479, section 4): report it with
    weight 0, or give it a negative weight.
    """
    return float(episode.stop == "no_call")


TERMS: dict[str, Term] = {"correct": correct, "format": format_, "tool": tool_use, "void_turn": void_turn}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rubric:
    """Weights of named terms; every term is computed and reported, a weight of 0 only reports it.

    Args:
        weights: of the terms by name.
        gates: terms that must be positive, or the reward is 0 whatever the others say (format before correctness).
        terms: terms of one's own; a name of ours is replaced by it.
        timeout_s: of one term, with its place in a queue: hundreds of episodes may end at once with answers that the
            grader works on until its own deadline, and that is no failure of ours.

    Raises:
        ValueError: a name that is no term.
    """

    weights: Mapping[str, float]
    gates: Sequence[str] = ()
    terms: Mapping[str, Term] = field(default_factory=dict)
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        known = {**TERMS, **self.terms}
        for name in (*self.weights, *self.gates):
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
                raise ValueError(f"no reward term {name!r}: {hint}")

    async def score(self, episode: Episode, grader: Grader) -> tuple[float, dict[str, float]]:
        """The weighted sum and the terms.

        Raises:
            GraderFailure: a term raised, hung, is no finite number or could not tell: the episode is then void, not
                worth 0.
            SandboxFailure: a term found the sandbox broken.
        """
        known = {**TERMS, **self.terms}
        names = dict.fromkeys([*self.weights, *self.gates, "correct"])
        terms = {name: await self._value(name, known[name], episode, grader) for name in names}
        if not all(terms[gate] > 0 for gate in self.gates):
            return 0.0, terms
        return sum(self.weights.get(name, 0.0) * value for name, value in terms.items()), terms

    async def _value(self, name: str, term: Term, episode: Episode, grader: Grader) -> float:
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                value = await term(episode, grader)
        except (GraderFailure, SandboxFailure):
            raise
        except Exception as error:  # the boundary of a grader
            if limit.expired():
                raise GraderFailure(f"term {name} took more than {self.timeout_s:g} s") from error
            raise GraderFailure(f"term {name} raised {type(error).__name__}: {error}") from error
        if value is None:
            raise GraderFailure(f"term {name} could not tell")
        if not math.isfinite(value):
            raise GraderFailure(f"term {name} is {value}, no finite number")
        return float(value)
