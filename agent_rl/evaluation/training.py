"""Evaluation inside a training run: on a schedule, with limits of its own; keeps the best weights, may end the run.

``evaluations.jsonl`` in the run folder has a line an evaluation, ``evaluations/step-N.jsonl`` its episodes, ``best/``
the weights that scored best. The same problems and seeds are used every time: two steps differ by their weights alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from agent_rl.engines.base import Engine
from agent_rl.errors import ConfigError
from agent_rl.evaluation import contamination
from agent_rl.evaluation.collect import EnginePlayer, EpisodeBudget, Stage, collect, missing_jobs
from agent_rl.evaluation.report import summarise
from agent_rl.evaluation.store import Row, final_rows, write_json
from agent_rl.evaluation.suites import MANY, Part, load_suite
from envs import Limits, Resources, TaskSource
from envs.parsers import Dialect

if TYPE_CHECKING:
    from agent_rl.config import RunConfig


def evaluation_parts(config: RunConfig, console: Console | None = None, train: TaskSource | None = None) -> list[Part]:
    """What the run's evaluations are about; empty without a schedule.

    Args:
        console: is told how many problems ``train`` has.
        train: the training tasks.

    Raises:
        ConfigError: as ``load_suite``.
    """
    settings = config.evaluation
    if not settings.every:
        return []
    try:
        parts = load_suite(
            settings.suite or config.task.env,
            scenario=settings.scenario,
            data=settings.data,
            options=settings.options or ({} if settings.suite else config.task.options),
            k=settings.k,
            limit=settings.limit,
            seed=config.seed,
        )
    except ConfigError as error:
        raise ConfigError(f"evaluation: {error}") from None
    if console is not None and train is not None and len(train) <= MANY:
        tasks = (train.task(place) for place in range(len(train)))
        found = contamination.overlaps(contamination.problem_texts(parts), tasks)
        if found:
            exact = sum(overlap.exact for overlap in found)
            console.print(
                f"[bold yellow]evaluation: {len(found)} of {sum(len(part.problems) for part in parts)} problems are in "
                f"the training data ({exact} word for word)",
                soft_wrap=True,
            )
    return parts


class TrainingEvaluation:
    """The evaluations of one run, past and to come.

    Args:
        parts: from ``evaluation_parts``.
        engine: of the run; it has the weights that are evaluated.
        last_step: of the checkpoint that the run goes on from; evaluations after it are done again.
    """

    def __init__(
        self,
        config: RunConfig,
        parts: Sequence[Part],
        *,
        resources: Resources,
        dialect: Dialect,
        engine: Engine,
        codec: Any,
        console: Console,
        last_step: int,
    ) -> None:
        self._settings = config.evaluation
        self._folder = config.folder
        self._seed = config.seed
        self._parts = list(parts)
        self._console = console
        rollout = config.rollout
        limits = Limits(max_turns=rollout.max_turns, max_tool_calls=rollout.max_tool_calls, wall_s=rollout.wall_s)
        budget = EpisodeBudget(
            temperature=self._settings.temperature,
            top_p=self._settings.top_p,
            max_tokens=self._settings.max_tokens or rollout.max_tokens,
            max_episode_tokens=rollout.max_episode_tokens,
        )
        self._stage = Stage(
            resources=resources,
            dialect=dialect,
            shots=config.task.shots,
            limits={part.name: limits for part in parts},
            budgets={part.name: budget for part in parts},
        )
        self._player = EnginePlayer(self._stage, engine, codec)
        self._concurrency = config.engine.max_num_seqs
        self._max_failures = rollout.max_failures
        self._max_refills = rollout.max_refills
        self._rows = [row for row in _read(self._path) if row["step"] <= last_step]
        _write(self._path, self._rows)

    @property
    def _path(self) -> Path:
        return self._folder / "evaluations.jsonl"

    def is_due(self, step: int) -> bool:
        """Also before the first step: what the training started from."""
        every = self._settings.every
        return bool(self._parts) and step % every == 0 and step not in {row["step"] for row in self._rows}

    @property
    def has_stalled(self) -> bool:
        """Whether the last ``patience`` evaluations were no better than the best before them."""
        whole = [row for row in self._rows if row["complete"]]
        patience = self._settings.patience
        if not patience or len(whole) <= patience:
            return False
        best = max(range(len(whole)), key=lambda place: (whole[place]["score"], -place))
        return len(whole) - 1 - best >= patience

    async def look(self, step: int, export: Callable[[Path], None]) -> dict[str, float | int | bool | None]:
        """One evaluation; returns its metrics. ``export`` writes the weights, and is called when they are the best."""
        started = time.monotonic()
        rows: list[Row] = []
        jobs = missing_jobs(self._parts, [])
        episodes = self._folder / "evaluations" / f"step-{step:06d}.jsonl"
        episodes.parent.mkdir(parents=True, exist_ok=True)
        with episodes.open("w", encoding="utf-8") as file:

            def finished(row: Row, transcript: Mapping[str, Any]) -> None:
                rows.append(row)
                file.write(json.dumps(asdict(row) | dict(transcript)) + "\n")

            try:
                async with asyncio.timeout(self._settings.max_seconds) as limit:
                    await collect(
                        jobs,
                        self._player,
                        self._stage,
                        seed=self._seed,
                        concurrency=self._concurrency,
                        max_refills=self._max_refills,
                        max_failures=self._max_failures,
                        finished=finished,
                    )
            except TimeoutError:
                if not limit.expired():
                    raise
        parts = [{"name": part.name, "k": part.k, "problems": len(part.problems)} for part in self._parts]
        tree = summarise(final_rows(rows), parts)
        entry = self._entry(step, tree, len(jobs), time.monotonic() - started)
        best_before = max((row["score"] for row in self._rows if row["complete"]), default=None)
        is_best = entry["complete"] and (best_before is None or entry["score"] > best_before)
        if is_best and self._settings.keep_best:
            export(self._folder / "best")
            write_json(self._folder / "best" / "best.json", entry)
        self._rows.append(entry)
        _write(self._path, self._rows)
        self._tell(entry, is_best=is_best)
        named = {f"eval/{name}": value["avg"] for name, value in entry["parts"].items()}
        return {"eval/score": entry["score"], "eval/void": entry["void"], "eval/best": is_best, **named}

    def _entry(self, step: int, tree: Mapping[str, Any], wanted: int, seconds: float) -> dict[str, Any]:
        values = [part["avg"]["value"] for part in tree["parts"].values()]
        return {
            "step": step,
            # The unweighted mean of the parts; None where one has no scored episode.
            "score": None if None in values else sum(values) / len(values),
            # Short episodes end first: a score that the clock cut off is no measure of anything else.
            "complete": tree["total"]["scored"] == wanted,
            "parts": {
                name: {
                    "avg": part["avg"]["value"],
                    "stderr": part["avg"]["stderr"],
                    "problems": part["avg"]["problems"],
                }
                for name, part in tree["parts"].items()
            },
            "void": tree["total"]["void"],
            "episodes": tree["total"]["episodes"],
            "seconds": round(seconds, 3),
        }

    def _tell(self, entry: Mapping[str, Any], *, is_best: bool) -> None:
        pieces = []
        for name, part in entry["parts"].items():
            spread = "" if part["stderr"] is None else f" +- {196 * part['stderr']:.1f}"
            value = "-" if part["avg"] is None else f"{100 * part['avg']:.1f}"
            pieces.append(f"{name} {value}{spread}")
        marks = ("" if entry["complete"] else ", cut short") + (", the best so far" if is_best else "")
        told = f"evaluation after step {entry['step']}: {', '.join(pieces)}{marks}, {entry['seconds']:.1f} s"
        self._console.print(told, highlight=False, soft_wrap=True)


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    aside = path.with_suffix(".partial")
    with aside.open("w") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
