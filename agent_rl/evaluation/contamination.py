"""Which problems of a suite the training data has seen: the same text, or most of its word 8-grams in one row.

The measure of GPT-3's appendix C (Brown et al. 2020, arXiv 2005.14165) in its small form: words are runs of letters and
digits in lower case, so that typesetting hides nothing.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agent_rl.errors import ConfigError
from agent_rl.evaluation.suites import Part
from envs import Task, load_tasks

N = 8
THRESHOLD = 0.5
"""Share of a problem's n-grams that one training row must have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What the training data has of one problem."""

    part: str
    problem: str
    share: float  # of the problem's n-grams, in the training row that has most; 1 when the text is the same
    row: str  # id of that row
    exact: bool


def words(text: str) -> list[str]:
    """``"Find $x^2$!"`` gives ``["find", "x", "2"]``."""
    return re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", text).lower())


def ngrams(text: Sequence[str], n: int = N) -> set[tuple[str, ...]]:
    """All runs of ``n`` words; the whole of a shorter text."""
    if len(text) <= n:
        return {tuple(text)} if text else set()
    return {tuple(text[start : start + n]) for start in range(len(text) - n + 1)}


def overlaps(
    problems: Iterable[tuple[str, str, str]], train: Iterable[Task], *, n: int = N, threshold: float = THRESHOLD
) -> list[Overlap]:
    """Problems (part, id, text) that training rows have, the largest share first; one pass over ``train``."""
    known = [(part, name, tuple(words(text))) for part, name, text in problems]
    grams = [ngrams(text, n) for _, _, text in known]
    holders: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, own in enumerate(grams):
        for gram in own:
            holders[gram].append(number)
    best: dict[int, Overlap] = {}
    for row in train:
        text = tuple(words(row.prompt))
        shared: Counter[int] = Counter()
        for gram in ngrams(text, n):
            shared.update(holders.get(gram, ()))
        for number, count in shared.items():
            part, name, wanted = known[number]
            exact = wanted == text
            share = 1.0 if exact else count / len(grams[number])
            held = best.get(number)
            if share >= threshold and (held is None or (exact, share) > (held.exact, held.share)):
                best[number] = Overlap(part=part, problem=name, share=share, row=row.id, exact=exact)
    return sorted(best.values(), key=lambda found: (-found.share, not found.exact, found.part, found.problem))


def check(parts: Sequence[Part], files: Sequence[str]) -> dict[str, Any]:
    """What ``evaluation.json`` keeps: the training files, the flagged problems and every overlap.

    Raises:
        ConfigError: a training file cannot be read.
    """
    found: list[Overlap] = []
    sizes: dict[str, int] = {}
    for file in files:
        try:
            train = load_tasks(file)
        except ValueError as error:
            raise ConfigError(f"--train-data: {error}") from None
        sizes[file] = len(train)
        found += overlaps(problem_texts(parts), train)
    flagged = sorted({(overlap.part, overlap.problem) for overlap in found})
    return {
        "files": sizes,
        "n": N,
        "threshold": THRESHOLD,
        "flagged": [list(pair) for pair in flagged],
        "overlaps": [asdict(overlap) for overlap in found],
    }


def problem_texts(parts: Sequence[Part]) -> list[tuple[str, str, str]]:
    """(part, id, text) of every problem, as its file has it: without what the environment puts around it."""
    texts = []
    for part in parts:
        raw = {task.id: task.prompt for task in load_tasks(part.path)} if part.path else {}
        texts += [(part.name, p.task.id, raw.get(p.task.id, p.task.prompt)) for p in part.problems]
    return texts


def summary(tree: dict[str, Any], parts: Sequence[Part]) -> list[str]:
    """One line a part."""
    lines = []
    for part in parts:
        own = [overlap for overlap in tree["overlaps"] if overlap["part"] == part.name]
        exact = {overlap["problem"] for overlap in own if overlap["exact"]}
        flagged = {overlap["problem"] for overlap in own}
        lines.append(
            f"{part.name}: {len(flagged)} of {len(part.problems)} problems share at least "
            f"{tree['threshold']:.0%} of their {tree['n']}-grams with one training row, {len(exact)} word for word"
        )
    return lines
