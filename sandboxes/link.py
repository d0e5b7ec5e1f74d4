"""Our end of the worker's protocol: one request at a time over a pair of streams, and replies that must match."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import secrets
import struct
from typing import Any, Protocol

from sandboxes.base import ExecutionResult, SandboxFailure, SandboxSpec, Status

GRACE_S = 10.0
"""Beyond a program's own limit: the worker must have answered by then, or it is broken."""

START_S = 60.0

MAX_CODE_BYTES = 4 * 1024 * 1024
"""Of a program's source. More is refused as the program's own error: the worker must not run out of memory over it."""

MAX_INPUT_BYTES = 64 * 1024 * 1024
"""Of standard input and files together."""


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
        self,
        code: str,
        *,
        timeout_s: float,
        stdin: str | None,
        files: dict[str, bytes] | None,
        session: str | None,
    ) -> ExecutionResult:
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s={timeout_s}: a positive number of seconds")
        if len(stdin or "") + sum(len(data) for data in (files or {}).values()) > MAX_INPUT_BYTES:
            raise ValueError(f"stdin and files have more than {MAX_INPUT_BYTES} bytes together")
        if len(code) > MAX_CODE_BYTES:
            message = f"SyntaxError: the program has {len(code)} characters, the limit is {MAX_CODE_BYTES}\n"
            return ExecutionResult(stdout="", stderr=message, exit_code=1, status="error", isolated=self._isolated)
        encoded = {}
        for name, data in (files or {}).items():
            if not name or "/" in name or "\0" in name or name in (".", ".."):
                raise ValueError(f"file name {name!r}: plain names only, no folders")
            encoded[name] = base64.b64encode(data).decode()
        request = {
            "op": "exec",
            "code": code,
            "timeout_s": timeout_s,
            "stdin": stdin or "",
            "files": encoded,
            "session": session,
        }
        reply = await self._request(request, timeout_s + GRACE_S)
        if not reply["clean"]:
            self.broken = True  # the result is good, the sandbox is not
        return _result(reply, isolated=self._isolated)

    async def reset(self) -> None:
        if not (await self._request({"op": "reset"}, START_S))["clean"]:
            self.broken = True
            raise SandboxFailure("the sandbox could not be cleaned")

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
    spec: SandboxSpec, *, scratch: str, wipe: list[str], uid: int | None, preload: list[str], remove_scratch: bool
) -> dict[str, Any]:
    """The worker's first frame."""
    return {
        "scratch": scratch,
        "remove_scratch": remove_scratch,
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
        isolated=isolated,
        session_began=reply.get("fresh", False),
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
