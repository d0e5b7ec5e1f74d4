"""Admission, refills and early stop, with random latencies, cancellations and failures injected."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timed import Codec, Seats, run

from agent_rl.collect import Collector
from agent_rl.config import RolloutConfig
from agent_rl.engines.base import EngineFailure
from agent_rl.types import Generation, Sampling
from envs.types import ModelTurn, Opening, Task, TurnResult


class Engine(Seats):
    """Answers after a random while, or fails."""

    def __init__(self, rng: random.Random, failures: float = 0.0) -> None:
        super().__init__()
        self.rng, self.failures = rng, failures

    async def generate(self, prompt_ids: Any, sampling: Sampling, *, request_id: str) -> Generation:
        with self.asking(request_id):
            await asyncio.sleep(self.rng.random() * 2e-3)
            if self.rng.random() < self.failures:
                raise EngineFailure("injected")
        return Generation(token_ids=(7, 1), logprobs=(-1.0, -1.0), finish_reason="stop", weight_version=0)


class Env:
    """Some turns long; the reward is the task's business."""

    opened = 0

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    async def areset(self, seed: int, task: Task) -> Opening:
        Env.opened += 1
        self.task, self.left = task, self.rng.randint(1, 4)
        return Opening(messages=(), tools=())

    async def astep(self, turn: ModelTurn) -> TurnResult:
        await asyncio.sleep(self.rng.random() * 2e-3)
        self.left -= 1
        if self.left:
            return TurnResult(messages=({"role": "tool", "content": ""},), reward=None, terms={}, stop=None, calls=())
        reward = self.rng.random() if self.task.answer == "differs" else 1.0
        return TurnResult(messages=(), reward=reward, terms={}, stop="answer", calls=())

    async def aclose(self) -> None:
        Env.opened -= 1


def collected(tasks: list[str], seed: int, *, failures: float = 0.0, enough: int | None = None, **config: Any) -> Any:
    Env.opened = 0
    rng = random.Random(seed)
    engine = Engine(rng, failures)
    config = {"group": 3, "max_refills": 50, "max_failures": 10_000, **config}
    collector = Collector(
        lambda: Env(rng),
        engine=engine,
        codec=Codec(),
        config=RolloutConfig(**config),
        seed=0,  # type: ignore[arg-type]
    )
    todo = [Task(id=str(i), prompt="", answer=answer) for i, answer in enumerate(tasks)]
    result = run(collector.groups(todo, 1, first_group=5, enough=enough))
    assert not +engine.joined, "an episode has not left"
    assert Env.opened == 0, "an environment was not closed"
    assert engine.at_once == 0
    return result, engine


@settings(max_examples=25)
@given(
    seed=st.integers(0, 99),
    groups=st.integers(1, 5),
    concurrency=st.one_of(st.none(), st.integers(1, 20)),
    failures=st.sampled_from([0.0, 0.2]),
)
def test_every_member_comes_back_once_whatever_was_slow_or_lost(
    seed: int, groups: int, concurrency: int | None, failures: float
) -> None:
    result, engine = collected(["differs"] * groups, seed, failures=failures, concurrency=concurrency)
    whole = [(t.group, t.member) for t in result.trajectories if not t.is_void]
    assert whole == [(5 + group, member) for group in range(groups) for member in range(3)]
    assert result.cancelled_tokens == ()
    assert engine.most_at_once <= (concurrency or 3 * groups)
    for trajectory in result.trajectories:
        if not trajectory.is_void:
            assert trajectory.num_sampled == 2 * len(trajectory.turns)


@settings(max_examples=25)
@given(seed=st.integers(0, 99), concurrency=st.one_of(st.none(), st.integers(1, 20)))
def test_the_rest_is_cancelled_when_enough_groups_differ_inside(seed: int, concurrency: int | None) -> None:
    tasks = ["differs", "same", "differs", "same", "differs", "differs"]
    result, _ = collected(tasks, seed, enough=2, concurrency=concurrency)
    members = Counter(t.group for t in result.trajectories)
    # What had ended of other groups is left out: the shortest episodes of a group are no baseline for each other.
    assert set(members.values()) == {3}
    assert sum(tasks[group - 5] == "differs" for group in members) == 2
    for tokens in result.cancelled_tokens:
        assert tokens >= 0


def test_length_costs_every_member_where_it_is_asked_to() -> None:
    price = {"overlong_penalty": {"most": 8, "buffer": 4}}
    result, _ = collected(
        ["differs", "same", "same", "same"], 0, failures=0.1, sampling=("overlong_penalty",), options=price
    )
    told = {(t.num_sampled, t.terms["overlong"]) for t in result.trajectories if not t.is_void}
    assert told == {(2, 0.0), (4, 0.0), (6, -0.5), (8, -1.0)}
    assert all(t.reward == 1.0 + t.terms["overlong"] for t in result.trajectories if not t.is_void and t.group > 5)


def test_refills_end_and_leave_a_void_member() -> None:
    result, _ = collected(["differs"], 0, failures=1.0, max_refills=2)
    assert len(result.trajectories) == 9
    assert all(t.is_void for t in result.trajectories)


def test_a_completion_that_does_not_come_voids_its_episode_alone() -> None:
    class Hangs(Engine):
        async def generate(self, prompt_ids: Any, sampling: Sampling, *, request_id: str) -> Generation:
            if request_id.endswith("-001-0"):
                await asyncio.sleep(60)
            return await super().generate(prompt_ids, sampling, request_id=request_id)

    rng = random.Random(0)
    engine = Hangs(rng)
    config = RolloutConfig(group=3, wall_s=1.0, max_refills=0)
    collector = Collector(
        lambda: Env(rng),
        engine=engine,
        codec=Codec(),
        config=config,
        seed=0,  # type: ignore[arg-type]
    )
    result = run(collector.groups([Task(id="0", prompt="", answer="differs")], 1))
    void = [t for t in result.trajectories if t.is_void]
    assert [(t.member, t.failure.kind) for t in void if t.failure] == [(1, "time")]
    assert "raise it, or lower rollout.concurrency" in void[0].failure.detail
    assert not +engine.joined


@pytest.mark.parametrize("lanes", [1, 2])
def test_admission_is_in_order(lanes: int) -> None:
    started: list[str] = []

    class Watched(Env):
        async def areset(self, seed: int, task: Task) -> Opening:
            started.append(task.id)
            return await super().areset(seed, task)

    rng = random.Random(0)
    config = RolloutConfig(group=2, concurrency=lanes)
    collector = Collector(
        lambda: Watched(rng),
        engine=Engine(rng),
        codec=Codec(),
        config=config,
        seed=0,  # type: ignore[arg-type]
    )
    run(collector.groups([Task(id=str(i), prompt="", answer="differs") for i in range(4)], 1))
    assert started == sorted(started)
