"""The optimizer's state on a disk (ZeRO 3 over NVMe, ZeRO-Infinity, arXiv 2104.07857), and a checkpoint that resumes.

DeepSpeed swaps each rank's partitions of weights and moments through files named by numbers that count on within a
process. Its own checkpoint copies these files and forgets how many steps Adam has made, so from it training goes on
with another step than it would have made (0.19.8). Here every rank writes its flat groups of partitions itself, one at
a time, and reads them back into a learner that has made its files.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agent_rl.errors import ConfigError

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Of Adam; SGD has none."""


def check_disk(path: str) -> None:
    """Raises ``ConfigError`` where DeepSpeed cannot swap to ``path``."""
    if not os.path.isdir(path) or not os.access(path, os.W_OK):
        raise ConfigError(f"learner.offload_path = {path!r} is no folder that can be written")
    from deepspeed.ops.op_builder import AsyncIOBuilder  # heavy

    _find_ninja()
    missing = [name for name in ("c++", "ninja") if shutil.which(name) is None]
    if missing or not AsyncIOBuilder().is_compatible(verbose=False):
        raise ConfigError(
            "learner.offload 'nvme' compiles DeepSpeed's asynchronous file access once: "
            "install libaio and a C++ compiler (apt-get install libaio-dev g++)"
        )


def swap_folder(path: str) -> Path:
    """A new folder for one learner; those that killed processes left are removed."""
    _find_ninja()
    for left in Path(path).iterdir():
        owner = re.fullmatch(r"agent-rl-swap-(\d+)-\w+", left.name)
        if owner is not None and not os.path.exists(f"/proc/{owner[1]}"):
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"agent-rl-swap-{os.getpid()}-", dir=path))


def _find_ninja() -> None:
    """pip puts it beside the interpreter, and torch looks for it on the PATH alone."""
    beside = str(Path(sys.executable).parent)
    if shutil.which("ninja") is None and shutil.which("ninja", path=beside) is not None:
        os.environ["PATH"] += os.pathsep + beside


def save_partitions(optimizer: Any, folder: Path, steps_taken: int) -> None:
    """This rank's float32 weights and moments, a file a group; ``optimizer`` is DeepSpeed's of ZeRO 3."""
    folder.mkdir(parents=True)
    for number in range(len(optimizer.fp32_partitioned_groups_flat)):
        with _in_memory(optimizer, number, write=False) as columns:
            torch.save({name: column.clone() for name, column in columns.items()}, folder / f"group-{number}.pt")
    torch.save({"adam": steps_of(optimizer), "taken": steps_taken}, folder / "steps.pt")


def load_partitions(optimizer: Any, folder: Path, idle_step: Callable[[], object]) -> int:
    """The other way; returns the steps taken.

    Args:
        optimizer: DeepSpeed's, with the same groups.
        folder: of this rank.
        idle_step: an optimizer step of learning rate 0 without a gradient. The first makes DeepSpeed create what is
            to be read into, the second carries the weights from the float32 partitions into the model.
    """
    steps = torch.load(folder / "steps.pt")
    idle_step()
    _fill(optimizer, folder, ["weight"])
    idle_step()
    _fill(optimizer, folder, MOMENTS)  # last, because an idle step moves them
    for state in optimizer.optimizer.state.values():
        if "step" in state:
            state["step"].fill_(steps["adam"] or 0)
    return int(steps["taken"])


def _fill(optimizer: Any, folder: Path, names: Collection[str]) -> None:
    for number in range(len(optimizer.fp32_partitioned_groups_flat)):
        saved: dict[str, Tensor] = torch.load(folder / f"group-{number}.pt", mmap=True)
        with _in_memory(optimizer, number, write=True) as columns:
            for name in columns.keys() & saved.keys() & set(names):
                columns[name].copy_(saved[name])


@contextmanager
def _in_memory(optimizer: Any, number: int, *, write: bool) -> Iterator[dict[str, Tensor]]:
    """Weights and moments of one group, read from its files and, with ``write``, written back."""
    # Groups below the size of a swap buffer stay in memory.
    swaps = optimizer._swappable_optimizer_subgroup(number)
    if swaps:
        optimizer._optimizer_states_and_gradient_swap_in(number)
    flat = optimizer.fp32_partitioned_groups_flat[number]
    moments = {name: value for name, value in optimizer.optimizer.state[flat].items() if name in MOMENTS}
    yield {"weight": flat.data, **moments}
    if swaps and write:
        optimizer._optimizer_states_and_gradient_swap_out(number)
    elif swaps:
        optimizer._release_swap_buffers(number)


def steps_of(optimizer: Any) -> float | None:
    """How many steps Adam has made; None before the first, and for SGD."""
    steps = {float(state["step"]) for state in optimizer.optimizer.state.values() if "step" in state}
    assert len(steps) <= 1, steps
    return steps.pop() if steps else None
