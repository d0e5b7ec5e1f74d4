"""Progress for a person: bars on a terminal, a line a step everywhere; and the wall clock of a step's phases."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agent_rl.records import Row
from agent_rl.types import Trajectory


class Clock:
    """Seconds of consecutive phases."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._last
        self._last = now

    def row(self) -> Row:
        return {f"seconds/{name}": round(seconds, 4) for name, seconds in self._laps.items()}


def bars(console: Console) -> Progress:
    """Bars with counts and times; they show on a terminal only."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


class StepProgress:
    """Bars over steps and over the episodes of the step under way."""

    def __init__(self, console: Console, *, total: int, done: int) -> None:
        self._console = console
        self._bars = bars(console)
        self._steps = self._bars.add_task("steps   ", total=total, completed=done)
        self._episodes = self._bars.add_task("episodes", total=None)
        self._total = total

    def __enter__(self) -> StepProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def start_episodes(self, count: int) -> None:
        self._bars.reset(self._episodes, total=count)

    def episode_done(self, trajectory: Trajectory) -> None:
        self._bars.advance(self._episodes)

    def step_done(self, step: int, row: Row) -> None:
        self._bars.advance(self._steps)
        self._console.print(step_line(step, self._total, row), highlight=False, soft_wrap=True)


def step_line(step: int, total: int, row: Row) -> str:
    """One step in one line."""

    def shown(key: str, pattern: str = "{:.3f}") -> str:
        value = row.get(key)
        return "-" if value is None else pattern.format(value)

    seconds = sum(float(v) for k, v in row.items() if k.startswith("seconds/") and v is not None)
    gate = {None: "-", True: "on", False: "off"}[row.get("gate")]  # type: ignore[index]
    return (
        f"step {step}/{total}  reward {shown('reward')}  accuracy {shown('accuracy')}  H {shown('entropy')}  "
        f"gate {gate}  calls {shown('tool_calls', '{:.2f}')}  grad {shown('grad_norm', '{:.2g}')}  "
        f"gap {shown('logprob_gap_max', '{:.1e}')}  {seconds:.1f} s"
    )
