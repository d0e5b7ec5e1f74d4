"""Our end of the worker's protocol: one request at a time over a pair of streams, and replies that must match."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import secrets
import struct
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from typing import Any, Protocol, TypeVar

from sandboxes.base import ExecutionResult, Limits, OnOutput, SandboxFailure, SandboxSpec, Status
from sandboxes.worker import packed

GRACE_S = 10.0
"""Beyond a program's own limit: the worker must have answered by then, or it is broken."""

START_S = 60.0

LATE_S = 1.0
"""For an answer that is there already to be read, once the time for it is over."""

MAX_CODE_BYTES = 4 * 1024 * 1024
"""Of a program's source. More is refused as the program's own error: the worker must not run out of memory over it."""

MAX_INPUT_BYTES = 64 * 1024 * 1024
"""Of standard input and files together."""


T = TypeVar("T")


async def within(timeout_s: float, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns; raises ``TimeoutError`` when it has no end after ``timeout_s``.

    Other than ``asyncio.timeout`` it takes what came while the event loop itself stood still, in a training step for
    one: an answer that waits to be read is none that is missing.
    """
    task = asyncio.ensure_future(work)
    try:
        for wait_s in (timeout_s, LATE_S):
            if (await asyncio.wait([task], timeout=wait_s))[0]:
                return task.result()
        raise TimeoutError
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


class Bytes(Protocol):
    """A stream to and from a worker."""

    async def readexactly(self, count: int) -> bytes: ...

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...


class ProcessBytes:
    """A process's stdin and stdout as one stream."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.readexactly = process.stdout.readexactly
        self.write = process.stdin.write
        self.drain = process.stdin.drain


class WorkerLink:
    """Frames over ``stream``. After any failure the link is broken for good."""

    def __init__(self, stream: Bytes, *, isolated: bool) -> None:
        self._stream = stream
        self._isolated = isolated
        self.broken = False

    async def handshake(self, settings: dict[str, Any]) -> None:
        self._stream.write(packed())
        await self._exchange(settings, START_S, None)

    async def execute(self, request: dict[str, Any], on_output: OnOutput | None) -> ExecutionResult:
        """The result of a request made by ``request_of``."""
        refusal = refused(request["code"], isolated=self._isolated)
        if refusal is not None:
            return refusal
        reply = await self._request({**request, "op": "exec"}, request["timeout_s"] + GRACE_S, on_output)
        if not reply["clean"]:
            self.broken = True  # the result is good, the sandbox is not
        return _result(reply, isolated=self._isolated)

    async def reset(self) -> None:
        if not (await self._request({"op": "reset"}, START_S))["clean"]:
            self.broken = True
            raise SandboxFailure("the sandbox could not be cleaned")

    async def _request(
        self, request: dict[str, Any], timeout_s: float, on_output: OnOutput | None = None
    ) -> dict[str, Any]:
        request_id = secrets.token_hex(8)
        return await self._exchange({**request, "id": request_id}, timeout_s, request_id, on_output)

    async def _exchange(
        self, message: dict[str, Any], timeout_s: float, expect_id: str | None, on_output: OnOutput | None = None
    ) -> dict[str, Any]:
        if self.broken:
            raise SandboxFailure("the sandbox is broken")
        self.broken = True  # until the matching reply is here; a cancelled call leaves half a conversation
        try:
            body = json.dumps(message).encode()
            self._stream.write(struct.pack(">I", len(body)) + body)
            reply = await within(timeout_s, self._reply(expect_id, on_output))
        except TimeoutError:
            raise SandboxFailure(f"the sandbox worker did not answer within {timeout_s:.0f} s") from None
        except (asyncio.IncompleteReadError, OSError, ValueError) as error:
            raise SandboxFailure(f"the sandbox worker is gone ({type(error).__name__})") from error
        self.broken = False
        return reply

    async def _reply(self, expect_id: str | None, on_output: OnOutput | None) -> dict[str, Any]:
        await self._stream.drain()
        while True:
            (size,) = struct.unpack(">I", await self._stream.readexactly(4))
            reply = json.loads(await self._stream.readexactly(size))
            if not isinstance(reply, dict) or reply.get("id") != expect_id:
                raise SandboxFailure("the sandbox worker answered another request")
            if "stream" not in reply:
                return reply
            if on_output is not None:
                on_output(reply["stream"], base64.b64decode(reply["data"]))


class WorkerSandbox:
    """What the backends share whose worker is reached through a stream of theirs."""

    kind: str
    isolated: bool
    spec: SandboxSpec
    link: WorkerLink | None = None
    observer: Callable[[ExecutionResult], None] | None = None

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
        assert self.link is not None, "start() first"
        request = request_of(
            self.spec,
            code,
            timeout_s=timeout_s,
            stdin=stdin,
            files=files,
            session=session,
            environment=environment,
            fetch=fetch,
            language=language,
            limits=limits,
            stream=on_output is not None,
        )
        result = await self.link.execute(request, on_output)
        if self.observer is not None:
            self.observer(result)
        return result

    async def reset(self) -> None:
        assert self.link is not None, "start() first"
        await self.link.reset()


def refused(code: str, *, isolated: bool) -> ExecutionResult | None:
    """The result of a source that is not sent anywhere: too long, or no text."""
    message = ""
    if len(code) > MAX_CODE_BYTES:
        message = f"SyntaxError: the program has {len(code)} characters, the limit is {MAX_CODE_BYTES}\n"
    else:
        try:
            code.encode()
        except UnicodeEncodeError as error:
            message = f"UnicodeEncodeError: {error}\n"
    if not message:
        return None
    return ExecutionResult(stdout="", stderr=message, exit_code=1, status="error", isolated=isolated)


def request_of(
    spec: SandboxSpec,
    code: str,
    *,
    timeout_s: float | None,
    stdin: str | None,
    files: dict[str, bytes] | None,
    session: str | None,
    environment: dict[str, str] | None,
    fetch: Sequence[str],
    language: str,
    limits: Limits | None,
    stream: bool,
) -> dict[str, Any]:
    """A call as JSON, for the worker and for the service alike. Raises ``ValueError`` as ``Sandbox.exec`` says."""
    limits = limits or Limits()
    timeout_s = spec.timeout_s if timeout_s is None else timeout_s
    if not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s={timeout_s}: a positive number of seconds")
    for name, value in asdict(limits).items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"limits.{name}={value}: a positive number")
    if len(stdin or "") + sum(len(data) for data in (files or {}).values()) > MAX_INPUT_BYTES:
        raise ValueError(f"stdin and files have more than {MAX_INPUT_BYTES} bytes together")
    for name in (*(files or {}), *fetch):
        if "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
            raise ValueError(f"file name {name!r}: a path inside the working folder, without '..'")
    if not language or "/" in language or "\0" in language:
        raise ValueError(f"language {language!r}: python, or the plain name of an interpreter")
    if session is not None and (language != "python" or limits.cpu_s or limits.memory_mb or limits.open_files):
        raise ValueError("a session is one Python process: no other language, and no limits but of time and output")
    for name, text in (environment or {}).items():
        if not name or "=" in name or "\0" in name + text:
            raise ValueError(f"environment variable {name!r}: a name without '=', and no NUL in its value")
    return {
        "code": code,
        "language": language,
        "timeout_s": timeout_s,
        "cpu_s": limits.cpu_s,
        "memory_mb": limits.memory_mb,
        "open_files": limits.open_files,
        "output_bytes": limits.output_bytes or spec.output_bytes,
        "stdin": (stdin or "").encode("utf-8", "replace").decode(),
        "files": {name: base64.b64encode(data).decode() for name, data in (files or {}).items()},
        "environment": environment or {},
        "fetch": list(fetch),
        "session": session,
        "stream": stream,
    }


WARM_UP = {
    "numpy": "import numpy as n; n.linalg.det(n.eye(3)); str(n.arange(3) / 2); n.random.default_rng(0).normal(size=3)",
    "sympy": "import sympy as s; x = s.Symbol('x'); s.solve(x**2 - 5 * x + 6, x); str(s.integrate(x * s.exp(x), x)); "
    "s.simplify((x**2 - 1) / (x - 1)); s.sympify('1/2 + x'); s.factor(x**2 - 1); s.latex(x / 2)",
}
"""Run once in a worker that preloads the module, so that its first use, which is slow, is behind every program."""


def settings_of(
    spec: SandboxSpec,
    *,
    scratch: str,
    wipe: list[str],
    uid: int | None,
    has_cgroup: bool = False,
    count_processes: bool = False,
    system_v: bool = False,
    remove_scratch: bool = False,
) -> dict[str, Any]:
    """The worker's first frame."""
    return {
        "scratch": scratch,
        "remove_scratch": remove_scratch,
        "wipe": wipe,
        "uid": uid,
        "warm_up": [f"import {name}\n{WARM_UP.get(name, '')}" for name in spec.preload],
        "scratch_mb": spec.scratch_mb,
        "open_files": spec.open_files,
        # A memory cgroup counts what is used; without one only address space can be bounded, process by process.
        "address_space_mb": 0 if has_cgroup else spec.memory_mb,
        "system_v": system_v,  # whether programs can make System V objects, in a namespace of ours alone
        "processes": spec.pids if count_processes else 0,
        "environment": {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": scratch,
            "LANG": "C.UTF-8",
            "TMPDIR": scratch,
            "OMP_NUM_THREADS": str(max(1, round(spec.cpus))),  # else numpy starts a thread for each core of the host
        },
    }


def _result(reply: dict[str, Any], *, isolated: bool) -> ExecutionResult:
    stdout, stdout_cut = _text(reply["stdout"])
    stderr, stderr_cut = _text(reply["stderr"])
    return ExecutionResult(
        stdout=stdout,
        stderr=stderr,
        exit_code=reply["exit_code"] if reply["signal"] is None else 128 + reply["signal"],
        status=_status(reply, stderr),
        stdout_cut_bytes=stdout_cut,
        stderr_cut_bytes=stderr_cut,
        wall_s=reply["wall_s"],
        cpu_s=reply["cpu_s"],
        isolated=isolated,
        session_began=reply["fresh"],
        files={name: base64.b64decode(data) for name, data in reply["files"].items()},
    )


def _status(reply: dict[str, Any], stderr: str) -> Status:
    if reply["timed_out"]:
        return "timeout"
    if reply["exit_code"] == 0:
        return "ok"
    last_line = stderr.rstrip().rpartition("\n")[2]
    if reply["out_of_memory"] or "MemoryError" in last_line.partition(":")[0]:
        return "memory"
    return "error" if reply["signal"] is None else "killed"


def _text(report: dict[str, Any]) -> tuple[str, int]:
    """The kept text and the number of bytes left out; a character that the cut went through is left out whole."""
    head, tail = base64.b64decode(report["head"]), base64.b64decode(report["tail"])
    cut = report["cut"]
    if not cut:
        return (head + tail).decode(errors="replace"), 0
    whole_head, whole_tail = _without_partial_end(head), _without_partial_start(tail)
    cut += len(head) - len(whole_head) + len(tail) - len(whole_tail)
    texts = whole_head.decode(errors="replace"), whole_tail.decode(errors="replace")
    return f"{texts[0]}\n[... {cut} bytes left out ...]\n{texts[1]}", cut


def _without_partial_end(data: bytes) -> bytes:
    """Without the first bytes of a UTF-8 character whose last ones are missing."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return data[:-back] if needed > back else data
    return data


def _without_partial_start(data: bytes) -> bytes:
    """Without the last bytes of a UTF-8 character whose first ones are missing."""
    start = 0
    while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
        start += 1
    return data[start:]
