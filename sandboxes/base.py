"""The sandbox contract: what runs model-written code, what it returns, and how our own failures are told apart.

A program's failure is a *result* (``ExecutionResult`` with a status); our failure is an *exception*
(``SandboxFailure``). The text of a ``SandboxFailure`` must never reach the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

Status = Literal["ok", "error", "timeout", "memory", "killed"]
"""``ok``: exit code 0; ``error``: it failed; ``timeout``: our deadline, of wall or processor time; ``memory``: its
limit; ``killed``: a signal."""

Kind = Literal["auto", "docker", "bwrap", "local", "remote"]
OnOutput = Callable[[Literal["stdout", "stderr"], bytes], None]
"""Told of output while the program runs: the first ``output_bytes`` bytes of each stream, in pieces as they come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one call; None leaves what the specification says. They can only lower what holds for the sandbox."""

    cpu_s: float | None = None  # seconds of processor time of one process, rounded to whole ones, at least 1
    memory_mb: int | None = None  # MiB of private memory of one process
    open_files: int | None = None
    output_bytes: int | None = None  # kept of each of stdout and stderr


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
    cpu_s: float | None = (
        None  # processor seconds of the program and what it waited for; None: killed by us, or a session
    )
    isolated: bool = True  # False when the backend gives no isolation (``local``)
    session_began: bool = False  # True when this call's session was new: no variables of earlier calls
    files: dict[str, bytes] = field(default_factory=dict)  # of ``fetch``; what is no regular file there is left out


class SandboxFailure(Exception):
    """Our side failed (engine down, worker dead, protocol broken): the episode is void, never a reward."""


class SandboxUnavailable(SandboxFailure):
    """No sandbox of the wanted kind can be had at all (no Docker engine, missing image)."""


PROFILES: dict[str, dict[str, Any]] = {
    "default": {},
    "strict": {
        "memory_mb": 256,
        "pids": 32,
        "cpus": 0.5,
        "output_bytes": 8_192,
        "scratch_mb": 16,
        "open_files": 64,
        "timeout_s": 5.0,
        "max_uses": 50,
    },
    "networked": {"network": True},
}
"""What a profile's name stands for: other values of fields that are not given."""


class SandboxBusy(SandboxFailure):
    """Too many others wait already: try later."""


class SandboxSpec(BaseModel):
    """Limits and identity of the sandboxes of one run. Sizes in MiB, times in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind = Field(
        "auto",
        description="auto: docker where an engine answers and the image exists, else bwrap, else local; both warn",
    )
    profile: Literal["strict", "default", "networked"] = Field(
        "default", description="strict: about half of every limit; networked: programs reach the network (docker)"
    )
    image: str = Field("agent-rl-sandbox:latest", description="image of the docker backend")
    runtime: str | None = Field(None, description="OCI runtime of the docker backend, such as runsc (gVisor)")
    hosts: tuple[str, ...] = Field((), description="services of the remote backend, such as http://box1:8088")
    timeout_s: float = Field(10.0, gt=0, description="wall-clock limit of one call")
    memory_mb: int = Field(512, ge=32, description="memory of one sandbox")
    pids: int = Field(128, ge=8, description="processes and threads of one sandbox")
    cpus: float = Field(1.0, gt=0, description="CPU share of one sandbox")
    output_bytes: int = Field(32_768, ge=64, description="bytes kept of each of stdout and stderr, head and tail")
    scratch_mb: int = Field(64, ge=1, description="size of the writable scratch folder")
    open_files: int = Field(256, ge=16, description="file descriptors of one process")
    network: bool = Field(False, description="whether programs reach the network (docker only)")
    preload: tuple[str, ...] = Field(("numpy", "sympy"), description="modules that every program finds imported")
    size: int = Field(4, ge=1, description="sandboxes of this run at once")
    warm: int = Field(1, ge=0, description="sandboxes kept started ahead of being asked for, at most size")
    max_uses: int = Field(1000, ge=1, description="leases after which a sandbox is replaced, clean or not")

    @model_validator(mode="before")
    @classmethod
    def _of_profile(cls, given: Any) -> Any:
        if isinstance(given, dict):
            return {**PROFILES.get(str(given.get("profile")), {}), **given}
        return given


class Sandbox(Protocol):
    """One place that runs programs. Not safe for concurrent calls: a lease has one user at a time."""

    kind: str  # name of the backend
    isolated: bool
    observer: Callable[[ExecutionResult], None] | None  # told of every result; set by the pool that holds the sandbox

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
        environment: dict[str, str] | None = None,
        fetch: Sequence[str] = (),
        language: str = "python",
        limits: Limits | None = None,
        on_output: OnOutput | None = None,
    ) -> ExecutionResult:
        """Run a program in a fresh process; files that it writes stay until ``reset``.

        Args:
            code: source text; of Python run as ``__main__``.
            timeout_s: wall-clock limit; the specification's when None. The whole process tree dies at the deadline.
            stdin: what the program reads; empty when None.
            files: written into the working folder first; relative paths, folders are made.
            session: run in the process of this name instead, which keeps variables, threads and child processes
                between calls; begun by its first call, ended by ``reset``, a timeout or its own death.
            environment: variables beside those of the sandbox; in a session they stay.
            fetch: files of the working folder to bring back; 64 MiB at most each.
            language: ``python``, or the name of any interpreter on the sandbox's path (``bash``, ``perl``), which is
                given the source as a file ``main`` of the working folder.
            limits: of this call alone.
            on_output: called with output while the program runs.

        Raises:
            ValueError: a path that leads out of the working folder, a time limit that is none, over 64 MiB of files and
                stdin, or what a session cannot have (another language, limits other than of output).
            SandboxFailure: when the sandbox, not the program, failed. The sandbox is then unusable.
        """
        ...

    async def reset(self) -> None:
        """Neither file nor process of earlier calls is left afterwards; ``SandboxFailure`` if that cannot be."""
        ...

    async def alive(self) -> bool:
        """Whether the next ``exec`` can be expected to work, as far as that shows at once."""
        ...

    async def close(self) -> None:
        """Remove everything this sandbox made; may be called twice and after a failure."""
        ...
