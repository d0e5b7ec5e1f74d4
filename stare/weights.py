"""Which tokens STARE reweights and by how much, chosen once for the whole batch (arXiv 2606.19236, Sec. 4.1-4.2).

The public reference ranks inside every micro-batch of every rank, so that its choice depends on how the batch was cut.
Here the functions take all sampled tokens of the batch at once (or this rank's, with ``group``): T is their number.

Four sets, named as in the paper, over tokens of good (A > 0) and bad (A < 0) trajectories:

    L+  A > 0, the top P of that side by score: a step on them raises entropy        U+  the rest of A > 0: lowers it
    L-  A < 0, the top P of that side by score: lowers it                            U-  the rest of A < 0: raises it
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from stare.selection import top_fraction

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Variant = Literal["none", "O1", "O2", "O3", "O4", "C1", "C2", "C3", "C4"]
"""Which sets carry a weight; ``none`` is GRPO. See ``OPERATIONS``."""

Selector = Literal["surprisal", "phi", "entropy"]
"""What L+ and L- are ranked by: the paper's surprisal, the exact sensitivity Phi (then only tokens with Phi > 0 are
chosen), or the position's entropy."""

Granularity = Literal["batch", "sample", "token"]
"""Whose entropy is held against the target: the batch's mean, each trajectory's mean, or each position's own."""

SetName = Literal["l_plus", "l_minus", "u_plus", "u_minus"]


@dataclass(frozen=True, slots=True)
class Operation:
    """What a variant does: W > 1 on the amplified sets, M < 1 on the attenuated ones."""

    amplified: tuple[SetName, ...] = ()
    attenuated: tuple[SetName, ...] = ()


OPERATIONS: Mapping[Variant, Operation] = {
    "none": Operation(),
    "O1": Operation(amplified=("l_plus",)),
    "O2": Operation(attenuated=("u_plus",)),
    "O3": Operation(amplified=("u_minus",)),
    "O4": Operation(attenuated=("l_minus",)),
    "C1": Operation(amplified=("l_plus", "u_minus")),  # both sets that raise entropy
    "C2": Operation(amplified=("l_plus",), attenuated=("l_minus",)),  # both high-surprisal sets
    "C3": Operation(amplified=("u_minus",), attenuated=("u_plus",)),  # both low-surprisal sets
    "C4": Operation(attenuated=("u_plus", "l_minus")),  # both sets that lower entropy
}
"""O1 and C2 are confirmed by the public code; the others come from second-hand readings of Sec. 4.2 and the appendix,
which agree on C1-C4 and in one case swap O2 with O3. That U+ and U- are whole complements is our reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSets:
    """The partition of the tokens with a non-zero advantage."""

    plus_T: Tensor  # bool [T], A > 0
    minus_T: Tensor  # bool [T], A < 0
    l_plus_T: Tensor  # bool [T], chosen among A > 0
    l_minus_T: Tensor  # bool [T], chosen among A < 0

    def named(self, name: SetName) -> Tensor:
        """One of the four sets, bool [T]."""
        if name == "l_plus":
            return self.l_plus_T
        if name == "l_minus":
            return self.l_minus_T
        return self.plus_T & ~self.l_plus_T if name == "u_plus" else self.minus_T & ~self.l_minus_T


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWeights:
    """omega of every sampled token and the two sets that it was chosen from."""

    omega_T: Tensor  # float [T], 1 outside the weighted sets and everywhere when the gate is off
    l_plus_T: Tensor  # bool [T], top surprisal among A > 0
    l_minus_T: Tensor  # bool [T], top surprisal among A < 0


def token_sets(
    score_T: Tensor,
    advantage_T: Tensor,
    fraction: float = 0.1,
    *,
    above: float = -math.inf,
    place_T: Tensor | None = None,
    group: ProcessGroup | None = None,
) -> TokenSets:
    """L+ and L-: the top ``fraction`` of each side by score, over the batch of all ranks.

    Args:
        score_T: float [T], what the selector ranks by (surprisal, Phi or entropy, under the weights before the update).
        advantage_T: float [T], the advantage of each token's trajectory (0 takes part in neither side).
        fraction: P.
        above: scores up to this one are never chosen, even if fewer than ``fraction`` are left. With Phi as score it is
            0: a token that moves entropy the other way has no place in L+ or L-, however few there are.
        place_T: as in ``top_fraction``.
        group: as in ``top_fraction``.

    Raises:
        ValueError: as ``top_fraction``.
    """
    sides = advantage_T > 0, advantage_T < 0
    chosen = [top_fraction(score_T, side_T, fraction, place_T=place_T, group=group) for side_T in sides]
    if above > -math.inf:
        chosen = [chosen_T & (score_T > above) for chosen_T in chosen]
    return TokenSets(plus_T=sides[0], minus_T=sides[1], l_plus_T=chosen[0], l_minus_T=chosen[1])


def omega(
    sets: TokenSets, variant: Variant, *, gate: bool | Tensor, amplify: float, attenuate: float, dtype: torch.dtype
) -> Tensor:
    """The weight of every token, ``dtype`` [T]: W, M or 1; exactly 1 where the gate is off.

    Args:
        sets: of the same tokens.
        variant: which of them carry a weight.
        gate: bool, or bool [T] for a gate per sample or token.
        amplify: W >= 1.
        attenuate: M in (0, 1].
        dtype: of the result.
    """
    omega_T = torch.ones(sets.plus_T.shape, dtype=dtype, device=sets.plus_T.device)
    if gate is False:
        return omega_T
    operation = OPERATIONS[variant]
    for names, weight in ((operation.amplified, amplify), (operation.attenuated, attenuate)):
        for name in names:
            weighted_T = sets.named(name) if gate is True else sets.named(name) & gate
            omega_T.masked_fill_(weighted_T, weight)
    return omega_T


def token_gate(entropy_T: Tensor, target: float, granularity: Granularity, sample_T: Tensor | None = None) -> Tensor:
    """Where the gate is on, bool [T], for a gate per ``sample`` or per ``token`` (arXiv 2606.19236, App. G).

    On where the mean entropy of the token's trajectory, or of its own position, is below the target; a non-finite
    entropy is below nothing, so there the gate is off. (The gate per batch has memory: ``stare.controller``.)

    Args:
        entropy_T: float [T], nats.
        target: H_tgt, nats.
        granularity: ``sample`` or ``token``.
        sample_T: int64 [T], the number of each token's trajectory, from 0; ``sample`` needs it. A trajectory lives
            whole on one rank.
    """
    if granularity == "token":
        return entropy_T < target
    if granularity != "sample" or sample_T is None:
        raise ValueError("token_gate is for a gate per token, or per sample with sample_T")
    sums_B = torch.bincount(sample_T, weights=entropy_T.double())
    counts_B = torch.bincount(sample_T).clamp(min=1)
    return (sums_B / counts_B < target)[sample_T]


def token_weights(
    surprisal_T: Tensor,
    advantage_T: Tensor,
    *,
    gate_on: bool | Tensor,
    amplify: float,
    attenuate: float,
    fraction: float = 0.1,
    variant: Variant = "O1",
    place_T: Tensor | None = None,
    group: ProcessGroup | None = None,
) -> TokenWeights:
    """Sets and omega in one call, the paper's way: all weights 1 while the gate is off.

    The sets are chosen whether or not the gate is on, so that they can be reported either way.

    Args:
        surprisal_T: float [T], ``-ln p`` of every sampled token of the batch.
        advantage_T: float [T], the advantage of each token's trajectory (0 takes part in neither set).
        gate_on: whether this step's batch entropy is below its target.
        amplify: W >= 1.
        attenuate: M in (0, 1].
        fraction: P.
        variant: which sets carry a weight.
        place_T: as in ``top_fraction``.
        group: as in ``top_fraction``.
    """
    sets = token_sets(surprisal_T, advantage_T, fraction, place_T=place_T, group=group)
    omega_T = omega(sets, variant, gate=gate_on, amplify=amplify, attenuate=attenuate, dtype=surprisal_T.dtype)
    return TokenWeights(omega_T=omega_T, l_plus_T=sets.l_plus_T, l_minus_T=sets.l_minus_T)
