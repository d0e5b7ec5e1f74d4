"""The ``local`` backend: the worker as an ordinary process of this machine. NO isolation: for trusted code and trials.

It stops runaway programs (time, address space, file size) but not hostile ones: they run as you, with your files and
your network.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile

from sandboxes.base import SandboxSpec, SandboxUnavailable
from sandboxes.link import ProcessBytes, WorkerLink, WorkerSandbox, settings_of
from sandboxes.owner import SCRATCH_PREFIX, start_ticks
from sandboxes.worker import BOOTSTRAP


class LocalSandbox(WorkerSandbox):
    """One worker process and its scratch folder; both go when this process goes, even by ``kill -9``."""

    kind = "local"
    isolated = False
    python = sys.executable  # what the worker and the programs run in

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.process: asyncio.subprocess.Process | None = None
        self._scratch: str | None = None

    async def start(self) -> None:
        try:
            self._scratch = tempfile.mkdtemp(prefix=f"{SCRATCH_PREFIX}{os.getpid()}-{start_ticks(os.getpid())}-")
            self.process = await asyncio.create_subprocess_exec(
                self.python,
                "-I",
                "-c",
                BOOTSTRAP,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C goes to us, who then close it
            )
        except OSError as error:
            raise SandboxUnavailable(f"cannot start {self.python}: {error}") from error
        self.link = WorkerLink(ProcessBytes(self.process), isolated=False)
        settings = settings_of(
            self.spec.model_copy(update={"preload": ()}),  # quick to start, and rarely the interpreter that has them
            scratch=self._scratch,
            wipe=[self._scratch],
            uid=None,
            remove_scratch=True,
        )
        await self.link.handshake(settings)

    async def alive(self) -> bool:
        is_running = self.process is not None and self.process.returncode is None
        return is_running and self.link is not None and not self.link.broken

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
