"""Our environments are Gymnasium's: registered, clean under its checker, vectorised, wrapped, in and out of a loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from envs_scripted import call
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit

import envs
from envs import Task
from envs.data import load_jsonl
from envs.facade import TextSpace
from envs.registration import make_env
from sandboxes import SandboxSpec

LOCAL = SandboxSpec(kind="local", size=1)


def gym_make(env_id: str, **settings: Any) -> Any:
    return gymnasium.make(env_id, sandbox=LOCAL, **settings)


def _answer(env_id: str) -> tuple[Task, str]:
    spec = envs.get(env_id)
    task = spec.tasks({}).task(0)
    return task, f"\\boxed{{{task.answer}}}"


@pytest.mark.parametrize(
    "program",
    [
        "import gymnasium; print(gymnasium.make('envs:agentic/Arithmetic-v1').spec.id.removeprefix('envs:'))",
        "import gymnasium, envs; print(gymnasium.spec('agentic/Arithmetic-v1').id)",
    ],
)
def test_gymnasium_finds_our_ids(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "agentic/Arithmetic-v1"


def test_a_package_adds_ids_by_its_entry_point(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(
        "from envs import EnvSpec, Task, TaskList, register\n"
        "def add():\n"
        "    tasks = lambda options: TaskList([Task(id='1', prompt='1+1', answer='2')])\n"
        "    register(EnvSpec(id='theirs/Tiny-v0', summary='s', tasks=tasks))\n"
    )
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[agentic.envs]\ntheirs = theirs:add\n")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import envs, gymnasium;"
        "envs.get('theirs/Tiny-v0'); e = gymnasium.make('theirs/Tiny-v0'); e.reset(seed=0);"
        "print('theirs/Tiny-v0' in envs.ids(), e.step(r'\\boxed{2}')[1]); e.close()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True 1.0"


def test_an_episode_by_reset_and_step() -> None:
    env = gym_make("agentic/Arithmetic-v1")
    task, box = _answer("agentic/Arithmetic-v1")
    observation, info = env.reset(seed=3, options={"task": task})
    assert (observation, info["task_id"]) == (task.prompt, task.id)
    observation, reward, terminated, truncated, info = env.step(call(code="print(6*7)"))
    assert (observation, reward, terminated, truncated, info["calls"]) == ("42", 0.0, False, False, ["ok"])
    _, reward, terminated, truncated, info = env.step(box)
    assert (reward, terminated, truncated, info["stop"], info["reward_valid"]) == (1.0, True, False, "answer", True)
    assert type(reward) is float
    env.close()
    env.close()


async def test_reset_and_step_work_inside_a_running_loop() -> None:
    await asyncio.sleep(0)
    env = gym_make("agentic/Arithmetic-v1")
    env.reset(seed=0)
    observation, *_ = env.step(call(code="print('in a loop')"))
    assert observation == "in a loop"
    env.close()


def test_a_group_of_the_same_seed_gets_the_same_task_in_a_vector() -> None:
    vector = gymnasium.make_vec(
        "agentic/Arithmetic-v1",
        num_envs=3,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED},
    )
    observations, _ = vector.reset(seed=[7, 7, 7])
    assert len(set(observations)) == 1
    assert len(set(vector.reset(seed=[1, 2, 3])[0])) == 3
    _, rewards, terminated, _, _ = vector.step(["no idea"] * 3)
    assert list(rewards) == [0.0] * 3
    assert all(terminated)
    vector.close()


def test_wrappers_count_turns_and_rewards() -> None:
    env = RecordEpisodeStatistics(TimeLimit(gym_make("agentic/Arithmetic-v1"), max_episode_steps=2))
    env.reset(seed=0)
    env.step(call(code="print(1)"))
    _, _, terminated, truncated, info = env.step(call(code="print(2)"))
    assert (terminated, truncated) == (False, True)
    assert info["episode"]["l"] == 2
    env.close()


def test_same_seed_and_actions_give_the_same_in_any_order_with_others_between() -> None:
    actions = [call(code="print(1)"), "<tool_call>x</tool_call>", "\\boxed{1}"]

    def episode(env: Any, between: Any = None) -> list[Any]:
        steps: list[Any] = [env.reset(seed=11)]
        for action in actions:
            if between is not None:
                between.step(call(code="print(9)"))
            steps.append(env.step(action))
        return steps

    first, second, other = (make_env(env_id="agentic/Arithmetic-v1", sandbox=LOCAL) for _ in range(3))
    alone = episode(first)
    other.reset(seed=99)
    assert episode(second, between=other) == alone
    for env in (first, second, other):
        env.close()


def test_tasks_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "import envs; s = envs.get('agentic/Arithmetic-v1').tasks({'seed': 5});print([s.task(i) for i in (0, 1, 999)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(outputs) == 1


def test_importing_envs_is_cheap() -> None:
    program = (
        "import sys, time; t = time.perf_counter(); import envs; s = time.perf_counter() - t;"
        "print(s, [m for m in ('torch', 'vllm', 'transformers', 'sympy', 'math_verify', 'mcp', 'openai', 'datasets',"
        " 'numba') if m in sys.modules])"
    )
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split(" ", 1)
        for _ in range(3)
    ]
    assert min(float(seconds) for seconds, _ in runs) < 1.0
    assert {loaded.strip() for _, loaded in runs} == {"[]"}


def test_an_unknown_id_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'agentic/Arithmetic-v1'"):
        envs.get("agentic/Arithmetik-v1")


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ('{"id": "a", "problem": "p", "answer": "1"}\n{"id"', ":2: not valid JSON"),
        ('{"id": "a", "answer": "1"}', ":1: field 'problem' is missing"),
        ('{"id": "a", "problem": "p", "answer": 1}', ":1: field 'answer' must be a non-empty string, not 1"),
        ('{"id": "a", "problem": "p", "answer": "1"}\n' * 2, ":2: id 'a' stands in line 1 already"),
        ("[1]", ":1: a row is an object"),
        ("", "has no rows"),
    ],
)
def test_bad_rows_are_named_by_file_and_line(tmp_path: Path, rows: str, complaint: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(rows)
    with pytest.raises(ValueError, match=r"rows\.jsonl") as caught:
        load_jsonl(file)
    assert complaint in str(caught.value)


def test_the_text_space_holds_any_text() -> None:
    space = TextSpace(seed=0)
    assert "two words\nand a line" in space
    assert 5 not in space
    assert TextSpace(seed=4).sample() == TextSpace(seed=4).sample()
