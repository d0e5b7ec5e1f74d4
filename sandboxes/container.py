"""The ``docker`` backend: the worker as PID 1 of a container without network, with a read-only root and hard limits.

The worker's source travels over the container's attached stdin, so any image with Python >= 3.8 will do. The stream is
attached with StdinOnce and the container with AutoRemove: when our side dies, even by ``kill -9``, the worker sees the
end of its stdin, kills its program, and the engine removes the container.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sandboxes.base import ExecutionResult, SandboxFailure, SandboxSpec, SandboxUnavailable
from sandboxes.link import WorkerLink, settings_of

T = TypeVar("T")

PROGRAM_UID = 65534
"""Programs run as nobody; the worker above them is root with SETUID, SETGID and KILL and no other capability."""

SCRATCH = "/scratch"
PRELOAD = ["numpy", "sympy"]
BOOTSTRAP = """\
import os
def take(n):
    b = b""
    while len(b) < n:
        b += os.read(0, n - len(b))
    return b
exec(compile(take(int.from_bytes(take(4), "big")), "worker.py", "exec"), {"__name__": "__main__"})
"""


def owner_label() -> str:
    """This process in a way that survives a reused pid: host, pid, start time in clock ticks since boot."""
    return f"{socket.gethostname()}:{os.getpid()}:{start_ticks(os.getpid())}"


def start_ticks(pid: int) -> str:
    """Empty when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def connect() -> Any:
    """A client of the Docker engine. Raises ``SandboxUnavailable`` in one line that says what to do."""
    try:
        import docker
        from docker.errors import DockerException
    except ImportError:
        raise SandboxUnavailable("the docker package is missing: pip install 'agent-rl[sandboxes]'") from None
    try:
        client = docker.from_env(timeout=60)
        client.ping()
    except (DockerException, OSError) as error:
        raise SandboxUnavailable(
            f"no Docker engine answers ({error}): start one, or run with --sandbox.kind local (no isolation)"
        ) from None
    return client


def check_image(client: Any, image: str) -> None:
    """Raises ``SandboxUnavailable`` when the image is not there."""
    from docker.errors import ImageNotFound

    try:
        client.images.get(image)
    except ImageNotFound:
        raise SandboxUnavailable(
            f"the Docker image {image!r} is missing: build it by `agent-rl sandbox build --tag {image}`"
        ) from None


class DockerSandbox:
    """One container, one worker."""

    kind = "docker"
    isolated = True

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.container_id: str | None = None
        self._client: Any = None
        self._link: WorkerLink | None = None
        self._stream: _AttachedBytes | None = None

    async def start(self) -> None:
        stream = await _in_thread(self._create)
        self._stream = _AttachedBytes(stream)
        self._link = WorkerLink(self._stream, isolated=True)
        source = Path(__file__).with_name("worker.py").read_bytes()
        self._stream.write(struct.pack(">I", len(source)) + source)
        settings = settings_of(
            self.spec,
            scratch=SCRATCH,
            wipe=[SCRATCH, "/tmp", "/dev/shm"],
            uid=PROGRAM_UID,
            preload=PRELOAD,
            remove_scratch=False,
        )
        try:
            await self._link.handshake(settings)
        except SandboxFailure as error:
            await self.close()
            raise SandboxUnavailable(f"image {self.spec.image!r} cannot run the worker: {error}") from error

    def _create(self) -> socket.socket:
        from docker.errors import DockerException

        spec = self.spec
        self._client = connect()
        check_image(self._client, spec.image)
        api = self._client.api
        try:
            host = api.create_host_config(
                network_mode="none",
                read_only=True,
                tmpfs={SCRATCH: f"size={spec.scratch_mb}m,mode=1777", "/tmp": "size=16m,mode=1777"},
                shm_size="16m",
                mem_limit=f"{spec.memory_mb}m",
                memswap_limit=f"{spec.memory_mb}m",
                pids_limit=spec.pids,
                nano_cpus=int(spec.cpus * 1e9),
                cap_drop=["ALL"],
                cap_add=["SETUID", "SETGID", "KILL"],
                security_opt=["no-new-privileges"],
                # System V and POSIX queues outlive the process that made them: there are none to be had.
                sysctls={
                    "kernel.shmmni": "0",
                    "kernel.msgmni": "0",
                    "kernel.sem": "0 0 0 0",
                    "fs.mqueue.queues_max": "0",
                },
                auto_remove=True,
                log_config={"type": "none"},
            )
            created = api.create_container(
                spec.image,
                command=["python3", "-I", "-c", BOOTSTRAP],
                entrypoint=[],
                user="0",
                stdin_open=True,
                detach=False,
                network_disabled=True,
                working_dir="/",
                labels={"agent-rl.sandbox": "1", "agent-rl.owner": owner_label()},
                host_config=host,
            )
            self.container_id = created["Id"]
            attached = api.attach_socket(self.container_id, {"stdin": 1, "stdout": 1, "stream": 1})
            api.start(self.container_id)
        except (DockerException, OSError) as error:
            self._remove()
            raise SandboxUnavailable(f"the Docker engine refused a sandbox: {error}") from None
        raw: socket.socket = attached._sock
        raw.setblocking(False)
        self._attached = attached  # its finaliser would close the socket under us
        return raw

    async def exec(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        stdin: str | None = None,
        files: dict[str, bytes] | None = None,
        session: str | None = None,
    ) -> ExecutionResult:
        assert self._link is not None, "start() first"
        limit = self.spec.timeout_s if timeout_s is None else timeout_s
        return await self._link.execute(code, timeout_s=limit, stdin=stdin, files=files, session=session)

    async def reset(self) -> None:
        assert self._link is not None, "start() first"
        await self._link.reset()

    async def alive(self) -> bool:
        return self._link is not None and not self._link.broken and self._stream is not None and self._stream.is_open()

    async def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if self.container_id is not None:
            await _in_thread(self._remove)

    def _remove(self) -> None:
        from docker.errors import APIError

        container_id, self.container_id = self.container_id, None
        if container_id is not None:
            try:
                self._client.api.remove_container(container_id, force=True)
            except APIError as error:
                if error.status_code not in (404, 409):  # gone, or already going
                    raise SandboxFailure(f"container {container_id[:12]} cannot be removed: {error}") from error
        self._client.close()


async def _in_thread(function: Callable[[], T]) -> T:
    """The result of a blocking call that is seen through even when we are cancelled: it may have made a container."""
    task = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


class _AttachedBytes:
    """An attached container stream: plain bytes in, 8-byte-headed frames of stdout out."""

    def __init__(self, raw: socket.socket) -> None:
        self._raw = raw
        self._pending = b""
        self._received = bytearray()

    def write(self, data: bytes) -> None:
        self._pending += data

    async def drain(self) -> None:
        data, self._pending = self._pending, b""
        await asyncio.get_running_loop().sock_sendall(self._raw, data)

    async def readexactly(self, count: int) -> bytes:
        while len(self._received) < count:
            _, size = struct.unpack(">BxxxI", await self._raw_exactly(8))
            self._received += await self._raw_exactly(size)
        data = bytes(self._received[:count])
        del self._received[:count]
        return data

    async def _raw_exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = await asyncio.get_running_loop().sock_recv(self._raw, count - len(data))
            if not part:
                raise asyncio.IncompleteReadError(data, count)
            data += part
        return data

    def is_open(self) -> bool:
        """False when the container is gone: between two calls nothing else arrives."""
        try:
            self._raw.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        self._raw.close()
