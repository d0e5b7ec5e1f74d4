"""Branching after tool calls (ARPO): where the policy is unsure of what to do with a result, the group goes on twice.

A group begins with some of its members. After each tool result the entropy over the first tokens of the turn that
follows decides whether new members start from there: with the ids, logprobs and turns up to the result, with a seed of
their own, and with an environment of their own that the earlier turns have brought there. Members that no branch took
start from the prompt when all others have ended; so a group always has the same size. ARPO, arXiv 2507.19849.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from pydantic import BaseModel, ConfigDict, Field

from agent_rl.rollout import Place
from agent_rl.seeds import derive_seed
from agent_rl.types import Generation, Prefix
from stare.neighbours import METHODS
from stare.neighbours.sampling import branch_after_tool, normalised_entropy

NAME = "arpo_branching"
TOP_LOGPROBS = 10
"""The entropy of a place is that of its most likely ids, as in the public code."""


class BranchOptions(BaseModel):
    """``rollout.options.arpo_branching``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    initial: int | None = Field(None, ge=1, description="members that start from the prompt; half of the group if None")
    beam: int = Field(2, ge=2, description="ways to go on from one tool result, the first member's own among them")
    tokens: int = Field(20, ge=1, description="first tokens of a turn whose entropy decides")
    threshold: float = Field(METHODS[NAME].defaults["threshold"], ge=0, le=1)
    weight: float = Field(METHODS[NAME].defaults["weight"], ge=0)

    def initial_of(self, group: int) -> int:
        return self.initial or max(1, group // 2)


@dataclass(slots=True, kw_only=True)
class Branches:
    """What the groups of one collection have begun, and where from."""

    options: BranchOptions
    group: int  # members of a group
    vocabulary: int
    seed: int
    begin: Callable[[Place], None]  # starts a new member
    begun: dict[int, int] = field(default_factory=dict)  # members of each group
    trunks: dict[tuple[int, int], tuple[Prefix, float]] = field(default_factory=dict)  # by group and member

    def start(self, groups: Iterable[int]) -> None:
        """These groups have begun with their first members."""
        self.begun |= dict.fromkeys(groups, self.options.initial_of(self.group))

    def missing(self) -> list[tuple[int, int]]:
        """Group and member of all that no branch took; they now start from the prompt."""
        places = [(group, member) for group, begun in self.begun.items() for member in range(begun, self.group)]
        self.begun = dict.fromkeys(self.begun, self.group)
        return places

    def of(self, place: Place) -> MemberBranching:
        trunk = self.trunks.get((place.group, place.member))
        return MemberBranching(
            branches=self, place=place, prefix=trunk[0] if trunk else None, entropy_at_start=trunk[1] if trunk else 0.0
        )

    def branch(self, place: Place, before: Prefix, entropy: float, entropy_at_start: float) -> None:
        """Begin up to ``beam - 1`` members from ``before``; each has a draw of its own."""
        for number in range(1, self.options.beam):
            member = self.begun[place.group]
            if member == self.group:
                return
            draw = derive_seed(
                self.seed, "branch", place.step, place.group, place.member, place.attempt, len(before.turns), number
            )
            options = self.options
            if branch_after_tool(
                entropy, entropy_at_start, draw / 2**63, threshold=options.threshold, weight=options.weight
            ):
                self.begun[place.group] = member + 1
                self.trunks[place.group, member] = (before, entropy_at_start)
                self.begin(Place(step=place.step, group=place.group, member=member))

    def entropy(self, top_logprobs: Sequence[Sequence[float]] | None) -> float:
        """Over the first tokens of a turn, as a share of ln V."""
        assert top_logprobs is not None, "the engine did not give the logprobs that were asked for"
        return normalised_entropy(torch.tensor(top_logprobs[: self.options.tokens]), self.vocabulary)


@dataclass(slots=True, kw_only=True)
class MemberBranching:
    """Branching as one member sees it."""

    branches: Branches
    place: Place
    prefix: Prefix | None
    entropy_at_start: float

    @property
    def top_logprobs(self) -> int:
        return TOP_LOGPROBS if self.branches.begun[self.place.group] < self.branches.group else 0

    def after_turn(self, before: Prefix, generation: Generation) -> None:
        """Measures the first turn, decides after every turn that answers a tool, but not twice at the same place."""
        entropy = self.branches.entropy(generation.top_logprobs)
        if not before.turns:
            self.entropy_at_start = entropy
        elif before.turns[-1].call_statuses and (self.prefix is None or before.token_ids != self.prefix.token_ids):
            self.branches.branch(self.place, before, entropy, self.entropy_at_start)
