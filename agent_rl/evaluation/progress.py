"""What an evaluation will take, said before it starts, and how it stands while it runs."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agent_rl.evaluation.collect import EpisodeBudget, missing_jobs
from agent_rl.evaluation.settings import Settings
from agent_rl.evaluation.statistics import student_t
from agent_rl.evaluation.store import Row
from agent_rl.evaluation.suites import Part
from envs import Limits

LINE_S = 30.0
"""Between lines of progress where no bar can be drawn."""
ENOUGH = 8
"""Ended episodes that a forecast may rest on."""


def plan_lines(
    parts: Sequence[Part],
    budgets: Mapping[str, EpisodeBudget],
    limits: Mapping[str, Limits],
    rows: Sequence[Row],
    settings: Settings,
) -> list[str]:
    """Episodes, the most tokens that they can take, and what they are likely to, where earlier ones tell."""
    jobs = missing_jobs(parts, rows)
    lines = []
    for part in parts:
        own = sum(job.part.name == part.name for job in jobs)
        lines.append(f"plan  {part.name}: {len(part.problems)} problems x {part.k} = {len(part.problems) * part.k}")
        lines[-1] += f" episodes, {own} to play" if own < len(part.problems) * part.k else " episodes"
    turns = {part.name: limits[part.name].max_turns for part in parts}
    sampled = sum(
        min(budgets[j.part.name].max_episode_tokens, turns[j.part.name] * budgets[j.part.name].max_tokens) for j in jobs
    )
    prompts = sum(turns[job.part.name] * budgets[job.part.name].max_episode_tokens for job in jobs)
    most = f"plan  at most {sampled:,} sampled tokens"
    dollars = settings.cost(prompts, sampled)
    lines.append(most + (f", ${dollars:,.2f}" if dollars is not None else ""))
    scored = [row for row in rows if not row.is_void]
    if len(scored) >= ENOUGH and jobs:
        lines.append("plan  likely " + _likely(Counter(job.part.name for job in jobs), scored, settings))
    return lines


def _likely(jobs_of_parts: Mapping[str, int], rows: Sequence[Row], settings: Settings) -> str:
    """From the mean of the episodes of each part, or of all where a part has none yet."""
    of_part: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        of_part[row.part].append(row)
    sampled = prompts = 0.0
    for part, count in jobs_of_parts.items():
        known = of_part.get(part) or rows
        sampled += count * sum(row.sampled_tokens for row in known) / len(known)
        prompts += count * sum(row.prompt_tokens for row in known) / len(known)
    dollars = settings.cost(prompts, sampled)
    return f"{sampled:,.0f} sampled tokens" + (f", ${dollars:,.2f}" if dollars is not None else "")


class EvaluationProgress:
    """A bar on a terminal, else a line every half minute; both with the running estimate."""

    def __init__(
        self, console: Console, parts: Sequence[Part], rows: Sequence[Row], total: int, settings: Settings
    ) -> None:
        self._console = console
        self._settings = settings
        self._rates: dict[str, dict[str, list[int]]] = {part.name: {} for part in parts}  # problem -> [right, all]
        self._left = {part.name: 0 for part in parts}
        for job in missing_jobs(parts, rows):
            self._left[job.part.name] += 1
        self._rows = [row for row in rows if not row.is_void]
        self._void = 0
        self._done = 0
        self._total = total
        self._spent = sum(row.cost or 0.0 for row in rows)
        self._sampled = 0
        self._started = self._spoken = time.monotonic()
        self._foretold = len(self._rows) >= ENOUGH
        for row in self._rows:
            self._count(row)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("episodes", total=total, state="")

    def __enter__(self) -> EvaluationProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def within_cost(self) -> bool:
        return self._settings.max_cost is None or self._spent < self._settings.max_cost

    def ended(self, row: Row) -> None:
        self._spent += row.cost or 0.0
        self._sampled += row.sampled_tokens
        if row.is_void:
            self._void += 1
        else:
            self._rows.append(row)
            self._count(row)
            self._left[row.part] -= 1
            self._done += 1
        self._bar.update(self._task, completed=self._done, state=self.state())
        now = time.monotonic()
        if not self._foretold and len(self._rows) >= ENOUGH:
            self._foretold = True
            self._console.print(f"forecast  {self.forecast()}", highlight=False, soft_wrap=True)
        if not self._console.is_terminal and (now - self._spoken >= LINE_S or self._done == self._total):
            self._spoken = now
            self._console.print(
                f"{self._done}/{self._total} episodes, {now - self._started:.0f} s, {self.forecast()}; {self.state()}",
                highlight=False,
                soft_wrap=True,
            )

    def forecast(self) -> str:
        """What is left, by what was seen."""
        elapsed = time.monotonic() - self._started
        left = sum(self._left.values())
        likely = _likely(self._left, self._rows, self._settings) if self._rows else "?"
        minutes = elapsed / self._done * left / 60 if self._done else math.nan
        return f"left: about {minutes:.1f} min, {likely}"

    def state(self) -> str:
        """The running estimate of every part that has one, with half its 95 % interval."""
        pieces = []
        for part, problems in self._rates.items():
            means = [right / count for right, count in problems.values()]
            if not means:
                continue
            value = sum(means) / len(means)
            piece = f"{part} {100 * value:.1f}"
            if len(means) > 1:
                variance = sum((mean - value) ** 2 for mean in means) / (len(means) - 1)
                half = student_t(0.975, len(means) - 1) * math.sqrt(variance / len(means))
                if value in (0.0, 1.0):
                    half = 1 - 0.025 ** (1 / len(means))  # as in ``statistics.estimate``: no spread is not certainty
                piece += f" +- {100 * half:.1f}"
            pieces.append(piece)
        elapsed = max(1e-9, time.monotonic() - self._started)
        pieces.append(f"{self._sampled / elapsed:.0f} tokens/s")
        if self._void:
            pieces.append(f"void {self._void}")
        if self._spent:
            pieces.append(f"${self._spent:.2f}")
        return ", ".join(pieces)

    def _count(self, row: Row) -> None:
        cell = self._rates[row.part].setdefault(row.problem, [0, 0])
        cell[0] += bool(row.correct)
        cell[1] += 1
