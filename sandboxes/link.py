"""Our end of the worker's protocol: one request at a time over a pair of streams, and replies that must match."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import struct
from typing import Any, Protocol

from sandboxes.base import ExecutionResult, SandboxFailure, SandboxSpec, Status

GRACE_S = 10.0
"""Beyond a program's own limit: the worker must have answered by then, or it is broken."""

START_S = 60.0


class Bytes(Protocol):
    """A stream to and from a worker."""

    async def readexactly(self, count: int) -> bytes: ...

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...


class WorkerLink:
    """Frames over ``stream``. After any failure the link is broken for good."""

    def __init__(self, stream: Bytes, *, isolated: bool) -> None:
        self._stream = stream
        self._isolated = isolated
        self.broken = False

    async def handshake(self, settings: dict[str, Any]) -> None:
        await self._exchange(settings, START_S, expect_id=None)

    async def execute(
        self, code: str, *, timeout_s: float, stdin: str | None, files: dict[str, bytes] | None
    ) -> ExecutionResult:
        encoded = {}
        for name, data in (files or {}).items():
            if not name or "/" in name or name in (".", ".."):
                raise ValueError(f"file name {name!r}: plain names only, no folders")
            encoded[name] = base64.b64encode(data).decode()
        request = {"op": "exec", "code": code, "timeout_s": timeout_s, "stdin": stdin or "", "files": encoded}
        reply = await self._request(request, timeout_s + GRACE_S)
        if not reply["clean"]:
            self.broken = True  # the result is good, the sandbox is not
        return _result(reply, isolated=self._isolated)

    async def reset(self) -> None:
        if not (await self._request({"op": "reset"}, START_S))["clean"]:
            self.broken = True
            raise SandboxFailure("the sandbox could not be cleaned")

    async def ping(self) -> bool:
        try:
            await self._request({"op": "ping"}, GRACE_S)
        except SandboxFailure:
            return False
        return True

    async def _request(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        request_id = secrets.token_hex(8)
        return await self._exchange({**request, "id": request_id}, timeout_s, expect_id=request_id)

    async def _exchange(self, message: dict[str, Any], timeout_s: float, expect_id: str | None) -> dict[str, Any]:
        if self.broken:
            raise SandboxFailure("the sandbox is broken")
        self.broken = True  # until the matching reply is here; a cancelled call leaves half a conversation
        try:
            body = json.dumps(message).encode()
            self._stream.write(struct.pack(">I", len(body)) + body)
            async with asyncio.timeout(timeout_s):
                await self._stream.drain()
                (size,) = struct.unpack(">I", await self._stream.readexactly(4))
                reply = json.loads(await self._stream.readexactly(size))
        except TimeoutError:
            raise SandboxFailure(f"the sandbox worker did not answer within {timeout_s:.0f} s") from None
        except (asyncio.IncompleteReadError, OSError, ValueError) as error:
            raise SandboxFailure(f"the sandbox worker is gone ({type(error).__name__})") from error
        if not isinstance(reply, dict) or reply.get("id") != expect_id:
            raise SandboxFailure("the sandbox worker answered another request")
        self.broken = False
        return reply


def settings_of(
    spec: SandboxSpec, *, scratch: str, wipe: list[str], uid: int | None, preload: list[str]
) -> dict[str, Any]:
    """The worker's first frame."""
    return {
        "scratch": scratch,
        "wipe": wipe,
        "uid": uid,
        "preload": preload,
        "output_bytes": spec.output_bytes,
        "scratch_mb": spec.scratch_mb,
        # In a container the memory cgroup counts what is used; outside only address space can be bounded.
        "address_space_mb": 0 if uid is not None else spec.memory_mb,
        "environment": {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": scratch, "LANG": "C.UTF-8", "TMPDIR": scratch},
    }


def _result(reply: dict[str, Any], *, isolated: bool) -> ExecutionResult:
    stdout, stderr = _text(reply["stdout"]), _text(reply["stderr"])
    return ExecutionResult(
        stdout=stdout,
        stderr=stderr,
        exit_code=reply["exit_code"],
        status=_status(reply, stderr, isolated=isolated),
        stdout_cut_bytes=reply["stdout"]["cut"],
        stderr_cut_bytes=reply["stderr"]["cut"],
        wall_s=reply["wall_s"],
        isolated=isolated,
    )


def _status(reply: dict[str, Any], stderr: str, *, isolated: bool) -> Status:
    if reply["timed_out"]:
        return "timeout"
    if reply["signal"] is not None:
        # In a container nothing but the kernel's out-of-memory killer sends SIGKILL to a program before its deadline.
        return "memory" if isolated and reply["signal"] == 9 else "killed"
    if reply["exit_code"] == 0:
        return "ok"
    return "memory" if stderr.rstrip().endswith("MemoryError") else "error"


def _text(report: dict[str, Any]) -> str:
    head, tail = base64.b64decode(report["head"]), base64.b64decode(report["tail"])
    if not report["cut"]:
        return (head + tail).decode(errors="replace")
    return f"{head.decode(errors='replace')}\n[... {report['cut']} bytes left out ...]\n{tail.decode(errors='replace')}"
