"""The ``docker`` backend: the worker as PID 1 of a container without network, with a read-only root and hard limits.

The worker's source travels over the container's attached stdin, so any image with Python >= 3.8 will do. The stream is
attached with StdinOnce and the container with AutoRemove: when our side dies, even by ``kill -9``, the worker sees the
end of its stdin, kills its program, and the engine removes the container.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from sandboxes.base import SandboxFailure, SandboxSpec, SandboxUnavailable
from sandboxes.link import WorkerLink, WorkerSandbox, settings_of
from sandboxes.owner import owner_label
from sandboxes.worker import BOOTSTRAP

T = TypeVar("T")

PROGRAM_UID = 65534
"""Programs run as nobody; the worker above them is root with SETUID, SETGID and KILL and no other capability."""

SCRATCH = "/scratch"

RUN_ID = os.environ.get("AGENT_RL_RUN") or secrets.token_hex(4)
"""Stands on all that this process makes on an engine."""

GVISOR_PIDS = 2048
"""gVisor counts the threads of its own kernel: with fewer it dies."""

GVISOR_MB = 512  # for its kernel, beside what programs may use

_network_lock = threading.Lock()


def labels() -> dict[str, str]:
    """Of everything that this process makes on an engine."""
    return {"agent-rl.sandbox": "1", "agent-rl.owner": owner_label(), "agent-rl.run": RUN_ID}


def open_network(client: Any) -> str:
    """Name of this run's network, made when first wanted: out to the world, but not from one sandbox to another."""
    from docker.errors import APIError

    name = f"agent-rl-{RUN_ID}"
    with _network_lock:
        if not client.api.networks(names=[name]):
            try:
                options = {"com.docker.network.bridge.enable_icc": "false"}
                client.api.create_network(name, driver="bridge", options=options, labels=labels(), check_duplicate=True)
                atexit.register(_remove_network, name)
            except APIError as error:
                raise SandboxUnavailable(f"the Docker engine made no network: {error}") from error
    return name


def _remove_network(name: str) -> None:
    from docker.errors import DockerException

    try:
        client = connect()
        client.api.remove_network(name)
        client.close()
    except (DockerException, SandboxUnavailable, OSError):
        pass  # the next run's start removes it


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


@contextmanager
def engine() -> Iterator[Any]:
    """A client of the Docker engine, closed afterwards; raises ``SandboxUnavailable`` for what the engine fails at."""
    client = connect()
    from docker.errors import DockerException

    try:
        yield client
    except (DockerException, OSError) as error:  # an OSError: it did not answer in time
        raise SandboxUnavailable(f"the Docker engine failed: {error}") from error
    finally:
        client.close()


def check_image(client: Any, image: str) -> None:
    """Raises ``SandboxUnavailable`` when the image is not there."""
    from docker.errors import ImageNotFound

    try:
        client.images.get(image)
    except ImageNotFound:
        raise SandboxUnavailable(
            f"the Docker image {image!r} is missing: build it by `agent-rl sandbox build --tag {image}`"
        ) from None


def check_runtime(client: Any, runtime: str | None) -> None:
    """Raises ``SandboxUnavailable`` when the engine does not know the runtime."""
    if runtime is not None:
        known = client.info().get("Runtimes", {})
        if runtime not in known:
            raise SandboxUnavailable(
                f"the Docker engine has no runtime {runtime!r} (it has {', '.join(sorted(known))}): install it and "
                "name it in /etc/docker/daemon.json"
            )


class DockerSandbox(WorkerSandbox):
    """One container, one worker."""

    kind = "docker"
    isolated = True

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.container_id: str | None = None
        self._client: Any = None
        self._attached: Any = None  # kept: its finaliser would close the socket under us
        self._stream: _AttachedBytes | None = None

    async def start(self) -> None:
        stream = await _in_thread(self._create)
        self._stream = _AttachedBytes(stream)
        self.link = WorkerLink(self._stream, isolated=True)
        settings = settings_of(
            self.spec,
            scratch=SCRATCH,
            wipe=[SCRATCH, "/tmp", "/dev/shm"],
            uid=PROGRAM_UID,
            # Another runtime may have a kernel of its own, which dies as a whole where a cgroup is full (gVisor), and
            # knows no sysctl that takes System V objects away.
            has_cgroup=self.spec.runtime is None,
            system_v=self.spec.runtime is not None,
        )
        try:
            await self.link.handshake(settings)
        except SandboxFailure as error:
            await self.close()
            raise SandboxUnavailable(f"image {self.spec.image!r} cannot run the worker: {error}") from error

    def _create(self) -> socket.socket:
        from docker.errors import DockerException

        spec = self.spec
        self._client = connect()
        api = self._client.api
        memory_mb = spec.memory_mb + (GVISOR_MB if spec.runtime == "runsc" else 0)
        try:
            check_image(self._client, spec.image)
            check_runtime(self._client, spec.runtime)
            host = api.create_host_config(
                network_mode=open_network(self._client) if spec.network else "none",
                runtime=spec.runtime,
                read_only=True,
                tmpfs={SCRATCH: f"size={spec.scratch_mb}m,mode=1777", "/tmp": "size=16m,mode=1777"},
                shm_size="16m",
                mem_limit=f"{memory_mb}m",
                memswap_limit=f"{memory_mb}m",
                pids_limit=max(spec.pids, GVISOR_PIDS) if spec.runtime == "runsc" else spec.pids,
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
                network_disabled=not spec.network,
                working_dir="/",
                labels=labels(),
                host_config=host,
            )
            self.container_id = created["Id"]
            attached = self._attached = api.attach_socket(self.container_id, {"stdin": 1, "stdout": 1, "stream": 1})
            api.start(self.container_id)
        except SandboxUnavailable:
            self._remove()
            raise
        except (DockerException, OSError) as error:
            self._remove()
            raise SandboxUnavailable(f"the Docker engine refused a sandbox: {error}") from None
        self._client.close()  # else it keeps a connection for each kind of request: five beside the attached one
        raw: socket.socket = attached._sock
        raw.setblocking(False)
        return raw

    async def alive(self) -> bool:
        return self.link is not None and not self.link.broken and self._stream is not None and self._stream.is_open()

    async def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        attached, self._attached = self._attached, None
        if attached is not None:  # also of a start that was cancelled: else it waits for the garbage collector
            attached._response.close()
            attached.close()
        if self.container_id is not None:
            await _in_thread(self._remove)

    def _remove(self) -> None:
        """Raises ``SandboxFailure`` when the engine does not say that it is done; it goes with its worker then."""
        from docker.errors import APIError, DockerException

        container_id, self.container_id = self.container_id, None
        try:
            if container_id is not None:
                self._client.api.remove_container(container_id, force=True)
        except (DockerException, OSError) as error:  # an OSError: the engine did not answer in time
            if not isinstance(error, APIError) or error.status_code not in (404, 409):  # gone, or already going
                raise SandboxFailure(f"container {str(container_id)[:12]} cannot be removed: {error}") from error
        finally:
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
