"""What a person sees at the end of a run: a table, a picture, one episode with its trained tokens in colour."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_rl.config import ConfigError
from agent_rl.entropy_report import entropy_table
from agent_rl.models import load_tokenizer
from agent_rl.records import iterate_rows, read_rows

SHOWN = (
    ("reward", "reward"),
    ("accuracy", "accuracy"),
    ("entropy", "entropy (nats)"),
    ("gate", "gate on (share of steps)"),
    ("tool_calls", "tool calls per episode"),
    ("malformed", "malformed calls (share)"),
)


def report(folder: Path, console: Console, *, target_entropy: float) -> None:
    """Print table, episode and folder of a run, and write ``curves.png`` into it.

    Raises:
        ConfigError: the run has not finished a step.
    """
    rows = read_rows(folder / "metrics.jsonl")
    if not rows:
        raise ConfigError(f"{folder} has no metrics.jsonl with a finished step: nothing to report")
    tenth = max(1, len(rows) // 10)
    table = Table(title=f"{folder.name}: {len(rows)} steps")
    for heading in ("", f"first {tenth} steps", f"last {tenth} steps"):
        table.add_column(heading, justify="left" if not heading else "right")
    for key, label in SHOWN:
        table.add_row(label, *(_shown(mean_of(part, key)) for part in (rows[:tenth], rows[-tenth:])))
    picture = draw_curves(rows, folder / "curves.png", target_entropy=target_entropy)
    scored = (t for t in iterate_rows(folder / "trajectories.jsonl") if t["reward"] is not None)
    shown = max(scored, key=lambda t: (t["step"], len(t["turns"]), t["reward"]), default=None)
    if shown is not None:
        console.print()
        console.print(episode_text(shown, load_tokenizer(folder / "tokenizer")))
    console.print(table)
    entropy = entropy_table(rows, target_entropy=target_entropy)
    if entropy is not None:
        console.print(entropy)
    console.print(f"curves      {picture}", soft_wrap=True)
    console.print(f"run folder  {folder}", soft_wrap=True)


def mean_of(rows: Sequence[dict[str, Any]], key: str) -> float | None:
    """Mean of the values that are known."""
    values = [float(row[key]) for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else None


def episode_text(record: dict[str, Any], tokenizer: Any) -> Text:
    """The whole token stream; sampled tokens, which are the ones trained on, in green, all others dim."""
    text = Text()
    text.append(f"episode of step {record['step']}, task {record['task']}: reward {record['reward']:.2f}, ")
    text.append(f"stop {record['stop']} (")
    text.append("green: sampled and trained", style="bold green")
    text.append(", dim: prompt, template and tool output)\n")
    spans = sorted([(turn[0], turn[2]) for turn in record["turns"]] + [*map(tuple, record.get("weight_changes", ()))])
    if len({version for _, version in spans}) > 1:
        text.append("weights " + ", ".join(f"{version} from token {start}" for start, version in spans) + "\n")
    text.append("\n")
    ids, mask = record["token_ids"], record["loss_mask"]
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or mask[end] != mask[start]:
            piece = tokenizer.decode(ids[start:end], skip_special_tokens=False)
            text.append(piece, style="bold green" if mask[start] else "dim")
            start = end
    text.append("\n")
    return text


def draw_curves(rows: Sequence[dict[str, Any]], path: Path, *, target_entropy: float) -> Path:
    """Reward and entropy over steps, the entropy against its target, steps with the gate on shaded."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    steps = [row["step"] for row in rows]
    upper.plot(steps, [row["reward"] for row in rows], color="tab:blue", label="mean reward")
    upper.plot(steps, [row["accuracy"] for row in rows], color="tab:cyan", linewidth=0.8, label="accuracy")
    upper.set_ylabel("reward")
    upper.legend(loc="lower right")
    known = [row for row in rows if row.get("entropy") is not None]
    lower.plot([r["step"] for r in known], [r["entropy"] for r in known], color="tab:orange", label="entropy")
    lower.axhline(target_entropy, color="black", linestyle="--", linewidth=1, label=f"target {target_entropy:g}")
    top = max([target_entropy, *(r["entropy"] for r in known)]) * 1.1
    lower.fill_between(
        [r["step"] for r in known],
        0,
        top,
        where=[bool(r["gate"]) for r in known],
        alpha=0.12,
        step="mid",
        label="gate on",
    )
    lower.set_ylim(0, top)
    lower.set_ylabel("entropy (nats)")
    lower.set_xlabel("step")
    lower.legend(loc="upper right")
    figure.savefig(path, dpi=120)
    return path


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
