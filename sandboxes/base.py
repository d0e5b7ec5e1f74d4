"""The sandbox contract: what runs model-written code, what it returns, and how our own failures are told apart.

A program's failure is a *result* (``ExecutionResult`` with a status); our failure is an *exception*
(``SandboxFailure``). The text of a ``SandboxFailure`` must never reach the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

Status = Literal["ok", "error", "timeout", "memory", "killed"]
"""``ok``: exit code 0; ``error``: it failed; ``timeout``: our deadline; ``memory``: its limit; ``killed``: a signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionResult:
    """What one program did. Output is text decoded as UTF-8 with replacement, head and tail kept when cut."""

    stdout: str
    stderr: str
    exit_code: int | None  # None when the program was stopped by us (timeout); 128 + n when signal n ended it
    status: Status
    stdout_cut_bytes: int = 0  # bytes left out of the middle of stdout
    stderr_cut_bytes: int = 0  # bytes left out of the middle of stderr
    wall_s: float = 0.0  # seconds from request to answer
    isolated: bool = True  # False when the backend gives no isolation (``local``)
    session_began: bool = False  # True when this call's session was new: no variables of earlier calls


class SandboxFailure(Exception):
    """Our side failed (engine down, worker dead, protocol broken): the episode is void, never a reward."""


class SandboxUnavailable(SandboxFailure):
    """No sandbox of the wanted kind can be had at all (no Docker engine, missing image)."""


class SandboxSpec(BaseModel):
    """Limits and identity of the sandboxes of one run. Sizes in MiB, times in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["auto", "docker", "local"] = Field(
        "auto", description="auto: docker when an engine answers and the image exists, else local with a warning"
    )
    image: str = Field("agent-rl-sandbox:latest", description="image of the docker backend")
    timeout_s: float = Field(10.0, gt=0, description="wall-clock limit of one call")
    memory_mb: int = Field(512, ge=32, description="memory of one sandbox")
    pids: int = Field(128, ge=8, description="processes and threads of one sandbox")
    cpus: float = Field(1.0, gt=0, description="CPU share of one sandbox")
    output_bytes: int = Field(32_768, ge=64, description="bytes kept of each of stdout and stderr, head and tail")
    scratch_mb: int = Field(64, ge=1, description="size of the writable scratch folder")
    size: int = Field(4, ge=1, description="sandboxes of this run at once")


class Sandbox(Protocol):
    """One place that runs programs. Not safe for concurrent calls: a lease has one user at a time."""

    kind: str  # name of the backend
    isolated: bool

    async def start(self) -> None:
        """Ready to execute after this. Raises ``SandboxUnavailable`` when it cannot be."""
        ...

    async def exec(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        stdin: str | None = None,
        files: dict[str, bytes] | None = None,
        session: str | None = None,
    ) -> ExecutionResult:
        """Run a Python program in a fresh process; files that it writes stay until ``reset``.

        Args:
            code: source text, run as ``__main__``.
            timeout_s: wall-clock limit; the specification's when None. The whole process tree dies at the deadline.
            stdin: what the program reads; empty when None.
            files: written into the working folder first; plain names, no folders.
            session: run in the process of this name instead, which keeps variables, threads and child processes
                between calls; begun by its first call, ended by ``reset``, a timeout or its own death.

        Raises:
            ValueError: a file name with a folder, a time limit that is none, or over 64 MiB of files and stdin.
            SandboxFailure: when the sandbox, not the program, failed. The sandbox is then unusable.
        """
        ...

    async def reset(self) -> None:
        """Neither file nor process of earlier calls is left afterwards; ``SandboxFailure`` if that cannot be."""
        ...

    async def alive(self) -> bool:
        """Whether the next ``exec`` can be expected to work."""
        ...

    async def close(self) -> None:
        """Remove everything this sandbox made; may be called twice and after a failure."""
        ...
