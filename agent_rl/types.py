"""The data that flows forward through a step: generation -> turn -> trajectory -> plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

from envs.types import Failure, Message, Stop, Task

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one completion is drawn. Training wants temperature > 0 and top_p = 1: what the learner scores."""

    max_tokens: int
    temperature: float = 1.0  # 0 means greedy
    top_p: float = 1.0
    seed: int | None = None  # same seed and prompt, same ids (on one machine)
    stop_token_ids: tuple[int, ...] = ()  # a hit is included as the last id
    top_logprobs: int = 0  # so many of the most likely ids' logprobs at each place are wanted; 0 costs nothing


class WeightChange(NamedTuple):
    """New weights that arrived in mid-completion."""

    position: int  # of the first token that they made
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What an engine sampled, token for token."""

    token_ids: tuple[int, ...]  # [L] as sampled, the stop id included
    logprobs: tuple[float, ...]  # [L] nats, of the distribution sampled from (after temperature)
    finish_reason: FinishReason
    weight_version: int  # version of the weights that made the first of these tokens
    weight_changes: tuple[WeightChange, ...] = ()  # in order; positions count from 0 here; empty: one version made all
    top_logprobs: tuple[tuple[float, ...], ...] | None = None  # [L, K] nats, largest first; None: not asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One completion inside a trajectory, as a half-open span of token positions."""

    start: int  # position of its first sampled id in ``Trajectory.token_ids``
    end: int
    weight_version: int  # version of the weights that made its first token
    finish_reason: FinishReason
    call_statuses: tuple[str, ...] = ()  # status of every tool-call attempt in this turn
    weight_changes: tuple[WeightChange, ...] = ()  # as of the generation; positions in ``Trajectory.token_ids``


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """An episode before one of its turns: what another rollout of the same prompt may start from."""

    token_ids: tuple[int, ...]  # [T] up to where the turn begins: it ends with the prompt, or with an observation
    loss_mask: tuple[bool, ...]  # [T]
    logprobs: tuple[float, ...]  # [T]
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One episode in token space. Worked example (P prompt, a sampled, E environment)::

    token_ids  P0 P1 a0 a1 E0 E1 a2
    loss_mask  .  .  T  T  .  .  T
    turns      [2, 4) and [6, 7)
    """

    task: Task
    group: int  # number of the group (prompt) in its batch
    member: int  # number of the rollout in its group
    token_ids: tuple[int, ...]  # [T] prompt, then completions and observations in order
    loss_mask: tuple[bool, ...]  # [T] True exactly where the sampler returned the id
    logprobs: tuple[float, ...]  # [T] nats under the sampling policy; 0.0 where loss_mask is False
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]  # the conversation as text, for records
    reward: float | None  # None = void (our failure), never 0.0
    terms: dict[str, float] = field(default_factory=dict)
    stop: Stop = "answer"
    failure: Failure | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # wall seconds by phase; telemetry only
    trunk: int | None = None  # leading ids taken over from another rollout (branching); 0: that branch was given up

    @property
    def is_void(self) -> bool:
        return self.reward is None

    @property
    def num_sampled(self) -> int:
        return sum(self.loss_mask)

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """[num_sampled] version of the weights that made each sampled token. Worked example::

        turns      [2, 5) version 3, from position 4 on 4; [7, 8) version 4
        versions   3 3 4 4
        """
        versions: list[int] = []
        for turn in self.turns:
            spans = [WeightChange(turn.start, turn.weight_version), *turn.weight_changes, WeightChange(turn.end, -1)]
            for span, following in pairwise(spans):
                versions += [span.version] * (following.position - span.position)
        return tuple(versions)
