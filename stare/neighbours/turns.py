"""One number per turn: advantages that tell the turns of a trajectory apart.

Every function takes ``Turns`` and returns the advantage of each turn, float [U]. A group of one trajectory and a group
whose trajectories all have the same total reward get exactly 0 in all of them; so does a turn with nobody to be
compared with.

Dimensions: U turns of all trajectories of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stare.neighbours.advantages import Groups, grpo


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The turns of a batch. The outcome reward of a trajectory is part of its last turn's reward."""

    reward_U: Tensor  # float [U], finite
    group_U: Tensor  # int64 [U], of the prompt
    trajectory_U: Tensor  # int64 [U], different across groups
    number_U: Tensor  # int64 [U], of the turn in its trajectory, from 0
    anchor_U: Tensor  # int64 [U], equal where the turn starts from the same observation

    def totals(self) -> Tensor:
        """The trajectory's total reward at each of its turns, [U]."""
        return self._per_trajectory(self.reward_U)

    def _per_trajectory(self, value_U: Tensor) -> Tensor:
        _, index = torch.unique(self.trajectory_U, return_inverse=True)
        totals = value_U.new_zeros(int(index.max()) + 1 if len(index) else 0)
        return totals.index_add(0, index, value_U).index_select(0, index)

    def returns(self, discount: float) -> Tensor:
        """Discounted reward to go, ``R_t = r_t + discount R_{t+1}``, [U]."""
        order = torch.argsort(self.number_U, descending=True, stable=True).tolist()
        running: dict[int, float] = {}
        returns_U = torch.zeros_like(self.reward_U)
        trajectories, rewards = self.trajectory_U.tolist(), self.reward_U.tolist()
        for place in order:
            running[trajectories[place]] = rewards[place] + discount * running.get(trajectories[place], 0.0)
            returns_U[place] = running[trajectories[place]]
        return returns_U

    def kept(self, advantage_U: Tensor) -> Tensor:
        """The advantage where the group's trajectories differ in total reward, exactly 0 elsewhere."""
        differs_U = Groups.of(self.totals(), self.group_U).differs_B
        return torch.where(differs_U, advantage_U, torch.zeros_like(advantage_U))

    def of_trajectories(self) -> Tensor:
        """GRPO's advantage of each turn's trajectory by its total reward, [U]."""
        first = self.number_U == 0
        numbers, index = torch.unique(self.trajectory_U, return_inverse=True)
        advantage = self.reward_U.new_zeros(len(numbers))
        advantage[index[first]] = grpo(self.totals()[first], self.group_U[first])
        return advantage[index]


def _joined(*columns: Tensor) -> Tensor:
    """One number per distinct row of the columns, int64 [U]."""
    _, number_U = torch.unique(torch.stack(columns, 1), dim=0, return_inverse=True)
    assert isinstance(number_U, Tensor)
    return number_U


def _normalised(value_U: Tensor, key_U: Tensor, *, by_std: bool, eps: float = 1e-6) -> Tensor:
    groups = Groups.of(value_U, key_U)
    centred_U = value_U - groups.mean_B
    return groups.kept(centred_U / (groups.std(value_U) + eps) if by_std else centred_U)


def trloo(turns: Turns, *, discount: float = 1.0) -> Tensor:
    """Leave-one-out per turn: ``n_t / (n_t - 1) (R_t - mean of R_t over the prompt's trajectories that reach turn t)``.

    TRLOO, of Dr. Kernel, arXiv 2602.05885. Its public code gives a lone turn its return as advantage; here it is 0.
    """
    return_U = turns.returns(discount)
    groups = Groups.of(return_U, _joined(turns.group_U, turns.number_U))
    scale_U = groups.size_B / (groups.size_B - 1).clamp(min=1)
    return turns.kept(groups.kept(scale_U * (return_U - groups.mean_B)))


def turn_norm(turns: Turns, *, discount: float = 1.0, by_std: bool = True) -> Tensor:
    """GRPO per turn: ``(R_t - mean_t) / std_t`` over the turns of the same prompt and number.

    Turn-level normalisation as in MARS, arXiv 2510.15414. Formula unconfirmed: known to us by its description; the
    return and the key are ours.
    """
    return_U = turns.returns(discount)
    return turns.kept(_normalised(return_U, _joined(turns.group_U, turns.number_U), by_std=by_std))


def mapo(turns: Turns, *, discount: float = 1.0, turn_share: float = 0.5) -> Tensor:
    """``share A_turn + (1 - share) A_batch``: returns normalised per prompt and turn number, and over the whole batch.

    MAPO, arXiv 2603.06194 (mixed advantage of turn-level and batch-level normalisation of Monte Carlo returns). Formula
    unconfirmed: known by its abstract; the shares are ours.
    """
    return_U = turns.returns(discount)
    turn_U = _normalised(return_U, _joined(turns.group_U, turns.number_U), by_std=True)
    batch_U = _normalised(return_U, torch.zeros_like(turns.group_U), by_std=True)
    return turns.kept(turn_share * turn_U + (1 - turn_share) * batch_U)


def gigpo(turns: Turns, *, weight: float = 1.0, discount: float = 0.95, by_std: bool = True) -> Tensor:
    """``A_trajectory + weight A_step``, the step compared with all turns of the prompt that start from the same state.

    GiGPO, arXiv 2505.10978. The trajectory's mean counts each trajectory once (the public code's default
    counts it once a turn).
    """
    step_U = _normalised(turns.returns(discount), _joined(turns.group_U, turns.anchor_U), by_std=by_std)
    return turns.kept(turns.of_trajectories() + weight * step_U)


def hgpo(turns: Turns, *, context: int = 2, discount: float = 0.95, alpha: float = 1.0, by_std: bool = True) -> Tensor:
    """Step advantages among turns that share their last k observations, ``sum_k w_k a_k``, for k = 1 .. context + 1.

    HGPO, arXiv 2602.22817; ``w_k`` is proportional to ``(k + 1) ** alpha`` over the levels that say something about the
    turn (``a_k != 0``). Std with n, as in the public code.
    """
    return_U = turns.returns(discount)
    place = {key: i for i, key in enumerate(zip(turns.trajectory_U.tolist(), turns.number_U.tolist(), strict=True))}
    weighted_U, weights_U = torch.zeros_like(return_U), torch.zeros_like(return_U)
    key_U = turns.group_U
    for level in range(1, context + 2):
        back = [
            place.get((trajectory, number - level + 1), -1)
            for trajectory, number in zip(turns.trajectory_U.tolist(), turns.number_U.tolist(), strict=True)
        ]
        index = torch.tensor(back, dtype=torch.int64)
        # A turn with a shorter past shares "nothing there" with others of its kind.
        anchor_U = torch.where(index >= 0, turns.anchor_U[index.clamp(min=0)], torch.full_like(index, -1))
        key_U = _joined(key_U, anchor_U)
        groups = Groups.of(return_U, key_U)
        value_U = return_U - groups.mean_B
        if by_std:
            biased = groups.std(return_U) * ((groups.size_B - 1) / groups.size_B).sqrt()
            value_U = value_U / (biased + 1e-6)
        value_U = groups.kept(value_U)
        # A return equal to its mean may miss it by a rounding.
        value_U = torch.where(value_U.abs() > 1e-9, value_U, torch.zeros_like(value_U))
        weight_U = (value_U != 0).to(return_U.dtype) * (level + 1) ** alpha
        weighted_U, weights_U = weighted_U + weight_U * value_U, weights_U + weight_U
    return turns.kept(weighted_U / weights_U.clamp(min=1e-12))


def information_gain(gold_logp_U: Tensor, gold_logp_start_U: Tensor) -> Tensor:
    """The turn reward of IGPO: ``exp(mean ln p(gold | after the turn)) - exp(mean ln p(gold | before it))``, [U].

    IGPO, arXiv 2510.14967. The caller scores the gold answer after every turn.

    Args:
        gold_logp_U: float [U], mean logprob of the gold answer's tokens after the turn.
        gold_logp_start_U: float [U], the same before it.
    """
    return gold_logp_U.exp() - gold_logp_start_U.exp()


def igpo(turns: Turns, *, discount: float = 1.0, eps: float = 1e-6) -> Tensor:
    """Rewards normalised over the prompt, information gains and outcomes apart, then discounted to go.

    IGPO, arXiv 2510.14967. ``turns.reward_U`` holds ``information_gain`` and, at the last turn, the outcome
    (the paper's F1) instead. The public code normalises per token position; this is the paper's way.
    """
    last_U = turns.number_U == turns._per_trajectory(torch.ones_like(turns.reward_U)).long() - 1
    normalised_U = _normalised(turns.reward_U, _joined(turns.group_U, last_U.long()), by_std=True, eps=eps)
    return turns.kept(replace(turns, reward_U=normalised_U).returns(discount))


def call_match_rewards(similarity: Tensor, *, unmatched: float = 0.0) -> Tensor:
    """The reward of each predicted call: its similarity to the gold call that an optimal assignment gives it.

    MatchTIR, arXiv 2601.10712, hard matching by the Hungarian algorithm (``scipy.optimize.linear_sum_assignment``; the
    public code's "hungarian" is greedy).

    Args:
        similarity: float [P, C], of each of P predicted calls with each of C gold calls (name, keys, values).
        unmatched: reward of a call that none is left for.

    Raises:
        ImportError: scipy is missing; the ``match`` extra brings it.
    """
    from scipy.optimize import linear_sum_assignment  # heavy, and only this function's

    rows, columns = linear_sum_assignment(similarity.detach().cpu().double().numpy(), maximize=True)
    reward = torch.full((similarity.shape[0],), unmatched, dtype=similarity.dtype)
    reward[torch.as_tensor(rows)] = similarity.cpu()[torch.as_tensor(rows), torch.as_tensor(columns)]
    return reward


def match_tir(turns: Turns, *, outcome_U: Tensor, discount: float = 0.9) -> Tensor:
    """``(A_group + A_turn) / 2``: the outcome's advantage, and discounted turn rewards normalised per turn number.

    MatchTIR, arXiv 2601.10712.

    Args:
        turns: with the mean of ``call_match_rewards`` of each turn's calls as its reward.
        outcome_U: float [U], the trajectory's outcome reward at each of its turns.
        discount: of turn rewards to go.
    """
    first = turns.number_U == 0
    _, index = torch.unique(turns.trajectory_U, return_inverse=True)
    group = outcome_U.new_zeros(int(index.max()) + 1 if len(index) else 0)
    group[index[first]] = grpo(outcome_U[first], turns.group_U[first])
    turn_U = _normalised(turns.returns(discount), _joined(turns.group_U, turns.number_U), by_std=True)
    compared = replace(turns, reward_U=torch.where(first, outcome_U, torch.zeros_like(outcome_U)))
    differs_U = (
        Groups.of(turns.totals(), turns.group_U).differs_B | Groups.of(compared.totals(), turns.group_U).differs_B
    )
    return torch.where(differs_U, (group[index] + turn_U) / 2, torch.zeros_like(turn_U))


def spo_chain(value_U: Tensor, value_next_U: Tensor) -> Tensor:
    """``A = V(end of the segment) - V(its start)``, both Monte Carlo means of fresh rollouts from there. [U]

    SPO-chain, arXiv 2505.23564; the caller cuts at tokens of low probability and rolls out from each cut. At
    the last segment ``value_next_U`` is the reward. The paper gives a segment's advantage only to its tokens of low
    probability (its probability mask).
    """
    return value_next_U - value_U
