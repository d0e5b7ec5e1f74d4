"""Thousands of programs with sandboxes killed under them: python tests/benchmarks/soak_sandbox.py --executions 10000

Prints one line of JSON and exits 1 when an answer was wrong or lost, a failure was not one of the injected kills, or
anything was left: containers, processes, files, descriptors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sandboxes import Sandbox, SandboxFailure, SandboxPool, SandboxSpec
from sandboxes.hostile import ATTACKS
from sandboxes.owner import SCRATCH_PREFIX
from sandboxes.worker.system import descendants

QUICK_ATTACKS = (
    "a daemon by double fork", "stopped processes", "patched builtins and modules", "os._exit", "segfault",
    "descriptor exhaustion", "NUL and invalid UTF-8", "closed descriptors", "a syntax error", "one huge line",
    "a daemon thread left running", "folders that cannot be entered", "a crowd in sessions of its own",
)  # fmt: skip


class Soak:
    """One run: what was asked, what came back, and who is leased now."""

    def __init__(self, executions: int, kills: int, seed: int) -> None:
        self.executions = executions
        self.kill_at = sorted(random.Random(seed).sample(range(executions), kills))
        self.random = random.Random(seed + 1)
        self.leased: set[Sandbox] = set()
        self.answered: set[int] = set()
        self.wrong: list[str] = []
        self.failures = 0
        self.killed = 0

    async def one(self, box: Sandbox, number: int, attacked: set[str]) -> None:
        """Run the program of this number and judge what it said.

        No attack comes twice in a lease: what it did to the files is there until the lease ends, and meets itself.
        """
        kind = self.random.random()
        left = [name for name in QUICK_ATTACKS if name not in attacked]
        if kind < 0.15 and left:
            name = self.random.choice(left)
            attacked.add(name)
            result = await box.exec(ATTACKS[name].code)
            if result.status not in ATTACKS[name].ends:
                self.wrong.append(f"{number}: {name}: {result}")
        else:
            session = "s" if kind < 0.3 else None
            code = f"left = open('mine', 'a').write('x')\nprint({number} * 7919 % 10007)"
            result = await box.exec(code, session=session)
            if result.stdout != f"{number * 7919 % 10007}\n":
                self.wrong.append(f"{number}: {result}")
        self.answered.add(number)

    async def work(self, pool: SandboxPool, numbers: list[int]) -> None:
        while numbers:
            batch = [numbers.pop() for _ in range(min(len(numbers), self.random.randint(1, 4)))]
            while batch:
                try:
                    async with pool.lease() as box:
                        if (await box.exec("import os; print(os.listdir('.'))")).stdout != "[]\n":
                            self.wrong.append("a lease began with files of another")
                        self.leased.add(box)
                        attacked: set[str] = set()
                        try:
                            while batch:
                                await self.one(box, batch[-1], attacked)
                                batch.pop()
                        finally:
                            self.leased.discard(box)
                except SandboxFailure:
                    self.failures += 1

    async def kill(self) -> None:
        for at in self.kill_at:
            while len(self.answered) < at or not self.leased:  # noqa: ASYNC110  # counters, not events
                await asyncio.sleep(0.002)
            box: Any = self.random.choice(list(self.leased))
            if box.kind == "docker":
                await asyncio.to_thread(_kill_container, box)
            else:
                box.process.kill()
            self.killed += 1

    async def progress(self) -> None:
        while True:
            await asyncio.sleep(10)
            print(f"{len(self.answered)}/{self.executions}, {self.killed} killed", file=sys.stderr, flush=True)


def _kill_container(box: Any) -> None:
    from docker.errors import APIError, NullResource

    from sandboxes.container import connect

    client = connect()
    try:
        client.api.kill(box.container_id)
    except (APIError, NullResource):
        pass  # given back and replaced meanwhile
    finally:
        client.close()


def left_over(kind: str) -> dict[str, int]:
    """What this process has open, runs, and left on disk or on the engine."""
    containers = 0
    if kind == "docker":
        from sandboxes.container import RUN_ID, connect

        client = connect()
        containers = len(client.api.containers(all=True, filters={"label": f"agent-rl.run={RUN_ID}"}))
        client.close()
    return {
        "containers": containers,
        "processes": len(descendants(os.getpid())),
        "files": len(list(Path(tempfile.gettempdir()).glob(f"{SCRATCH_PREFIX}{os.getpid()}-*"))),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--executions", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--kind", choices=("docker", "bwrap", "local"), default="docker")
    parser.add_argument("--size", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    soak = Soak(given.executions, given.kills, given.seed)
    left_over(given.kind)  # what the client library opens once
    before = left_over(given.kind)
    started = time.monotonic()
    spec = SandboxSpec(kind=given.kind, size=given.size, warm=given.size, max_uses=200)
    async with SandboxPool(spec) as pool:
        numbers = list(range(given.executions))
        reporting = asyncio.create_task(soak.progress())
        killing = asyncio.create_task(soak.kill())
        await asyncio.gather(*(soak.work(pool, numbers) for _ in range(2 * given.size)))
        killing.cancel()
        reporting.cancel()
        await asyncio.wait([killing, reporting])
    seconds = time.monotonic() - started
    after = left_over(given.kind)
    deadline = time.monotonic() + 10
    while after["containers"] > before["containers"] and time.monotonic() < deadline:
        await asyncio.sleep(0.2)  # the engine is still removing what was killed
        after = left_over(given.kind)
    counters = pool.counters
    report = {
        "executions": given.executions,
        "answered": len(soak.answered),
        "wrong": len(soak.wrong),
        "kills": soak.killed,
        "failures": soak.failures,
        "left": {name: after[name] - before[name] for name in after},
        "leaked": counters.leaked,
        "in_use": counters.leased + counters.waiting,
        "started": counters.started,
        "discarded": counters.discarded,
        "retired": counters.retired,
        "seconds": round(seconds, 1),
    }
    print(json.dumps(report))
    for line in soak.wrong[:5]:
        print(line[:500], file=sys.stderr)
    is_good = report["answered"] == given.executions and not soak.wrong and soak.failures <= soak.killed
    is_empty = not any(report["left"].values()) and not counters.leaked and not report["in_use"]
    return 0 if is_good and is_empty else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
