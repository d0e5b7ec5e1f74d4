"""Environments over HTTP: the same as on the spot; sessions, tokens, and what a lost server is."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from envs_scripted import FakeResources, breaks, call, play
from gymnasium.utils.env_checker import check_env

from envs import Limits, Resources
from envs.registration import get, make_env
from envs.remote import RemoteEnv
from envs.serve import EnvServer
from envs.types import ModelTurn
from sandboxes import SandboxFailure, SandboxSpec

ARITHMETIC = "agentic/Arithmetic-v1"
LOCAL = SandboxSpec(kind="local", size=1)


@asynccontextmanager
async def serving(resources: Resources, **settings: Any) -> AsyncIterator[tuple[EnvServer, str]]:
    server = EnvServer(resources, token="secret", **settings)
    runner = web.AppRunner(server.application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield server, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_remote_episode_equals_one_on_the_spot() -> None:
    spec = get(ARITHMETIC)
    task = spec.tasks({"seed": 3}).task(5)
    turns = [call(code="print(1)") + "<tool_call>x</tool_call>", "\\boxed{" + str(task.answer) + "}"]
    here = await play(spec.make(spec.tasks({}), resources=FakeResources()), *turns, task=task)
    async with serving(FakeResources()) as (server, url):
        remote = RemoteEnv(url, "secret", ARITHMETIC, options={"seed": 3}, limits={"max_turns": 4})
        assert await remote.atask(5) == task
        there = await play(remote, *turns, task=task)  # type: ignore[arg-type]
        assert there == here
        assert there[-1].reward == 1.0
        assert server._sessions == {}, "closing gives the session back"


async def test_a_failure_of_the_servers_side_voids_and_is_not_shown() -> None:
    async with serving(FakeResources(breaks)) as (_, url):
        results = await play(RemoteEnv(url, "secret", ARITHMETIC), call(code="1"))  # type: ignore[arg-type]
    assert (results[-1].stop, results[-1].reward, results[-1].messages) == ("failure", None, ())
    assert results[-1].failure is not None
    assert results[-1].failure.kind == "sandbox"


async def test_a_session_that_the_server_closed_voids_its_episode_and_no_other() -> None:
    """A learner's step may take longer than the server keeps an idle session."""
    task = get(ARITHMETIC).tasks({}).task(0)
    async with serving(FakeResources()) as (server, url):
        remote = RemoteEnv(url, "secret", ARITHMETIC, limits=Limits(max_turns=1))
        for _ in range(2):
            await remote.areset(0, task)
            server._sessions.clear()
            assert (await remote.astep(ModelTurn(text="x", finish="stop"))).stop == "failure"
        assert await remote.atask(0) == task
        await remote.areset(0, task)
        assert (await remote.astep(ModelTurn(text=call(code="1"), finish="stop"))).stop == "max_turns"
        await remote.aclose()


async def test_a_setting_that_a_session_does_not_have_is_refused() -> None:
    async with serving(FakeResources()) as (_, url):
        remote = RemoteEnv(url, "secret", ARITHMETIC, limit={"max_turns": 1})
        with pytest.raises(ValueError, match="no setting 'limit'; there are env, options"):
            await remote.atask(0)
        await remote.aclose()


async def test_a_server_that_goes_away_voids_the_episode() -> None:
    task = get(ARITHMETIC).tasks({}).task(0)
    async with serving(FakeResources()) as (_, url):
        remote = RemoteEnv(url, "secret", ARITHMETIC)
        await remote.areset(0, task)
    result = await remote.astep(ModelTurn(text="x", finish="stop"))
    assert (result.stop, result.reward) == ("failure", None)
    await remote.aclose()
    await remote.aclose()
    with pytest.raises(SandboxFailure, match="cannot reach"):
        await remote.areset(0, task)
    await remote.aclose()


async def test_tokens_bad_requests_and_full_servers_are_answered() -> None:
    task = get(ARITHMETIC).tasks({}).task(0)
    async with serving(FakeResources(), max_sessions=1) as (_, url):
        wrong = RemoteEnv(url, "guess", ARITHMETIC)
        with pytest.raises(SandboxFailure, match="401"):
            await wrong.areset(0, task)
        for env, options, complaint in (
            ("agentic/Arithmetik-v1", {}, "did you mean"),
            (ARITHMETIC, {"min_digits": 0}, "greater than or equal to 1"),
        ):
            bad = RemoteEnv(url, "secret", env, options=options)
            with pytest.raises(ValueError, match=complaint):
                await bad.areset(0, task)
            await bad.aclose()
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer secret"}) as http:
            async with http.post(f"{url}/sessions", data=b"not json") as response:
                assert response.status == 400
            async with http.get(f"{url}/envs") as response:
                assert ARITHMETIC in await response.json()
        first, second = RemoteEnv(url, "secret", ARITHMETIC), RemoteEnv(url, "secret", ARITHMETIC)
        await first.areset(0, task)
        with pytest.raises(SandboxFailure, match="all 1 sessions are taken"):
            await second.areset(0, task)
        with pytest.raises(ValueError, match="there are tasks 0 to"):
            await first.atask(-1)
        await first.astep(ModelTurn(text="x", finish="stop"))
        with pytest.raises(ValueError, match="the episode is over"):
            await first.astep(ModelTurn(text="x", finish="stop"))
        for env in (wrong, first, second):
            await env.aclose()


async def test_a_session_that_is_left_alone_is_closed() -> None:
    task = get(ARITHMETIC).tasks({}).task(0)
    async with serving(FakeResources(), idle_s=0.1) as (server, url):
        remote = RemoteEnv(url, "secret", ARITHMETIC)
        await remote.areset(0, task)
        for _ in range(100):
            if not server._sessions:
                break
            await asyncio.sleep(0.05)
        assert server._sessions == {}
        assert (await remote.astep(ModelTurn(text="x", finish="stop"))).stop == "failure"
        await remote.aclose()


@pytest.mark.slow
def test_the_command_serves_a_gymnasium_environment_and_leaves_nothing() -> None:
    program = (
        "import argparse, sys; from envs.cli import add_parser; p = argparse.ArgumentParser();"
        "add_parser(p.add_subparsers()); a = p.parse_args(sys.argv[1:]); sys.exit(a.func(a))"
    )
    arguments = ["envs", "serve", "--port", "0", "--sandbox", "local", "--size", "1"]
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = re.search(r"http://\S+", process.stdout.readline())
        token = process.stdout.readline().split()
        assert url is not None
        remote = RemoteEnv(url[0], token[1], ARITHMETIC)
        here = make_env(env_id=ARITHMETIC, sandbox=LOCAL)
        assert remote.reset(seed=8) == here.reset(seed=8)
        for action in (call(code="print(6*7)"), "\\boxed{1}"):
            assert remote.step(action) == here.step(action)
        here.close()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_env(remote, skip_render_check=True)
        remote.close()
        remote.close()
        children = subprocess.run(
            ["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, text=True
        ).stdout
        assert children.split(), "a sandbox and a grader run"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    for _ in range(50):
        if not any(os.path.exists(f"/proc/{pid}") for pid in children.split()):
            return
        time.sleep(0.1)
    raise AssertionError(f"left behind: {children}")
