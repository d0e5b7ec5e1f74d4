"""Sandboxes beside ``docker exec`` and the bare fork: python tests/benchmarks/bench_sandbox.py [PART ...]

Prints Markdown tables; the parts are latency, throughput, cost and start, all when none is named. All figures come from
one run on one machine, the ways taking turns, so that a busy neighbour hits all of them. Needs a Docker engine and the
sandbox image.
"""

from __future__ import annotations

import asyncio
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from sandboxes import Sandbox, SandboxPool, SandboxSpec, make_sandbox
from sandboxes.bench import PROGRAMS, machine, program, rate, row, times
from sandboxes.container import DockerSandbox, connect
from sandboxes.wire import TOKEN_VARIABLE

WIDTHS = (1, 4, 16, 64)
FLOOR = """
import os, sys, time
for name in sys.argv[1:]: __import__(name)
for _ in range(300):
    began = time.perf_counter()
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write_fd, b"1")
        os._exit(0)
    os.read(read_fd, 1)
    os.waitpid(pid, 0)
    os.close(read_fd); os.close(write_fd)
    print(1e3 * (time.perf_counter() - began))
"""
"""The least that a fresh process can cost: fork, one byte through a pipe, wait."""

BARE = SandboxSpec(kind="docker", preload=(), warm=0)
LOADED = SandboxSpec(kind="docker", warm=0)

Call = Callable[[], Awaitable[object]]


def docker_exec(client: Any, container: Any, code: str) -> Call:
    async def call() -> object:
        done = await asyncio.to_thread(container.exec_run, ["python3", "-c", code])
        assert done.output, "a call gave no output"
        return done

    return call


async def latency(boxes: dict[str, Sandbox], engine: Callable[[str], Call], rounds: int) -> None:
    print("| way | program | p50 ms | p99 ms | calls |\n|---|---|---|---|---|")
    medians: dict[tuple[str, str], float] = {}
    for name, code in PROGRAMS.items():
        ways: dict[str, tuple[Call, int]] = {"docker exec": (engine(code), 4)}
        for way, box in boxes.items():
            ways[way] = (program(box, code), 20)
        ways["session"] = (program(boxes["fresh process"], code, "bench"), 40)
        ways["session over HTTP"] = (program(boxes["fresh process over HTTP"], code, "bench"), 40)
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for call, _ in ways.values():
            await call()
        for _ in range(rounds):
            for way, (call, count) in ways.items():
                await call()  # the first one after another way has run pays for cold caches
                taken[way] += await times(call, count)
        for way, values in taken.items():
            medians[way, name] = statistics.median(values)
            print(row(way, name, values), flush=True)
        for box in boxes.values():
            await box.reset()
    for loaded in ((), ("numpy", "sympy")):
        command = ["docker", "run", "--rm", "--network", "none", LOADED.image, "python3", "-c", FLOOR, *loaded]
        floor = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
        values = [float(line) for line in floor.stdout.split()]
        print(row("fork floor", "numpy, sympy loaded" if loaded else "bare", values), flush=True)
    print("\n| times below docker exec | print(1) | numpy | sympy |\n|---|---|---|---|")
    for way in ("bare fresh process", "fresh process", "session", "fresh process over HTTP", "session over HTTP"):
        cells = (f"{medians['docker exec', name] / medians[way, name]:.0f}" for name in PROGRAMS)
        print(f"| {way} | {' | '.join(cells)} |")


async def started(spec: SandboxSpec, count: int) -> list[Sandbox]:
    """A few at a time: all at once would only slow each other down."""
    boxes = [make_sandbox(spec) for _ in range(count)]
    for begin in range(0, count, 4):
        await asyncio.gather(*(box.start() for box in boxes[begin : begin + 4]))
    return boxes


async def throughput(container: Any, client: Any, service: str) -> None:
    print(
        "\n| in flight | docker exec /s | bare fresh /s | fresh /s | session /s | leased, run, reset /s |"
        " over HTTP /s | bare to docker exec |\n|---|---|---|---|---|---|---|---|"
    )
    for width in WIDTHS:
        rates: list[float] = []
        engine = [docker_exec(client, container, "print(1)")] * width
        engine_rates = [await rate(engine, max(20, width))]
        for spec in (BARE, LOADED):
            boxes = await started(spec, width)
            await rate([program(box, "print(1)") for box in boxes], 2 * width)
            rates.append(await rate([program(box, "print(1)") for box in boxes], 400))
            if spec is LOADED:
                await rate([program(box, "print(1)", "s") for box in boxes], 2 * width)
                rates.append(await rate([program(box, "print(1)", "s") for box in boxes], 4000))
            await asyncio.gather(*(box.close() for box in boxes))
            engine_rates.append(await rate(engine, max(20, width)))
        remote = SandboxSpec(kind="remote", hosts=(service,), size=min(width, 16))
        for pool_spec in (LOADED.model_copy(update={"size": width, "warm": 0}), remote):
            async with SandboxPool(pool_spec) as pool:

                async def leased(pool: SandboxPool = pool) -> object:
                    async with pool.lease() as box:
                        return await program(box, "print(1)")()

                await rate([leased] * width, 2 * width)
                rates.append(await rate([leased] * width, 200))
        engine_rate = statistics.median(engine_rates)
        cells = (f"{one:.0f}" for one in (engine_rate, *rates))
        print(f"| {width} | {' | '.join(cells)} | {rates[0] / engine_rate:.1f} |", flush=True)


def engine_s(*, with_children: bool) -> float:
    """Processor seconds of the engine's processes so far, and of the children that they have waited for."""
    ticks = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            except OSError:
                continue
            if name.startswith(("dockerd", "containerd")):
                fields = rest.split()
                ticks += sum(map(int, fields[11 : 15 if with_children else 13]))
    return ticks / os.sysconf("SC_CLK_TCK")


async def cost(container: Any) -> None:
    """Processor time of a call wherever it is spent: tells more than a clock where neighbours are busy."""
    print("\n| way | program | processor ms a call | docker exec to this |\n|---|---|---|---|")
    client = connect()
    for name, code in PROGRAMS.items():
        boxes = {"bare fresh process": DockerSandbox(BARE), "fresh process": DockerSandbox(LOADED)}
        engine = docker_exec(client, container, code)
        await engine()
        began = engine_s(with_children=True) + time.process_time()
        await times(engine, 20)
        await asyncio.sleep(0.5)  # until what ran there is waited for
        spent = {"docker exec": (engine_s(with_children=True) + time.process_time() - began) / 20}
        for way, box in boxes.items():
            await box.start()
            for session in (None, "bench") if box.spec.preload else (None,):
                call = program(box, code, session)
                await call()

                def so_far(box: DockerSandbox = box) -> float:
                    usage = client.api.stats(box.container_id, stream=False, one_shot=True)["cpu_stats"]["cpu_usage"]
                    return float(usage["total_usage"] / 1e9)

                inside = await asyncio.to_thread(so_far)
                began = engine_s(with_children=False) + time.process_time()
                await times(call, 100)
                outside = engine_s(with_children=False) + time.process_time() - began
                inside = await asyncio.to_thread(so_far) - inside
                spent["session" if session else way] = (inside + outside) / 100
            await box.close()
        for way, seconds in spent.items():
            print(f"| {way} | {name} | {1e3 * seconds:.2f} | {spent['docker exec'] / seconds:.0f} |", flush=True)
    client.close()


async def start_up(client: Any) -> None:
    print()
    for name, spec in (("bare", BARE), ("numpy, sympy preloaded", LOADED)):
        cold, memory = [], []
        for _ in range(5):
            started = time.perf_counter()
            box = DockerSandbox(spec)
            await box.start()
            await box.exec("print(1)")
            cold.append(time.perf_counter() - started)
            await box.reset()
            memory.append(client.api.stats(box.container_id, stream=False)["memory_stats"]["usage"] / 2**20)
            await box.close()
        print(
            f"- {name}: from nothing to the first result {statistics.median(cold):.2f} s (median of {len(cold)}); "
            f"an idle sandbox holds {statistics.median(memory):.0f} MiB"
        )
    async with SandboxPool(LOADED.model_copy(update={"size": 1, "warm": 1})) as pool:

        async def first() -> object:
            async with pool.lease() as box:
                return await box.exec("print(1)")

        await first()
        taken = await times(first, 100)
        print(f"- from lease to first result, warm: p50 {statistics.median(taken):.2f} ms, with the reset after it")


def start_plain() -> str:
    """A container for ``docker exec``: same image, no worker; it ends by itself after a while."""
    options = ["--detach", "--rm", "--network", "none", "--stop-timeout", "0", "--cap-drop", "ALL", "--read-only"]
    command = ["docker", "run", *options, SandboxSpec().image, "sleep", "1200"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


async def start_service() -> tuple[asyncio.subprocess.Process, str]:
    command = ["sandbox", "serve", "--kind", "docker", "--bind", "127.0.0.1:0", "--size", "16", "--per-client", "64"]
    served = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "agent_rl", *command, stdout=asyncio.subprocess.PIPE
    )
    assert served.stdout is not None
    line = (await served.stdout.readline()).decode()
    found = re.search(r"http://\S+", line)
    assert found, f"the service did not start: {line}"
    return served, found.group()


async def main() -> None:
    parts = sys.argv[1:] or ["latency", "throughput", "cost", "start"]
    os.environ.setdefault(TOKEN_VARIABLE, "bench")
    client = connect()
    plain = await asyncio.to_thread(start_plain)
    served, service = await start_service()
    boxes: dict[str, Sandbox] = {
        "bare fresh process": make_sandbox(BARE),
        "fresh process": make_sandbox(LOADED),
        "fresh process over HTTP": make_sandbox(SandboxSpec(kind="remote", hosts=(service,))),
    }
    try:
        container = client.containers.get(plain)
        for box in boxes.values():
            await box.start()
        print(f"{machine()}\n")
        if "latency" in parts:
            await latency(boxes, lambda code: docker_exec(client, container, code), rounds=5)
        for box in boxes.values():
            await box.close()
        if "throughput" in parts:
            await throughput(container, client, service)
        if "cost" in parts:
            await cost(container)
        if "start" in parts:
            await start_up(client)
        print(f"\nafter: {machine()}")
    finally:
        for box in boxes.values():
            await box.close()
        served.terminate()
        await served.wait()
        await asyncio.to_thread(client.api.remove_container, plain, force=True)
        client.close()


if __name__ == "__main__":
    asyncio.run(main())
