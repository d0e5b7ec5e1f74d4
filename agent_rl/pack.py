"""Cuts an update batch into micro-batches without changing what is computed: layout, token budget, ranks.

A micro-batch is a block of rows [R, L]. ``padded`` puts one trajectory in a row (best for many short ones on a CPU);
``packed`` joins trajectories end to end in one row, kept apart by the attention mask; ``shared`` does too, and what
trajectories have in common from their start (the prompt of a group, the trunk of branches) is laid down once. Only
positions that predict a sampled token are ever projected to the vocabulary, and each carries its index in the batch's
one flat list of sampled tokens, so results are put back where they belong whatever the cut.

Dimensions: R rows, L row length, M sampled tokens of the micro-batch, T sampled tokens of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Layout = Literal["padded", "packed", "shared"]

LEAST_SHARED = 8
"""Tokens in common from which trajectories are kept in one micro-batch by the ``shared`` layout."""


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
    last: Tensor | None  # int64 [R, L], the last slot that may look back at this one; None: causal attention does
    predict: Tensor  # int64 [M], flat position in [R * L] whose output predicts the token
    target: Tensor  # int64 [M], the sampled ids
    origin: Tensor  # int64 [M], index among the T sampled tokens of the batch
    widest: int  # largest M among the ranks' micro-batches of this turn: all make equally many head calls (ZeRO 3)
    is_pad: bool = False  # keeps ranks in step; contributes exactly 0

    @property
    def num_slots(self) -> int:
        return self.input_ids.numel()


def attention_mask(last: Tensor) -> Tensor:
    """bool [R, 1, L, L]: slot i looks at slot j where j <= i <= last[j].

    Slots lie in preorder of the tree of common beginnings, so that is "j is on i's own trajectory, not after it".
    """
    slots = torch.arange(last.shape[1], device=last.device)
    return ((slots[:, None] >= slots[None]) & (slots[:, None] <= last[:, None, :]))[:, None]


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
        layout: ``padded``, ``packed`` or ``shared``.
        token_budget: most slots R * L of a micro-batch; a single longer trajectory gets one of its own.
        num_ranks: data-parallel world size.
        max_sequences: most trajectories of a micro-batch.
    """
    starts = [0]
    for sequence in sequences:
        starts.append(starts[-1] + len(sequence.positions))
    # Longest first: rows of a padded block are alike, and the order is a pure function of the batch.
    order = sorted(range(len(sequences)), key=lambda i: (-len(sequences[i].token_ids), i))
    if layout == "shared":
        bins = _fill_bins_by_family(sequences, token_budget, max_sequences or len(order))
    else:
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


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two sequences have in common from their start."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:length]) != np.asarray(b[:length]))
    return int(differ[0]) if differ.size else length


def _fill_bins_by_family(
    sequences: Sequence[SampledSequence], token_budget: int, max_sequences: int
) -> list[list[int]]:
    """Sequences with a common beginning stay together; such families then go first fit, largest first."""
    families: list[tuple[int, list[int]]] = []  # slots, members
    order = sorted(range(len(sequences)), key=lambda i: (sequences[i].token_ids, i))
    for place, index in enumerate(order):
        ids = sequences[index].token_ids
        common = _common(sequences[order[place - 1]].token_ids, ids) if place else 0
        if common >= LEAST_SHARED:
            slots, members = families[-1]
            if slots + len(ids) - common <= token_budget and len(members) < max_sequences:
                families[-1] = (slots + len(ids) - common, [*members, index])
                continue
        families.append((len(ids), [index]))
    bins: list[tuple[int, list[int]]] = []
    for slots, members in sorted(families, key=lambda family: (-family[0], family[1][0])):
        for number, (filled, chosen) in enumerate(bins):
            if filled + slots <= token_budget and len(chosen) + len(members) <= max_sequences:
                bins[number] = (filled + slots, chosen + members)
                break
        else:
            bins.append((slots, members))
    return [members for _, members in bins]


def _block(sequences: list[SampledSequence], starts: list[int], layout: Layout) -> MicroBatch:
    if layout != "padded":
        return _row(sequences, starts, share=layout == "shared")
    lengths = [len(s.token_ids) for s in sequences]
    num_rows, length = len(sequences), max(lengths)
    input_ids = torch.zeros(num_rows, length, dtype=torch.int64)
    predict: list[int] = []
    for number, sequence in enumerate(sequences):
        input_ids[number, : len(sequence.token_ids)] = torch.tensor(sequence.token_ids)
        predict += [number * length + position - 1 for position in sequence.positions]
    return _micro_batch(input_ids, torch.arange(length).repeat(num_rows, 1), None, predict, sequences, starts)


def _row(sequences: list[SampledSequence], starts: list[int], *, share: bool) -> MicroBatch:
    """All in one row; with ``share``, what a sequence has in common with the one before it is not laid down again."""
    pairs = list(zip(sequences, starts, strict=True))
    if share:
        pairs.sort(key=lambda pair: (pair[0].token_ids, pair[1]))
    input_ids: list[int] = []
    position_ids: list[int] = []
    predict: list[int] = []
    path = np.zeros(0, dtype=np.int64)  # slots of the sequence before, in order
    looked_at = np.zeros(sum(len(s.token_ids) for s in sequences), dtype=np.int64)
    before: tuple[int, ...] = ()
    for sequence, _ in pairs:
        common = _common(before, sequence.token_ids) if share else 0
        new = np.arange(len(input_ids), len(input_ids) + len(sequence.token_ids) - common)
        path = np.concatenate([path[:common], new])
        input_ids += sequence.token_ids[common:]
        position_ids += range(common, len(sequence.token_ids))
        looked_at[path] = len(input_ids) - 1
        predict += path[np.asarray(sequence.positions, dtype=np.int64) - 1].tolist()
        before = sequence.token_ids
    alone = len(sequences) == 1
    return _micro_batch(
        torch.tensor([input_ids]),
        torch.tensor([position_ids]),
        None if alone else torch.from_numpy(looked_at[: len(input_ids)])[None],
        predict,
        [sequence for sequence, _ in pairs],
        [start for _, start in pairs],
    )


def _micro_batch(
    input_ids: Tensor,
    position_ids: Tensor,
    last: Tensor | None,
    predict: list[int],
    sequences: Sequence[SampledSequence],
    starts: Sequence[int],
) -> MicroBatch:
    target = [sequence.token_ids[position] for sequence in sequences for position in sequence.positions]
    origin = [
        start + i for sequence, start in zip(sequences, starts, strict=True) for i in range(len(sequence.positions))
    ]
    return MicroBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        last=last,
        predict=torch.tensor(predict, dtype=torch.int64),
        target=torch.tensor(target, dtype=torch.int64),
        origin=torch.tensor(origin, dtype=torch.int64),
        widest=len(target),
    )


def _pad() -> MicroBatch:
    return MicroBatch(
        input_ids=torch.zeros(1, 2, dtype=torch.int64),
        position_ids=torch.arange(2)[None],
        last=None,
        predict=torch.zeros(1, dtype=torch.int64),
        target=torch.zeros(1, dtype=torch.int64),
        origin=torch.zeros(1, dtype=torch.int64),
        widest=1,
        is_pad=True,
    )
