"""The ``local`` backend: the worker as an ordinary process of this machine. NO isolation: for trusted code and trials.

It stops runaway programs (time, address space, file size) but not hostile ones: they run as you, with your files and
your network.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

from sandboxes.base import ExecutionResult, SandboxSpec, SandboxUnavailable
from sandboxes.link import WorkerLink, settings_of

WORKER = Path(__file__).with_name("worker.py")


class LocalSandbox:
    """One worker process and its scratch folder; both go when this process goes, even by ``kill -9``."""

    kind = "local"
    isolated = False

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.process: asyncio.subprocess.Process | None = None
        self._link: WorkerLink | None = None
        self._scratch: str | None = None

    async def start(self) -> None:
        self._scratch = tempfile.mkdtemp(prefix="agent-rl-sandbox-")
        try:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                str(WORKER),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C goes to us, who then close it
            )
        except OSError as error:
            raise SandboxUnavailable(f"cannot start {sys.executable}: {error}") from error
        self._link = WorkerLink(_ProcessBytes(self.process), isolated=False)
        settings = settings_of(
            self.spec, scratch=self._scratch, wipe=[self._scratch], uid=None, preload=[], remove_scratch=True
        )
        await self._link.handshake(settings)

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
        is_running = self.process is not None and self.process.returncode is None
        return is_running and self._link is not None and not self._link.broken

    async def close(self) -> None:
        process, self.process = self.process, None
        if process is not None and process.returncode is None:
            process.stdin.close()  # type: ignore[union-attr]  # the worker kills its programs and exits
            try:
                async with asyncio.timeout(5):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None


class _ProcessBytes:
    """A process's stdin and stdout as one stream."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.readexactly = process.stdout.readexactly
        self.write = process.stdin.write
        self.drain = process.stdin.drain
