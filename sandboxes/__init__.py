"""Runs untrusted programs: one contract, several backends, a pool; knows nothing of reinforcement learning."""

from sandboxes.base import (
    ExecutionResult,
    Limits,
    Sandbox,
    SandboxBusy,
    SandboxFailure,
    SandboxSpec,
    SandboxUnavailable,
    Status,
)
from sandboxes.choose import make_sandbox, resolve
from sandboxes.pool import SandboxPool

__all__ = [
    "ExecutionResult",
    "Limits",
    "Sandbox",
    "SandboxBusy",
    "SandboxFailure",
    "SandboxPool",
    "SandboxSpec",
    "SandboxUnavailable",
    "Status",
    "make_sandbox",
    "resolve",
]
