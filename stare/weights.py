"""Which tokens STARE reweights, chosen once over the whole update batch (arXiv 2606.19236, Sec. 4.1-4.2).

The public reference ranks inside every micro-batch of every rank, so that its choice depends on how the batch was cut.
Here the functions take all sampled tokens of the batch at once: T is their number, in one fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Variant = Literal["none", "O1", "C2"]
"""``O1``: W on high-surprisal tokens of good trajectories; ``C2``: also M on those of bad ones; ``none``: GRPO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWeights:
    """omega of every sampled token and the two sets that it was chosen from."""

    omega_T: Tensor  # float [T], 1 outside the chosen sets and everywhere when the gate is off
    l_plus_T: Tensor  # bool [T], top surprisal among A > 0
    l_minus_T: Tensor  # bool [T], top surprisal among A < 0


def num_selected(num_candidates: int, fraction: float) -> int:
    """``ceil(fraction * n)``, at least 1 of a non-empty set; a product that misses an integer by rounding is it."""
    return max(1, int(num_candidates * fraction + 0.999999)) if num_candidates else 0


def top_surprisal(surprisal_T: Tensor, candidate_T: Tensor, fraction: float) -> Tensor:
    """Marks the ``num_selected`` candidates of highest surprisal; equal surprisals go to the earlier token.

    Linear time: the threshold is found by selection, not by sorting.

    Args:
        surprisal_T: float [T], nats, no NaN among the candidates.
        candidate_T: bool [T].
        fraction: P of the paper, in (0, 1].

    Returns:
        bool [T], a subset of ``candidate_T``.

    Raises:
        ValueError: a candidate's surprisal is NaN, or the fraction is outside (0, 1].
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be in (0, 1], got {fraction}")
    values = surprisal_T.detach()[candidate_T]
    selected_T = torch.zeros_like(candidate_T)
    if values.numel() == 0:
        return selected_T
    if torch.isnan(values).any():
        raise ValueError("surprisal of a sampled token is NaN: the score pass returned a non-finite logprob")
    k = num_selected(values.numel(), fraction)
    threshold = torch.kthvalue(values, values.numel() - k + 1).values
    above = values > threshold
    tied = values == threshold
    chosen = above | (tied & (tied.cumsum(0) <= k - above.sum()))
    selected_T[candidate_T] = chosen
    return selected_T


def token_weights(
    surprisal_T: Tensor,
    advantage_T: Tensor,
    *,
    gate_on: bool,
    amplify: float,
    attenuate: float,
    fraction: float = 0.1,
    variant: Variant = "O1",
) -> TokenWeights:
    """omega over the whole batch: ``W`` on L+, ``M`` on L- (C2 only), 1 elsewhere; all 1 while the gate is off.

    The sets are chosen whether or not the gate is on, so that they can be reported either way.

    Args:
        surprisal_T: float [T], ``-ln p`` of every sampled token of the batch.
        advantage_T: float [T], the advantage of each token's trajectory (0 takes part in neither set).
        gate_on: whether this step's batch entropy is below its target.
        amplify: W >= 1.
        attenuate: M in (0, 1].
        fraction: P.
        variant: which sets carry a weight.
    """
    l_plus_T = top_surprisal(surprisal_T, advantage_T > 0, fraction)
    l_minus_T = top_surprisal(surprisal_T, advantage_T < 0, fraction)
    omega_T = torch.ones_like(surprisal_T)
    if gate_on and variant != "none":
        omega_T[l_plus_T] = amplify
        if variant == "C2":
            omega_T[l_minus_T] = attenuate
    return TokenWeights(omega_T=omega_T, l_plus_T=l_plus_T, l_minus_T=l_minus_T)
