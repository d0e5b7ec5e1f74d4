"""What a run's rows say about entropy: tracking, prediction against measurement, quadrants, the tokens chosen."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from rich.table import Table
from rich.text import Text

from stare import tracking

Rows = Sequence[dict[str, Any]]

QUADRANTS = {
    "plus_high": "A > 0, high s: raises",
    "plus_low": "A > 0, low s: lowers",
    "minus_low": "A < 0, low s: raises",
    "minus_high": "A < 0, high s: lowers",
}


def correlation(pairs: Iterable[tuple[float | None, float | None]]) -> tuple[float, int] | None:
    """Pearson's r over the pairs that are known, and their number; None for fewer than three or a constant side."""
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if len(known) < 3:
        return None
    try:
        return statistics.correlation(*zip(*known, strict=True)), len(known)
    except statistics.StatisticsError:
        return None


def change_correlations(rows: Rows) -> dict[str, tuple[float, int] | None]:
    """Predicted change of entropy, ``lr * entropy_drift``, against what was measured.

    ``same batch``: of the update itself (``entropy_change``, with ``stare.remeasure``). ``next batch``: entropy of the
    next step's batch minus this one's, which other prompts blur.
    """
    return {
        "same batch": correlation((_predicted(row), row.get("entropy_change")) for row in rows),
        "next batch": correlation(
            (_predicted(row), _difference(following.get("entropy"), row.get("entropy")))
            for row, following in pairwise(rows)
        ),
    }


def entropy_table(rows: Rows, *, target_entropy: float) -> Table | None:
    """The whole run's entropy in a table; None where no step knows its entropy."""
    held = tracking((row.get("entropy") for row in rows), target_entropy)
    if held is None:
        return None
    tenth = max(1, len(rows) // 10)
    table = Table(title=f"entropy, target {target_entropy:g} nats; shares are of sampled tokens or of steps")
    table.add_column("", no_wrap=True)
    for heading in (f"first {tenth} steps", f"last {tenth} steps", "all steps"):
        table.add_column(heading, justify="right")
    parts = (rows[:tenth], rows[-tenth:], rows)

    def line(label: str, value: Callable[[Rows], float | None]) -> None:
        table.add_row(label, *(_shown(value(part)) for part in parts))

    def tracked(part: Rows, name: str) -> float | None:
        of_part = tracking((row.get("entropy") for row in part), target_entropy)
        return None if of_part is None else float(getattr(of_part, name))

    line("RMS error (nats)", lambda part: tracked(part, "rms"))
    line("within 10 % of target", lambda part: tracked(part, "within"))
    line("W", lambda part: _mean(part, "W"))
    line("critical W*, median", lambda part: _median(part, "W_critical"))  # a ratio: now and then by almost nothing
    for name, label in QUADRANTS.items():
        line(label, lambda part, name=name: _mean(part, f"quadrant/{name}/share"))  # type: ignore[misc]
    line("L+ with Phi > 0", lambda part: _mean(part, "l_plus_rising"))
    line("chosen in top 20 % H", lambda part: _mean(part, "overlap_80_20"))
    for name, found in change_correlations(rows).items():
        shown = "-" if found is None else f"{found[0]:.2f} (n = {found[1]})"
        table.add_row(f"predicted dH, r {name}", "", "", shown)
    table.caption = Text(f"most in L+: {chosen_text(rows)}")  # not markup: tokens have square brackets of their own
    return table


def chosen_text(rows: Rows, count: int = 10) -> str:
    """The tokens most often in L+ over the run, with their counts (among the ten most frequent of each step)."""
    total: Counter[str] = Counter()
    for row in rows:
        for text, number in row.get("chosen_tokens") or ():
            total[text] += number
    return " ".join(f"{text!r} {number}" for text, number in total.most_common(count)) or "-"


def _predicted(row: dict[str, Any]) -> float | None:
    return None if row.get("lr") is None or row.get("entropy_drift") is None else row["lr"] * row["entropy_drift"]


def _difference(later: float | None, earlier: float | None) -> float | None:
    return None if later is None or earlier is None else later - earlier


def _mean(rows: Rows, key: str) -> float | None:
    values = [float(row[key]) for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else None


def _median(rows: Rows, key: str) -> float | None:
    values = [float(row[key]) for row in rows if row.get(key) is not None]
    return statistics.median(values) if values else None


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
