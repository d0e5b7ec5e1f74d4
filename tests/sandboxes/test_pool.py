"""The pool: bounded, fair, clean, and never short of a place."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from docker.api.client import APIClient
from requests.exceptions import ReadTimeout

from sandboxes import SandboxBusy, SandboxFailure, SandboxPool, SandboxSpec, SandboxUnavailable, resolve
from sandboxes.local import LocalSandbox
from sandboxes.owner import start_ticks
from sandboxes.reaper import remove_folders

LOCAL = SandboxSpec(kind="local", size=2, warm=0)


async def test_no_more_than_size_at_once_and_served_in_order() -> None:
    async with SandboxPool(LOCAL) as pool:
        order: list[int] = []
        most = running = 0
        both = asyncio.Event()

        async def use(number: int) -> None:
            nonlocal most, running
            async with pool.lease():
                order.append(number)
                running += 1
                most = max(most, running)
                if running == 2:
                    both.set()
                await both.wait()
                running -= 1

        await asyncio.gather(*(use(number) for number in range(12)))
        assert most == 2
        assert order[2:] == list(range(2, 12))
        assert (pool.counters.leases, pool.counters.started) == (12, 2)


async def test_a_broken_sandbox_is_replaced() -> None:
    async with SandboxPool(LOCAL) as pool:
        with pytest.raises(SandboxFailure):
            async with pool.lease() as box:
                await box.exec("import os; os.kill(os.getppid(), 9)")
        async with pool.lease() as box:
            assert (await box.exec("print(1)")).stdout == "1\n"
        assert (pool.counters.started, pool.counters.discarded) == (2, 1)


async def test_cancelled_leases_and_waiters_free_their_places() -> None:
    async with SandboxPool(LOCAL) as pool:

        async def hold() -> None:
            async with pool.lease() as box:
                await box.exec("import time; time.sleep(30)", timeout_s=60)

        tasks = [asyncio.create_task(hold()) for _ in range(5)]
        await asyncio.sleep(0.5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(10), pool.lease() as box:
            assert (await box.exec("print(1)")).stdout == "1\n"


async def test_a_closed_pool_says_so() -> None:
    pool = SandboxPool(LOCAL)
    await pool.close()
    await pool.close()
    with pytest.raises(SandboxFailure, match="closed"):
        async with pool.lease():
            pass


async def test_auto_falls_back_to_local_with_one_loud_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/docker.sock")
    monkeypatch.setenv("PATH", "/nowhere")  # no bwrap
    lines: list[str] = []
    assert (await resolve(SandboxSpec(kind="auto"), lines.append)).kind == "local"
    assert len(lines) == 1
    assert "NO ISOLATION" in lines[0]
    with pytest.raises(SandboxUnavailable, match=r"no Docker engine answers.*--sandbox\.kind local"):
        await resolve(SandboxSpec(kind="docker"), lines.append)


@pytest.mark.bwrap
async def test_auto_takes_bwrap_before_local_and_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/docker.sock")
    lines: list[str] = []
    assert (await resolve(SandboxSpec(kind="auto"), lines.append)).kind == "bwrap"
    assert len(lines) == 1
    assert "NO CGROUP LIMITS" in lines[0]
    assert (await resolve(SandboxSpec(kind="auto", network=True), lines.append)).kind == "local"
    with pytest.raises(SandboxUnavailable, match="no network"):
        await resolve(SandboxSpec(kind="bwrap", network=True), lines.append)


async def test_a_machine_without_namespaces_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match=r"bwrap is missing: install it \(apt-get install bubblewrap\)"):
        await resolve(SandboxSpec(kind="bwrap"), print)
    refusing = tmp_path / "bwrap"
    refusing.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
    refusing.chmod(0o755)
    with pytest.raises(SandboxUnavailable, match=r"cannot make namespaces here \(No permissions.*run as root"):
        await resolve(SandboxSpec(kind="bwrap"), print)


@pytest.mark.docker
@pytest.mark.slow
async def test_a_missing_image_is_named_with_the_way_to_build_it() -> None:
    with pytest.raises(SandboxUnavailable, match=r"'no-such-image:1' is missing.*agent-rl sandbox build --tag"):
        await resolve(SandboxSpec(kind="docker", image="no-such-image:1"))


async def test_one_that_died_while_idle_is_replaced_before_anybody_sees_it() -> None:
    async with SandboxPool(SandboxSpec(kind="local", size=1)) as pool:
        async with pool.lease() as box:
            assert isinstance(box, LocalSandbox)
            process = box.process
        assert process is not None
        process.kill()
        await process.wait()
        async with pool.lease() as box:
            assert (await box.exec("print(1)")).stdout == "1\n"
        assert (pool.counters.started, pool.counters.discarded) == (2, 1)


async def test_sandboxes_are_ready_before_they_are_asked_for() -> None:
    async with SandboxPool(SandboxSpec(kind="local", size=3, warm=2)) as pool:
        async with asyncio.timeout(20):
            while pool.counters.started < 2:  # noqa: ASYNC110  # a counter, not an event
                await asyncio.sleep(0.01)
        async with pool.lease(), pool.lease(), pool.lease():
            assert pool.counters.leased == 3
        assert pool.counters.started == 3
        assert pool.counters.wait.count == 3


async def test_a_lease_takes_over_a_sandbox_that_is_on_its_way() -> None:
    async with SandboxPool(SandboxSpec(kind="local", size=1, warm=1)) as pool:
        async with pool.lease() as box:
            assert (await box.exec("print(1)")).stdout == "1\n"
        assert pool.counters.started == 1
    async with SandboxPool(SandboxSpec(kind="local", size=1, warm=1)):
        pass  # closed while one is on its way


async def test_a_lease_takes_what_comes_back_before_its_own_has_started() -> None:
    # As with services that have fewer sandboxes than the pool's size: the others do not start for a minute.
    made: list[LocalSandbox] = []

    class OneOnly(LocalSandbox):
        async def start(self) -> None:
            made.append(self)
            if len(made) > 1:
                await asyncio.Event().wait()
            await super().start()

    async with SandboxPool(SandboxSpec(kind="local", size=3, warm=1), OneOnly) as pool:

        async def use(number: int) -> str:
            async with pool.lease() as box:
                return (await box.exec(f"print({number})")).stdout

        async with asyncio.timeout(30):
            assert await asyncio.gather(*(use(number) for number in range(12))) == [f"{n}\n" for n in range(12)]
        async with pool.lease():
            waiters = [asyncio.create_task(use(number)) for number in range(2)]
            for _ in range(10):
                await asyncio.sleep(0)
            for waiter in waiters:
                waiter.cancel()
            await asyncio.wait(waiters)
        assert await asyncio.wait_for(use(12), 30) == "12\n"
        assert len(made) == 3, "one used, two on their way: what a cancelled lease began is the next one's"
    assert [one.process for one in made] == [None] * len(made)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_sandbox_is_replaced_after_its_number_of_uses() -> None:
    async with SandboxPool(SandboxSpec(kind="local", size=1, warm=0, max_uses=2)) as pool:
        workers = set()
        for _ in range(5):
            async with pool.lease() as box:
                workers.add((await box.exec("import os; print(os.getppid())")).stdout)
        assert (len(workers), pool.counters.started, pool.counters.retired, pool.counters.discarded) == (3, 3, 2, 0)


async def test_a_full_queue_refuses() -> None:
    async with SandboxPool(SandboxSpec(kind="local", size=1), max_waiting=1) as pool:
        async with pool.lease():
            waiter = asyncio.create_task(pool.lease().__aenter__())
            await asyncio.sleep(0)
            with pytest.raises(SandboxBusy, match="1 others wait for one of 1 sandboxes"):
                async with pool.lease():
                    pass
            waiter.cancel()
            await asyncio.wait([waiter])
        async with pool.lease() as box:  # the cancelled waiter left no trace
            assert (await box.exec("print(1)")).stdout == "1\n"
        assert (pool.counters.refused, pool.counters.waiting, pool.counters.leased) == (1, 0, 0)


async def test_one_that_stopped_answering_while_idle_is_found_before_it_is_leased(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sandboxes.pool.TEND_S", 0.1)
    monkeypatch.setattr("sandboxes.link.START_S", 1.0)
    async with SandboxPool(SandboxSpec(kind="local", size=1, warm=1)) as pool:
        async with pool.lease() as box:
            assert isinstance(box, LocalSandbox)
            assert box.process is not None
            pid = box.process.pid
        os.kill(pid, signal.SIGSTOP)  # alive, but deaf
        async with asyncio.timeout(20):
            while pool.counters.discarded == 0 or pool.counters.started < 2:  # noqa: ASYNC110  # counters
                await asyncio.sleep(0.05)
        async with pool.lease() as box:
            assert (await box.exec("print(1)")).stdout == "1\n"


async def test_what_a_pool_did_is_counted() -> None:
    async with SandboxPool(SandboxSpec(kind="local", size=1, warm=0)) as pool:
        async with pool.lease() as box:
            await box.exec("print(1)")
            await box.exec("while True: pass", timeout_s=0.3)
            await box.exec("1 / 0")
        counters = pool.counters
        assert counters.results == {"ok": 1, "timeout": 1, "error": 1}
        assert (counters.exec.count, counters.start.count, counters.wait.count) == (3, 1, 1)
        assert 0.3 <= counters.exec.longest_s < counters.exec.total_s < 10
        assert sum(counters.exec.buckets) == 3


def test_scratch_folders_of_dead_owners_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead = tmp_path / "agent-rl-sandbox-999999-1-x"
    mine = tmp_path / f"agent-rl-sandbox-{os.getpid()}-{start_ticks(os.getpid())}-x"
    for folder in (dead, mine, tmp_path / "something-else"):
        (folder / "d").mkdir(parents=True)
    assert remove_folders() == [str(dead)]
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([mine.name, "something-else"])


async def test_a_sandbox_whose_working_folder_is_gone_is_not_leased_again() -> None:
    async with SandboxPool(SandboxSpec(kind="local", size=1, warm=0)) as pool:
        for remove in ("shutil.rmtree(os.getcwd())", "os.rmdir(os.environ['HOME'])"):
            async with pool.lease() as box:
                await box.exec(f"import os, shutil; {remove}")
            async with pool.lease() as box:
                assert (await box.exec("print(1)")).stdout == "1\n"
        assert pool.counters.discarded == 2


@pytest.mark.docker
@pytest.mark.slow
async def test_an_engine_that_answers_too_late_fails_no_lease_and_ends_no_tending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remove, found = APIClient.remove_container, APIClient.containers
    rounds: list[int] = []

    def removed_late(self: APIClient, *arguments: Any, **options: Any) -> None:
        remove(self, *arguments, **options)
        raise ReadTimeout("UnixHTTPConnectionPool: Read timed out. (read timeout=60)")

    def found_late(self: APIClient, *arguments: Any, **options: Any) -> Any:
        rounds.append(len(rounds))
        if len(rounds) == 2:
            raise ReadTimeout("UnixHTTPConnectionPool: Read timed out. (read timeout=60)")
        return found(self, *arguments, **options)

    monkeypatch.setattr(APIClient, "remove_container", removed_late)
    monkeypatch.setattr(APIClient, "containers", found_late)
    monkeypatch.setattr("sandboxes.pool.TEND_S", 0.1)
    async with SandboxPool(SandboxSpec(kind="docker", size=1, warm=0, max_uses=1)) as pool:
        async with pool.lease() as box:
            assert (await box.exec("print(1)")).stdout == "1\n"
        assert pool.counters.leaked == 1
        async with asyncio.timeout(30):
            while len(rounds) < 4:  # noqa: ASYNC110  # the next round comes by the clock
                await asyncio.sleep(0.05)
