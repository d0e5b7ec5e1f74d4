"""The ``remote`` backend over real services: spread, asked again, moved when one dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from sandbox_services import TOKEN, ServiceProcess

from sandboxes import SandboxFailure, SandboxPool, SandboxSpec, SandboxUnavailable, resolve
from sandboxes.remote import RemoteSandbox


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_RL_SANDBOX_TOKEN", TOKEN)


async def test_sandboxes_are_spread_and_a_dead_hosts_share_goes_to_the_others() -> None:
    async with ServiceProcess() as one, ServiceProcess() as two:
        spec = await resolve(SandboxSpec(kind="remote", hosts=(one.url, two.url), size=4))
        async with SandboxPool(spec) as pool:

            async def host_of(number: int) -> str:
                async with pool.lease() as box:
                    assert isinstance(box, RemoteSandbox)
                    assert box.host is not None
                    url = box.host.url  # a first program may move it
                    assert (await box.exec(f"print({number})")).stdout == f"{number}\n"
                    await asyncio.sleep(0.3)
                    return url

            urls = await asyncio.gather(*(host_of(number) for number in range(4)))
            assert sorted(urls) == sorted([one.url, two.url] * 2)
            one.process.kill()
            await one.process.wait()
            for number in range(6):
                assert await asyncio.wait_for(host_of(number), 20) == two.url


async def test_a_first_program_is_run_elsewhere_a_later_one_is_our_failure() -> None:
    async with ServiceProcess() as one, ServiceProcess() as two:
        by_url = {one.url: one, two.url: two}
        spec = SandboxSpec(kind="remote", hosts=(one.url, two.url))
        box = RemoteSandbox(spec)
        await box.start()
        assert box.host is not None
        first = box.host.url
        asyncio.get_running_loop().call_later(0.5, by_url[first].process.kill)
        result = await box.exec("import time; time.sleep(1); print('done')")
        assert result.stdout == "done\n"
        assert box.host.url != first
        asyncio.get_running_loop().call_later(0.3, by_url[box.host.url].process.kill)
        with pytest.raises(SandboxFailure, match="gone with what ran there"):
            await box.exec("import time; time.sleep(1)")
        with pytest.raises(SandboxFailure, match="broken"):
            await box.exec("print(1)")
        await box.close()
        with pytest.raises(SandboxUnavailable, match=r"no sandbox service answers: .*; "):
            await resolve(spec)
        lost = RemoteSandbox(spec)
        with pytest.raises(SandboxUnavailable, match="no sandbox service gives a sandbox"):
            await lost.start()
        await lost.close()


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
