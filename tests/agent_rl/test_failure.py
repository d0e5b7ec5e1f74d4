"""Our failure is never a reward: the episode is void, and everything else is as if it had not been."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
import torch
from scripted import ScriptedEngine

from agent_rl.codec import ChatCodec
from agent_rl.collect import Collector
from agent_rl.config import RolloutConfig
from agent_rl.engines.base import EngineFailure
from agent_rl.plan import PlanOptions, make_plan, update_batch
from agent_rl.rollout import Place, TooManyFailures, run_episode
from agent_rl.setup import Setup
from agent_rl.types import Trajectory
from envs import Resources
from sandboxes import SandboxSpec
from sandboxes.container import DockerSandbox
from sandboxes.local import LocalSandbox
from stare import Controller, ControllerConfig, TokenStatistics

CONFIG = RolloutConfig(max_tokens=60, max_episode_tokens=400, group=2, max_refills=0)
SLOW = "import time; print('on my way', flush=True); time.sleep(30)"


@pytest_asyncio.fixture(
    params=["local", pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.slow])], ids=["local", "docker"]
)
async def either(request: pytest.FixtureRequest) -> AsyncIterator[Resources]:
    async with Resources(SandboxSpec(kind=request.param, size=2, warm=0, timeout_s=20)) as opened:
        yield opened


def play(script: list[Any], codec: ChatCodec, setup: Setup, resources: Resources) -> Any:
    return run_episode(
        setup.make_env(resources),
        setup.tasks.task(0),
        Place(step=1, group=0, member=0),
        engine=ScriptedEngine(codec, script),
        codec=codec,
        config=CONFIG,
        seed=0,
    )


def call(setup: Setup, code: str) -> str:
    return setup.dialect.written("python", {"code": code})


def watch(resources: Resources) -> list[Any]:
    """The sandboxes that the pool makes from now on."""
    made: list[Any] = []
    factory: Callable[[SandboxSpec], Any] = resources.pool._factory

    def remember(spec: SandboxSpec) -> Any:
        made.append(factory(spec))
        return made[-1]

    resources.pool._factory = remember
    return made


async def until_running(resources: Resources) -> None:
    async with asyncio.timeout(30):
        while resources.pool.counters.started == 0:  # noqa: ASYNC110  # a counter, not an event
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.5)


async def kill_when_running(resources: Resources, made: list[Any]) -> None:
    """Kill the worker or its container as soon as a sandbox is leased and has had time to start its program."""
    await until_running(resources)
    box = made[0]
    if isinstance(box, LocalSandbox):
        assert box.process is not None
        os.kill(box.process.pid, signal.SIGKILL)
    else:
        assert isinstance(box, DockerSandbox)
        await asyncio.to_thread(box._client.api.kill, box.container_id)


async def test_a_sandbox_killed_in_mid_call_voids_the_episode(
    codec: ChatCodec, setup: Setup, either: Resources
) -> None:
    made = watch(either)
    episode = asyncio.ensure_future(play([call(setup, SLOW), "\\boxed{1}"], codec, setup, either))
    await kill_when_running(either, made)
    trajectory: Trajectory = await asyncio.wait_for(episode, 30)
    assert trajectory.is_void
    assert trajectory.stop == "failure"
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "sandbox"
    assert trajectory.failure.where == "turn 1, call 1 of 1, tool python"
    # The model saw nothing of it: the last thing in the stream is its own call.
    assert trajectory.messages[-1]["role"] == "assistant"
    assert trajectory.loss_mask[-1]
    again: Trajectory = await play([call(setup, "print(5)"), "\\boxed{1}"], codec, setup, either)
    assert again.messages[-2]["content"] == "5"  # a fresh sandbox took its place


async def test_an_exception_in_model_code_is_an_observation(codec: ChatCodec, setup: Setup, either: Resources) -> None:
    trajectory = await play([call(setup, "print('before'); 1/0"), "\\boxed{1}"], codec, setup, either)
    assert not trajectory.is_void
    seen = trajectory.messages[-2]["content"]
    assert seen.startswith("before")
    assert seen.endswith("ZeroDivisionError: division by zero")
    assert trajectory.terms["tool"] == 0.0


async def test_engine_and_grader_failures_void_too(
    codec: ChatCodec, setup: Setup, resources: Resources, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = await play([EngineFailure("gone")], codec, setup, resources)
    assert broken.failure is not None
    assert (broken.is_void, broken.failure.kind) == (True, "engine")

    def fail(gold: str, answer: str) -> bool:
        raise ValueError("broken")

    monkeypatch.setattr("envs.arithmetic.same_exactly", fail)
    ungraded = await play(["\\boxed{1}"], codec, setup, resources)
    assert ungraded.failure is not None
    assert (ungraded.is_void, ungraded.failure.kind) == (True, "grader")


async def test_a_cancelled_episode_gives_its_sandbox_back(codec: ChatCodec, setup: Setup, either: Resources) -> None:
    episode = asyncio.ensure_future(play([call(setup, SLOW)], codec, setup, either))
    await until_running(either)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    again = await asyncio.wait_for(play([call(setup, "print(5)"), "\\boxed{1}"], codec, setup, either), 30)
    assert again.messages[-2]["content"] == "5"


def statistics(count: int) -> TokenStatistics:
    generator = torch.Generator().manual_seed(count)
    return TokenStatistics(
        -torch.rand(count, generator=generator) * 5,
        torch.rand(count, generator=generator),
        torch.rand(count, generator=generator) - 0.5,
    )


def trajectory_of(group: int, member: int, reward: float | None, setup: Setup) -> Trajectory:
    length = 4 + 3 * group + 2 * member
    return Trajectory(
        task=setup.tasks.task(group),
        group=group,
        member=member,
        token_ids=tuple(range(length)),
        loss_mask=tuple(i > 1 for i in range(length)),
        logprobs=tuple(-1.0 if i > 1 else 0.0 for i in range(length)),
        turns=(),
        messages=(),
        reward=reward,
        stop="answer" if reward is not None else "failure",
    )


def test_void_rows_leave_no_trace_in_the_plan(setup: Setup) -> None:
    """Advantages, chosen tokens, N and the batch entropy are those of a batch without the void rows, bit for bit."""
    rewards: list[list[float | None]] = [[1.0, None, 0.0, 0.5], [None, 1.0, 0.0, 0.0], [None, None, None, 1.0]]
    everyone = [trajectory_of(g, m, r, setup) for g, row in enumerate(rewards) for m, r in enumerate(row)]
    scored = [t for t in everyone if not t.is_void]
    plans = []
    for trajectories in (everyone, scored):
        batch = update_batch(trajectories)
        controllers = {"default": Controller.start(ControllerConfig(target_entropy=9.0))}
        options = PlanOptions(variant="C2", fraction=0.2)
        plans.append(make_plan(batch, statistics(batch.num_tokens), controllers, options))
        assert {t.group for t in batch.trajectories} == {0, 1}  # a lone survivor has nothing to be compared with
    for name in ("coefficient_T", "advantage_T", "omega_T"):
        assert torch.equal(getattr(plans[0], name), getattr(plans[1], name)), name
    for name in ("l_plus_T", "l_minus_T"):
        assert torch.equal(getattr(plans[0].sets, name), getattr(plans[1].sets, name)), name
    assert plans[0].entropy == plans[1].entropy
    assert plans[0].controllers == plans[1].controllers


async def test_lost_members_are_refilled_by_the_same_prompt(
    codec: ChatCodec, setup: Setup, resources: Resources
) -> None:
    engine = ScriptedEngine(codec, [EngineFailure("once"), EngineFailure("once"), "\\boxed{1}"])
    engine.completions = []
    calls = {"count": 0}
    real = engine.generate

    async def failing_twice(*args: Any, **kwargs: Any) -> Any:
        calls["count"] += 1
        if calls["count"] <= 2:
            raise EngineFailure("once")
        engine.script = ["\\boxed{1}"]
        return await real(*args, **kwargs)

    engine.generate = failing_twice  # type: ignore[method-assign]
    config = CONFIG.model_copy(update={"max_refills": 2, "group": 3})
    collector = Collector(lambda: setup.make_env(resources), engine=engine, codec=codec, config=config, seed=0)
    trajectories = (await collector.groups([setup.tasks.task(0)], 1)).trajectories
    assert sum(t.is_void for t in trajectories) == 2
    assert sorted(t.member for t in trajectories if not t.is_void) == [0, 1, 2]


async def test_failures_in_a_row_stop_the_run_in_one_line(codec: ChatCodec, setup: Setup, resources: Resources) -> None:
    config = CONFIG.model_copy(update={"max_failures": 3, "group": 8})
    engine = ScriptedEngine(codec, [EngineFailure("the engine is gone")])
    collector = Collector(lambda: setup.make_env(resources), engine=engine, codec=codec, config=config, seed=0)
    with pytest.raises(TooManyFailures, match=r"3 episodes in a row failed on our side.*the engine is gone"):
        await collector.groups([setup.tasks.task(0)], 1)


def test_a_reward_of_none_is_not_zero(setup: Setup) -> None:
    trajectory = trajectory_of(0, 0, 0.0, setup)
    assert not trajectory.is_void
    assert replace(trajectory, reward=None).is_void
