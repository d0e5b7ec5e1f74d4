"""Estimators over problems with several samples each, and how sure they are.

A problem is a cluster: its samples share their difficulty, so that every standard error is taken over problems, never
over samples (Miller 2024, arXiv 2411.00640, section 2.2). Rows may be of different length, because void samples are
left out; a problem without any sample is left out too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

CONFIDENCE = 0.95
DRAWS = 10_000
"""Of a bootstrap: the ends of a 95 % interval then repeat within about 2 % of its width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over problems. Everything but ``value`` and ``problems`` is None where fewer than two problems tell."""

    value: float | None  # None: no problem has a sample
    problems: int  # clusters that it is a mean over
    stderr: float | None = None  # over problems: what another set of problems and samples would move it by
    low: float | None = None  # end of the analytic interval, Student's t over problems; may leave [0, 1]
    high: float | None = None
    boot_low: float | None = None  # end of the percentile interval of the cluster bootstrap
    boot_high: float | None = None


def estimate(values: Sequence[float], *, seed: int = 0, confidence: float = CONFIDENCE, share: bool = True) -> Estimate:
    """Mean of one value a problem, with the analytic and the bootstrap interval.

    stderr = sd(values, ddof 1) / sqrt(n); interval = mean +- t(n - 1) * stderr. Where every problem scored 0, or every
    one 1, neither shows any spread; the other end is then the exact binomial bound, 1 - (alpha / 2)^(1 / n) away
    (Clopper and Pearson 1934), unless the values are no shares of [0, 1] (``share=False``).
    """
    n = len(values)
    if n == 0:
        return Estimate(value=None, problems=0)
    array = np.asarray(values, dtype=np.float64)
    mean = float(array.mean())
    if n < 2:
        return Estimate(value=mean, problems=n)
    stderr = float(array.std(ddof=1)) / math.sqrt(n)
    half = student_t(0.5 + confidence / 2, n - 1) * stderr
    low, high = bootstrap(array, seed=seed, confidence=confidence)
    if share and stderr == 0 and mean in (0.0, 1.0):
        bound = 1 - ((1 - confidence) / 2) ** (1 / n)
        low, high = (0.0, bound) if mean == 0 else (1 - bound, 1.0)
        return Estimate(value=mean, problems=n, stderr=0.0, low=low, high=high, boot_low=low, boot_high=high)
    return Estimate(
        value=mean, problems=n, stderr=stderr, low=mean - half, high=mean + half, boot_low=low, boot_high=high
    )


def bootstrap(
    values: Array, *, seed: int = 0, draws: int = DRAWS, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Percentile interval of the mean of ``values`` ([n], one a problem), problems drawn with replacement."""
    rng = np.random.default_rng(seed)
    n = len(values)
    block = max(1, 4_000_000 // n)  # bounds the memory: 32 MB of indices at a time
    means = np.concatenate(
        [
            values[rng.integers(0, n, size=(min(block, draws - start), n))].mean(axis=1)
            for start in range(0, draws, block)
        ]
    )
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def avg_at_k(rows: Sequence[Sequence[bool]], *, seed: int = 0) -> Estimate:
    """Mean over problems of the share of right samples."""
    return estimate([sum(row) / len(row) for row in rows if row], seed=seed)


def sampling_stderr(rows: Sequence[Sequence[bool]]) -> float | None:
    """Standard error of avg@k for these very problems: only the samples would be drawn anew.

    sqrt(sum_i p_i (1 - p_i) / (n_i - 1)) / m over the m problems; None where a problem has a single sample.
    """
    known = [row for row in rows if row]
    if not known or min(map(len, known)) < 2:
        return None
    total = 0.0
    for row in known:
        p = sum(row) / len(row)
        total += p * (1 - p) / (len(row) - 1)
    return math.sqrt(total) / len(known)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that one of ``k`` of the ``n`` samples, ``c`` of them right, is right: 1 - C(n - c, k) / C(n, k).

    Unbiased for 1 - (1 - p)^k (Chen et al. 2021, arXiv 2107.03374, Eq. 1).

    Raises:
        ValueError: not 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} needs 0 <= c <= n and 1 <= k <= n, not n = {n}, c = {c}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_curve(rows: Sequence[Sequence[bool]], *, seed: int = 0) -> dict[int, Estimate]:
    """pass@k for every k up to the most samples of a problem.

    Problems with fewer than ``k`` samples (void ones do not count) are left out, as ``Estimate.problems`` shows.
    """
    most = max(map(len, rows), default=0)
    return {
        k: estimate([pass_at_k(len(row), sum(row), k) for row in rows if len(row) >= k], seed=seed)
        for k in range(1, most + 1)
    }


def majority(answers: Sequence[object | None], right: Sequence[bool]) -> float | None:
    """Whether the most frequent answer is right; tied answers share the vote, so that order decides nothing.

    ``answers`` are hashable keys, None where a sample gave none: it does not vote. 0 where none votes; None without
    samples.
    """
    if not answers:
        return None
    votes: dict[object, int] = {}
    correct: dict[object, int] = {}
    for answer, is_right in zip(answers, right, strict=True):
        if answer is not None:
            votes[answer] = votes.get(answer, 0) + 1
            correct[answer] = correct.get(answer, 0) + is_right
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    return sum(correct[answer] / votes[answer] for answer in winners) / len(winners)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """How two runs differ on the same problems; positive means that the first is better."""

    difference: Estimate
    better: int  # problems on which the first run's mean is higher
    worse: int
    ties: int
    sign_p: float | None  # two-sided exact sign test over the problems that differ; None when none does


def paired(first: Sequence[float], second: Sequence[float], *, seed: int = 0) -> Paired:
    """The mean difference of one value a problem, in the same order of problems.

    Pairing takes out what the problems themselves contribute (Miller 2024, section 4.2).
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    better = sum(d > 1e-12 for d in differences)
    worse = sum(d < -1e-12 for d in differences)
    return Paired(
        difference=estimate(differences, seed=seed, share=False),
        better=better,
        worse=worse,
        ties=len(differences) - better - worse,
        sign_p=sign_test(better, worse),
    )


def sign_test(better: int, worse: int) -> float | None:
    """Two-sided exact p under "either is as likely": 2 P[Binomial(n, 1/2) <= min(better, worse)], at most 1."""
    n = better + worse
    if n == 0:
        return None
    tail = sum(math.comb(n, i) for i in range(min(better, worse) + 1))
    return min(1.0, float(2 * tail / 2**n) if n < 1000 else 2 * tail / 2**n)


def student_t(probability: float, degrees: int) -> float:
    """Quantile of Student's t, by bisection on the exact distribution."""
    if degrees < 1 or not 0 < probability < 1:
        raise ValueError(f"student_t needs a probability in (0, 1) and degrees >= 1, not {probability}, {degrees}")
    if probability < 0.5:
        return -student_t(1 - probability, degrees)
    if degrees > 1000:
        z = NormalDist().inv_cdf(probability)
        return z + (z**3 + z) / (4 * degrees)  # Abramowitz and Stegun 26.7.5; the next term is below 1e-6 here
    return _root(lambda t: _student_cdf(t, degrees) - probability, 0.0, 1e6)


def _student_cdf(t: float, degrees: int) -> float:
    """Abramowitz and Stegun 26.7.3 and 26.7.4: finite sums for whole degrees of freedom; t >= 0."""
    theta = math.atan(t / math.sqrt(degrees))
    cosine, sine = math.cos(theta), math.sin(theta)
    if degrees % 2:
        term, total = cosine, cosine if degrees > 1 else 0.0
        for i in range(3, degrees - 1, 2):
            term *= cosine * cosine * (i - 1) / i
            total += term
        between = 2 / math.pi * (theta + sine * total)
    else:
        term, total = 1.0, 1.0
        for i in range(2, degrees - 1, 2):
            term *= cosine * cosine * (i - 1) / i
            total += term
        between = sine * total
    return 0.5 + between / 2


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(200):
        middle = (low + high) / 2
        if function(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2
