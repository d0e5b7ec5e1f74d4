"""The methods around STARE as a run uses them: advantage, weights, ratio, regularisers by name (docs/methods.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from agent_rl.correction import CorrectionName
from agent_rl.methods import chosen
from agent_rl.regularisers import OF_ENTROPY, OF_REFERENCE, OF_SCORES
from agent_rl.types import Trajectory
from stare import SurrogateSum
from stare.neighbours import Tokens, Turns, options_of

PER_TRAJECTORY = ("gspo", "gmpo")
"""Ratio rules of a whole trajectory."""

PER_TURN = ("turn_ratio",)

BY_ENTROPY = ("hapo_clip",)
"""Ratio rules that look at the entropy of each token's position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioRule:
    """What the learner makes of the ratio, where it is not PPO's clip of its own section."""

    name: str
    options: Mapping[str, Any]
    segment_T: Tensor | None  # int64 [T], trajectory or turn of every sampled token; None: the rule is per token
    signal_T: Tensor | None = None  # float32 [T], ``entropy_signal`` over the whole batch; None: not looked at

    def surrogate(self, logp_M: Tensor, logp_old_M: Tensor, coefficient_M: Tensor, origin_M: Tensor) -> SurrogateSum:
        """Of one micro-batch, in which trajectories are whole; ``origin_M`` is the place of its tokens among T."""
        arguments = dict(self.options)
        if self.segment_T is not None:
            arguments["segment_M"] = self.segment_T[origin_M].to(logp_M.device)
        if self.signal_T is not None:
            arguments["signal_M"] = self.signal_T[origin_M].to(logp_M.device)
        result: SurrogateSum = chosen(self.name, "ratio").function(logp_M, logp_old_M, coefficient_M, **arguments)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """Names from the registry, with options by name. The default is GRPO.

    Raises:
        ConfigError: a name that is unknown, of another hook or library only.
        ValueError: an option that its method has not got, or one for a method that is not chosen.
    """

    advantage: str = "grpo"
    ratio: str = "dapo"  # with the bounds of the learner's section
    token_weights: tuple[str, ...] = ()  # each multiplies what the ones before it and STARE's omega leave
    regularisers: tuple[str, ...] = ()  # terms of the loss beside the surrogate
    correction: CorrectionName = "none"  # of tokens that another policy sampled
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        chosen(self.advantage, "advantage", "turn advantage")
        chosen(self.ratio, "ratio")
        if "dapo" in self.options:
            raise ValueError("dapo's bounds are learner.clip_low, learner.clip_high and learner.dual_clip")
        for name in self.token_weights:
            if name == "stare":
                raise ValueError("'stare' is always on, by its own section: stare.variant 'none' leaves it out")
            chosen(name, "token weight")
        for name in self.regularisers:
            chosen(name, "regulariser")
            if self.regularisers.count(name) > 1:
                raise ValueError(f"regulariser {name!r} is named twice: set its coefficient instead")
            weight = self.options.get(name, {}).get("coefficient", 0.0)
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
                raise ValueError(f"options.{name}.coefficient = {weight!r}: give a finite number")
        if self.correction in self.token_weights:
            raise ValueError(f"{self.correction!r} is both token weight and correction: it would count twice")
        for name, options in self.options.items():
            if name not in (self.advantage, self.ratio, self.correction, *self.token_weights, *self.regularisers):
                raise ValueError(f"options for {name!r}, which is not chosen")
            options_of(name, options)

    def advantages(self, trajectories: Sequence[Trajectory]) -> Tensor:
        """float64 of scored trajectories, each compared with those of its group: [B], or [U] where it is per turn."""
        if self.is_per_turn:
            of_turns: Tensor = chosen(self.advantage, "turn advantage").function(
                turns_of(trajectories), **self.options.get(self.advantage, {})
            )
            return of_turns
        reward_B = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
        group_B = torch.tensor([t.group for t in trajectories], dtype=torch.int64)
        arguments = dict(self.options.get(self.advantage, {}))
        if self.advantage == "unlikeliness":
            means = [sum(t.logprobs) / max(1, t.num_sampled) for t in trajectories]  # 0 where not sampled
            arguments["sequence_logp_B"] = torch.tensor(means, dtype=torch.float64)
        advantage_B: Tensor = chosen(self.advantage, "advantage").function(reward_B, group_B, **arguments)
        return advantage_B

    @property
    def is_per_turn(self) -> bool:
        return chosen(self.advantage, "advantage", "turn advantage").hook == "turn advantage"

    @property
    def needs_reference(self) -> bool:
        """Something compares with the policy that the run started with."""
        return "ace" in self.token_weights or any(name in OF_REFERENCE for name in self.regularisers)

    @property
    def needs_entropy_gradient(self) -> bool:
        """Something moves the entropy itself."""
        return any(name in OF_ENTROPY for name in self.regularisers)

    @property
    def needs_scores(self) -> tuple[str, ...]:
        """Chosen methods that must know the learner's logprobs and entropy of the batch before its first step."""
        late = tuple(name for name in self.regularisers if name in OF_SCORES)
        ratio = (self.ratio,) if self.ratio in BY_ENTROPY else ()
        correction = (self.correction,) if self.correction != "none" else ()
        return (*self.token_weights, *late, *ratio, *correction)

    def ratio_rule(self, trajectories: Sequence[Trajectory], signal_T: Tensor | None = None) -> RatioRule | None:
        """For the sampled tokens of these trajectories; None for the default, which is the learner's own clip.

        ``signal_T`` is ``entropy_signal`` of these tokens, from the whole batch; only rules in ``BY_ENTROPY`` take it.
        """
        if self.ratio == "dapo":
            return None
        counts: list[int] | None = None
        if self.ratio in PER_TURN:
            counts = [count for trajectory in trajectories for count in tokens_of_turns(trajectory)]
        elif self.ratio in PER_TRAJECTORY:
            counts = [trajectory.num_sampled for trajectory in trajectories]
        segment_T = None if counts is None else torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        if self.ratio not in BY_ENTROPY:
            signal_T = None
        return RatioRule(
            name=self.ratio, options=self.options.get(self.ratio, {}), segment_T=segment_T, signal_T=signal_T
        )

    def weights(self, tokens: Tokens) -> Tensor:
        """float64 [T], the product of all token weights; 1 where there are none."""
        weight_T = torch.ones_like(tokens.advantage_T)
        for name in self.token_weights:
            weight_T = weight_T * chosen(name, "token weight").function(tokens, **self.options.get(name, {}))
        return weight_T


def tokens_of_turns(trajectory: Trajectory) -> list[int]:
    """How many tokens were sampled in each turn; a trajectory whose turns nobody kept is one turn."""
    if not trajectory.turns:
        return [trajectory.num_sampled]
    counts = [sum(trajectory.loss_mask[turn.start : turn.end]) for turn in trajectory.turns]
    assert sum(counts) == trajectory.num_sampled, (counts, trajectory.num_sampled)
    return counts


def turns_of(trajectories: Sequence[Trajectory]) -> Turns:
    """The turns [U] of scored trajectories, in their order: the reward counts at the last one, and a turn starts from
    the ids that stand between it and the turn before (at first, the prompt)."""
    anchors: dict[tuple[int, ...], int] = {}
    rows: list[tuple[float, int, int, int, int]] = []
    for number, trajectory in enumerate(trajectories):
        assert trajectory.reward is not None, "a void trajectory has no turns to compare"
        ends = [turn.end for turn in trajectory.turns]
        spans = [(turn.start, before) for turn, before in zip(trajectory.turns, [0, *ends], strict=False)] or [(0, 0)]
        for place, (start, before) in enumerate(spans):
            reward = trajectory.reward if place == len(spans) - 1 else 0.0
            anchor = anchors.setdefault(trajectory.token_ids[before:start], len(anchors))
            rows.append((reward, trajectory.group, number, place, anchor))
    rewards, *others = zip(*rows, strict=True) if rows else ((),) * 5
    group, trajectory_number, place_in, anchor_number = (torch.tensor(column, dtype=torch.int64) for column in others)
    return Turns(
        reward_U=torch.tensor(rewards, dtype=torch.float64),
        group_U=group,
        trajectory_U=trajectory_number,
        number_U=place_in,
        anchor_U=anchor_number,
    )
