"""One weight per sampled token, from the whole batch at once: the neighbours of STARE's omega.

Every function takes ``Tokens`` (all sampled tokens of the update batch, under the weights before the update) and
returns the factor that multiplies each token's advantage, float [T]. Where a paper adds to the advantage, the weight
is the quotient. A token without an advantage gets 1: nothing times anything stays nothing. What the public codes rank
or normalise inside a micro-batch is ranked and normalised over the batch here.

Dimensions: T sampled tokens, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stare.selection import num_selected, top_fraction

_LEAST_ENTROPY = 1e-8
"""Nats; a distribution that is all but certain counts as this, so that its logarithm is finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What is known of every sampled token of the update batch before the update."""

    logp_T: Tensor  # float [T], ln p of the sampled token
    entropy_T: Tensor  # float [T], of its position, nats
    advantage_T: Tensor  # float [T]
    row_T: Tensor  # int64 [T], the number of its trajectory
    sampler_logp_T: Tensor | None = None  # float [T], as the sampling engine gave it
    reference_logp_T: Tensor | None = None  # float [T], under the reference policy

    def needed(self, name: str) -> Tensor:
        """A column that not every caller has; raises ``ValueError`` where it is missing."""
        column: Tensor | None = getattr(self, name)
        if column is None:
            raise ValueError(f"this method needs {name}, which the caller has not given")
        return column

    @property
    def acts_T(self) -> Tensor:
        """bool [T], the advantage is not 0."""
        return self.advantage_T != 0


def _weight(tokens: Tokens, weight_T: Tensor) -> Tensor:
    weight_T = weight_T.to(tokens.advantage_T.dtype)
    return torch.where(tokens.acts_T, weight_T, torch.ones_like(weight_T))


def forking(tokens: Tokens, *, fraction: float = 0.2, renormalise: bool = True) -> Tensor:
    """1 on the 20 % of positions of highest entropy, 0 elsewhere: mean over the kept tokens.

    Beyond the 80/20 Rule, arXiv 2506.01939. ``renormalise`` multiplies the kept by T / kept, so that a
    token-mean loss is the mean over them.
    """
    everyone_T = torch.ones_like(tokens.acts_T)
    kept_T = top_fraction(tokens.entropy_T, everyone_T, fraction)
    scale = len(kept_T) / max(1, int(kept_T.sum())) if renormalise else 1.0
    return _weight(tokens, kept_T.to(tokens.advantage_T.dtype) * scale)


def stapo(
    tokens: Tokens, *, low_probability: float = 0.01, entropy_quantile: float = 0.05, renormalise: bool = True
) -> Tensor:
    """0 on rare spurious tokens: ``A > 0``, ``p < low_probability``, entropy in the lowest share; 1 elsewhere.

    STAPO, arXiv 2602.15620 (S2T mask); thresholds from the paper as read second-hand, no public code found. The rest is
    scaled so that a token-mean loss is the mean over it.
    """
    threshold = quantile_value(tokens.entropy_T, entropy_quantile)
    silent_T = (tokens.advantage_T > 0) & (tokens.logp_T < math.log(low_probability)) & (tokens.entropy_T <= threshold)
    scale = len(silent_T) / max(1, int((~silent_T).sum())) if renormalise else 1.0
    return _weight(tokens, (~silent_T).to(tokens.advantage_T.dtype) * scale)


def quantile_value(value_T: Tensor, quantile: float) -> float:
    """The smallest value of which at least this share of the values is not above it; exact for any T, 0.0 for none."""
    if not len(value_T):
        return 0.0
    place = max(1, math.ceil(quantile * len(value_T) - 1e-9))
    return float(torch.kthvalue(value_T, place).values)


def covariance(tokens: Tokens) -> Tensor:
    """``(ln p - mean ln p)(A - mean A)`` of every token, means over the batch, float [T]. arXiv 2505.22617."""
    return (tokens.logp_T - tokens.logp_T.mean()) * (tokens.advantage_T - tokens.advantage_T.mean())


def clip_cov(tokens: Tokens, *, fraction: float = 2e-4, low: float = 1.0, high: float = 5.0, seed: int = 0) -> Tensor:
    """0 on a random share of the tokens whose covariance lies in ``(low, high)``, 1 elsewhere.

    The Entropy Mechanism, arXiv 2505.22617 (Clip-Cov). The share is of all T tokens; the draw is by ``seed``
    and by place in the batch, so it does not depend on how the batch is cut.
    """
    covariance_T = covariance(tokens)
    candidates = ((covariance_T > low) & (covariance_T < high)).nonzero().flatten().cpu()
    generator = torch.Generator().manual_seed(seed)
    count = min(len(candidates), num_selected(len(covariance_T), fraction))
    chosen = candidates[torch.randperm(len(candidates), generator=generator)[:count]]
    weight_T = torch.ones_like(tokens.advantage_T)
    weight_T[chosen.to(weight_T.device)] = 0.0
    return _weight(tokens, weight_T)


def entropy_advantage(tokens: Tokens, *, alpha: float = 0.4, kappa: float = 2.0) -> Tensor:
    """``(A + min(alpha H, |A| / kappa)) / A``. Reasoning with Exploration, arXiv 2506.14758.

    ``alpha`` (0.4 with GRPO, 0.1 with PPO) and ``kappa`` as read second-hand; no public code found.
    """
    bonus_T = torch.minimum(alpha * tokens.entropy_T.to(tokens.advantage_T.dtype), tokens.advantage_T.abs() / kappa)
    safe_T = torch.where(tokens.acts_T, tokens.advantage_T, torch.ones_like(tokens.advantage_T))
    return _weight(tokens, 1 + bonus_T / safe_T)


def steer(tokens: Tokens, *, weakest: float = 0.8, floor: float = 0.02) -> Tensor:
    """``exp(-k m)``, m the estimated size of the token's entropy change: tokens that move entropy most weigh least.

    STEER, arXiv 2510.10150: with ``x = p(o)``, ``m = |A / p_old x (1 - x) (ln x + H)|``, which at the old policy is
    ``|A (1 - x) (ln x + H)|``, and ``k = -ln(weakest) / max(m_max, floor)``, m_max over the batch.
    """
    probability_T = tokens.logp_T.exp()
    measure_T = (tokens.advantage_T * (1 - probability_T) * (tokens.logp_T + tokens.entropy_T)).abs()
    largest = float(measure_T.max()) if len(measure_T) else 0.0
    return _weight(tokens, torch.exp(math.log(weakest) / max(largest, floor) * measure_T))


def hapo(tokens: Tokens, *, beta: float = 1.0, pivot: float = 0.8, largest: float = 5.0) -> Tensor:
    """``1 + beta h`` with h in [-1, 1], the log entropy around its ``pivot`` quantile; 1 where ``|A|`` is extreme.

    HAPO, arXiv 2509.16591 (differential advantage redistribution). Formula unconfirmed in where it acts: the public
    code leaves tokens of high entropy alone while their ratio is near 1 and those of low entropy while it is far, which
    no weight fixed before the update can do. Its clip is ``ratios.hapo_clip``, its temperature
    ``sampling.hapo_temperature``.
    """
    plain_T = tokens.advantage_T.abs() >= largest
    weight_T = (1 + beta * entropy_signal(tokens.entropy_T, pivot)).clamp(min=0)
    return _weight(tokens, torch.where(plain_T, torch.ones_like(weight_T), weight_T))


def entropy_signal(entropy_T: Tensor, pivot: float = 0.8, *, among_T: Tensor | None = None) -> Tensor:
    """HAPO's h, [T]: 0 at the ``pivot`` quantile of ``ln H``, 1 at its maximum, -1 at its minimum, linear between.

    HAPO, arXiv 2509.16591. Its public code divides the lower side by a negative minimum, so that h is positive on both
    sides and nothing is ever low; here the lower side is negative, as in the paper.

    Args:
        entropy_T: float [T], nats.
        pivot: quantile that h is 0 at.
        among_T: float [any], entropies that quantile and extremes are taken from, instead of ``entropy_T``; what lies
            beyond them gets -1 or 1.
    """
    known_T = (entropy_T if among_T is None else among_T).clamp(min=_LEAST_ENTROPY).log()
    if not len(known_T):
        return torch.zeros_like(entropy_T)
    middle = quantile_value(known_T, pivot)
    above = max(float(known_T.max()) - middle, 1e-12)
    below = max(middle - float(known_T.min()), 1e-12)
    shift_T = entropy_T.clamp(min=_LEAST_ENTROPY).log() - middle
    return torch.where(shift_T > 0, shift_T / above, shift_T / below).clamp(-1, 1)


def ace(tokens: Tokens, *, alpha: float = 1.0) -> Tensor:
    """``1 + alpha softplus(c)`` where A < 0, c the trajectory's ``ln(pi / pi_ref)``; 1 elsewhere.

    ACE, arXiv 2602.21420: overconfident errors are corrected more strongly. c is the sum over the trajectory's tokens,
    bounded by 20; needs ``reference_logp_T``. ``alpha`` is ours.
    """
    shift_T = (tokens.logp_T - tokens.needed("reference_logp_T")).to(tokens.advantage_T.dtype)
    index_T, sums = _of_trajectories(tokens, shift_T)
    confidence_T = sums[index_T].clamp(-20, 20)
    penalty_T = 1 + alpha * torch.nn.functional.softplus(confidence_T)
    return _weight(tokens, torch.where(tokens.advantage_T < 0, penalty_T, torch.ones_like(penalty_T)))


def d3s_tokens(tokens: Tokens, *, fraction: float = 0.5, renormalise: bool = True) -> Tensor:
    """1 on the share of tokens of largest ``|A| H``, 0 elsewhere. D3S, arXiv 2509.22115.

    The paper raises the share during training; its schedule is the caller's, the constant is ours.
    """
    kept_T = top_fraction(
        (tokens.advantage_T.abs() * tokens.entropy_T).float(), torch.ones_like(tokens.acts_T), fraction
    )
    scale = len(kept_T) / max(1, int(kept_T.sum())) if renormalise else 1.0
    return _weight(tokens, kept_T.to(tokens.advantage_T.dtype) * scale)


def lp_reg_tokens(tokens: Tokens, *, fraction: float = 0.01) -> Tensor:
    """bool [T], the tokens that ``regularisers.lp_reg`` protects: A < 0 among the batch's least likely ``fraction``.

    Lp-Reg, arXiv 2510.03222.
    """
    least_T = top_fraction(-tokens.logp_T, torch.ones_like(tokens.acts_T), fraction)
    return least_T & (tokens.advantage_T < 0)


def kl_cov_tokens(tokens: Tokens, *, fraction: float = 2e-3) -> Tensor:
    """bool [T], the tokens that ``regularisers.kl_cov`` holds: the share of largest covariance, A = 0 left out.

    KL-Cov, arXiv 2505.22617 (0.2 % for 7B, 0.02 % for 32B).
    """
    return top_fraction(covariance(tokens).float(), torch.ones_like(tokens.acts_T), fraction) & tokens.acts_T


def importance_ratio(tokens: Tokens, *, sequence: bool = False) -> Tensor:
    """``pi_learner / pi_sampler`` under the weights before the update, [T]; exactly 1 where the logprobs are equal.

    Args:
        tokens: with ``sampler_logp_T``.
        sequence: the product over the token's trajectory instead of the token's own.
    """
    difference_T = (tokens.logp_T - tokens.needed("sampler_logp_T")).clamp(-20, 20)
    if sequence:
        index_T, sums = _of_trajectories(tokens, difference_T)
        difference_T = sums.clamp(-20, 20)[index_T]
    return difference_T.exp()


def _of_trajectories(tokens: Tokens, value_T: Tensor) -> tuple[Tensor, Tensor]:
    """The number of each token's trajectory from 0, and the sum of the values over each trajectory."""
    rows, index_T = torch.unique(tokens.row_T, return_inverse=True)
    return index_T, value_T.new_zeros(len(rows)).index_add(0, index_T, value_T)


def truncated_importance(tokens: Tokens, *, most: float = 2.0) -> Tensor:
    """``min(pi_learner / pi_sampler, most)`` per token: TIS, for sampled tokens that are not from the learner's policy.

    Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (Yao et al., 2025, a blog post). Needs
    ``sampler_logp_T``.
    """
    return _weight(tokens, importance_ratio(tokens).clamp(max=most))


def masked_importance(tokens: Tokens, *, least: float = 0.5, most: float = 2.0, sequence: bool = False) -> Tensor:
    """``pi_learner / pi_sampler`` inside ``[least, most]``, 0 outside: MIS (IcePop's rule for tokens).

    When Speed Kills Stability (Liu et al., 2025, a blog post). ``sequence`` decides by the trajectory's geometric mean
    ratio instead of each token's. Needs ``sampler_logp_T``.
    """
    ratio_T = importance_ratio(tokens)
    judged_T = ratio_T
    if sequence:
        index_T, sums = _of_trajectories(tokens, ratio_T.log())
        judged_T = (sums / torch.bincount(index_T, minlength=len(sums)).clamp(min=1)).exp()[index_T]
    inside_T = (judged_T >= least) & (judged_T <= most)
    return _weight(tokens, torch.where(inside_T, ratio_T, torch.zeros_like(ratio_T)))


def sequence_truncated_importance(tokens: Tokens, *, most: float = 2.0) -> Tensor:
    """``min(prod_t pi_learner / pi_sampler, most)``, the same for all tokens of a trajectory: Seq-TIS.

    When Speed Kills Stability (Liu et al., 2025, a blog post): the product, which is unbiased before the cut, not the
    geometric mean. Over long trajectories it is far from 1 for small differences already. Needs ``sampler_logp_T``.
    """
    return _weight(tokens, importance_ratio(tokens, sequence=True).clamp(max=most))


def sequence_masked_importance(tokens: Tokens, *, least: float = 0.0, most: float = 2.0) -> Tensor:
    """``prod_t pi_learner / pi_sampler`` inside ``[least, most]``, else 0 for the whole trajectory: Seq-MIS.

    When Speed Kills Stability (Liu et al., 2025, a blog post); the product as in Seq-TIS, bounded above alone by
    default. Needs ``sampler_logp_T``.
    """
    ratio_T = importance_ratio(tokens, sequence=True)
    inside_T = (ratio_T >= least) & (ratio_T <= most)
    return _weight(tokens, torch.where(inside_T, ratio_T, torch.zeros_like(ratio_T)))
