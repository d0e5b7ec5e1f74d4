"""Group-normalised advantages: one number per trajectory, relative to the other rollouts of its prompt.

Dimensions: B trajectories.
"""

from __future__ import annotations

import torch
from torch import Tensor

SAME = 1e-9
"""Rewards nearer to one another than this share of their size are equal, as 0.1 + 0.2 and 0.3 are."""


def differ(low: Tensor, high: Tensor) -> Tensor:
    """bool [...], whether the least and the largest reward of a group are two; float [...] each.

    By value, not by the standard deviation: the mean of equal floats may miss them by one rounding.
    """
    return high - low > SAME * torch.maximum(low.abs(), high.abs())


def group_advantage(reward_B: Tensor, group_B: Tensor, *, divide_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Advantage of each trajectory inside its group: ``(r - mean) / (std + eps)``, std with n - 1.

    GRPO, arXiv 2402.03300.

    A group of one and a group of equal rewards get exactly 0: there is nothing to compare with, so nothing is pushed.

    Args:
        reward_B: float [B]; every value finite (void trajectories leave before this).
        group_B: int [B]; equal numbers are rollouts of one prompt. Order and contiguity do not matter.
        divide_by_std: False is Dr.GRPO (arXiv 2503.20783).
        eps: added to the standard deviation.

    Returns:
        float [B], dtype of ``reward_B``.

    Raises:
        ValueError: a reward is not finite (an unscored trajectory is not a reward of anything).
    """
    if not torch.isfinite(reward_B).all():
        raise ValueError("rewards must be finite: leave void trajectories out before computing advantages")
    advantage_B = torch.zeros_like(reward_B)
    for group in torch.unique(group_B):
        members = group_B == group
        rewards = reward_B[members]
        if rewards.numel() < 2 or not differ(rewards.min(), rewards.max()):
            continue
        centred = rewards - rewards.mean()
        advantage_B[members] = centred / (rewards.std(unbiased=True) + eps) if divide_by_std else centred
    return advantage_B
