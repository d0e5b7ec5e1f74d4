"""The tools in the isolated sandbox: what holds without isolation holds there, as another user, without a network."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from envs_scripted import call, make_env, play
from test_contract import by_shell

import envs
from envs import Resources
from envs.files import FilesOptions, FilesTasks
from envs.toolbox import TOOLBOX
from sandboxes import SandboxSpec

pytestmark = [pytest.mark.slow, pytest.mark.docker, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def resources() -> AsyncIterator[Resources]:
    async with Resources(SandboxSpec(kind="docker", size=1, timeout_s=5)) as resources:
        yield resources


async def test_files_tasks_are_solved_and_scored(resources: Resources) -> None:
    tasks = FilesTasks(FilesOptions(seed=2))
    spec = envs.get("agentic/Bash-v1")
    for index in range(6):
        task = tasks.task(index)
        env = spec.make(tasks, resources=resources)
        solved = (await play(env, *by_shell(task), task=task))[-1]
        assert (solved.reward, solved.failure) == (1.0, None), task
        looked = (await play(env, call("bash", command="ls -la; cat data.csv"), "Done.", task=task))[-1]
        assert (looked.reward, looked.failure) == (0.0, None), task


async def test_tools_see_no_network_and_no_root(resources: Resources) -> None:
    env = make_env(resources, list(TOOLBOX.values()))
    turns = (
        call(code="import os; print(os.getuid() != 0)"),
        call("bash", command="cat < /dev/tcp/1.1.1.1/80; echo $?; id -u"),
        call("write_file", path="/etc/motd", content="x"),
    )
    results = await play(env, "".join(turns))
    texts = [str(message["content"]) for message in results[0].messages]
    assert texts[0] == "True"
    assert texts[1].splitlines()[0] == "1"
    assert texts[1].splitlines()[1] != "0"
    assert "Read-only file system" in texts[2] or "Permission denied" in texts[2]
