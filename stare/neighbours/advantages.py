"""One number per trajectory from the rewards of its group: the neighbours of GRPO's advantage.

Every function takes ``reward_B`` (float [B], finite) and ``group_B`` (int [B], equal numbers are rollouts of one
prompt, in any order) and returns the advantage, [B] in the dtype of the rewards. A group of one and a group of equal
rewards get exactly 0 in all of them; where a paper pushes such groups too, ``constant_groups=True`` brings that back.

Dimensions: B trajectories, Q groups, G members of a group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stare.advantage import differ, group_advantage


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """What the functions below share: who belongs together, and the moments of each group, at each member's place."""

    index_B: Tensor  # int64 [B], number of the group from 0
    size_B: Tensor  # [B] G, dtype of the rewards
    mean_B: Tensor  # [B]
    differs_B: Tensor  # bool [B], the group has two different rewards

    @staticmethod
    def of(reward_B: Tensor, group_B: Tensor) -> Groups:
        """Raises ``ValueError`` for a reward that is not finite."""
        if not torch.isfinite(reward_B).all():
            raise ValueError("rewards must be finite: leave void trajectories out before computing advantages")
        numbers, index_B = torch.unique(group_B, return_inverse=True)
        zeros = reward_B.new_zeros(len(numbers))
        size_Q = zeros.index_add(0, index_B, torch.ones_like(reward_B))
        mean_Q = zeros.index_add(0, index_B, reward_B) / size_Q
        low_Q = zeros.scatter_reduce(0, index_B, reward_B, "amin", include_self=False)
        high_Q = zeros.scatter_reduce(0, index_B, reward_B, "amax", include_self=False)
        return Groups(
            index_B=index_B, size_B=size_Q[index_B], mean_B=mean_Q[index_B], differs_B=differ(low_Q, high_Q)[index_B]
        )

    def sum(self, value_B: Tensor) -> Tensor:
        """The sum over each member's group, at each member's place."""
        totals = value_B.new_zeros(int(self.index_B.max()) + 1 if len(value_B) else 0)
        return totals.index_add(0, self.index_B, value_B)[self.index_B]

    def std(self, reward_B: Tensor) -> Tensor:
        """With n - 1, [B]; 0 for a group of one."""
        return ((self.sum((reward_B - self.mean_B).square())) / (self.size_B - 1).clamp(min=1)).sqrt()

    def kept(self, advantage_B: Tensor) -> Tensor:
        """The advantage where the group differs inside, exactly 0 elsewhere."""
        return torch.where(self.differs_B, advantage_B, torch.zeros_like(advantage_B))


def grpo(reward_B: Tensor, group_B: Tensor, *, eps: float = 1e-6) -> Tensor:
    """``(r - mean) / (std + eps)``, std with n - 1. DeepSeekMath, arXiv 2402.03300, Sec. 4.1."""
    return group_advantage(reward_B, group_B, eps=eps)


def dr_grpo(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """``r - mean``. Understanding R1-Zero-Like Training, arXiv 2503.20783, Sec. 3; its other half is the loss mode
    ``seq-mean-token-sum`` (a constant instead of each trajectory's length)."""
    return group_advantage(reward_B, group_B, divide_by_std=False)


def rloo(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """``r - mean of the others = G / (G - 1) (r - mean)``. Back to Basics, arXiv 2402.14740."""
    groups = Groups.of(reward_B, group_B)
    scale_B = groups.size_B / (groups.size_B - 1).clamp(min=1)
    return groups.kept(scale_B * (reward_B - groups.mean_B))


def reinforce_pp_baseline(reward_B: Tensor, group_B: Tensor, *, eps: float = 1e-8) -> Tensor:
    """``(r - mean of the group) / std over the whole batch`` of that. REINFORCE++, arXiv 2501.03262 (the
    variant with baseline). Groups without a difference count in the batch's std, as zeros."""
    groups = Groups.of(reward_B, group_B)
    centred_B = groups.kept(reward_B - groups.mean_B)
    if len(centred_B) < 2:
        return centred_B
    return groups.kept((centred_B - centred_B.mean()) / (centred_B.std() + eps))


def w_reinforce(
    reward_B: Tensor,
    group_B: Tensor,
    *,
    positive: float = 0.1,
    negative: float = 1.0,
    threshold: float = 0.5,
    constant_groups: bool = False,
) -> Tensor:
    """``+positive`` where the answer is right (``r > threshold``), ``-negative`` where wrong; no group statistics.

    The Surprising Effectiveness of Negative Reinforcement, arXiv 2506.01347 (lambda = 0.1). The paper also
    pushes groups without a difference: ``constant_groups``.
    """
    groups = Groups.of(reward_B, group_B)
    right_B = (reward_B > threshold).to(reward_B.dtype)
    advantage_B = positive * right_B - negative * (1 - right_B)
    return advantage_B if constant_groups else groups.kept(advantage_B)


def psr(reward_B: Tensor, group_B: Tensor, *, threshold: float = 0.5, constant_groups: bool = False) -> Tensor:
    """Positive samples alone: 1 where the answer is right, else 0. arXiv 2506.01347."""
    return w_reinforce(
        reward_B, group_B, positive=1.0, negative=0.0, threshold=threshold, constant_groups=constant_groups
    )


def nsr(reward_B: Tensor, group_B: Tensor, *, threshold: float = 0.5, constant_groups: bool = False) -> Tensor:
    """Negative samples alone: -1 where the answer is wrong, else 0. arXiv 2506.01347."""
    return w_reinforce(
        reward_B, group_B, positive=0.0, negative=1.0, threshold=threshold, constant_groups=constant_groups
    )


def ngrpo(
    reward_B: Tensor,
    group_B: Tensor,
    *,
    max_reward: float = 1.0,
    eps: float = 1e-6,
    constant_groups: bool = False,
) -> Tensor:
    """GRPO with one virtual member of reward ``max_reward`` in mean and std. NGRPO, arXiv 2509.18851.

    Meant for groups that are wrong throughout: they get a negative advantage with ``constant_groups``; groups that are
    right throughout stay 0 (the public code drops them). Pair with an asymmetric clip of 0.16 / 0.24.
    """
    groups = Groups.of(reward_B, group_B)
    size_B = groups.size_B + 1
    mean_B = (groups.mean_B * groups.size_B + max_reward) / size_B
    squares_B = groups.sum((reward_B - mean_B).square()) + (max_reward - mean_B).square()
    advantage_B = (reward_B - mean_B) / ((squares_B / (size_B - 1)).sqrt() + eps)
    if constant_groups:
        return torch.where(groups.differs_B | (reward_B < max_reward), advantage_B, torch.zeros_like(advantage_B))
    return groups.kept(advantage_B)


def qae(reward_B: Tensor, group_B: Tensor, *, quantile: float = 0.4, eps: float = 1e-6) -> Tensor:
    """``(r - Q_K) / (std + eps)``: the K-quantile of the group is the baseline. QAE, arXiv 2509.22611.

    The quantile is the smallest reward of which at least K of the group is not above it, so with 0/1 rewards and a
    success rate p the baseline is 0 for p <= 1 - K and 1 above, as in the paper.
    """
    groups = Groups.of(reward_B, group_B)
    baseline_B = torch.zeros_like(reward_B)
    for number in torch.unique(groups.index_B[groups.differs_B]):
        members = groups.index_B == number
        ordered = reward_B[members].sort().values
        place = max(0, math.ceil(quantile * len(ordered) - 1e-9) - 1)
        baseline_B[members] = ordered[place]
    return groups.kept((reward_B - baseline_B) / (groups.std(reward_B) + eps))


def a_grae(
    reward_B: Tensor, group_B: Tensor, *, suppress: float = 0.5, progress: float | None = None, eps: float = 1e-6
) -> Tensor:
    """GRPO with the advantage of right answers times ``suppress`` and harder prompts weighing more as training goes on.

    A-GRAE, arXiv 2602.05548. Formula unconfirmed: the abstract says that suppressing the advantage of correct
    trajectories helps exploration, and that easy prompts should lead to hard ones by the batch's mean reward. Ours:
    ``w = 2 ((1 - c) m + c (1 - m))`` with m the group's mean reward and ``c`` the progress (None: the batch's mean
    reward), clipped to [0, 1].
    """
    groups = Groups.of(reward_B, group_B)
    if not len(reward_B):
        return reward_B
    course = min(max(float(reward_B.mean()) if progress is None else progress, 0.0), 1.0)
    ease_B = groups.mean_B.clamp(0, 1)
    weight_B = 2 * ((1 - course) * ease_B + course * (1 - ease_B))
    advantage_B = group_advantage(reward_B, group_B, eps=eps) * weight_B
    return torch.where(advantage_B > 0, advantage_B * suppress, advantage_B)


def unlikeliness(
    reward_B: Tensor, group_B: Tensor, *, sequence_logp_B: Tensor, beta: float = 0.25, eps: float = 1e-6
) -> Tensor:
    """GRPO on ``r (1 - beta rank / G)``, rank 0 the least likely of the group.

    Rewarding the Unlikely, arXiv 2506.02355. ``sequence_logp_B`` [B] is the mean logprob of each trajectory's tokens;
    ties share the lower rank. Groups whose own rewards do not differ stay 0: a rank is no success.
    """
    groups = Groups.of(reward_B, group_B)
    less_likely = sequence_logp_B[None, :] < sequence_logp_B[:, None]
    rank_B = (less_likely & (groups.index_B[None, :] == groups.index_B[:, None])).sum(1)
    shaped_B = reward_B * (1 - beta * rank_B.to(reward_B.dtype) / groups.size_B)
    return groups.kept(group_advantage(shaped_B, group_B, eps=eps))


def progrpo(
    reward_B: Tensor,
    group_B: Tensor,
    *,
    prompt_confidence_B: Tensor,
    answer_confidence_B: Tensor,
    alpha: float = 0.3,
    eps: float = 1e-6,
) -> Tensor:
    """``A_grpo + alpha (c(q) - c(o | q))``: the advantage re-weighted by confidence (ARM). ProGRPO, arXiv 2602.05281.

    Formula seen second-hand, ``alpha`` is ours. The caller gives both confidences [B] in [0, 1]: of the policy in the
    prompt, and in the answer given it (the paper means over the 20 % of tokens of lowest probability).
    """
    groups = Groups.of(reward_B, group_B)
    shift_B = alpha * (prompt_confidence_B - answer_confidence_B).to(reward_B.dtype)
    return groups.kept(group_advantage(reward_B, group_B, eps=eps) + shift_B)


def pass_at_k(reward_B: Tensor, group_B: Tensor, *, k: int = 4, threshold: float = 0.5) -> Tensor:
    """The advantage of being in a set of k that holds a right answer, over all such sets. Pass@k Training, arXiv
    2508.10751 (analytical form).

    With N_w wrong of N: ``R = 1 - C(N_w, k) / C(N, k)``, ``s = sqrt(R (1 - R))``, right: ``(1 - R) / s``, wrong:
    ``(1 - R - C(N_w - 1, k - 1) / C(N - 1, k - 1)) / s``. 0 where every set of k succeeds, and in a group of fewer than
    k (it may have lost members): there is no such set.

    Raises:
        ValueError: k is not positive.
    """
    if k < 1:
        raise ValueError(f"pass@k needs k >= 1, got {k}")
    groups = Groups.of(reward_B, group_B)
    right_B = reward_B > threshold
    wrong = groups.sum((~right_B).to(reward_B.dtype))
    advantage_B = torch.zeros_like(reward_B)
    for place in groups.differs_B.nonzero().flatten().tolist():
        size, num_wrong = round(float(groups.size_B[place])), round(float(wrong[place]))
        if size < k:
            continue
        rate = 1 - math.comb(num_wrong, k) / math.comb(size, k)
        if not 0 < rate < 1:
            continue
        spread = math.sqrt(rate * (1 - rate))
        if right_B[place]:
            advantage_B[place] = (1 - rate) / spread
        else:
            advantage_B[place] = (1 - rate - math.comb(num_wrong - 1, k - 1) / math.comb(size - 1, k - 1)) / spread
    return groups.kept(advantage_B)
