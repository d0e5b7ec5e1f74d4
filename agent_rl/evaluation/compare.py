"""Two evaluations on the same problems: what differs, how surely, and what makes the comparison unfair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from agent_rl.errors import ConfigError
from agent_rl.evaluation import statistics as st
from agent_rl.evaluation.report import BOOTSTRAP_SEED, asked_rows, correctness
from agent_rl.evaluation.store import Row, read_settings


def compare(first: Path, second: Path) -> dict[str, Any]:
    """``st.paired`` for every part that both have, over the problems that both scored.

    Raises:
        ConfigError: a folder holds no evaluation, or they share no problem.
    """
    settings = [read_settings(folder) for folder in (first, second)]
    rows = [asked_rows(folder, own) for folder, own in zip((first, second), settings, strict=True)]
    notes: list[str] = []
    parts: dict[str, Any] = {}
    for name in dict.fromkeys(row.part for row in rows[0]):
        sides = [{problem: samples for problem, samples in _of(side, name).items() if samples} for side in rows]
        common = [problem for problem in sides[0] if problem in sides[1]]
        if not common:
            continue
        notes += _golds_differ(name, rows, set(common))
        if dropped := len(sides[0].keys() ^ sides[1].keys()):
            notes.append(f"{name}: {dropped} problems that only one of the two has are left out")
        means = [[sum(side[p]) / len(side[p]) for p in common] for side in sides]
        result = st.paired(means[0], means[1], seed=BOOTSTRAP_SEED)
        parts[name] = {
            "problems": len(common),
            "samples": [sum(len(side[p]) for p in common) for side in sides],
            "first": sum(means[0]) / len(common),
            "second": sum(means[1]) / len(common),
            **asdict(result),
        }
    if not parts:
        raise ConfigError(f"{first} and {second} have no scored problem in common")
    return {
        "first": {"folder": str(first), "title": settings[0]["title"]},
        "second": {"folder": str(second), "title": settings[1]["title"]},
        "parts": parts,
        "notes": list(dict.fromkeys([*_unfair(settings, list(parts)), *notes])),
    }


def _of(rows: Sequence[Row], part: str) -> dict[str, list[bool]]:
    return correctness([row for row in rows if row.part == part])


NOT_FAIR = ("scenario", "temperature", "top_p", "budgets", "shots")
"""Settings in which a difference is a difference of method."""
BY_PART = ("environments", "limits")
"""The same, each with a value for every part."""


def _unfair(settings: Sequence[Mapping[str, Any]], parts: Sequence[str]) -> list[str]:
    a, b = (side["identity"] for side in settings)
    differing = [name for name in NOT_FAIR if a.get(name) != b.get(name)]
    differing += [name for name in BY_PART if any(a[name].get(part) != b[name].get(part) for part in parts)]
    return [f"the two differ in {', '.join(differing)}: not only the model was changed"] if differing else []


def _golds_differ(part: str, rows: Sequence[Sequence[Row]], common: set[str]) -> list[str]:
    golds = [{r.problem: r.gold for r in side if r.part == part and r.problem in common} for side in rows]
    wrong = [problem for problem in golds[0] if golds[0][problem] != golds[1][problem]]
    return [f"{part}: {len(wrong)} problems have other gold answers, first {wrong[0]}"] if wrong else []


def comparison_rows(tree: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, part in tree["parts"].items():
        d = part["difference"]
        # Where no problem differs, nothing is known about how far another set of them would.
        known = part["better"] + part["worse"] > 0 and d["low"] is not None
        rows.append(
            (
                f"{name} ({part['problems']})",
                f"{100 * part['first']:.1f}",
                f"{100 * part['second']:.1f}",
                f"{100 * d['value']:+.1f}",
                f"[{100 * d['low']:+.1f}, {100 * d['high']:+.1f}]" if known else "-",
                f"[{100 * d['boot_low']:+.1f}, {100 * d['boot_high']:+.1f}]" if known else "-",
                f"{part['better']}/{part['worse']}/{part['ties']}",
                "-" if part["sign_p"] is None else f"{part['sign_p']:.3g}",
            )
        )
    return rows


HEADINGS = ("part", "A", "B", "A - B", "95 % interval", "bootstrap", "better/worse/tied", "sign test p")


def comparison_table(tree: Mapping[str, Any]) -> Table:
    table = Table(title=f"A: {tree['first']['title']}\nB: {tree['second']['title']}")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "part" else "right")
    for row in comparison_rows(tree):
        table.add_row(*row)
    return table


def comparison_markdown(tree: Mapping[str, Any]) -> str:
    lines = [f"A: {tree['first']['title']}  ", f"B: {tree['second']['title']}", ""]
    lines += ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join(row) + " |" for row in comparison_rows(tree)]
    lines += ["", *(f"- {note}" for note in tree["notes"])]
    return "\n".join(lines) + "\n"
