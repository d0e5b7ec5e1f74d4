"""Micro-batches by their own laws: nothing lost, nothing seen across trajectories, common beginnings laid down once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.pack import Layout, MicroBatch, SampledSequence, attention_mask, pack

LAYOUTS: tuple[Layout, ...] = ("auto", "padded", "packed", "shared")
FEW_IDS = st.integers(0, 2)


@st.composite
def families(draw: st.DrawFn) -> list[SampledSequence]:
    """Sequences with and without common beginnings, some of them equal."""
    sequences = []
    for _ in range(draw(st.integers(1, 3))):
        trunk = draw(st.lists(FEW_IDS, min_size=1, max_size=20))
        for _ in range(draw(st.integers(1, 4))):
            ids = [*trunk, *draw(st.lists(FEW_IDS, min_size=1, max_size=12))]
            positions = draw(st.sets(st.integers(1, len(ids) - 1), min_size=1))
            sequences.append(SampledSequence(token_ids=tuple(ids), positions=tuple(sorted(positions))))
    return sequences


def seen_by(block: MicroBatch, slot: int) -> list[int]:
    """The ids that the slot's row of the mask lets it see, in order."""
    row, place = divmod(slot, block.input_ids.shape[1])
    if block.last is None:
        return block.input_ids[row, : place + 1].tolist()
    allowed = attention_mask(block.last)[row, 0, place]
    return block.input_ids[row, allowed].tolist()


@given(
    sequences=families(),
    layout=st.sampled_from(LAYOUTS),
    budget=st.integers(4, 80),
    num_ranks=st.integers(1, 3),
    most=st.one_of(st.none(), st.integers(1, 4)),
)
def test_every_sampled_token_is_predicted_once_from_just_what_came_before_it(
    sequences: list[SampledSequence], layout: Layout, budget: int, num_ranks: int, most: int | None
) -> None:
    ranks = pack(sequences, layout=layout, token_budget=budget, num_ranks=num_ranks, max_sequences=most)
    assert len({len(of_rank) for of_rank in ranks}) == 1
    before = [(s.token_ids[:p], s.token_ids[p]) for s in sequences for p in s.positions]  # by index in the batch
    found = []
    for block in (block for of_rank in ranks for block in of_rank if not block.is_pad):
        for slot, target, origin in zip(
            *(x.tolist() for x in (block.predict, block.target, block.origin)), strict=True
        ):
            assert (tuple(seen_by(block, slot)), target) == before[origin]
            assert int(block.position_ids.flatten()[slot]) == len(before[origin][0]) - 1
            found.append(origin)
    assert sorted(found) == list(range(len(before)))


@given(trunk=st.lists(FEW_IDS, min_size=8, max_size=20), data=st.data())
def test_the_shared_layout_has_one_slot_for_each_distinct_beginning(trunk: list[int], data: st.DataObject) -> None:
    tails = data.draw(st.lists(st.lists(FEW_IDS, min_size=1, max_size=12), min_size=1, max_size=8))
    sequences = [SampledSequence(token_ids=(*trunk, *tail), positions=(len(trunk),)) for tail in tails]
    ((block,),) = pack(sequences, layout="shared", token_budget=10_000)
    assert block.num_slots == len({s.token_ids[: n + 1] for s in sequences for n in range(len(s.token_ids))})


def family(prompt: int, lengths: list[int], first: int = 0) -> list[SampledSequence]:
    """Continuations of one prompt, that differ from their first token on."""
    start = tuple(range(first, first + prompt))
    return [
        SampledSequence(token_ids=(*start, *([1000 + first + i] * n)), positions=tuple(range(prompt, prompt + n)))
        for i, n in enumerate(lengths)
    ]


def test_rows_are_no_longer_than_they_must_be() -> None:
    uneven = family(2, [62, 30, 30, 30, 20, 10])
    ((block,),) = pack(uneven, layout="packed", token_budget=10_000)
    assert block.input_ids.shape == (4, 64)
    groups = [s for g in range(4) for s in family(40, [8] * 8, first=100 * g)]
    ((block,),) = pack(groups, layout="shared", token_budget=10_000)
    assert block.input_ids.shape == (4, 40 + 8 * 8)


UNEVEN = family(2, [300 + 7 * i % 240 for i in range(64)])
"""No two fit into the row of the longest."""


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_packed_leaves_few_slots_empty(num_ranks: int) -> None:
    ranks = pack(UNEVEN, layout="packed", token_budget=32_768, num_ranks=num_ranks)
    num_slots = sum(block.num_slots for of_rank in ranks for block in of_rank if not block.is_pad)
    assert sum(len(s.token_ids) for s in UNEVEN) >= 0.95 * num_slots


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_no_rank_is_without_work(num_ranks: int) -> None:
    ranks = pack(UNEVEN, layout="auto", token_budget=32_768, num_ranks=num_ranks)
    assert not any(block.is_pad for of_rank in ranks for block in of_rank)
    slots = [sum(block.num_slots for block in of_rank) for of_rank in ranks]
    assert max(slots) < 1.2 * sum(slots) / num_ranks


@pytest.mark.parametrize(
    ("sequences", "width", "shape"),
    [
        (family(2, [60] * 8), 128, (8, 62)),  # alike and with little in common: a row each
        (family(60, [4] * 8), 128, (1, 60 + 8 * 4)),  # a long prompt: once
        (family(2, [62, 30, 30, 30, 30]), 128, (3, 64)),  # uneven: two in a row
        (family(60, [600] * 8), 128, (8, 660)),  # shared would be fewer slots, but longer rows than it is worth
        (family(600, [600] * 8), 8192, (1, 600 + 8 * 600)),  # the wider the model, the less attention counts
    ],
)
def test_auto_takes_the_cheapest_layout(sequences: list[SampledSequence], width: int, shape: tuple[int, int]) -> None:
    ((block,),) = pack(sequences, layout="auto", token_budget=100_000, width=width)
    assert block.input_ids.shape == shape


@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_a_trajectory_does_not_see_its_neighbour(layout: Layout, tiny_model: Any) -> None:
    prompt = tuple(range(3, 23))
    own = SampledSequence(token_ids=(*prompt, 30, 31, 32), positions=(20, 21, 22))

    def hidden(neighbour: tuple[int, ...]) -> torch.Tensor:
        other = SampledSequence(token_ids=(*prompt, *neighbour), positions=(20,))
        longest = SampledSequence(token_ids=tuple(range(60, 110)), positions=(1,))  # makes room for both in one row
        ((block,),) = pack([own, other, longest], layout=layout, token_budget=1000)
        assert block.last is not None
        assert block.input_ids.shape == (2, 50)
        with torch.no_grad():
            states = tiny_model.get_decoder()(
                input_ids=block.input_ids, position_ids=block.position_ids, attention_mask=attention_mask(block.last)
            ).last_hidden_state
        slots = [slot for slot, o in zip(block.predict.tolist(), block.origin.tolist(), strict=True) if o < 3]
        return states.flatten(0, 1)[slots]

    torch.testing.assert_close(hidden((40, 41, 42)), hidden((50, 51, 52)), rtol=0, atol=1e-6)
