"""The methods around STARE as a run uses them: an advantage and token weights chosen by name (docs/methods.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from agent_rl.methods import chosen
from agent_rl.types import Trajectory
from stare.neighbours import Tokens, options_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """Names from the registry, with options by name. The default is GRPO.

    Raises:
        ConfigError: a name that is unknown, of another hook or library only.
        ValueError: an option that its method has not got, or one for a method that is not chosen.
    """

    advantage: str = "grpo"
    token_weights: tuple[str, ...] = ()  # each multiplies what the ones before it and STARE's omega leave
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        chosen(self.advantage, "advantage")
        for name in self.token_weights:
            if name == "stare":
                raise ValueError("'stare' is always on, by its own section: stare.variant 'none' leaves it out")
            chosen(name, "token weight")
        for name, options in self.options.items():
            if name not in (self.advantage, *self.token_weights):
                raise ValueError(f"options for {name!r}, which is not chosen")
            options_of(name, options)

    def advantages(self, trajectories: Sequence[Trajectory]) -> Tensor:
        """float64 [B] of scored trajectories, each compared with those of its group."""
        reward_B = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
        group_B = torch.tensor([t.group for t in trajectories], dtype=torch.int64)
        arguments = dict(self.options.get(self.advantage, {}))
        if self.advantage == "unlikeliness":
            means = [sum(t.logprobs) / max(1, t.num_sampled) for t in trajectories]  # 0 where not sampled
            arguments["sequence_logp_B"] = torch.tensor(means, dtype=torch.float64)
        advantage_B: Tensor = chosen(self.advantage, "advantage").function(reward_B, group_B, **arguments)
        return advantage_B

    def weights(self, tokens: Tokens) -> Tensor:
        """float64 [T], the product of all token weights; 1 where there are none."""
        weight_T = torch.ones_like(tokens.advantage_T)
        for name in self.token_weights:
            weight_T = weight_T * chosen(name, "token weight").function(tokens, **self.options.get(name, {}))
        return weight_T
