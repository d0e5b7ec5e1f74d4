"""The chosen tokens are those of a full sort, however the batch is ordered, split over ranks, or stored."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stare import num_selected, top_fraction

WORKER = Path(__file__).with_name("selection_worker.py")

# Few values, so that ties are the rule; infinities and both zeros among them.
values = st.sampled_from([-3.5, -1.0, -0.0, 0.0, 1e-38, 0.25, 1.0, 1.0000001, 7.0, float("inf"), float("-inf")])
rows = st.lists(st.tuples(values, st.booleans()), min_size=1, max_size=60)
fractions = st.floats(0.01, 1.0)


def by_full_sort(scores: list[float], candidates: list[bool], places: list[int], fraction: float) -> list[int]:
    ranked = sorted((i for i, flag in enumerate(candidates) if flag), key=lambda i: (-scores[i], places[i]))
    return sorted(ranked[: num_selected(len(ranked), fraction)])


@given(rows, fractions, st.sampled_from([torch.float32, torch.float64]))
def test_the_choice_is_that_of_a_full_sort_with_ties_to_the_earlier_token(
    rows: list[tuple[float, bool]], fraction: float, dtype: torch.dtype
) -> None:
    score = torch.tensor([value for value, _ in rows], dtype=dtype)
    candidate = torch.tensor([flag for _, flag in rows])
    chosen = top_fraction(score, candidate, fraction).nonzero().flatten().tolist()
    assert chosen == by_full_sort(score.tolist(), candidate.tolist(), list(range(len(rows))), fraction)


@given(rows, fractions, st.randoms(use_true_random=False))
def test_the_choice_moves_with_the_tokens_when_they_are_permuted(
    rows: list[tuple[float, bool]], fraction: float, random: object
) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    score = torch.tensor([value for value, _ in rows])
    candidate = torch.tensor([flag for _, flag in rows])
    place = torch.arange(len(rows))
    chosen = top_fraction(score, candidate, fraction, place_T=place)
    assert torch.equal(top_fraction(score, candidate, fraction), chosen)
    moved = top_fraction(score[order], candidate[order], fraction, place_T=place[order])
    assert torch.equal(moved, chosen[order])


@given(st.lists(st.floats(-100, 100, width=16), min_size=1, max_size=80), fractions)
def test_the_choice_does_not_depend_on_the_dtype(values: list[float], fraction: float) -> None:
    candidate = torch.ones(len(values), dtype=torch.bool)
    half, single, double = (
        top_fraction(torch.tensor(values, dtype=dtype), candidate, fraction)
        for dtype in (torch.float16, torch.float32, torch.float64)
    )
    assert torch.equal(half, single)
    assert torch.equal(single, double)


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_a_large_batch_is_chosen_as_by_a_sort_on_every_device(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    score = torch.empty(300_000).exponential_(generator=generator)
    score[::3] = score[::3].mul(50).round() / 50  # with ties
    candidate = torch.rand(300_000, generator=generator) < 0.4
    expected = torch.zeros_like(candidate)
    order = torch.sort(torch.where(candidate, score, -1.0), descending=True, stable=True).indices
    expected[order[: num_selected(int(candidate.sum()), 0.1)]] = True
    assert torch.equal(top_fraction(score.to(device), candidate.to(device), 0.1).cpu(), expected)


@pytest.mark.parametrize(
    ("n", "fraction", "expected"), [(0, 0.1, 0), (1, 0.1, 1), (30, 0.1, 3), (31, 0.1, 4), (7, 1.0, 7)]
)
def test_selection_size_is_the_ceiling_without_rounding_surprises(n: int, fraction: float, expected: int) -> None:
    assert num_selected(n, fraction) == expected
    chosen = top_fraction(torch.rand(n), torch.ones(n, dtype=torch.bool), fraction)
    assert int(chosen.sum()) == expected


def test_a_nan_score_is_refused_not_ranked() -> None:
    nan = torch.tensor([1.0, float("nan")])
    with pytest.raises(ValueError, match="NaN"):
        top_fraction(nan, torch.tensor([True, True]), 0.5)
    assert top_fraction(nan, torch.tensor([True, False]), 0.5).tolist() == [True, False]


def test_a_fraction_outside_its_range_is_named() -> None:
    with pytest.raises(ValueError, match=r"\(0, 1\], got 0"):
        top_fraction(torch.ones(1), torch.ones(1, dtype=torch.bool), 0)


@pytest.mark.slow
def test_ranks_choose_together_what_one_process_chooses(tmp_path: Path) -> None:
    """Two and four gloo ranks with uneven and empty shares, against the whole batch in one process (see the worker)."""
    store = tmp_path / "store"
    processes = [
        subprocess.Popen([sys.executable, str(WORKER), str(store), str(rank), "4"], stderr=subprocess.PIPE, text=True)
        for rank in range(4)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors[-3000:]
