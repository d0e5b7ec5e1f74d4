"""ARPO's branches: the same ids up to a tool's answer, groups of the same size whatever fails, the same run twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timed import run

from agent_rl.collect import Collector
from agent_rl.config import LearnerConfig, RolloutConfig
from agent_rl.engines.base import EngineFailure
from agent_rl.engines.transformers import TransformersEngine
from agent_rl.learner import Learner
from agent_rl.models import load_model
from agent_rl.pack import pack
from agent_rl.plan import update_batch
from agent_rl.records import rollout_metrics
from agent_rl.types import Generation, Sampling, Trajectory
from envs.types import Failure, ModelTurn, Opening, Task, ToolCall, TurnResult

CALL = ToolCall(status="ok", name="tool", arguments={})
ALWAYS = {"threshold": 1.0, "weight": 0.0}
NEVER = {"threshold": 0.0, "weight": 0.0}


class Codec:
    """A turn is its ids as text; a tool's answer is one id."""

    tokenizer = range(64)
    stop_token_ids = (1,)

    def open(self, opening: Opening) -> list[int]:
        return [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]

    def extend(self, finish: str, messages: Any) -> list[int]:
        return [4, *(int(message["content"]) for message in messages)]

    def decode(self, ids: Sequence[int], finish: str) -> str:
        return " ".join(map(str, ids))


class Env:
    """Three turns, the first two of which call a tool; the answer is a function of all that was written."""

    opened = 0
    drift: Any = None  # a counter: answers that are no function of what was written

    def __init__(self, rng: random.Random, failures: float) -> None:
        self.rng, self.failures = rng, failures

    async def areset(self, seed: int, task: Task) -> Opening:
        self.seen = str(seed)
        self.turns = 0
        self.is_open = True
        return Opening(messages=(), tools=())

    async def astep(self, turn: ModelTurn) -> TurnResult:
        await asyncio.sleep(self.rng.random() * 2e-3)
        if self.rng.random() < self.failures:
            failure = Failure(kind="sandbox", where="tool", detail="injected")
            return TurnResult(messages=(), reward=None, terms={}, stop="failure", calls=(CALL,), failure=failure)
        self.turns += 1
        self.seen += turn.text
        value = random.Random(self.seen).random()
        if self.turns == 3:
            return TurnResult(messages=(), reward=value, terms={}, stop="answer", calls=())
        answer = next(Env.drift) % 30 if Env.drift else int(30 * value)
        message = {"role": "tool", "content": str(30 + answer)}
        return TurnResult(messages=(message,), reward=None, terms={}, stop=None, calls=(CALL,))

    async def aclose(self) -> None:
        Env.opened -= 1


class Engine:
    """Ids by the seed of the request alone, in any order of time; sometimes it fails."""

    max_model_len = 1000
    weight_version = 0

    def __init__(self, rng: random.Random, failures: float) -> None:
        self.rng, self.failures = rng, failures
        self.joined: set[str] = set()
        self.asked: Counter[int] = Counter()

    def join(self, episode_id: str) -> None:
        self.joined.add(episode_id)

    def leave(self, episode_id: str) -> None:
        self.joined.discard(episode_id)

    async def generate(self, prompt_ids: Any, sampling: Sampling, *, request_id: str) -> Generation:
        assert request_id in self.joined, "an episode asks that has not joined"
        self.asked[sampling.top_logprobs] += 1
        await asyncio.sleep(self.rng.random() * 2e-3)
        if self.rng.random() < self.failures:
            raise EngineFailure("injected")
        own = random.Random(sampling.seed)
        ids = (*(own.randrange(20, 10**6) for _ in range(3)), 1)
        top = tuple((-0.7,) * sampling.top_logprobs for _ in ids) if sampling.top_logprobs else None
        return Generation(
            token_ids=ids,
            logprobs=tuple(-own.random() for _ in ids),
            finish_reason="stop",
            weight_version=0,
            top_logprobs=top,
        )


def collected(
    engine: Any,
    *,
    latencies: int = 0,
    failures: float = 0.0,
    groups: int = 2,
    arpo: dict[str, Any] | None = None,
    **config: Any,
) -> tuple[Trajectory, ...]:
    rng = random.Random(latencies)

    def make_env() -> Env:
        Env.opened += 1
        return Env(rng, failures)

    Env.opened = 0
    strategy = {"sampling": ("arpo_branching",), "options": {"arpo_branching": arpo}} if arpo is not None else {}
    settings = RolloutConfig(**{"group": 6, "max_refills": 50, "max_failures": 10_000, **strategy, **config})
    collector = Collector(make_env, engine=engine, codec=Codec(), config=settings, seed=0)  # type: ignore[arg-type]
    tasks = [Task(id=str(number), prompt="") for number in range(groups)]
    result = run(collector.groups(tasks, 1, first_group=3))
    assert Env.opened == 0, "an environment was not closed"
    return tuple(replace(trajectory, seconds={}) for trajectory in result.trajectories)


def assert_branches_are_right(trajectories: Sequence[Trajectory], beam: int) -> None:
    """Each took its first ids, logprobs and turns from another member, up to an answer; few from each place."""
    places: Counter[tuple[int, tuple[int, ...]]] = Counter()
    for branch in trajectories:
        if not branch.trunk:
            continue
        end = branch.trunk
        same = [
            other
            for other in trajectories
            if (other.group, other.member) != (branch.group, branch.member)
            and other.token_ids[:end] == branch.token_ids[:end]
            and other.loss_mask[:end] == branch.loss_mask[:end]
            and other.logprobs[:end] == branch.logprobs[:end]
            and [t for t in other.turns if t.end <= end] == [t for t in branch.turns if t.end <= end]
        ]
        assert same, "nobody has this trunk"
        assert not branch.loss_mask[end - 1], "a trunk ends with what the environment said"
        if not branch.is_void:
            assert branch.loss_mask[end]
            assert branch.turns[-1].start >= end
            places[branch.group, branch.token_ids[:end]] += 1
        for other in same:
            if not branch.is_void and not other.is_void and (other.trunk or 0) <= end:  # not a branch of this branch
                assert other.token_ids[end : end + 3] != branch.token_ids[end : end + 3]
    assert all(number <= beam - 1 for number in places.values())


@settings(max_examples=40)
@given(
    seed=st.integers(0, 99),
    failures=st.sampled_from([0.0, 0.15]),
    concurrency=st.one_of(st.none(), st.integers(1, 9)),
    beam=st.integers(2, 4),
    initial=st.integers(1, 5),
    threshold=st.sampled_from([0.3, 1.0]),
)
def test_a_group_has_all_its_members_once_whatever_fails(
    seed: int, failures: float, concurrency: int | None, beam: int, initial: int, threshold: float
) -> None:
    engine = Engine(random.Random(seed), failures)
    arpo = {"beam": beam, "initial": initial, "threshold": threshold}
    trajectories = collected(engine, latencies=seed, failures=failures, concurrency=concurrency, arpo=arpo)
    whole = [(t.group, t.member) for t in trajectories if not t.is_void]
    assert whole == [(group, member) for group in (3, 4) for member in range(6)]
    assert not engine.joined
    assert_branches_are_right(trajectories, beam)
    assert all(t.trunk is None for t in trajectories if t.member < initial)


def test_where_branching_is_certain_it_fills_the_group_and_where_it_is_not_members_start_from_the_prompt() -> None:
    engine = Engine(random.Random(0), 0.0)
    always = collected(engine, arpo={"initial": 2, **ALWAYS})
    assert [t.trunk is not None for t in always] == [False, False, True, True, True, True] * 2
    assert engine.asked[0] > 0  # nothing is asked for once a group is full
    never = collected(Engine(random.Random(0), 0.0), arpo={"initial": 2, **NEVER})
    assert all(t.trunk is None for t in never)
    plain = collected(Engine(random.Random(0), 0.0))
    assert never == plain  # the same members, seeds and ids as without branching
    row = rollout_metrics(always, update_batch(always))
    assert (row["branches"], row["branches_given_up"]) == (8, 0)
    assert row["branched_tokens"] == sum(t.trunk or 0 for t in always)


def test_a_branch_whose_environment_answers_otherwise_starts_from_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Env, "drift", count())
    trajectories = collected(Engine(random.Random(0), 0.0), groups=1, arpo={"initial": 3, **ALWAYS})
    assert [t.trunk for t in trajectories] == [None, None, None, 0, 0, 0]
    assert all(len(t.turns) == 3 and t.turns[0].start == 10 for t in trajectories)
    assert rollout_metrics(trajectories, update_batch(trajectories))["branches_given_up"] == 3


@pytest.mark.parametrize("concurrency", [None, 3])
def test_the_embedded_engine_gives_the_same_groups_whatever_was_slow(
    tiny_folder: Path, concurrency: int | None
) -> None:
    def once(latencies: int) -> tuple[Trajectory, ...]:
        engine = TransformersEngine(load_model(tiny_folder, "float32"), max_model_len=200)
        arpo = {"threshold": 0.8, "initial": 4}  # more branches are wanted than the group has room for
        return collected(engine, latencies=latencies, arpo=arpo, max_tokens=5, groups=3, concurrency=concurrency)

    first = once(1)
    assert {t.trunk for t in first} > {None}
    assert all(once(latencies) == first for latencies in range(2, 6))


def test_branches_share_their_trunk_in_the_learner_and_leave_the_same_gradient(tiny_folder: Path) -> None:
    engine = TransformersEngine(load_model(tiny_folder, "float32"), max_model_len=200)
    batch = update_batch(collected(engine, groups=1, arpo={"initial": 2, "beam": 5, **ALWAYS}, max_tokens=8))
    assert len(batch.trajectories) == 6
    slots = {
        layout: sum(m.num_slots for m in pack(batch.sequences, layout=layout, token_budget=10_000)[0])
        for layout in ("packed", "shared")
    }
    beginnings = {s.token_ids[: n + 1] for s in batch.sequences for n in range(len(s.token_ids))}
    assert slots["shared"] == len(beginnings)
    assert slots["shared"] <= slots["packed"] - sum(t.trunk or 0 for t in batch.trajectories)

    def moved(layout: str) -> dict[str, torch.Tensor]:
        settings: Any = {"layout": layout, "optimizer": "sgd", "lr": 1.0, "grad_clip": 1e6}
        learner = Learner(load_model(tiny_folder, "float32"), LearnerConfig(**settings), temperature=1.0)
        learner.step(learner.pack(batch.sequences), batch.advantage_T.float() / batch.num_tokens, None)
        tensors = {name: tensor.clone() for name, tensor in learner.named_tensors()}
        learner.close()
        return tensors

    before = dict(load_model(tiny_folder, "float32").named_parameters())
    padded, shared = moved("padded"), moved("shared")
    size = torch.cat([(padded[name] - before[name]).flatten() for name in before]).norm()
    gap = torch.cat([(padded[name] - shared[name]).flatten() for name in before]).norm()
    assert size > 1e-3
    assert gap < 1e-5 * size
