"""Runs recipes in the lab and shows what came out: a table, JSON, and curves with confidence bands."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agent_rl.lab.world import Curves, Recipe, World, simulate
from agent_rl.progress import bars
from stare import tracking

Z95 = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One recipe over all seeds: mean and half-width of the 95 % interval of each seed's own figure."""

    name: str
    entropy: float  # mean of the last tenth of the steps, nats
    entropy_half_width: float
    reward: float  # exact expected reward, mean of the last tenth
    reward_half_width: float
    rms: float | None  # of H - H_tgt over the last half, nats; None where nothing is steered
    within: float | None  # share of the steps of the last half within 10 % of the target
    weight: float  # mean W of the last tenth


def outcome_of(curves: Curves) -> Outcome:
    """The figures of a recipe's curves."""
    steps = len(curves.entropy)
    tail, half = max(1, steps // 10), steps // 2
    steered = curves.recipe.variant != "none"
    target = curves.recipe.controller.target_entropy
    tracked = [tracking(column, target) for column in curves.entropy[half:].T.tolist()] if steered else []
    found = [t for t in tracked if t is not None]
    entropy, reward = curves.entropy[-tail:].mean(0), curves.reward[-tail:].mean(0)
    return Outcome(
        name=curves.recipe.name,
        entropy=float(entropy.mean()),
        entropy_half_width=_half_width(entropy.tolist()),
        reward=float(reward.mean()),
        reward_half_width=_half_width(reward.tolist()),
        rms=sum(t.rms for t in found) / len(found) if found else None,
        within=sum(t.within for t in found) / len(found) if found else None,
        weight=float(curves.amplify[-tail:].mean()) if steered else 1.0,
    )


def _half_width(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return Z95 * math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))


def run(world: World, recipes: Sequence[Recipe], steps: int, *, seed: int, console: Console) -> list[Curves]:
    """All recipes, each on the same worlds."""
    curves = []
    with bars(console) as progress:
        for recipe in recipes:
            bar = progress.add_task(f"{recipe.name:24}", total=steps)
            advance = functools.partial(progress.advance, bar)
            curves.append(simulate(world, recipe, steps, seed=seed, on_step=advance))
    return curves


def table(title: str, outcomes: Sequence[Outcome]) -> Table:
    """For the terminal."""
    grid = Table(title=title)
    grid.add_column("method")
    for heading in ("entropy at the end", "reward at the end", "RMS of H - H_tgt", "within 10 %", "W at the end"):
        grid.add_column(heading, justify="right")
    for o in outcomes:
        grid.add_row(
            o.name,
            f"{o.entropy:.3f} ± {o.entropy_half_width:.3f}",
            f"{o.reward:.3f} ± {o.reward_half_width:.3f}",
            "-" if o.rms is None else f"{o.rms:.3f}",
            "-" if o.within is None else f"{o.within:.0%}",
            f"{o.weight:.2f}",
        )
    return grid


def write(folder: Path, name: str, world: World, steps: int, seed: int, outcomes: dict[str, list[Outcome]]) -> Path:
    """``NAME.json``: the settings and every figure of the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    content: dict[str, Any] = {"world": asdict(world), "steps": steps, "seed": seed}
    content["outcomes"] = {title: [asdict(o) for o in of_title] for title, of_title in outcomes.items()}
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def draw(curves: Sequence[Curves], path: Path) -> Path:
    """Entropy and expected reward over steps: the mean over seeds and its 95 % band."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for number, one in enumerate(curves):
        steps = range(len(one.entropy))
        for axis, values in ((left, one.entropy), (right, one.reward)):
            mean = values.mean(1)
            half = Z95 * values.std(1) / math.sqrt(values.shape[1]) if values.shape[1] > 1 else 0 * mean
            colour = f"C{number % 10}"
            axis.plot(steps, mean, color=colour, label=one.recipe.name, linewidth=1.4)
            axis.fill_between(steps, mean - half, mean + half, color=colour, alpha=0.2, linewidth=0)
    targets = {c.recipe.controller.target_entropy for c in curves if c.recipe.variant != "none"}
    for target in targets:
        left.axhline(target, color="black", linestyle="--", linewidth=1, label=f"target {target:g}")
    left.set_ylabel("entropy (nats)")
    right.set_ylabel("expected reward")
    right.set_ylim(0, 1.02)
    for axis in (left, right):
        axis.set_xlabel("step")
    left.set_ylim(bottom=0)
    right.legend(loc="lower right", fontsize=8)
    left.legend(loc="upper right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path
