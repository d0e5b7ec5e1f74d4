"""An evaluation of the scripted server's model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from agent_rl.evaluation.settings import checked

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k_sample.jsonl"
QUIET = Console(quiet=True)


def settings_for(url: str, output: Path, **changes: Any) -> Any:
    base: dict[str, Any] = {"suite": "gsm8k", "data": str(GSM8K), "limit": 6, "k": 3, "served_name": "scripted"}
    return checked(**(base | {"model": url, "output": str(output), "name": "run"} | changes))


def by_seed(body: dict[str, Any]) -> str:
    """Right for about half of the seeds, with several wrong answers."""
    return f"\\boxed{{{'7' if body['seed'] % 2 else body['seed'] % 5}}}"


def lines_of(folder: Path) -> list[str]:
    path = folder / "episodes.jsonl"
    return path.read_text().splitlines() if path.is_file() else []
