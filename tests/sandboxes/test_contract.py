"""The shipped contract over every backend."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest
from sandbox_services import TOKEN, ServiceProcess

from sandboxes import Sandbox, SandboxSpec, make_sandbox
from sandboxes.contract import CHECKS, Check, check

DOCKER = pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.slow])
BWRAP = pytest.param("bwrap", marks=[pytest.mark.bwrap])
GVISOR = pytest.param("docker runsc", marks=[pytest.mark.docker, pytest.mark.runsc, pytest.mark.slow])
REMOTE_DOCKER = pytest.param("remote docker", marks=[pytest.mark.docker, pytest.mark.slow])


@pytest.fixture(scope="module", params=["local", BWRAP, DOCKER, GVISOR, "remote local", REMOTE_DOCKER])
def running(request: pytest.FixtureRequest) -> Iterator[tuple[asyncio.Runner, Sandbox]]:
    """One sandbox for all checks, as a pool would use it."""
    with asyncio.Runner() as runner:
        kind, _, served = request.param.partition(" ")
        service = ServiceProcess(kind=served) if kind == "remote" else None
        if service is not None:
            os.environ["AGENT_RL_SANDBOX_TOKEN"] = TOKEN
            runner.run(service.__aenter__())
        hosts = (service.url,) if service else ()
        box = make_sandbox(SandboxSpec(kind=kind, hosts=hosts, runtime=None if service else served or None, size=1))
        runner.run(box.start())
        yield runner, box
        runner.run(box.close())
        if service is not None:
            service.process.terminate()
            runner.run(service.process.wait())


@pytest.mark.parametrize("one", CHECKS, ids=lambda one: one.__name__)
def test_contract(running: tuple[asyncio.Runner, Sandbox], one: Check) -> None:
    runner, box = running
    runner.run(one(box))
    runner.run(box.reset())


async def test_a_backend_that_breaks_a_promise_is_found() -> None:
    class Forgetful:
        """Answers the first program of its life for ever."""

        def __init__(self) -> None:
            self.box = make_sandbox(SandboxSpec(kind="local"))
            self.start, self.reset, self.close = self.box.start, self.box.reset, self.box.close
            self.first = None

        async def exec(self, code, **options):  # type: ignore[no-untyped-def]
            self.first = self.first or await self.box.exec(code, **options)
            return self.first

    with pytest.raises(AssertionError):
        await check(Forgetful)  # type: ignore[arg-type]
