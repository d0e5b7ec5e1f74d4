"""What the update will do to entropy, to first order, and what STARE chose: sums over the tokens of the batch.

All follow from Phi (``stare.sensitivity``): a step of size eta on ``c ln p(o)`` changes the entropy of its position by
``eta c Phi``. Positions are taken as independent, each with logits of its own; a network that shares parameters and an
optimizer that rescales gradients keep to this only in tendency, which is why predicted and measured change are both
recorded. T: sampled tokens of the update batch that live on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stare.selection import all_reduce, top_fraction
from stare.weights import OPERATIONS, TokenSets, Variant

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ENTROPY_SHARE = 0.2
"""The share of positions that "Beyond the 80/20 Rule" (arXiv 2506.01939) calls forking: the 20 % of highest entropy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyDynamics:
    """First-order change of the batch's mean entropy as a function of the weights: linear in W and M.

    ``drift(W, M) = -(Lambda - (W - 1) Gamma_W - (M - 1) Gamma_M) / N`` per unit of logit step; for O1 this is
    arXiv 2606.19236, Sec. 3.3, with ``Gamma_W`` its Gamma.
    """

    residual: float = 0.0  # Lambda: minus the sum of A Phi over all tokens, the net pull downwards of plain GRPO
    amplified: float = 0.0  # Gamma_W: sum of A Phi over the tokens that W multiplies
    attenuated: float = 0.0  # Gamma_M: sum of A Phi over the tokens that M multiplies
    num_tokens: int = 0  # N

    @property
    def leverage(self) -> float:
        """Gamma: what one unit of strength u adds where W = 1 + u and M = 1 - u; equals ``amplified`` for O1."""
        return self.amplified - self.attenuated

    @property
    def critical_weight(self) -> float | None:
        """``W* = 1 + Lambda / Gamma``, at which the predicted drift is zero; None where the weights have no leverage.

        With M in play (C2, C3, C4, O2, O4) it is 1 + u* of the common strength u.
        """
        weight = 1 + self.residual / self.leverage if self.leverage > 0 else math.nan
        return weight if math.isfinite(weight) else None

    def drift(self, amplify: float, attenuate: float) -> float:
        """Predicted change of mean entropy, nats per unit of logit step; 0 for an empty batch."""
        moved = -self.residual + (amplify - 1) * self.amplified + (attenuate - 1) * self.attenuated
        return moved / max(1, self.num_tokens)


def entropy_dynamics(
    advantage_T: Tensor,
    phi_T: Tensor,
    sets: TokenSets,
    variant: Variant,
    *,
    gate: Tensor | None = None,
    group: ProcessGroup | None = None,
) -> EntropyDynamics:
    """Lambda, Gamma and N of a batch, summed in float64 over all ranks.

    Args:
        advantage_T: float [T]; where the loss weighs tokens unequally, the advantage times the token's share times N.
        phi_T: float [T], exact sensitivities under the weights before the update.
        sets: of the same tokens.
        variant: which of them W and M multiply.
        gate: bool [T], where weights are allowed at all (a gate per sample or token); None is everywhere.
        group: ranks that hold the batch together.
    """
    pull_T = advantage_T.double() * phi_T.double()
    operation = OPERATIONS[variant]
    sums = [-pull_T.sum()]
    for names in (operation.amplified, operation.attenuated):
        total = pull_T.new_zeros(())
        for name in names:
            weighted_T = sets.named(name) if gate is None else sets.named(name) & gate
            total = total + pull_T[weighted_T].sum()
        sums.append(total)
    sums.append(pull_T.new_tensor(float(pull_T.numel())))
    residual, amplified, attenuated, num_tokens = all_reduce(torch.stack(sums), group).tolist()
    return EntropyDynamics(residual=residual, amplified=amplified, attenuated=attenuated, num_tokens=round(num_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quadrant:
    """One of the four quadrants of (sign of A, surprisal above or below its critical value)."""

    share: float  # of all sampled tokens of the batch, those with A = 0 included
    drift: float  # its part of the predicted change of mean entropy, nats per unit of logit step


def quadrants(weight_T: Tensor, phi_T: Tensor, *, group: ProcessGroup | None = None) -> Mapping[str, Quadrant]:
    """Share and weight of the four quadrants (arXiv 2606.19236, Sec. 3.2); the drifts add up to the whole.

    A surprisal is above its critical value exactly where Phi > 0, so no s* has to be solved for.

    Args:
        weight_T: float [T], omega A (times share times N where the loss weighs tokens unequally).
        phi_T: float [T].
        group: ranks that hold the batch together.

    Returns:
        ``plus_high`` (raises entropy), ``plus_low`` (lowers), ``minus_low`` (raises), ``minus_high`` (lowers).
    """
    pull_T = weight_T.double() * phi_T.double()
    high_T = phi_T > 0
    masks = {
        "plus_high": (weight_T > 0) & high_T,
        "plus_low": (weight_T > 0) & (phi_T < 0),
        "minus_low": (weight_T < 0) & (phi_T < 0),
        "minus_high": (weight_T < 0) & high_T,
    }
    sums = [pull_T.new_tensor(float(pull_T.numel()))]
    for mask_T in masks.values():
        sums += [mask_T.sum().double(), pull_T[mask_T].sum()]
    num_tokens, *rest = all_reduce(torch.stack(sums), group).tolist()
    total = max(1.0, num_tokens)
    return {
        name: Quadrant(share=count / total, drift=drift / total)
        for name, count, drift in zip(masks, rest[::2], rest[1::2], strict=True)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionReport:
    """How well the chosen tokens are the ones that theory, and another rule, would have chosen; None: none chosen."""

    l_plus_rising: float | None  # share of L+ with Phi > 0: a larger step there does raise entropy
    l_minus_falling: float | None  # share of L- with Phi > 0: a smaller step there does keep entropy up
    high_entropy: float | None  # share of L+ and L- among the 20 % of positions of highest entropy


def selection_report(
    sets: TokenSets,
    entropy_T: Tensor,
    phi_T: Tensor,
    *,
    place_T: Tensor | None = None,
    group: ProcessGroup | None = None,
) -> SelectionReport:
    """The paper reports about 60 % early and above 95 % late for the first two, with the surprisal quantile.

    Args:
        sets: of the same tokens.
        entropy_T: float [T], nats.
        phi_T: float [T].
        place_T: as in ``top_fraction``.
        group: as in ``top_fraction``.
    """
    forking_T = top_fraction(entropy_T, torch.ones_like(sets.plus_T), ENTROPY_SHARE, place_T=place_T, group=group)
    chosen_T = sets.l_plus_T | sets.l_minus_T
    counts = [
        (sets.l_plus_T & (phi_T > 0)).sum(),
        sets.l_plus_T.sum(),
        (sets.l_minus_T & (phi_T > 0)).sum(),
        sets.l_minus_T.sum(),
        (chosen_T & forking_T).sum(),
        chosen_T.sum(),
    ]
    values = all_reduce(torch.stack(counts), group).tolist()
    rising, falling, overlap = (a / b if b else None for a, b in zip(values[::2], values[1::2], strict=True))
    return SelectionReport(l_plus_rising=rising, l_minus_falling=falling, high_entropy=overlap)


def most_chosen(token_T: Tensor, chosen_T: Tensor, count: int = 10) -> list[tuple[int, int]]:
    """The token ids most often among the chosen, with how often; equal counts go to the smaller id.

    Args:
        token_T: int64 [T], the sampled ids.
        chosen_T: bool [T].
        count: how many at most.
    """
    tokens, counts = torch.unique(token_T[chosen_T], return_counts=True)
    order = torch.argsort(counts, descending=True, stable=True)[:count]
    return list(zip(tokens[order].tolist(), counts[order].tolist(), strict=True))
