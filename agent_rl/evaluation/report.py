"""What an evaluation found, from its rows: one tree of numbers, and that tree as a table, Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from agent_rl.evaluation import statistics as st
from agent_rl.evaluation.store import Row, final_rows, read_rows, read_settings, write_json
from envs.answers import normalised
from envs.equality import exact_number

RESULTS = "results.json"
BOOTSTRAP_SEED = 0


def summarise(
    rows: Sequence[Row], parts: Sequence[Mapping[str, Any]], *, flagged: Iterable[tuple[str, str]] = ()
) -> dict[str, Any]:
    """All numbers of an evaluation.

    Args:
        rows: one a sample (``final_rows``).
        parts: ``{"name", "k", "problems"}`` as they were asked for, in order.
        flagged: (part, problem) pairs that overlap with training data; a second estimate leaves them out.
    """
    by_part: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_part[row.part].append(row)
    left_out = set(flagged)
    tree: dict[str, Any] = {"parts": {}}
    for part in parts:
        own = by_part.get(part["name"], [])
        summary = part_summary(own, k=part["k"], problems=part["problems"])
        if any(row.key[:2] in left_out for row in own):
            kept = [row for row in own if row.key[:2] not in left_out]
            summary["without_overlap"] = {
                "flagged": sorted({row.problem for row in own if row.key[:2] in left_out}),
                "avg": asdict(st.avg_at_k(list(correctness(kept).values()), seed=BOOTSTRAP_SEED)),
            }
        tree["parts"][part["name"]] = summary
    tree["average"] = average([tree["parts"][part["name"]]["avg"] for part in parts])
    tree["total"] = totals(rows)
    return tree


def part_summary(rows: Sequence[Row], *, k: int, problems: int) -> dict[str, Any]:
    """The numbers of one data set; ``avg`` and the curves are over the problems that have scored samples."""
    scored = [row for row in rows if not row.is_void]
    right = correctness(rows)
    per_problem = list(right.values())
    complete = sum(len(row) >= k for row in per_problem)
    return {
        "k": k,
        "problems": problems,
        "complete_problems": complete,  # with k scored samples
        "avg": asdict(st.avg_at_k(per_problem, seed=BOOTSTRAP_SEED)),
        "avg_sampling_stderr": st.sampling_stderr(per_problem),
        "pass": {str(n): asdict(e) for n, e in st.pass_curve(per_problem, seed=BOOTSTRAP_SEED).items()},
        "maj": asdict(st.estimate(majorities(scored), seed=BOOTSTRAP_SEED)),
        "verdicts": dict(Counter(row.verdict for row in rows)),
        **totals(rows),
    }


def correctness(rows: Sequence[Row]) -> dict[str, list[bool]]:
    """Whether each scored sample of each problem is right; problems in order of their place."""
    found: dict[str, list[bool]] = {}
    for row in rows:
        samples = found.setdefault(row.problem, [])
        if row.correct is not None:
            samples.append(row.correct)
    return found


def majorities(rows: Sequence[Row]) -> list[float]:
    """maj@n of every problem, n being its scored samples."""
    of_problem: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        of_problem[row.problem].append(row)
    votes = [
        st.majority([ballot(row.answer) for row in own], [bool(row.correct) for row in own])
        for own in of_problem.values()
    ]
    return [vote for vote in votes if vote is not None]


def ballot(answer: str | None) -> object | None:
    """What answers that vote together share: their rational value, else their spelling."""
    if answer is None:
        return None
    value = exact_number(answer)
    return value if value is not None else normalised(answer).replace(" ", "")


def totals(rows: Sequence[Row]) -> dict[str, Any]:
    """Counts, lengths and costs; means are over scored episodes."""
    scored = [row for row in rows if not row.is_void]
    calls: Counter[str] = Counter()
    for row in scored:
        calls.update(row.calls)
    costs = [row.cost for row in rows if row.cost is not None]
    sampled = sorted(row.sampled_tokens for row in scored)
    return {
        "episodes": len(rows),
        "scored": len(scored),
        "void": len(rows) - len(scored),
        "void_causes": dict(Counter((row.failure or "?").split(" at ")[0] for row in rows if row.is_void)),
        "stops": dict(sorted(Counter(row.stop for row in rows).items())),
        "truncated": _mean([float(row.is_truncated) for row in scored]),
        "turns": _mean([row.turns for row in scored]),
        "calls": _mean([sum(row.calls.values()) for row in scored]),  # attempts an episode
        "call_statuses": dict(sorted(calls.items())),
        "malformed": (sum(calls.values()) - calls["ok"]) / sum(calls.values()) if calls else None,
        "with_calls": _mean([float(sum(row.calls.values()) > 0) for row in scored]),  # share of episodes
        "tokens_sampled": sum(row.sampled_tokens for row in rows),
        "tokens_prompt": sum(row.prompt_tokens for row in rows),
        "length_mean": _mean(sampled),
        "length_median": None if not sampled else sampled[len(sampled) // 2],
        "length_max": sampled[-1] if sampled else None,
        "length_right": _mean([row.sampled_tokens for row in scored if row.correct]),
        "length_wrong": _mean([row.sampled_tokens for row in scored if not row.correct]),
        "seconds": round(sum(row.seconds for row in rows), 3),  # of episodes, which overlap
        "requests": sum(row.requests for row in rows),
        "retries": sum(row.retries for row in rows),
        "cost": sum(costs) if costs else None,
    }


def average(estimates: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The unweighted mean of the parts, as papers print it; its error from independent parts. None unless all tell."""
    values = [e["value"] for e in estimates]
    if len(values) < 2 or None in values:
        return None
    errors = [e["stderr"] for e in estimates]
    known = None not in errors and any(errors)  # where no part shows spread, nothing is known of the average's
    stderr = sum(error**2 for error in errors) ** 0.5 / len(errors) if known else None
    return {"value": sum(values) / len(values), "stderr": stderr}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


# A finished (or half finished) folder.


def asked_rows(folder: Path, settings: Mapping[str, Any]) -> list[Row]:
    """``final_rows`` of what was asked for last; a smaller ``--k`` or ``--limit`` than before leaves some out."""
    samples = {(part["name"], problem): part["k"] for part in settings["parts"] for problem in part["ids"]}
    rows = final_rows(row for row, _ in read_rows(folder))
    return [row for row in rows if row.sample < samples.get(row.key[:2], 0)]


def write_results(folder: Path, *, wall_s: float | None = None) -> dict[str, Any]:
    """``results.json``, ``results.md`` and ``results.csv`` of what the folder holds now; returns the tree."""
    settings = read_settings(folder)
    rows = asked_rows(folder, settings)
    parts = [{"name": p["name"], "k": p["k"], "problems": len(p["ids"])} for p in settings["parts"]]
    flagged = [tuple(pair) for pair in settings.get("contamination", {}).get("flagged", [])]
    tree = {
        "title": settings["title"],
        "identity": settings["identity"],
        "data": {p["name"]: {"digest": p["digest"], "path": p["path"]} for p in settings["parts"]},
        "notes": settings.get("notes", []),
        "contamination": settings.get("contamination"),
        **summarise(rows, parts, flagged=flagged),  # type: ignore[arg-type]
    }
    if wall_s is not None:
        tree["wall_seconds"] = round(wall_s, 1)
    write_json(folder / RESULTS, tree)
    (folder / "results.md").write_text(markdown(tree), encoding="utf-8")
    (folder / "results.csv").write_text(as_csv(tree), encoding="utf-8")
    return tree


COLUMNS = ("part", "avg@k", "95 % interval", "pass@k", "maj@k", "void", "cut", "calls", "tokens")


def table_rows(tree: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, part in tree["parts"].items():
        curve = part["pass"]
        most = max(map(int, curve), default=0)
        rows.append(
            (
                f"{name} ({part['avg']['problems']}, k={part['k']})",
                percent(part["avg"]["value"]),
                interval(part["avg"]),
                f"{percent(curve[str(most)]['value'])} (k={most})" if most else "-",
                percent(part["maj"]["value"]),
                f"{part['void']}/{part['episodes']}",
                percent(part["truncated"]),
                "-" if part["calls"] is None else f"{part['calls']:.2f}",
                "-" if part["length_mean"] is None else f"{part['length_mean']:.0f}",
            )
        )
    if tree["average"]:
        mean = tree["average"]
        spread = "" if mean["stderr"] is None else f"+- {100 * 1.96 * mean['stderr']:.1f}"
        rows.append(("average", percent(mean["value"]), spread, *[""] * 6))
    return rows


def rich_table(tree: Mapping[str, Any]) -> Table:
    table = Table(title=tree["title"])
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "part" else "right")
    for row in table_rows(tree):
        table.add_row(*row)
    return table


def markdown(tree: Mapping[str, Any]) -> str:
    lines = [f"# {tree['title']}", "", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(row) + " |" for row in table_rows(tree)]
    lines += ["", *(f"- {line}" for line in remarks(tree)), ""]
    return "\n".join(lines)


def remarks(tree: Mapping[str, Any]) -> list[str]:
    """What belongs under the table: ends, verdicts, overlap, costs, and what is odd."""
    total = tree["total"]
    lines = [
        "interval: Student's t over problems (clusters); `results.json` has the bootstrap's beside it",
        "ends: " + (", ".join(f"{stop} {count}" for stop, count in total["stops"].items()) or "none"),
    ]
    verdicts: Counter[str] = Counter()
    for part in tree["parts"].values():
        verdicts.update(part["verdicts"])
    lines.append("verdicts: " + (", ".join(f"{name} {count}" for name, count in verdicts.most_common()) or "none"))
    if total["call_statuses"]:
        lines.append("calls: " + ", ".join(f"{status} {count}" for status, count in total["call_statuses"].items()))
    if total["void"]:
        causes = ", ".join(f"{cause} {count}" for cause, count in total["void_causes"].items())
        lines.append(f"void (our failures, in no estimate): {total['void']} ({causes})")
    for name, part in tree["parts"].items():
        if part["complete_problems"] < part["problems"]:
            lines.append(
                f"{name}: {part['complete_problems']} of {part['problems']} problems have all {part['k']} samples"
            )
        if "without_overlap" in part:
            rest = part["without_overlap"]
            lines.append(
                f"{name}: {len(rest['flagged'])} problems overlap with training data; "
                f"without them {percent(rest['avg']['value'])} {interval(rest['avg'])}"
            )
    tokens = f"tokens: {total['tokens_sampled']:,} sampled, {total['tokens_prompt']:,} of prompts"
    if tree.get("wall_seconds"):
        tokens += f"; {tree['wall_seconds']:.0f} s in the last run"
    lines.append(tokens)
    if total["requests"]:
        lines.append(f"requests: {total['requests']}, {total['retries']} of them tried again")
    if total["cost"] is not None:
        lines.append(f"cost: ${total['cost']:.4f}")
    return lines + list(tree.get("notes") or [])


def as_csv(tree: Mapping[str, Any]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    numbers = ("value", "stderr", "low", "high", "boot_low", "boot_high")
    counts = ("scored", "void", "truncated", "turns", "calls", "malformed", "length_mean", "seconds", "cost")
    writer.writerow(["part", "metric", "k", "problems", *numbers, *counts])
    for name, part in tree["parts"].items():
        metrics = [("avg", part["k"], part["avg"]), ("maj", part["k"], part["maj"])]
        metrics += [("pass", int(k), e) for k, e in part["pass"].items()]
        for metric, k, e in metrics:
            cells = [e[number] for number in numbers]
            writer.writerow([name, metric, k, e["problems"], *cells, *(part[count] for count in counts)])
    return out.getvalue()


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def interval(e: Mapping[str, Any]) -> str:
    return "-" if e["low"] is None else f"[{100 * max(0.0, e['low']):.1f}, {100 * min(1.0, e['high']):.1f}]"
