"""Search over a local corpus by BM25, and questions that take two searches to answer."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from envs.grader import Grader
from envs.rewards import Episode
from envs.tools import ToolContext, ToolError, tool
from envs.types import Task

K1, B = 1.2, 0.75
"""Robertson and Zaragoza 2009, section 3.4: saturation of term frequency and strength of length normalisation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One document."""

    title: str
    text: str


class Index:
    """BM25 (``bm25s``, Lucene's form) over pages that are all in memory."""

    def __init__(self, pages: Sequence[Page]) -> None:
        import bm25s  # here: it brings numba along

        self._pages = tuple(pages)
        words = [_words(f"{page.title} {page.text}") for page in pages]
        self._known = {word for of_page in words for word in of_page}
        self._bm25 = bm25s.BM25(k1=K1, b=B, method="lucene")
        if self._known:
            self._bm25.index(words, show_progress=False)

    def best(self, query: str, k: int) -> list[Page]:
        """The ``k`` best pages that share a word with the query, best first, ties in the order of the corpus."""
        words = sorted(set(_words(query)) & self._known)
        if not words:
            return []
        scores = self._bm25.get_scores(words)
        order = np.argsort(-scores, kind="stable")[:k]
        return [self._pages[number] for number in order if scores[number] > 0]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


@tool
def search(ctx: ToolContext, query: str, k: int = 3) -> str:
    """Search the library and read the best pages.

    Args:
        query: words to look for
        k: how many pages, at most 10
    """
    if not 1 <= k <= 10:
        raise ToolError(f"k must be between 1 and 10, not {k}")
    pages = index_of(str(ctx.task.meta["corpus"])).best(query, k)
    return "\n\n".join(f"{page.title}\n{page.text}" for page in pages) or "no page has any of these words"


@lru_cache(maxsize=8)
def index_of(corpus: str) -> Index:
    """The index of ``generated:SEED`` or of a JSONL file with ``title`` and ``text`` in every row."""
    if corpus.startswith("generated:"):
        return Index(_world(int(corpus.removeprefix("generated:")))[0])
    return Index(load_pages(corpus))


def load_pages(path: str) -> list[Page]:
    """Raises ``ValueError`` naming file and line."""
    pages = []
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8-sig").split("\n")  # JSON holds other ends of lines
    except OSError as error:
        raise ValueError(f"corpus {path!r} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            pages.append(Page(title=str(row["title"]), text=str(row["text"])))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: a page is an object with title and text ({error!r})") from None
    return pages


class SearchOptions(BaseModel):
    """The library that questions are asked about."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int = Field(0, description="of the people, companies and towns")


class SearchTasks:
    """Question ``i`` asks for the river at the town of the employer of person ``i``; no single page says it."""

    def __init__(self, options: SearchOptions) -> None:
        self._seed = options.seed
        self._questions = _world(options.seed)[1]

    def __len__(self) -> int:
        return len(self._questions)

    def task(self, index: int) -> Task:
        person, river = self._questions[index]
        return Task(
            id=f"search-{self._seed}-{index}",
            prompt=f"On which river lies the town where the employer of {person} has its seat?",
            answer=river,
            meta={"corpus": f"generated:{self._seed}"},
        )


_STARTS = ("Al", "Bor", "Cor", "Dar", "El", "Fen", "Gal", "Hol", "Ir", "Jor", "Kel", "Lor", "Mar", "Nor", "Or", "Per")
_ENDS = ("bach", "dale", "fen", "gard", "ham", "ia", "kirk", "lund", "mere", "ova", "rica", "sund", "ton", "vik")


@lru_cache(maxsize=8)
def _world(seed: int) -> tuple[tuple[Page, ...], tuple[tuple[str, str], ...]]:
    """Pages, and pairs of a person and the river that is asked for."""
    rng = random.Random(f"world/{seed}")
    names = [start + end for start in _STARTS for end in _ENDS]
    rng.shuffle(names)
    towns, rivers, firms, first, last = (names[i : i + 20] for i in range(0, 100, 20))
    people = [f"{rng.choice(first)} {rng.choice(last)}" for _ in range(60)]
    people = list(dict.fromkeys(people))
    river_of = {town: rng.choice(rivers) for town in towns}
    town_of = {firm: rng.choice(towns) for firm in firms}
    pages = [Page(title=t, text=f"{t} is a town on the river {river_of[t]}.") for t in towns]
    pages += [Page(title=f"{f} Works", text=f"{f} Works is a company with its seat in {town_of[f]}.") for f in firms]
    questions = []
    for person in people:
        firm = rng.choice(firms)
        pages.append(Page(title=person, text=f"{person} is an engineer employed by {firm} Works."))
        questions.append((person, river_of[town_of[firm]]))
    rng.shuffle(pages)
    return tuple(pages), tuple(questions)


def plain_words(text: str) -> str:
    """Lower case, no articles, no punctuation: "The Rhine." becomes "rhine" (as SQuAD's exact match does)."""
    bare = re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", r"\1", text).lower()
    return " ".join(word for word in re.findall(r"\w+", bare) if word not in ("a", "an", "the"))


async def same_words(episode: Episode, grader: Grader) -> float:
    """1 when the answer has the gold answer's words, whatever their case and articles."""
    if episode.answer is None or episode.task.answer is None:
        return 0.0
    return float(plain_words(episode.answer) == plain_words(episode.task.answer))
