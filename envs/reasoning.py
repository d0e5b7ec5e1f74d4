"""Tasks of the package ``reasoning-gym`` by name, scored exactly by us instead of by its own scorers.

Those pay for part of an answer, for the gold answer inside any text, or run what the model wrote. Ours pays 1 for the
gold answer and 0 for anything else, and uses no algebra: that takes ``2 3 1`` for a product, ``06:09`` for a quotient,
and the question ``7 - 5`` for its answer. Tasks with several right answers are therefore left to the package's scorer
only where that runs nothing, and count when it says exactly 1. What neither can score safely is refused by name.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import re
from collections.abc import Mapping
from typing import Any

from envs.answers import normalised
from envs.equality import exact_number, same_exactly
from envs.grader import Grader
from envs.quantities import measured
from envs.rewards import Episode
from envs.search import plain_words
from envs.types import Task

REFUSED = {
    "n_queens": "several right answers, and its scorer runs model output",
    "countdown": "several right answers, and its scorer runs model output",
    "puzzle24": "several right answers, and its scorer runs model output",
    "simple_integration": "several right forms, and its scorer runs model output",
    "intermediate_integration": "several right forms, and its scorer runs model output",
    "polynomial_multiplication": "its problems change with PYTHONHASHSEED, and its scorer runs model output",
    "isomorphic_strings": "its problems change with PYTHONHASHSEED",
    "knight_swap": "its problems change with PYTHONHASHSEED",
    "ransom_note": "its problems change with PYTHONHASHSEED",
    "word_ladder": "its problems change with PYTHONHASHSEED",
    "game_of_life": "a constant answer scores 0.96",
    "game_of_life_halting": "its answer is yes or no, and its scorer pays for anything",
    "coin_flip": "a constant answer scores 0.95",
    "boxnet": "no gold answer, and its scorer raises on garbage",
    "composite": "name the tasks themselves; mixtures are made of sources",
}

OWN_SCORER = frozenset(
    {"graph_color", "propositional_logic", "rubiks_cube", "rush_hour", "tower_of_hanoi", "mini_sudoku", "sudoku"}
)
"""Several answers may be right, and the package's scorer only parses: it counts when it says exactly 1."""

AS_WRITTEN = frozenset({"fraction_simplification"})
"""Another form of the same number is the question, not its answer."""

ASK = "\n\nPut the final answer, and nothing else, between <answer> and </answer>."


class ReasoningGymTasks:
    """Task ``i`` of one of the package's data sets.

    Args:
        options: ``name``, perhaps ``seed``, ``size``, and the data set's own settings.

    Raises:
        ValueError: the package is missing, the name or a setting is unknown, or the name is refused (with the reason).
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        settings = {"seed": 0, "size": 10_000, **options}
        name = str(settings.pop("name", ""))
        if name in REFUSED:
            raise ValueError(f"reasoning-gym task {name!r} is refused: {REFUSED[name]}")
        self._name = name
        self._seed = settings["seed"]
        self._data = _data_set(name, settings)

    def __len__(self) -> int:
        return len(self._data)

    def task(self, index: int) -> Task:
        entry = self._data[index]
        answer = entry["answer"]
        return Task(
            id=f"{self._name}-{self._seed}-{index}",
            prompt=str(entry["question"]) + ASK,
            answer=None if answer is None else str(answer),
            meta={"name": self._name, "entry": entry if self._name in OWN_SCORER else {}},
        )


def _data_set(name: str, settings: Mapping[str, Any]) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset  # here: optional, and a second to import
    except ImportError:
        raise ValueError("agentic/ReasoningGym-v1 needs the package: pip install reasoning-gym") from None
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=1)
        raise ValueError(f"no reasoning-gym task {name!r}" + (f": did you mean {close[0]!r}?" if close else ""))
    known = set(inspect.signature(DATASETS[name][1]).parameters)
    for key in settings:
        if key not in known:
            raise ValueError(f"reasoning-gym task {name!r} has no setting {key!r}; it has {', '.join(sorted(known))}")
    try:
        return create_dataset(name, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"reasoning-gym task {name!r} refuses {dict(settings)}: {error}") from None


async def gold_answer(episode: Episode, grader: Grader) -> float:
    """1 for the gold answer, or for one that a safe scorer calls perfect.

    Blanks and the case of words do not count, and numbers are compared by value.
    """
    answer, task = episode.answer, episode.task
    if answer is None:
        return 0.0
    if task.answer is not None:
        if _rows(answer) == _rows(task.answer):
            return 1.0
        if plain_words(task.answer) and plain_words(answer) == plain_words(task.answer) and _is_prose(task.answer):
            return 1.0
        same_digits = re.findall(r"\d+", answer) == re.findall(r"\d+", task.answer)
        if _same_values(task.answer, answer) and (same_digits or task.meta["name"] not in AS_WRITTEN):
            return 1.0
    name = str(task.meta["name"])
    if name not in OWN_SCORER:
        return 0.0
    return float(_scorer(name)(answer, task.meta["entry"]) == 1.0)


@functools.lru_cache(maxsize=64)
def _scorer(name: str) -> Any:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(name)


def _rows(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.strip().splitlines() if line.strip()]


def _same_values(gold: str, answer: str) -> bool:
    """Whether both are the same JSON, number, complex number, or numbers; the order counts between brackets."""
    if gold[:1] in ("[", "{") and (read := _json(gold)) is not None and read == _json(answer):
        return True
    if max(len(gold), len(answer)) > 256 or "\n" in gold:  # a grid is its rows
        return False
    if same_exactly(gold, answer):
        return True
    complexes = _complex(gold), _complex(answer)
    if complexes[0] is not None:
        return complexes[0] == complexes[1]
    (left, brackets), (right, other_brackets) = _items(gold), _items(answer)
    return (
        len(left) == len(right) > 1
        and brackets == other_brackets
        and all(measured(a) and measured(b) and same_exactly(a, b) for a, b in zip(left, right, strict=True))
    )


def _items(text: str) -> tuple[list[str], str]:
    """The pieces between commas, without quotes, and the brackets around them; sorted by value when there are none."""
    bare = normalised(text)
    brackets = bare[:1] + bare[-1:] if re.fullmatch(r"\[.*\]|\(.*\)", bare, flags=re.DOTALL) else ""
    items = [item.strip(" '\"") for item in (bare[1:-1] if brackets else bare).split(",")]
    return items if brackets else sorted(items, key=lambda item: exact_number(item) or 0), brackets


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _complex(text: str) -> complex | None:
    """``48.0 + 36.0i``; None for anything else."""
    bare = re.sub(r"\s", "", text)
    if not re.fullmatch(r"[-+\d.]*i|[-+\d.]+[-+][\d.]*i", bare):
        return None
    try:
        return complex(bare.replace("i", "j"))
    except ValueError:
        return None


def _is_prose(text: str) -> bool:
    return text.replace(" ", "").isalpha()
