"""The exact top share of a batch's tokens by some score: linear time, deterministic ties, over any number of ranks.

Radix selection: scores are mapped to integers of the same order, and the threshold is found 16 bits at a time from a
histogram of the digit. Only histograms (65,536 counts) travel between ranks, two for float32, four for float64; no rank
ever sees another's tokens, and the result is the one that a full sort of all tokens would give.

T: sampled tokens of the update batch that live on this rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_DIGIT_BITS = 16
_NUM_BINS = 1 << _DIGIT_BITS


def num_selected(num_candidates: int, fraction: float) -> int:
    """``ceil(fraction * n)``, at least 1 of a non-empty set; a product that misses an integer by rounding is it."""
    return max(1, int(num_candidates * fraction + 0.999999)) if num_candidates else 0


def all_reduce(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum over the ranks of ``group``, in place; None is this process alone."""
    if group is not None:
        torch.distributed.all_reduce(tensor, group=group)
    return tensor


def top_fraction(
    score_T: Tensor,
    candidate_T: Tensor,
    fraction: float,
    *,
    place_T: Tensor | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Marks the ``num_selected`` candidates of highest score over all ranks; equal scores go to the earlier token.

    Args:
        score_T: float [T]; no NaN among the candidates. bfloat16 and float16 are ranked as float32.
        candidate_T: bool [T].
        fraction: share of the candidates of all ranks, in (0, 1].
        place_T: int64 [T], >= 0, place of each token in the whole batch, which decides between equal scores; None is
            the order given. Needed with ``group``, where every place must be different.
        group: ranks that hold the batch together, each with its own tokens (possibly none); every one must call. None
            is this process alone (``torch.distributed.group.WORLD`` is all of them).

    Returns:
        bool [T], a subset of ``candidate_T``.

    Raises:
        ValueError: a candidate's score is NaN on some rank (raised on every one), the fraction is outside (0, 1], or
            ``group`` is given without ``place_T``.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be in (0, 1], got {fraction}")
    if group is not None and place_T is None:
        raise ValueError("top_fraction over a group needs place_T: which of two equal tokens comes first?")
    key_T = _ordered_key(score_T.detach())
    num_nan = (torch.isnan(score_T.detach()) & candidate_T).sum()
    totals = all_reduce(torch.stack((candidate_T.sum(), num_nan)), group)
    num_candidates, num_nan_all = totals.tolist()
    if num_nan_all:
        raise ValueError("score of a sampled token is NaN: the score pass returned a non-finite value")
    k = num_selected(num_candidates, fraction)
    if k == 0:
        return torch.zeros_like(candidate_T)
    threshold, num_above, num_tied = _kth_largest(key_T, candidate_T, k, group)
    chosen_T = (key_T > threshold) & candidate_T
    missing = k - num_above
    tied_T = (key_T == threshold) & candidate_T
    if missing == num_tied:
        return chosen_T | tied_T
    if place_T is None:
        chosen_T[tied_T.nonzero().flatten()[:missing]] = True
        return chosen_T
    # The earliest `missing` of the tied: the largest by negated place, all different.
    negated_T = -place_T.to(torch.int64)
    last, _, _ = _kth_largest(negated_T, tied_T, missing, group)
    return chosen_T | (tied_T & (negated_T >= last))


def _ordered_key(score_T: Tensor) -> Tensor:
    """Integers in the order of the scores; -0.0 and 0.0 are one."""
    if score_T.dtype not in (torch.float32, torch.float64):
        score_T = score_T.float()
    integer, top = (torch.int32, 31) if score_T.dtype == torch.float32 else (torch.int64, 63)
    bits_T = (score_T + 0.0).view(integer)
    # Negative floats count downwards: flip all bits but the sign.
    return (bits_T >> top).bitwise_and_(torch.iinfo(integer).max).bitwise_xor_(bits_T)


def _kth_largest(key_T: Tensor, candidate_T: Tensor, k: int, group: ProcessGroup | None) -> tuple[int, int, int]:
    """The k-th largest key among the candidates of all ranks, how many are larger, and how many equal it."""
    if group is None and key_T.numel() < _NUM_BINS:  # fewer tokens than bins: the histograms would be most of the work
        kept = key_T[candidate_T]
        kth = torch.kthvalue(kept, kept.numel() - k + 1).values
        return int(kth), int((kept > kth).sum()), int((kept == kth).sum())
    num_digits = key_T.element_size() * 8 // _DIGIT_BITS
    threshold = num_above = num_equal = 0
    for number in range(num_digits):
        shift = _DIGIT_BITS * (num_digits - 1 - number)
        if number == 0:
            # Arithmetic shift keeps the sign: move the leading digit to [0, 65536), and what does not count behind it
            # (by arithmetic: a masked fill takes ten times as long).
            digit_T = (key_T >> shift).add_(_NUM_BINS // 2)
            digit_T |= (~candidate_T).to(key_T.dtype) << _DIGIT_BITS
        else:
            digit_T = (key_T >> shift) & (_NUM_BINS - 1)
        counts = all_reduce(torch.bincount(digit_T, minlength=_NUM_BINS)[:_NUM_BINS], group)
        from_top = counts.flip(0).cumsum(0)
        place = int(torch.searchsorted(from_top, k - num_above))  # first bin from the top that reaches k
        digit = _NUM_BINS - 1 - place
        num_equal = int(counts[digit])
        num_above += int(from_top[place]) - num_equal
        threshold = (threshold << _DIGIT_BITS) | digit if number else digit - _NUM_BINS // 2
        if number + 1 < num_digits:
            key_T = key_T[digit_T == digit]
    return threshold, num_above, num_equal
