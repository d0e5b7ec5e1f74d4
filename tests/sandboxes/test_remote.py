"""The ``remote`` backend over real services: spread, asked again, moved when one dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from sandbox_services import TOKEN, ServiceProcess, until_there

from sandboxes import SandboxFailure, SandboxPool, SandboxSpec, SandboxUnavailable, resolve
from sandboxes.remote import RemoteSandbox, hosts_of


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_RL_SANDBOX_TOKEN", TOKEN)


async def test_sandboxes_are_spread_and_a_dead_hosts_share_goes_to_the_others() -> None:
    async with ServiceProcess() as one, ServiceProcess() as two:
        spec = await resolve(SandboxSpec(kind="remote", hosts=(one.url, two.url), size=4))
        async with SandboxPool(spec) as pool:
            all_four = asyncio.Barrier(4)

            async def host_of(number: int) -> str:
                async with pool.lease() as box:
                    assert isinstance(box, RemoteSandbox)
                    assert box.host is not None
                    url = box.host.url  # a first program may move it
                    assert (await box.exec(f"print({number})")).stdout == f"{number}\n"
                    if number < 4:
                        await all_four.wait()
                    return url

            urls = await asyncio.gather(*(host_of(number) for number in range(4)))
            assert sorted(urls) == sorted([one.url, two.url] * 2)
            one.process.kill()
            await one.process.wait()
            for number in range(4, 10):
                assert await asyncio.wait_for(host_of(number), 20) == two.url


async def test_a_first_program_is_run_elsewhere_a_later_one_is_our_failure(tmp_path: Path) -> None:
    begun, enough = tmp_path / "begun", tmp_path / "enough"

    async def kill_when_begun(process: asyncio.subprocess.Process) -> None:
        while not begun.exists():  # noqa: ASYNC110  # a file, not an event
            await asyncio.sleep(0.01)
        process.kill()
        await process.wait()
        begun.unlink()
        enough.touch()

    async with ServiceProcess() as one, ServiceProcess() as two:
        by_url = {one.url: one, two.url: two}
        spec = SandboxSpec(kind="remote", hosts=(one.url, two.url))
        box = RemoteSandbox(spec)
        await box.start()
        assert box.host is not None
        first = box.host.url
        program = f"open({str(begun)!r}, 'w')\n{until_there(enough)}print('done')"
        result, _ = await asyncio.gather(box.exec(program), kill_when_begun(by_url[first].process))
        assert result.stdout == "done\n"
        assert box.host.url != first
        enough.unlink()
        begun.unlink(missing_ok=True)
        killing = asyncio.create_task(kill_when_begun(by_url[box.host.url].process))
        with pytest.raises(SandboxFailure, match="gone with what ran there"):
            await box.exec(program)
        await killing
        with pytest.raises(SandboxFailure, match="broken"):
            await box.exec("print(1)")
        await box.close()
        with pytest.raises(SandboxUnavailable, match=r"no sandbox service answers: .*; "):
            await resolve(spec)
        lost = RemoteSandbox(spec)
        with pytest.raises(SandboxUnavailable, match="no sandbox service gives a sandbox"):
            await lost.start()
        await lost.close()


async def test_a_host_that_is_down_for_long_is_our_failure_each_time() -> None:
    url = "http://127.0.0.1:1"
    host = hosts_of(SandboxSpec(kind="remote", hosts=(url,)))[0]
    for _ in range(3000):  # of leases that tried it beside others, over hours
        host.failed()
    box = RemoteSandbox(SandboxSpec(kind="remote", hosts=(url,)))
    with pytest.raises(SandboxUnavailable, match="no sandbox service gives a sandbox"):
        await box.start()
    await box.close()


async def test_a_busy_host_is_waited_for_also_after_it_was_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ServiceProcess("--per-client", "1") as one:
        spec = SandboxSpec(kind="remote", hosts=(one.url,))
        first, second = RemoteSandbox(spec), RemoteSandbox(spec)
        await first.start()
        hosts_of(spec)[0].failed()
        starting = asyncio.create_task(second.start())
        asked = asyncio.Event()
        ask = second._ask

        async def overheard(*arguments: Any, **options: Any) -> Any:
            try:
                return await ask(*arguments, **options)
            finally:
                asked.set()

        monkeypatch.setattr(second, "_ask", overheard)
        await asked.wait()
        await first.close()
        await asyncio.wait_for(starting, 20)
        assert (await second.exec("print(1)")).stdout == "1\n"
        await second.close()


@asynccontextmanager
async def losing_answers(port: int) -> AsyncIterator[tuple[str, list[int]]]:
    """A way to the service on which every answer but each third one is lost on its way back."""
    connections: list[int] = []

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)

        async def up() -> None:
            while data := await reader.read(65536):
                up_writer.write(data)

        task = asyncio.create_task(up())
        while data := await up_reader.read(65536):
            connections.append(len(data))
            if len(connections) % 3:
                break
            writer.write(data)
            await writer.drain()
        task.cancel()
        up_writer.close()
        writer.close()

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connections


async def test_a_lost_answer_is_asked_for_again_and_nothing_runs_twice() -> None:
    async with ServiceProcess() as one, losing_answers(int(one.url.rpartition(":")[2])) as (url, seen):
        box = RemoteSandbox(SandboxSpec(kind="remote", hosts=(url,)))
        await box.start()
        for number in range(1, 4):
            result = await box.exec("open('log', 'a').write('ran '); print(open('log').read())")
            assert result.stdout == "ran " * number + "\n"
        assert len(seen) >= 12
        await box.close()


async def test_a_loop_that_stood_still_loses_no_answer_and_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ServiceProcess() as one:
        box = RemoteSandbox(SandboxSpec(kind="remote", hosts=(one.url,)))
        ask, asked = box._ask, []

        async def slow_to_connect(*arguments: Any, **options: Any) -> Any:
            asked.append(arguments)
            if len(asked) < 3:
                raise aiohttp.ConnectionTimeoutError("the loop stood still for longer than a connection may take")
            return await ask(*arguments, **options)

        monkeypatch.setattr(box, "_ask", slow_to_connect)
        await box.start()
        assert len(asked) == 3
        monkeypatch.setattr("sandboxes.remote.GRACE_S", -4.95)  # so that the time is over after 0.1 s
        monkeypatch.setattr("sandboxes.link.LATE_S", 10.0)
        call = asyncio.create_task(box.exec("print(1)", timeout_s=10))
        for _ in range(20):  # until it is sent
            await asyncio.sleep(0)
        time.sleep(0.5)  # noqa: ASYNC251  # as a training step does
        assert (await call).stdout == "1\n"
        assert box.host is not None
        assert box.host.failures == 0
        await box.close()


async def test_a_lease_is_kept_while_nothing_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ServiceProcess("--idle", "200") as one:
        box = RemoteSandbox(SandboxSpec(kind="remote", hosts=(one.url,)))
        ask, heard = box._ask, asyncio.Semaphore(0)

        async def overheard(method: str, path: str, **options: Any) -> Any:
            answer = await ask(method, path, **options)
            if method == "PUT":
                assert answer["idle_s"] == 200
                answer["idle_s"] = 0.2
            elif method == "GET":
                heard.release()
            return answer

        monkeypatch.setattr(box, "_ask", overheard)
        await box.start()
        async with asyncio.timeout(20):
            for _ in range(3):
                await heard.acquire()
        await box.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_start_that_is_cancelled_leaves_no_lease_at_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ServiceProcess() as one, aiohttp.ClientSession() as session:
        box = RemoteSandbox(SandboxSpec(kind="remote", hosts=(one.url,)))
        ask, given = box._ask, asyncio.Event()

        async def slow_to_read(*arguments: Any, **options: Any) -> Any:
            await ask(*arguments, **options)
            given.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(box, "_ask", slow_to_read)
        starting = asyncio.create_task(box.start())
        await given.wait()
        starting.cancel()
        await asyncio.wait([starting])
        monkeypatch.setattr(box, "_ask", ask)
        await box.close()
        async with session.get(f"{one.url}/healthz") as answer:
            assert (await answer.json())["leased"] == 0


async def test_a_size_that_the_services_do_not_have_is_said_before_a_run() -> None:
    async with ServiceProcess() as one, ServiceProcess("--per-client", "1") as two:
        hosts = (one.url, two.url, "http://127.0.0.1:1")
        lines: list[str] = []
        await resolve(SandboxSpec(kind="remote", hosts=hosts, size=3), lines.append)
        assert lines == []
        await resolve(SandboxSpec(kind="remote", hosts=hosts, size=4), lines.append)
        assert len(lines) == 1
        assert "sandbox.size is 4, and the services that answer give one client 3" in lines[0]


async def test_a_wrong_token_and_no_token_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ServiceProcess() as one:
        spec = SandboxSpec(kind="remote", hosts=(one.url,))
        monkeypatch.setenv("AGENT_RL_SANDBOX_TOKEN", "wrong")
        box = RemoteSandbox(spec)
        with pytest.raises(SandboxUnavailable, match="refuses our token"):
            await box.start()
        await box.close()
        monkeypatch.delenv("AGENT_RL_SANDBOX_TOKEN")
        with pytest.raises(SandboxUnavailable, match="token in the variable AGENT_RL_SANDBOX_TOKEN"):
            await resolve(spec)
    monkeypatch.setenv("AGENT_RL_SANDBOX_TOKEN", TOKEN)
    with pytest.raises(SandboxUnavailable, match=r"needs --sandbox\.hosts"):
        await resolve(SandboxSpec(kind="remote"))
