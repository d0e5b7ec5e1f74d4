"""Which prompts are drawn and which rollouts are learned from: by name, composable, exact after a resume."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agent_rl import checkpoint
from agent_rl.algorithm import Algorithm
from agent_rl.checkpoint import RunState
from agent_rl.config import ConfigError, RunConfig, load_config
from agent_rl.plan import update_batch
from agent_rl.records import rollout_metrics
from agent_rl.sampling import SamplingState, StepSampling, Strategies, with_overlong_penalty
from agent_rl.seeds import shuffled_index
from agent_rl.setup import preflight
from agent_rl.types import Trajectory, Turn
from envs.data import TaskList
from envs.types import Task
from stare.neighbours.advantages import grpo

SIZE = 7
TASKS = TaskList([Task(id=str(number), prompt=f"question {number}") for number in range(SIZE)])
GROUP = 4


def sampling(state: SamplingState, step: int, *names: str, tasks: TaskList = TASKS, **options: Any) -> StepSampling:
    strategies = Strategies.of(names, options, group=GROUP, max_episode_tokens=100)
    return StepSampling(strategies, state, tasks, group=GROUP, seed=5, step=step)


def rollouts(tasks: list[Task], rewards: list[list[float | None]], salt: int = 0) -> list[Trajectory]:
    """Prompt of two ids, then turns of two and one with an observed id between them."""
    return [
        Trajectory(
            task=task,
            group=group,
            member=member,
            token_ids=(2, 3, 10 + salt, 20 + group, 4, 30 + member),
            loss_mask=(False, False, True, True, False, True),
            logprobs=(0.0, 0.0, -0.1 - salt, -0.3, 0.0, -1 / 3),
            turns=(
                Turn(start=2, end=4, weight_version=salt, finish_reason="stop", call_statuses=("ok",)),
                Turn(start=5, end=6, weight_version=salt, finish_reason="stop"),
            ),
            messages=({"role": "user", "content": task.prompt},),
            reward=reward,
            terms={} if reward is None else {"correct": float(reward > 0.5)},
        )
        for group, (task, row) in enumerate(zip(tasks, rewards, strict=True))
        for member, reward in enumerate(row)
    ]


def through_a_checkpoint(state: SamplingState, folder: Path) -> SamplingState:
    whole = RunState(step=1, cursor=2, seed=5, controllers={}, sampling=state)
    return checkpoint.read_state(checkpoint.save(folder, whole, lambda path: None, keep=1)).sampling


def test_without_strategies_the_run_takes_prompts_in_its_order_and_learns_from_all() -> None:
    step = sampling(SamplingState(), 1)
    tasks = step.draw(3, 2)
    assert [task.id for task in tasks] == [str(shuffled_index(cursor, SIZE, 5)) for cursor in (3, 4)]
    trajectories = rollouts(tasks, [[1.0, 0.0, 0.0, None], [1.0, 1.0, 1.0, 1.0]])
    batch, plain = step.batch(trajectories, Algorithm()), update_batch(trajectories)
    assert batch.trajectories == plain.trajectories
    assert torch.equal(batch.advantage_B, plain.advantage_B)
    assert step.after(trajectories) == SamplingState()


# VADE


def test_vade_draws_each_prompt_once_until_all_are_drawn_and_the_same_ones_again() -> None:
    for step in range(20):
        draws = [sampling(SamplingState(), step, "vade") for _ in range(2)]
        first = [task.id for count in (2, 3, 4) for task in draws[0].draw(0, count)]
        assert sorted(first[:SIZE]) == sorted(str(number) for number in range(SIZE))
        assert first[SIZE:] == first[: 9 - SIZE]
        assert [task.id for task in draws[1].draw(0, 9)] == first  # in whatever rounds they are asked for
    orders = {tuple(t.id for t in sampling(SamplingState(), step, "vade").draw(0, SIZE)) for step in range(20)}
    assert len(orders) > 10


def test_vade_prefers_prompts_that_are_neither_solved_nor_hopeless(tmp_path: Path) -> None:
    state = SamplingState()
    for step in range(8):
        one = sampling(state, step, "vade", vade={"decay": 1.0})
        tasks = one.draw(0, SIZE)
        rows: list[list[float | None]] = [
            [1.0, 0.0, 1.0, 0.0] if task.id == "4" else [float(int(task.id) % 2)] * GROUP for task in tasks
        ]
        state = one.after(rollouts(tasks, rows))
    beliefs = {prompt: (right, wrong) for prompt, right, wrong in state.beliefs}
    assert beliefs == {n: (16.0, 16.0) if n == 4 else (32.0, 0.0) if n % 2 else (0.0, 32.0) for n in range(SIZE)}
    state = through_a_checkpoint(state, tmp_path)
    first = Counter(sampling(state, step, "vade").draw(0, 1)[0].id for step in range(100))
    assert first["4"] == 100


def test_vade_counts_right_by_the_term_and_forgets_by_its_decay() -> None:
    one = sampling(SamplingState(beliefs=((3, 2.0, 1.0),)), 1, "vade", vade={"decay": 0.5})
    tasks = one.draw(0, 2)
    trajectories = rollouts(tasks, [[0.9, 0.1, None, 0.1], [0.2, 0.2, 0.2, 0.2]])
    trajectories[1] = replace(trajectories[1], terms={"correct": 1.0})
    beliefs = {prompt: (right, wrong) for prompt, right, wrong in one.after(trajectories).beliefs}
    expected = {int(tasks[0].id): [2.0, 1.0], int(tasks[1].id): [0.0, 4.0]}
    expected.setdefault(3, [0.0, 0.0])
    expected[3] = [expected[3][0] + 1.0, expected[3][1] + 0.5]
    assert beliefs == {prompt: tuple(counts) for prompt, counts in expected.items()}


# D3S


@given(rewards=st.lists(st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=4, max_size=4), min_size=1, max_size=4))
def test_d3s_learns_from_the_kept_with_the_advantages_of_the_whole_group(rewards: list[list[float | None]]) -> None:
    step = sampling(SamplingState(), 1, "d3s_samples", d3s_samples={"keep": 2})
    trajectories = rollouts(step.draw(0, len(rewards)), rewards)
    for algorithm in (Algorithm(), Algorithm(advantage="trloo")):
        whole, batch = update_batch(trajectories, algorithm), step.batch(trajectories, algorithm)
        places = {(t.group, t.member): row for row, t in enumerate(whole.trajectories)}
        rows = [places[t.group, t.member] for t in batch.trajectories]
        assert rows == sorted(rows)
        assert torch.equal(batch.advantage_B, whole.advantage_B[rows])
        parts = torch.split(whole.advantage_T, whole.num_tokens_B.tolist())
        expected = torch.cat([parts[row] for row in rows]) if rows else torch.zeros(0)
        assert torch.equal(batch.advantage_T.double(), expected.double())
        assert [s.token_ids for s in batch.sequences] == [t.token_ids for t in batch.trajectories]
    batch = step.batch(trajectories, Algorithm())
    for group, row in enumerate(rewards):
        kept = [t.reward for t in batch.trajectories if t.group == group]
        assert sorted(kept) == ([min(row), max(row)] if min(row) < max(row) else [])  # type: ignore[type-var]
    metrics = rollout_metrics(trajectories, batch)
    assert metrics["dropped"] == len(batch.trajectories)
    assert metrics["recalled"] == 0


# R^3


def test_r3_recalls_the_newest_of_another_reward_with_its_old_logprobs(tmp_path: Path) -> None:
    state = SamplingState()
    for number, rewards in enumerate(([1.0, 0.0, 0.0, None], [0.0, 0.0, 0.5, 0.0])):
        one = sampling(state, number, "cross_context_replay")
        tasks = one.draw(0, 1)
        state = one.after(rollouts(tasks, [rewards], salt=number))
    assert [(r.prompt, r.reward) for r in state.remembered] == [(int(tasks[0].id), r) for r in (1.0, 0.5, 0.0)]
    assert through_a_checkpoint(state, tmp_path) == state

    one = sampling(through_a_checkpoint(state, tmp_path), 2, "cross_context_replay")
    now = rollouts(one.draw(0, 2), [[0.0, 0.0, None, 0.0], [0.0] * GROUP], salt=2)
    (recalled,) = one.recalled(now)  # nothing is known of the second prompt
    source = rollouts(tasks, [[0.0, 0.0, 0.5, 0.0]], salt=1)[2]
    assert recalled == replace(source, member=GROUP, messages=())
    batch = one.batch(now, Algorithm())
    assert [(t.group, t.member) for t in batch.trajectories] == [(0, 0), (0, 1), (0, 3), (0, GROUP)]
    rewards_B = torch.tensor([0.0, 0.0, 0.0, 0.5], dtype=torch.float64)
    assert torch.equal(batch.advantage_B, grpo(rewards_B, torch.zeros(4, dtype=torch.int64)))
    assert batch.sampler_logp_T[-3:].tolist() == pytest.approx([-1.1, -0.3, -1 / 3])
    assert rollout_metrics(now, batch)["recalled"] == 1
    after = one.after(now)
    assert [r.reward for r in after.remembered] == [1.0, 0.5, 0.0, 0.0]  # what was recalled is not new again
    assert recalled not in rollouts(tasks, [[0.5]])


def test_r3_leaves_groups_with_a_difference_alone_and_forgets_the_oldest() -> None:
    state = SamplingState()
    for number in range(6):
        one = sampling(state, number, "cross_context_replay", cross_context_replay={"capacity": 3})
        tasks = one.draw(number, 1)
        state = one.after(rollouts(tasks, [[0.0, 0.25, 0.5, 1.0]], salt=number))
        assert [r.reward for r in state.remembered] == [0.25, 0.5, 1.0]
        assert {r.prompt for r in state.remembered} == {int(tasks[0].id)}
    one = sampling(state, 7, "cross_context_replay")
    assert one.recalled(rollouts(one.draw(5, 1), [[1.0, 0.0, 0.0, 0.0]])) == []
    assert one.recalled(rollouts(one.draw(5, 1), [[None] * GROUP])) == []


# DAPO's price on length


@pytest.mark.parametrize(
    ("options", "limit", "penalty"),
    [
        ({"most": 5, "buffer": 4, "factor": 0.5}, 100, -0.25),  # of three sampled tokens, two are beyond one
        ({"most": 3, "buffer": 1}, 100, -1.0),
        ({"most": 7, "buffer": 4}, 100, 0.0),
        ({"buffer": 2}, 4, -0.5),
        ({}, 10, 0.0),
    ],
)
def test_length_is_paid_for_by_the_sampled_token(options: dict[str, Any], limit: int, penalty: float) -> None:
    chosen = Strategies.of(["overlong_penalty"], {"overlong_penalty": options}, group=2, max_episode_tokens=limit)
    assert chosen.overlong is not None
    right, void = rollouts([Task(id="0", prompt="question")], [[1.0, None]])
    paid = with_overlong_penalty(right, chosen.overlong, limit)
    assert (paid.reward, paid.terms) == (1.0 + penalty, {"correct": 1.0, "overlong": penalty})
    assert with_overlong_penalty(void, chosen.overlong, limit) is void


# Together, and by name


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--rollout.sampling", '["arpo"]'], "did you mean 'arpo_branching'"),
        (["--rollout.sampling", '["gspo"]'], "is of hook 'ratio'"),
        (["--rollout.sampling", '["adhint"]'], "cannot be trained with"),
        (["--rollout.sampling", '["dynamic_sampling"]'], "always on: rollout.max_rounds"),
        (["--rollout.sampling", '["vade"]', "--rollout.leftovers", "keep"], "'vade' needs 'cancel'"),
        (["--rollout.options.vade.decay", "0.5"], "options for 'vade', which is not chosen"),
        (["--rollout.sampling", '["vade"]', "--rollout.options.vade.rate", "1"], "vade has no option 'rate': decay"),
        (["--rollout.sampling", '["vade"]', "--rollout.options.vade.decay", "2"], "vade: decay = 2: "),
        (
            ["--rollout.sampling", '["d3s_samples"]', "--rollout.options.d3s_samples.keep", "8"],
            "keep = 8 drops nothing of groups of 8",
        ),
        (
            ["--rollout.sampling", '["arpo_branching"]', "--rollout.options.arpo_branching.initial", "8"],
            "initial = 8 leaves no branch in groups of 8",
        ),
        (
            ["--rollout.sampling", "overlong_penalty", "--rollout.options.overlong_penalty.most", "99999"],
            "most - buffer = 80000 sampled tokens, where it begins, is not between 0",
        ),
        (
            [
                *["--rollout.sampling", "overlong_penalty", "--rollout.options.overlong_penalty.most", "100"],
                *["--rollout.options.overlong_penalty.buffer", "101"],
            ],
            "most - buffer = -1 sampled tokens",
        ),
    ],
)
def test_what_cannot_be_is_said(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("quickstart", overrides)


def test_recalled_rollouts_are_corrected_for_their_age() -> None:
    names = ["--rollout.sampling", '["cross_context_replay"]']
    assert load_config("quickstart", names).chosen_algorithm.correction == "tis"
    assert load_config("quickstart", ["--rollout.sampling", '["vade"]']).chosen_algorithm.correction == "none"
    assert load_config("quickstart", [*names, "--stare.score", "reuse"]).chosen_algorithm.correction == "none"


async def test_vade_wants_a_bounded_source(quick_config: RunConfig) -> None:
    overrides = ["--rollout.sampling", '["vade"]', "--sandbox.kind", "local", "--task.options.size"]
    with pytest.raises(ConfigError, match=r"at most 1,000,000: agentic/Arithmetic-v1 has 1,000,001"):
        await preflight(load_config("quickstart", [*overrides, "1000001"]), Console(quiet=True))


SETTINGS = (
    "--threads 1 --sandbox.kind local --rollout.prompts 3 --rollout.group 6 --rollout.max_tokens 30 "
    "--cold_start.steps 45 --cold_start.batch 24 --cold_start.guesses 0 --task.options.size 5 "
    "--checkpoint.every 2 --records.trajectories 18 --learner.lr 1e-3 --learner.layout shared "
    "--rollout.options.arpo_branching.threshold 1.0"
).split()
STRATEGIES = ["--rollout.sampling", '["arpo_branching", "vade", "cross_context_replay", "d3s_samples"]']


def trained(output: Path, steps: int) -> list[dict[str, Any]]:
    """Metrics rows of the run, without the wall clock's readings."""
    command = [sys.executable, "-m", "agent_rl", "train", "quickstart", "--output", str(output), "--steps", str(steps)]
    done = subprocess.run([*command, *SETTINGS, *STRATEGIES], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    lines = (output / "quickstart" / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("seconds")} for line in lines]


@pytest.mark.slow
def test_a_run_with_all_strategies_goes_on_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", 4)
    for name in ("cold_start", "tiny"):
        shutil.copytree(tmp_path / "whole" / "quickstart" / name, tmp_path / "parts" / "quickstart" / name)
    assert trained(tmp_path / "parts", 2) == whole[:2]
    assert trained(tmp_path / "parts", 4) == whole
    models = [(tmp_path / name / "quickstart" / "model" / "model.safetensors") for name in ("whole", "parts")]
    assert models[0].read_bytes() == models[1].read_bytes()
    assert all(row["episodes"] == 18 and row["void"] == 0 for row in whole)
    assert sum(row["branches"] for row in whole) > 8
    assert sum(row["branches_given_up"] for row in whole) == 0
    assert sum(row["dropped"] for row in whole) > 8
    assert sum(row["recalled"] for row in whole) > 0
    assert sum(row["tool_calls"] for row in whole) > 0
    records = (tmp_path / "whole" / "quickstart" / "trajectories.jsonl").read_text().splitlines()
    assert any(json.loads(line)["trunk"] for line in records)
