"""The public reference's way, which ranks surprisal and normalises inside every micro-batch.

It exists as the negative control of our invariance tests (``stare.selection = "per_micro_batch"``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agent_rl.pack import MicroBatch
from stare import TokenSets, token_sets


def sets_per_micro_batch(
    score_T: Tensor, advantage_T: Tensor, fraction: float, micro_batches: Sequence[MicroBatch]
) -> TokenSets:
    """L+ and L-, each the top ``fraction`` of its side within every micro-batch."""
    l_plus_T = torch.zeros_like(advantage_T, dtype=torch.bool)
    l_minus_T = torch.zeros_like(l_plus_T)
    for tokens in _scopes(micro_batches):
        part = token_sets(score_T[tokens], advantage_T[tokens], fraction)
        l_plus_T[tokens], l_minus_T[tokens] = part.l_plus_T, part.l_minus_T
    return TokenSets(plus_T=advantage_T > 0, minus_T=advantage_T < 0, l_plus_T=l_plus_T, l_minus_T=l_minus_T)


def scale_per_micro_batch(scale_T: Tensor, counts_B: Tensor, micro_batches: Sequence[MicroBatch]) -> None:
    """In place: the reference averages over the tokens of a micro-batch and weighs it by its share of sequences."""
    row_T = torch.repeat_interleave(torch.arange(len(counts_B)), counts_B)
    for tokens in _scopes(micro_batches):
        share = len(set(row_T[tokens].tolist())) / len(counts_B)
        scale_T[tokens] = share / len(tokens)


def _scopes(micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
    return [micro_batch.origin for micro_batch in micro_batches if not micro_batch.is_pad]
