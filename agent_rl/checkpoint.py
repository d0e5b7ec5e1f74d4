"""What a run needs to go on as if it had never stopped, written so that a kill at any moment leaves the last one whole.

Random choices are pure functions of the run's seed and their place (``agent_rl.seeds``), so the state of every random
stream is the step number and the data cursor.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from agent_rl.config import ConfigError
from agent_rl.regularisers import RegulariserState
from agent_rl.sampling import SamplingState
from stare import Controller


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Beside weights and optimizer (in the same folder, by the learner)."""

    step: int  # steps done
    cursor: int  # prompts begun: all consumed but the pending ones
    seed: int
    controllers: dict[str, Controller]  # by scenario
    regularisers: RegulariserState = field(default_factory=RegulariserState)
    pending: tuple[int, ...] = ()  # places before the cursor of prompts begun and not yet consumed, oldest first
    sampling: SamplingState = field(default_factory=SamplingState)


def folders(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [p for p in root.glob("step-*") if re.fullmatch(r"step-\d{6,}", p.name) and (p / "state.json").is_file()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def save(root: Path, state: RunState, save_learner: Callable[[Path], None], *, keep: int) -> Path:
    """A new checkpoint; older ones beyond ``keep`` leave only after it is whole."""
    root.mkdir(parents=True, exist_ok=True)
    folder = root / f"step-{state.step:06d}"
    aside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    save_learner(aside)
    (aside / "state.json").write_text(json.dumps(asdict(state), allow_nan=False))
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    for old in folders(root)[:-keep]:
        shutil.rmtree(old)
    return folder


def read_state(folder: Path) -> RunState:
    """Raises ``ConfigError`` naming the folder when its state is not readable."""
    try:
        data = json.loads((folder / "state.json").read_text())
        controllers = {name: Controller.from_dict(state) for name, state in data["controllers"].items()}
        regularisers = RegulariserState.from_dict(data["regularisers"])
        sampling = SamplingState.from_dict(data["sampling"])
        pending = tuple(data["pending"])
        own = {"controllers": controllers, "regularisers": regularisers, "pending": pending, "sampling": sampling}
        return RunState(**{**data, **own})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"checkpoint {folder} is damaged ({error}): remove it to go on from an older one") from None
