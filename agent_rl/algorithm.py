"""The methods around STARE as a run uses them: advantage, token weights and ratio rule by name (docs/methods.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from agent_rl.methods import chosen
from agent_rl.types import Trajectory
from stare import SurrogateSum
from stare.neighbours import Tokens, Turns, options_of

PER_TRAJECTORY = ("gspo", "gmpo")
"""Ratio rules of a whole trajectory."""

PER_TURN = ("turn_ratio",)


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioRule:
    """What the learner makes of the ratio, where it is not PPO's clip of its own section."""

    name: str
    options: Mapping[str, Any]
    segment_T: Tensor | None  # int64 [T], trajectory or turn of every sampled token; None: the rule is per token

    def surrogate(self, logp_M: Tensor, logp_old_M: Tensor, coefficient_M: Tensor, origin_M: Tensor) -> SurrogateSum:
        """Of one micro-batch, in which trajectories are whole; ``origin_M`` is the place of its tokens among T."""
        arguments = dict(self.options)
        if self.segment_T is not None:
            arguments["segment_M"] = self.segment_T[origin_M].to(logp_M.device)
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
        for name, options in self.options.items():
            if name not in (self.advantage, self.ratio, *self.token_weights):
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

    def ratio_rule(self, trajectories: Sequence[Trajectory]) -> RatioRule | None:
        """For the sampled tokens of these trajectories; None for the default, which is the learner's own clip."""
        if self.ratio == "dapo":
            return None
        counts: list[int] | None = None
        if self.ratio in PER_TURN:
            counts = [count for trajectory in trajectories for count in tokens_of_turns(trajectory)]
        elif self.ratio in PER_TRAJECTORY:
            counts = [trajectory.num_sampled for trajectory in trajectories]
        segment_T = None if counts is None else torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        return RatioRule(name=self.ratio, options=self.options.get(self.ratio, {}), segment_T=segment_T)

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
