"""Programs that mean harm: each gets its own result, the next call a correct one, and nothing of it is left."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from sandboxes import Sandbox, SandboxFailure, SandboxPool, SandboxSpec, make_sandbox
from sandboxes.container import DockerSandbox, connect
from sandboxes.hostile import ATTACKS, GVISOR_CANNOT_STOP, LOCAL_CANNOT_STOP, check_attack, check_hostile

DOCKER = pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.slow])
BWRAP = pytest.param("bwrap", marks=[pytest.mark.bwrap, pytest.mark.slow])


@pytest.fixture(scope="module", params=["local", BWRAP, DOCKER])
def running(request: pytest.FixtureRequest) -> Iterator[tuple[asyncio.Runner, Sandbox]]:
    with asyncio.Runner() as runner:
        box = make_sandbox(SandboxSpec(kind=request.param, memory_mb=512, pids=64, scratch_mb=16))
        runner.run(box.start())
        yield runner, box
        runner.run(box.close())


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_gets_its_own_result_and_leaves_nothing(running: tuple[asyncio.Runner, Sandbox], name: str) -> None:
    runner, box = running
    if box.kind == "local" and name in LOCAL_CANNOT_STOP:
        return  # it would harm this machine; which these are is pinned below
    runner.run(check_attack(box, name))


def test_what_is_not_stopped_is_named() -> None:
    assert set(LOCAL_CANNOT_STOP) < set(ATTACKS)
    assert set(GVISOR_CANNOT_STOP) < set(ATTACKS)
    assert len(ATTACKS) - len(LOCAL_CANNOT_STOP) >= 35


@pytest.mark.parametrize("kind", [BWRAP, DOCKER])
async def test_a_fork_bomb_left_in_a_session_ends_sessions_and_no_sandbox(kind: str) -> None:
    bomb = "import os\nif os.fork() == 0:\n    while True:\n        try: os.fork()\n        except OSError: pass\n"
    async with SandboxPool(SandboxSpec(kind=kind, size=1, warm=0, pids=64, timeout_s=60)) as pool:  # type: ignore[arg-type]
        for options in ({}, {"session": "b"}, {"session": "a", "fetch": ["f"]}):
            async with pool.lease() as box:
                assert (await box.exec(f"{bomb}open('f', 'w').write('x')", session="a")).status == "ok"
                await asyncio.sleep(0.3)  # for it to fill the place there is
                for number in range(3):
                    result = await box.exec(f"print({number})", **options)  # type: ignore[arg-type]
                    assert (result.status, result.stdout) == ("ok", f"{number}\n"), (options, result)
                    assert result.files == ({"f": b"x"} if "fetch" in options else {})
        assert pool.counters.discarded == 0


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.runsc
async def test_gvisor_stops_what_it_says() -> None:
    spec = SandboxSpec(kind="docker", runtime="runsc", memory_mb=256, pids=64, scratch_mb=16)
    names = {"memory bomb", "disk fill", "killing the worker", "ptrace", "root again", "a mount"}
    names |= {"System V memory", "a daemon by double fork", "egress by TCP", "egress by UDP", "our environment"}
    ran = await check_hostile(lambda: make_sandbox(spec), cannot_stop=set(ATTACKS) - names | set(GVISOR_CANNOT_STOP))
    assert set(ran) == names


@pytest.mark.docker
@pytest.mark.slow
async def test_a_backend_that_lets_one_through_is_found() -> None:
    with pytest.raises(AssertionError, match="egress by UDP"):
        await check_hostile(
            lambda: make_sandbox(SandboxSpec(kind="docker", network=True)),
            cannot_stop=set(ATTACKS) - {"egress by UDP"},
        )


@pytest.mark.docker
@pytest.mark.slow
def test_what_memory_takes_is_told_from_what_a_signal_takes() -> None:
    bombs = {
        "x = bytearray(10**9)": "memory",
        "x = []\nwhile True: x.append(bytearray(10**6))": "memory",
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'x = bytearray(10**9)'], check=True)": "memory",
        "import os; os.kill(os.getpid(), 9)": "killed",
        "print(1)": "ok",
    }

    async def run() -> dict[str, str]:
        async with SandboxPool(SandboxSpec(kind="docker", memory_mb=128, size=1)) as pool, pool.lease() as box:
            return {code: (await box.exec(code)).status for code in bombs}

    assert asyncio.run(run()) == bombs


@pytest.mark.docker
@pytest.mark.slow
async def test_a_pools_counters_are_right_after_attacks() -> None:
    names = ["fork bomb", "memory bomb", "endless output", "a daemon by double fork", "killing the worker", "10**10**8"]
    async with SandboxPool(SandboxSpec(kind="docker", size=2, warm=0, memory_mb=256)) as pool:

        async def attack(name: str) -> str:
            async with pool.lease() as box:
                return (await box.exec(ATTACKS[name].code, timeout_s=1)).status

        statuses = await asyncio.gather(*(attack(name) for name in names))
        counters = pool.counters
        assert (counters.leases, counters.leased, counters.waiting) == (6, 0, 0)
        assert (counters.started, counters.discarded, counters.leaked) == (2, 0, 0)
        assert sum(counters.results.values()) == counters.exec.count == counters.wait.count == 6
        assert counters.results == {status: statuses.count(status) for status in set(statuses)}


@pytest.mark.docker
@pytest.mark.slow
async def test_a_container_killed_in_mid_call_is_our_failure_and_is_replaced() -> None:
    async with SandboxPool(SandboxSpec(kind="docker", size=1, warm=0)) as pool:
        client = connect()

        async def call() -> None:
            async with pool.lease() as box:
                asyncio.get_running_loop().call_later(0.5, lambda: client.api.kill(box.container_id))
                await box.exec("import time; time.sleep(30)", timeout_s=60)

        with pytest.raises(SandboxFailure, match="worker is gone"):
            await asyncio.wait_for(call(), 10)
        async with pool.lease() as box:
            assert isinstance(box, DockerSandbox)
            assert (await box.exec("print(1)")).stdout == "1\n"
            idle = box.container_id
        await asyncio.to_thread(client.api.kill, idle)
        async with pool.lease() as box:  # one that died while idle is replaced before anybody sees it
            assert (await box.exec("print(2)")).stdout == "2\n"
        client.close()
        assert (pool.counters.started, pool.counters.discarded, pool.counters.leaked) == (3, 2, 0)


@pytest.mark.docker
@pytest.mark.slow
async def test_a_start_that_is_cancelled_leaves_no_container_and_no_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))
    ids: set[str] = set()
    for delay_s in (0.0, 0.02, 0.05, 0.1, 0.2):
        box = DockerSandbox(SandboxSpec(kind="docker", preload=()))
        starting = asyncio.create_task(box.start())
        await asyncio.sleep(delay_s)
        starting.cancel()
        await asyncio.wait([starting])
        ids.add(str(box.container_id))
        await box.close()
    assert set(os.listdir("/proc/self/fd")) == before
    client = connect()
    assert not ids & {container["Id"] for container in client.api.containers(all=True)}
    client.close()


@pytest.mark.docker
@pytest.mark.slow
async def test_nothing_is_left_on_the_engine() -> None:
    async def used(number: int) -> str:
        async with pool.lease() as box:
            assert isinstance(box, DockerSandbox)
            ids.add(str(box.container_id))
            return (await box.exec(f"import os; os.fork(); print({number})")).stdout

    ids: set[str] = set()
    async with SandboxPool(SandboxSpec(kind="docker", size=2)) as pool:
        answers = await asyncio.gather(*(used(number) for number in range(20)))
    assert all(set(answer.split()) == {str(number)} for number, answer in enumerate(answers))
    client = connect()
    left = {container["Id"] for container in client.api.containers(all=True)}
    client.close()
    assert not ids & left
