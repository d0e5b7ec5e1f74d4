"""Sandbox latency and throughput beside ``docker exec`` and the bare fork: python tests/benchmarks/bench_sandbox.py

Prints a Markdown table. All rows come from one run on one machine, alternating, so that a busy neighbour hits all.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

from sandboxes import Sandbox, SandboxPool, SandboxSpec, make_sandbox
from sandboxes.container import DockerSandbox, connect

PROGRAMS = {
    "print(1)": "print(1)",
    "numpy": "import numpy as np; print(np.linalg.det(np.eye(3)))",
    "sympy": "import sympy as s; x = s.Symbol('x'); print(s.solve(x**2 - 5 * x + 6, x))",
}


def fork_floor() -> None:
    """The least that a fresh process can cost: fork, one byte through a pipe, wait."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write_fd, b"1")
        os._exit(0)
    os.read(read_fd, 1)
    os.waitpid(pid, 0)
    os.close(read_fd)
    os.close(write_fd)


async def times(call: Callable[[], Awaitable[object]], count: int) -> list[float]:
    """Milliseconds of each of ``count`` calls, one after the other."""
    taken = []
    for _ in range(count):
        started = time.perf_counter()
        await call()
        taken.append(1e3 * (time.perf_counter() - started))
    return taken


def row(name: str, program: str, taken: list[float]) -> None:
    p99 = sorted(taken)[min(len(taken) - 1, int(0.99 * len(taken)))]
    print(f"| {name} | {program} | {statistics.median(taken):.2f} | {p99:.2f} | {len(taken)} |", flush=True)


def must(result_stdout: str) -> None:
    assert result_stdout, "a call gave no output"


async def latency(box: Sandbox, docker_id: str, rounds: int) -> None:
    client = connect()

    async def engine(code: str) -> None:
        must((await asyncio.to_thread(client.containers.get(docker_id).exec_run, ["python3", "-c", code])).output)

    async def fresh(code: str) -> None:
        must((await box.exec(code)).stdout)

    async def session(code: str) -> None:
        must((await box.exec(code, session="bench")).stdout)

    async def floor(code: str) -> None:
        fork_floor()

    print("| way | program | p50 ms | p99 ms | calls |\n|---|---|---|---|---|")
    for name, code in PROGRAMS.items():
        taken: dict[str, list[float]] = {"docker exec": [], "fresh process": [], "session": []}
        await session(code)
        for _ in range(rounds):
            await box.exec("pass")  # ends nothing of the session; keeps the worker warm after the engine's call
            taken["docker exec"] += await times(lambda code=code: engine(code), 2)  # type: ignore[misc]
            taken["fresh process"] += await times(lambda code=code: fresh(code), 20)  # type: ignore[misc]
            taken["session"] += await times(lambda code=code: session(code), 40)  # type: ignore[misc]
        for way, values in taken.items():
            row(way, name, values)
    row("bare fork (floor)", "-", await times(lambda: floor(""), 200))
    client.close()


async def throughput(docker_id: str) -> None:
    client = connect()
    print("\n| in flight | docker exec /s | fresh process /s | with lease and reset /s |\n|---|---|---|---|")
    for width in (1, 4, 16):

        async def rate(call: Callable[[], Awaitable[object]], count: int, width: int = width) -> float:
            left = iter(range(count))

            async def work() -> None:
                for _ in left:
                    await call()

            started = time.perf_counter()
            await asyncio.gather(*(work() for _ in range(width)))
            return count / (time.perf_counter() - started)

        async def engine() -> None:
            must(
                (
                    await asyncio.to_thread(client.containers.get(docker_id).exec_run, ["python3", "-c", "print(1)"])
                ).output
            )

        async with SandboxPool(SandboxSpec(kind="docker", size=width)) as pool:

            async def leased(pool: SandboxPool = pool) -> None:
                async with pool.lease() as box:
                    must((await box.exec("print(1)")).stdout)

            await rate(leased, width)
            leases = await rate(leased, 100)
        boxes = [make_sandbox(SandboxSpec(kind="docker")) for _ in range(width)]
        for box in boxes:
            await box.start()
        free = list(boxes)

        async def fresh(free: list[Sandbox] = free) -> None:
            box = free.pop()
            must((await box.exec("print(1)")).stdout)
            free.append(box)

        fresh_rate = await rate(fresh, 200)
        engine_rate = await rate(engine, max(10, 2 * width))
        for box in boxes:
            await box.close()
        print(f"| {width} | {engine_rate:.0f} | {fresh_rate:.0f} | {leases:.0f} |", flush=True)
    client.close()


async def cold() -> None:
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        box = make_sandbox(SandboxSpec(kind="docker"))
        await box.start()
        await box.exec("print(1)")
        taken.append(time.perf_counter() - started)
        await box.close()
    print(f"\ncold start to first result: {statistics.median(taken):.2f} s (median of {len(taken)})")


def start_plain() -> str:
    """A container for ``docker exec``: same image, no worker; it ends by itself after ten minutes."""
    options = ["--detach", "--rm", "--network", "none", "--stop-timeout", "0"]
    command = ["docker", "run", *options, SandboxSpec().image, "sleep", "600"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


async def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    name = await asyncio.to_thread(start_plain)
    try:
        box = DockerSandbox(SandboxSpec(kind="docker"))
        await box.start()
        await latency(box, name, rounds)
        await box.close()
        await throughput(name)
        await cold()
    finally:
        await asyncio.to_thread(subprocess.run, ["docker", "rm", "-f", name], capture_output=True)


if __name__ == "__main__":
    asyncio.run(main())
