"""The estimators: against enumeration, against each other, and against the truth they estimate."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.evaluation import statistics as ev

ROWS = st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=2, max_size=12)


@given(n=st.integers(1, 9), c=st.integers(0, 9), k=st.integers(1, 9))
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_sample(n: int, c: int, k: int) -> None:
    if c > n or k > n:
        with pytest.raises(ValueError, match="pass@"):
            ev.pass_at_k(n, c, k)
        return
    samples = [True] * c + [False] * (n - c)
    subsets = list(itertools.combinations(samples, k))
    assert ev.pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize("p", [0.05, 0.4])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_pass_at_k_is_unbiased(p: float, k: int) -> None:
    n = 8
    expected = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * ev.pass_at_k(n, c, k) for c in range(n + 1))
    assert expected == pytest.approx(1 - (1 - p) ** k)


def test_one_right_of_32_passes_at_32() -> None:
    assert ev.pass_at_k(32, 1, 32) == 1.0  # a bootstrap with replacement says 0.638


@given(rows=ROWS)
def test_pass_curve_starts_at_avg_and_rises(rows: list[list[bool]]) -> None:
    rows = [row[: min(map(len, rows))] for row in rows]  # of the same length: no problem leaves the curve
    curve = ev.pass_curve(rows)
    assert list(curve) == list(range(1, len(rows[0]) + 1))
    assert curve[1].value == pytest.approx(ev.avg_at_k(rows).value)
    values = [e.value for e in curve.values()]
    assert all(a is not None and b is not None and a <= b + 1e-12 for a, b in itertools.pairwise(values))


def test_problems_with_too_few_samples_leave_the_curve_and_say_so() -> None:
    curve = ev.pass_curve([[True, False], [True], []])
    assert [(k, e.value, e.problems) for k, e in curve.items()] == [(1, 0.75, 2), (2, 1.0, 1)]


def test_averages_weigh_problems_not_samples() -> None:
    assert ev.avg_at_k([[True, True, True, True], [False]]).value == 0.5
    assert ev.avg_at_k([[], []]) == ev.Estimate(value=None, problems=0)
    assert ev.avg_at_k([[True]]) == ev.Estimate(value=1.0, problems=1)


@settings(max_examples=30)
@given(rows=ROWS, copies=st.integers(2, 4))
def test_more_samples_that_say_the_same_make_nothing_surer(rows: list[list[bool]], copies: int) -> None:
    once, often = ev.avg_at_k(rows), ev.avg_at_k([row * copies for row in rows])
    for name in ("value", "stderr", "low", "high", "boot_low", "boot_high"):
        assert getattr(once, name) == pytest.approx(getattr(often, name))


def beta_rows(rng: np.random.Generator, problems: int, k: int) -> list[list[bool]]:
    """Problems of very different difficulty: mean 0.4, most of them near 0 or 1."""
    chances = rng.beta(0.4, 0.6, size=problems)
    return [[bool(hit) for hit in rng.random(k) < p] for p in chances]


def test_bootstrap_and_analytic_intervals_agree() -> None:
    rng = np.random.default_rng(0)
    for problems in (100, 400):
        for _ in range(5):
            e = ev.avg_at_k(beta_rows(rng, problems, 8))
            assert e.low is not None
            assert e.high is not None
            assert e.boot_low is not None
            assert e.boot_high is not None
            width = e.high - e.low
            assert abs(e.low - e.boot_low) < 0.06 * width
            assert abs(e.high - e.boot_high) < 0.06 * width


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    covered = {"t": 0, "bootstrap": 0}
    runs = 400
    for _ in range(runs):
        values = [sum(row) / len(row) for row in beta_rows(rng, 40, 4)]
        e = ev.estimate(values)
        assert e.low is not None
        assert e.high is not None
        covered["t"] += e.low <= 0.4 <= e.high
        low, high = ev.bootstrap(np.asarray(values), draws=1000, seed=2)
        covered["bootstrap"] += low <= 0.4 <= high
    # 0.95 +- three standard errors of the count; the percentile bootstrap is known to be a little short at n = 40.
    assert 0.917 <= covered["t"] / runs <= 0.983
    assert 0.90 <= covered["bootstrap"] / runs <= 0.983


def test_error_for_these_problems_is_what_drawing_samples_anew_gives() -> None:
    rng = np.random.default_rng(3)
    chances = rng.beta(0.4, 0.6, size=50)
    means, told = [], []
    for _ in range(400):
        rows = [[bool(hit) for hit in rng.random(4) < p] for p in chances]
        means.append(ev.avg_at_k(rows).value)
        told.append(ev.sampling_stderr(rows))
    assert np.std(means, ddof=1) == pytest.approx(np.sqrt(np.mean(np.square(told))), rel=0.12)
    assert ev.sampling_stderr([[True], [False, True]]) is None


def test_no_spread_is_not_certainty() -> None:
    none = ev.avg_at_k([[False] * 4] * 30)
    assert (none.value, none.low) == (0.0, 0.0)
    assert none.high == pytest.approx(0.1157, abs=1e-4)  # Clopper-Pearson for 0 of 30
    every = ev.avg_at_k([[True]] * 30)
    assert every.low == pytest.approx(1 - 0.1157, abs=1e-4)
    assert ev.paired([1.0, 0.0], [1.0, 0.0]).difference.high == 0.0


@pytest.mark.parametrize(
    ("answers", "right", "share"),
    [
        (["a", "b", "a"], [True, False, True], 1.0),
        (["a", "b", "b"], [True, False, False], 0.0),
        (["a", "b"], [True, False], 0.5),  # a tie is shared, whoever came first
        (["b", "a"], [False, True], 0.5),
        ([None, None, "a"], [False, False, True], 1.0),  # silence does not vote
        ([None, None], [False, False], 0.0),
        ([], [], None),
    ],
)
def test_majority(answers: list[object | None], right: list[bool], share: float | None) -> None:
    assert ev.majority(answers, right) == share


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        (1, 12.7062),
        (2, 4.30265),
        (3, 3.18245),
        (4, 2.77645),
        (29, 2.04523),
        (39, 2.02269),
        (999, 1.96234),
        (5000, 1.96044),
    ],
)
def test_student_t_equals_the_tables(degrees: int, expected: float) -> None:
    assert ev.student_t(0.975, degrees) == pytest.approx(expected, abs=2e-5 * expected)
    assert ev.student_t(0.025, degrees) == pytest.approx(-expected, abs=2e-5 * expected)


@pytest.mark.parametrize(
    ("better", "worse", "p"), [(0, 0, None), (5, 0, 0.0625), (3, 3, 1.0), (9, 1, 22 / 1024), (1, 9, 22 / 1024)]
)
def test_sign_test_is_the_exact_binomial(better: int, worse: int, p: float | None) -> None:
    assert ev.sign_test(better, worse) == (None if p is None else pytest.approx(p))


def test_sign_test_of_thousands_neither_overflows_nor_lies() -> None:
    p = ev.sign_test(1100, 1000)
    assert p is not None
    assert p == pytest.approx(2 * (1 - 0.9846), abs=3e-3)  # normal approximation with continuity: z = 99 / sqrt(2100)


def test_pairing_sees_what_two_intervals_cannot() -> None:
    rng = random.Random(0)
    hard = [rng.betavariate(0.4, 0.6) for _ in range(60)]
    better = [min(1.0, p + 0.05 + rng.gauss(0, 0.02)) for p in hard]
    result = ev.paired(better, hard)
    assert result.difference.low is not None
    assert result.difference.low > 0
    assert result.sign_p is not None
    assert result.sign_p < 1e-6
    first, second = ev.estimate(better), ev.estimate(hard)
    assert first.low is not None
    assert second.high is not None
    assert first.low < second.high  # taken alone, the intervals overlap by far
    assert ev.paired(hard, better).difference.value == pytest.approx(-result.difference.value)  # type: ignore[operator]
