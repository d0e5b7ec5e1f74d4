"""Services in processes of their own, for tests that kill them."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

TOKEN = "a-token-of-tests"
ROOT = Path(__file__).parents[2]


def until_there(path: Path) -> str:
    """A program that waits for a file; for sandboxes that see the files of the host."""
    return f"import os, time\nwhile not os.path.exists({str(path)!r}): time.sleep(0.01)\n"


class ServiceProcess:
    """``agent-rl sandbox serve`` on a free port."""

    def __init__(self, *options: str, kind: str = "local") -> None:
        self._options = ("--kind", kind, *options)

    async def __aenter__(self) -> ServiceProcess:
        command = ["-m", "agent_rl", "sandbox", "serve", "--bind", "127.0.0.1:0", "--size", "2"]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            *self._options,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "AGENT_RL_SANDBOX_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdout is not None
        line = (await asyncio.wait_for(self.process.stdout.readline(), 30)).decode()
        assert line.startswith("serving 2 "), line
        self.url = line.split()[-1]
        return self

    async def __aexit__(self, *error: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
