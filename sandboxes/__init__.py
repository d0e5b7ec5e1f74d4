"""Runs untrusted programs: one contract, several backends, a pool; knows nothing of reinforcement learning."""

from sandboxes.base import ExecutionResult, Sandbox, SandboxFailure, SandboxSpec, SandboxUnavailable, Status
from sandboxes.pool import SandboxPool, make_sandbox, resolve

__all__ = [
    "ExecutionResult",
    "Sandbox",
    "SandboxFailure",
    "SandboxPool",
    "SandboxSpec",
    "SandboxUnavailable",
    "Status",
    "make_sandbox",
    "resolve",
]
