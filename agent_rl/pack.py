"""Cuts an update batch into micro-batches without changing what is computed: layout, token budget, ranks.

A micro-batch is a block of rows [R, L]. ``padded`` puts one trajectory in a row; ``packed`` joins trajectories end to
end in rows, kept apart by the attention mask, so that hardly any slot is padding; ``shared`` does too, and what
trajectories have in common from their start (the prompt of a group, the trunk of branches) is laid down once. ``auto``
takes what costs the least arithmetic for the batch at hand. Only positions that predict a sampled token are ever
projected to the vocabulary, and each carries its index in the batch's one flat list of sampled tokens, so results are
put back where they belong whatever the cut.

Dimensions: R rows, L row length, M sampled tokens of the micro-batch, T sampled tokens of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

Layout = Literal["auto", "padded", "packed", "shared"]

MOST_PADDING = 0.05
"""Share of slots that ``packed`` leaves empty, where rows can be joined so that it does."""

SLACK = 1.1
"""Slots of a micro-batch over its even share, so that uneven rows find a place."""

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
    width: int = 1024,
) -> list[list[MicroBatch]]:
    """Micro-batches of every rank, the same number for each (ZeRO 2 and 3 hang otherwise), filled up with pads.

    Args:
        sequences: the update batch in its fixed order; token T indices follow this order.
        layout: ``auto``, ``padded``, ``packed`` or ``shared``.
        token_budget: most slots R * L of a micro-batch; a single longer trajectory gets one of its own.
        num_ranks: data-parallel world size.
        max_sequences: most trajectories of a micro-batch.
        width: of the model's hidden states, for what attention costs beside the rest.
    """
    starts = [0]
    for sequence in sequences:
        starts.append(starts[-1] + len(sequence.positions))
    layouts: tuple[Layout, ...] = ("padded", "packed", "shared") if layout == "auto" else (layout,)
    if num_ranks > 1:
        # As many micro-batches as all ranks have turns, about equal: none waits while the others have one more.
        lengths = [len(sequence.token_ids) for sequence in sequences]
        turns = -(-sum(lengths) // (num_ranks * token_budget))
        token_budget = min(token_budget, max(*lengths, math.ceil(SLACK * sum(lengths) / (num_ranks * turns))))
    cuts = [
        (one, cut) for one in layouts for cut in _cuts(sequences, one, token_budget, max_sequences or len(sequences))
    ]

    def badness(pair: tuple[Layout, list[list[Unit]]]) -> tuple[bool, int, float]:
        turns = -(-len(pair[1]) // num_ranks) if num_ranks > 1 else 0
        return layout == "packed" and _padding(pair[1]) > MOST_PADDING, turns, _cost(pair[1], width)

    best, cut = min(cuts, key=badness)
    blocks = [
        _block([[(sequences[i], starts[i]) for i in members] for _, members in rows], share=best == "shared")
        for rows in cut
    ]
    ranks: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
    for block in sorted(blocks, key=lambda b: -b.num_slots):
        min(ranks, key=lambda blocks_of_rank: sum(b.num_slots for b in blocks_of_rank)).append(block)
    turns = max(len(blocks_of_rank) for blocks_of_rank in ranks)
    for blocks_of_rank in ranks:
        blocks_of_rank += [_pad()] * (turns - len(blocks_of_rank))
    widest = [max(block.widest for block in turn) for turn in zip(*ranks, strict=True)]
    return [[replace(block, widest=w) for block, w in zip(of_rank, widest, strict=True)] for of_rank in ranks]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two sequences have in common from their start."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:length]) != np.asarray(b[:length]))
    return int(differ[0]) if differ.size else length


Unit = tuple[int, list[int]]
"""Slots, and the numbers of the trajectories that lie in them."""


def _cuts(
    sequences: Sequence[SampledSequence], layout: Layout, token_budget: int, max_sequences: int
) -> Iterator[list[list[Unit]]]:
    """Which trajectories share a row, and which rows a micro-batch; one way for each length that rows may have."""
    if layout == "shared":
        units = _families(sequences, token_budget, max_sequences)
    else:
        units = [(len(sequence.token_ids), [index]) for index, sequence in enumerate(sequences)]
    # Largest first: rows of a block are alike, and the order is a pure function of the batch.
    units.sort(key=lambda unit: (-unit[0], unit[1][0]))
    if layout == "padded":
        yield _stacked(units, token_budget, max_sequences)
        return
    capacity = units[0][0] if units else 1
    yield _stacked(_rows(units, capacity, max_sequences), token_budget, max_sequences)
    while 2 * capacity <= min(token_budget, sum(slots for slots, _ in units)):
        capacity *= 2
        yield _stacked(_rows(units, capacity, max_sequences), token_budget, max_sequences)


def _padding(cut: Sequence[Sequence[Unit]]) -> float:
    """Share of slots that nothing lies in."""
    return 1 - sum(slots for rows in cut for slots, _ in rows) / sum(len(rows) * rows[0][0] for rows in cut)


def _cost(cut: Sequence[Sequence[Unit]], width: int) -> float:
    """Arithmetic of all micro-batches, up to a factor.

    In a layer a slot meets about ``12 width^2`` weights, and a pair of slots takes ``2 width``. Without a mask the
    kernels leave out the pairs that causality forbids.
    """
    cost = 0.0
    for rows in cut:
        length = rows[0][0]
        is_masked = any(len(members) > 1 for _, members in rows)
        cost += len(rows) * length * (6 * width + length * (1.0 if is_masked else 0.5))
    return cost


def _families(sequences: Sequence[SampledSequence], token_budget: int, max_sequences: int) -> list[Unit]:
    """Sequences with a common beginning together, as far as a micro-batch has room for them."""
    families: list[Unit] = []
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
    return families


def _rows(units: Sequence[Unit], capacity: int, max_sequences: int) -> list[Unit]:
    """First fit into rows of ``capacity``: the longer a row, the less padding, but attention costs its square."""
    rows: list[Unit] = []
    for slots, members in units:
        for number, (filled, chosen) in enumerate(rows):
            if filled + slots <= capacity and len(chosen) + len(members) <= max_sequences:
                rows[number] = (filled + slots, chosen + members)
                break
        else:
            rows.append((slots, members))
    return sorted(rows, key=lambda row: (-row[0], row[1][0]))


def _stacked(rows: Sequence[Unit], token_budget: int, max_sequences: int) -> list[list[Unit]]:
    """Neighbouring rows, which are alike in length, as micro-batches; the first row of each is its longest."""
    blocks: list[list[Unit]] = []
    for row in rows:
        if blocks:
            block = blocks[-1]
            count = sum(len(members) for _, members in block) + len(row[1])
            if block[0][0] * (len(block) + 1) <= token_budget and count <= max_sequences:
                block.append(row)
                continue
        blocks.append([row])
    return blocks


def _block(rows: list[list[tuple[SampledSequence, int]]], *, share: bool) -> MicroBatch:
    """One micro-batch of rows of (sequence, index of its first sampled token)."""
    laid = [_row(pairs, share=share) for pairs in rows]
    length = max(len(row.input_ids) for row in laid)
    input_ids = np.zeros((len(laid), length), dtype=np.int64)
    position_ids = np.zeros_like(input_ids)
    # Padding sees itself alone: attention over nothing is not a number.
    last = np.tile(np.arange(length), (len(laid), 1))
    predict: list[int] = []
    for number, row in enumerate(laid):
        filled = len(row.input_ids)
        input_ids[number, :filled], position_ids[number, :filled] = row.input_ids, row.position_ids
        last[number, :filled] = row.last
        predict += [number * length + slot for slot in row.predict]
    pairs = [pair for row in laid for pair in row.pairs]
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        last=None if all(len(row.pairs) == 1 for row in laid) else torch.from_numpy(last),
        predict=torch.tensor(predict, dtype=torch.int64),
        target=torch.tensor([s.token_ids[p] for s, _ in pairs for p in s.positions], dtype=torch.int64),
        origin=torch.tensor([start + i for s, start in pairs for i in range(len(s.positions))], dtype=torch.int64),
        widest=len(predict),
    )


@dataclass(frozen=True, slots=True)
class _Row:
    input_ids: list[int]
    position_ids: list[int]
    last: np.ndarray[Any, np.dtype[np.int64]]  # [len(input_ids)]
    predict: list[int]  # slots of the row, by the order of pairs
    pairs: list[tuple[SampledSequence, int]]


def _row(pairs: list[tuple[SampledSequence, int]], *, share: bool) -> _Row:
    """All in one row; with ``share``, what a sequence has in common with the one before it is not laid down again."""
    if share:
        pairs = sorted(pairs, key=lambda pair: (pair[0].token_ids, pair[1]))
    input_ids: list[int] = []
    position_ids: list[int] = []
    predict: list[int] = []
    path = np.zeros(0, dtype=np.int64)  # slots of the sequence before, in order
    last = np.zeros(sum(len(sequence.token_ids) for sequence, _ in pairs), dtype=np.int64)
    before: tuple[int, ...] = ()
    for sequence, _ in pairs:
        common = _common(before, sequence.token_ids) if share else 0
        new = np.arange(len(input_ids), len(input_ids) + len(sequence.token_ids) - common)
        path = np.concatenate([path[:common], new])
        input_ids += sequence.token_ids[common:]
        position_ids += range(common, len(sequence.token_ids))
        last[path] = len(input_ids) - 1
        predict += path[np.asarray(sequence.positions, dtype=np.int64) - 1].tolist()
        before = sequence.token_ids
    return _Row(input_ids, position_ids, last[: len(input_ids)], predict, pairs)


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
