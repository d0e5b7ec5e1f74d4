"""Cuts an update batch into micro-batches without changing what is computed: layout, token budget, ranks.

A micro-batch is a block of rows [R, L]. ``padded`` puts one trajectory in a row (best for many short ones on a CPU);
``packed`` joins trajectories end to end in one row, kept apart by a block-diagonal attention mask. Only positions that
predict a sampled token are ever projected to the vocabulary, and each carries its index in the batch's one flat list
of sampled tokens, so results are put back where they belong whatever the cut.

Dimensions: R rows, L row length, M sampled tokens of the micro-batch, T sampled tokens of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["padded", "packed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """What the learner needs of one trajectory: its ids and where the sampled ones stand (never at position 0)."""

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]  # of sampled ids, increasing

    @staticmethod
    def of(token_ids: Sequence[int], loss_mask: Sequence[bool]) -> SampledSequence:
        positions = tuple(i for i, is_sampled in enumerate(loss_mask) if is_sampled)
        assert len(token_ids) == len(loss_mask), (len(token_ids), len(loss_mask))
        assert not positions or positions[0] > 0, "a sampled id needs at least one id before it"
        return SampledSequence(token_ids=tuple(token_ids), positions=positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward. ``origin`` is empty of meaning for a pad: a pad's tokens carry no weight."""

    input_ids: Tensor  # int64 [R, L]; padding is 0 and never looked at
    position_ids: Tensor  # int64 [R, L], from 0 in every trajectory
    segments: Tensor | None  # int64 [R, L], number of the trajectory in its row; None: one a row, causal attention does
    predict: Tensor  # int64 [M], flat position in [R * L] whose output predicts the token
    target: Tensor  # int64 [M], the sampled ids
    origin: Tensor  # int64 [M], index among the T sampled tokens of the batch
    widest: int  # largest M among the ranks' micro-batches of this turn: all make equally many head calls (ZeRO 3)
    is_pad: bool = False  # keeps ranks in step; contributes exactly 0

    @property
    def num_slots(self) -> int:
        return self.input_ids.numel()


def attention_mask(segments: Tensor) -> Tensor:
    """bool [R, 1, L, L]: causal and inside one trajectory only."""
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    return (causal & (segments[:, :, None] == segments[:, None, :]))[:, None]


def pack(
    sequences: Sequence[SampledSequence],
    *,
    layout: Layout,
    token_budget: int,
    num_ranks: int = 1,
    max_sequences: int | None = None,
) -> list[list[MicroBatch]]:
    """Micro-batches of every rank, the same number for each (ZeRO 2 and 3 hang otherwise), filled up with pads.

    Args:
        sequences: the update batch in its fixed order; token T indices follow this order.
        layout: ``padded`` or ``packed``.
        token_budget: most slots R * L of a micro-batch; a single longer trajectory gets one of its own.
        num_ranks: data-parallel world size.
        max_sequences: most trajectories of a micro-batch.
    """
    starts = [0]
    for sequence in sequences:
        starts.append(starts[-1] + len(sequence.positions))
    # Longest first: rows of a padded block are alike, and the order is a pure function of the batch.
    order = sorted(range(len(sequences)), key=lambda i: (-len(sequences[i].token_ids), i))
    bins = _fill_bins(order, [len(s.token_ids) for s in sequences], layout, token_budget, max_sequences)
    blocks = [_block([sequences[i] for i in chosen], [starts[i] for i in chosen], layout) for chosen in bins]
    ranks: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
    for block in sorted(blocks, key=lambda b: -b.num_slots):
        min(ranks, key=lambda blocks_of_rank: sum(b.num_slots for b in blocks_of_rank)).append(block)
    most = max(len(blocks_of_rank) for blocks_of_rank in ranks)
    for blocks_of_rank in ranks:
        blocks_of_rank += [_pad()] * (most - len(blocks_of_rank))
    widest = [max(block.widest for block in turn) for turn in zip(*ranks, strict=True)]
    return [[replace(block, widest=w) for block, w in zip(of_rank, widest, strict=True)] for of_rank in ranks]


def _fill_bins(
    order: list[int], lengths: list[int], layout: Layout, token_budget: int, max_sequences: int | None
) -> list[list[int]]:
    """Greedy in order for ``padded`` (neighbours are alike in length), first fit for ``packed``."""
    bins: list[list[int]] = []
    for index in order:
        for chosen in bins if layout == "packed" else bins[-1:]:
            if layout == "packed":
                slots = sum(lengths[i] for i in chosen) + lengths[index]
            else:
                slots = lengths[chosen[0]] * (len(chosen) + 1)
            if slots <= token_budget and len(chosen) < (max_sequences or len(order)):
                chosen.append(index)
                break
        else:
            bins.append([index])
    return bins


def _block(sequences: list[SampledSequence], starts: list[int], layout: Layout) -> MicroBatch:
    lengths = [len(s.token_ids) for s in sequences]
    num_rows, length = (1, sum(lengths)) if layout == "packed" else (len(sequences), max(lengths))
    input_ids = torch.zeros(num_rows * length, dtype=torch.int64)
    position_ids = torch.arange(length).repeat(num_rows)
    segments = torch.zeros(num_rows * length, dtype=torch.int64)
    predict: list[int] = []
    target: list[int] = []
    origin: list[int] = []
    offset = 0
    for number, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
        offset = offset if layout == "packed" else number * length
        end = offset + len(sequence.token_ids)
        input_ids[offset:end] = torch.tensor(sequence.token_ids)
        position_ids[offset:end] = torch.arange(end - offset)
        segments[offset:end] = number
        predict += [offset + position - 1 for position in sequence.positions]
        target += [sequence.token_ids[position] for position in sequence.positions]
        origin += range(start, start + len(sequence.positions))
        offset = end
    shape = (num_rows, length)
    return MicroBatch(
        input_ids=input_ids.view(shape),
        position_ids=position_ids.view(shape),
        segments=segments.view(shape) if layout == "packed" and len(sequences) > 1 else None,
        predict=torch.tensor(predict, dtype=torch.int64),
        target=torch.tensor(target, dtype=torch.int64),
        origin=torch.tensor(origin, dtype=torch.int64),
        widest=len(target),
    )


def _pad() -> MicroBatch:
    return MicroBatch(
        input_ids=torch.zeros(1, 2, dtype=torch.int64),
        position_ids=torch.arange(2)[None],
        segments=None,
        predict=torch.zeros(1, dtype=torch.int64),
        target=torch.zeros(1, dtype=torch.int64),
        origin=torch.zeros(1, dtype=torch.int64),
        widest=1,
        is_pad=True,
    )
