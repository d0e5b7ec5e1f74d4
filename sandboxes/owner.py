"""Who owns what is left lying about: this process, named so that a later one can tell whether it still lives."""

from __future__ import annotations

import os
import socket
from pathlib import Path

SCRATCH_PREFIX = "agent-rl-sandbox-"
"""Of temporary folders; pid and start time of their owner follow."""


def start_ticks(pid: int) -> str:
    """Clock ticks since boot when the process began; empty when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def owner_label() -> str:
    """This process in a way that survives a reused pid: host, pid, start time in clock ticks since boot."""
    return f"{socket.gethostname()}:{os.getpid()}:{start_ticks(os.getpid())}"


def is_orphan(owner: str) -> bool:
    """Whether the process that an owner label names is gone; what is of other hosts is never ours to judge."""
    host, _, rest = owner.partition(":")
    pid, _, ticks = rest.partition(":")
    return host == socket.gethostname() and pid.isdigit() and start_ticks(int(pid)) != ticks
