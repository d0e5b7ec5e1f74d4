"""Micro-batches by their own laws: nothing lost, nothing seen across trajectories, common beginnings laid down once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.pack import Layout, MicroBatch, SampledSequence, attention_mask, pack

LAYOUTS: tuple[Layout, ...] = ("padded", "packed", "shared")
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


@given(sequences=families())
def test_the_shared_layout_has_one_slot_for_each_distinct_beginning(sequences: list[SampledSequence]) -> None:
    ((block,),) = pack(sequences, layout="shared", token_budget=10_000)
    beginnings = {s.token_ids[: n + 1] for s in sequences for n in range(len(s.token_ids))}
    assert block.num_slots == len(beginnings)


@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_a_trajectory_does_not_see_its_neighbour(layout: Layout, tiny_model: Any) -> None:
    prompt = tuple(range(3, 23))
    own = SampledSequence(token_ids=(*prompt, 30, 31, 32), positions=(20, 21, 22))

    def hidden(neighbour: tuple[int, ...]) -> torch.Tensor:
        other = SampledSequence(token_ids=(*prompt, *neighbour), positions=(20,))
        ((block,),) = pack([own, other], layout=layout, token_budget=1000)
        assert block.last is not None
        with torch.no_grad():
            states = tiny_model.get_decoder()(
                input_ids=block.input_ids, position_ids=block.position_ids, attention_mask=attention_mask(block.last)
            ).last_hidden_state
        return states[0][[slot for slot, o in zip(block.predict.tolist(), block.origin.tolist(), strict=True) if o < 3]]

    torch.testing.assert_close(hidden((40, 41, 42)), hidden((50, 51, 52)), rtol=0, atol=1e-6)
