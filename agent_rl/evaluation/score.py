"""Judges the stored episodes anew by another grader; nothing is generated again and the episodes stay as they were."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from agent_rl.errors import ConfigError
from agent_rl.evaluation.report import asked_rows, summarise
from agent_rl.evaluation.store import Row, read_rows, read_settings, write_json
from envs.answers import final_answer, normalised, stated_answer
from envs.grader import Grader, GraderFailure

Judge = Callable[[str, str, Grader], Awaitable[tuple[str | None, str]]]
"""Gold answer and last turn -> the answer found and the verdict."""


async def boxed(gold: str, text: str, grader: Grader) -> tuple[str | None, str]:
    """The last box of the last turn: what rewards see."""
    return await _verdict(gold, final_answer(text), grader)


async def stated(gold: str, text: str, grader: Grader) -> tuple[str | None, str]:
    """The last box, or without any what follows "answer is"."""
    return await _verdict(gold, stated_answer(text), grader)


async def exact(gold: str, text: str, grader: Grader) -> tuple[str | None, str]:
    """The last box, right only when it is spelled as the gold answer is, typesetting aside."""
    answer = final_answer(text)
    if answer is None:
        return None, "unparsable"
    same = normalised(answer).replace(" ", "") == normalised(gold).replace(" ", "")
    return answer, "correct" if same else "wrong"


async def _verdict(gold: str, answer: str | None, grader: Grader) -> tuple[str | None, str]:
    return (None, "unparsable") if answer is None else (answer, await grader.verdict(gold, answer))


GRADERS: dict[str, Judge] = {"boxed": boxed, "stated": stated, "exact": exact}


def find_grader(name: str) -> Judge:
    """One of ``GRADERS``, or ``module:function`` with (gold, last turn) -> bool, synchronous or not.

    Raises:
        ConfigError: there is no such grader.
    """
    if name in GRADERS:
        return GRADERS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(f"no grader {name!r}: there are {', '.join(GRADERS)}, or write MODULE:FUNCTION")
    if os.getcwd() not in sys.path:  # an installed command has its own folder there, not the one it is typed in
        sys.path.append(os.getcwd())
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"grader {name!r}: {error}") from None

    async def judge(gold: str, text: str, grader: Grader) -> tuple[str | None, str]:
        right = function(gold, text)
        if inspect.isawaitable(right):
            right = await right
        return final_answer(text), "correct" if right else "wrong"

    return judge


async def score(
    folder: Path, name: str, *, tell: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """``scores-NAME.json`` in the folder: the results by this grader, and how often it agrees with the first.

    Void episodes stay void; those that a limit cut, and those without a gold answer, keep their verdict.
    """
    settings = read_settings(folder)
    judge = find_grader(name)
    chosen = {(row.key, row.attempt) for row in asked_rows(folder, settings)}
    rows: list[Row] = []
    table: dict[str, dict[str, int]] = {}
    grader = Grader()
    try:
        for row, transcript in read_rows(folder):
            if (row.key, row.attempt) not in chosen:
                continue
            new = await _judged(row, transcript["messages"], judge, grader)
            rows.append(new)
            counts = table.setdefault(row.verdict, {})
            counts[new.verdict] = counts.get(new.verdict, 0) + 1
            tell(len(rows), len(chosen))
    finally:
        await grader.close()
    rows.sort(key=lambda row: (row.part, row.place, row.sample))
    parts = [{"name": p["name"], "k": p["k"], "problems": len(p["ids"])} for p in settings["parts"]]
    tree = {
        "title": f"{settings['title']}, graded by {name}",
        "grader": name,
        "changed": table,  # verdict before -> verdict now -> episodes
        **summarise(rows, parts),
    }
    safe = name.replace(":", "-").replace("/", "-")
    write_json(folder / f"scores-{safe}.json", tree | {"verdict_of": [_small(row) for row in rows]})
    return tree


async def _judged(row: Row, messages: Sequence[Any], judge: Judge, grader: Grader) -> Row:
    if row.is_void or row.gold is None or row.is_truncated:  # what a limit cut is no answer, whoever looks at it
        return row
    said = [message for message in messages if message["role"] == "assistant"]
    if not said:
        return replace(row, answer=None, verdict="unparsable", correct=False)
    text = str(said[-1]["content"])
    if row.answer is not None and final_answer(text) is None:
        text = f"\\boxed{{{row.answer}}}"  # it was handed in by a tool
    try:
        answer, verdict = await judge(row.gold, text, grader)
    except GraderFailure as error:
        return replace(row, verdict="void", correct=None, failure=f"grader at scoring: {error}")
    return replace(row, answer=answer, verdict=verdict, correct=verdict == "correct")


def _small(row: Row) -> dict[str, Any]:
    tree = asdict(row)
    return {name: tree[name] for name in ("part", "problem", "sample", "answer", "verdict")}
