"""``agent-rl sandbox bench``: what a call costs on this machine, by backend."""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

from sandboxes.base import Sandbox, SandboxFailure, SandboxSpec
from sandboxes.choose import make_sandbox

PROGRAMS = {
    "print(1)": "print(1)",
    "numpy": "import numpy as np; print(np.linalg.det(np.eye(3)))",
    "sympy": "import sympy as s; x = s.Symbol('x'); print(s.solve(x**2 - 5 * x + 6, x))",
}


def machine() -> str:
    return f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}"


async def times(call: Callable[[], Awaitable[object]], count: int) -> list[float]:
    """Milliseconds of each of ``count`` calls, one after the other."""
    taken = []
    for _ in range(count):
        started = time.perf_counter()
        await call()
        taken.append(1e3 * (time.perf_counter() - started))
    return taken


async def rate(calls: list[Callable[[], Awaitable[object]]], count: int) -> float:
    """Calls a second when each of ``calls`` is made over and over beside the others, ``count`` times in all."""
    left = iter(range(count))

    async def work(call: Callable[[], Awaitable[object]]) -> None:
        for _ in left:
            await call()

    started = time.perf_counter()
    await asyncio.gather(*(work(call) for call in calls))
    return count / (time.perf_counter() - started)


def row(name: str, program: str, taken: list[float]) -> str:
    p99 = sorted(taken)[min(len(taken) - 1, int(0.99 * len(taken)))]
    return f"| {name} | {program} | {statistics.median(taken):.2f} | {p99:.2f} | {len(taken)} |"


def program(box: Sandbox, code: str, session: str | None = None) -> Callable[[], Awaitable[object]]:
    """A call that raises where the program gave no output: a figure must not be that of a failure."""

    async def call() -> object:
        result = await box.exec(code, session=session)
        if not result.stdout:
            raise SandboxFailure(f"the program said nothing ({result.status}): {result.stderr[-300:]}")
        return result

    return call


async def bench(spec: SandboxSpec, calls: int, say: Callable[[str], None]) -> None:
    """Latency, throughput and start-up of one backend, as Markdown tables. ``spec.kind`` must be resolved."""
    boxes: list[Sandbox] = []
    try:
        cold = []
        for _ in range(spec.size):
            started = time.perf_counter()
            boxes.append(make_sandbox(spec))
            await boxes[-1].start()
            await boxes[-1].exec("print(1)")
            cold.append(time.perf_counter() - started)
        say(f"{spec.kind}, {machine()}\n\n| call | program | p50 ms | p99 ms | calls |\n|---|---|---|---|---|")
        for name, code in PROGRAMS.items():
            if (await boxes[0].exec(code)).status != "ok":
                say(f"| - | {name} | not in this sandbox | | |")
                continue
            say(row("fresh process", name, await times(program(boxes[0], code), calls)))
            await boxes[0].exec(code, session="bench")
            say(row("session", name, await times(program(boxes[0], code, "bench"), calls)))
            await boxes[0].reset()
        for width in sorted({1, spec.size}):
            per_s = await rate([program(box, "print(1)") for box in boxes[:width]], calls)
            say(f"\nfresh processes a second, {width} in flight: {per_s:.0f}")
        say(f"\nfrom nothing to the first result: {statistics.median(cold):.2f} s (median of {len(cold)})")
    finally:
        for box in boxes:
            await box.close()
