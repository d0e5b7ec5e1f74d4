"""Several environments as one: each task in its own, with its own tools, rewards and limits."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

import envs
from envs import Limits, ModelTurn
from envs.registration import make_env
from envs.trl import for_trl
from sandboxes import SandboxSpec

GSM8K = str(Path(__file__).parents[1] / "data" / "gsm8k_sample.jsonl")
LOCAL = SandboxSpec(kind="local", size=1)
PARTS = {
    "agentic/Maze-v1": {"weight": 3.0, "scenario": "tool_use"},
    "agentic/LongCoT-v1": {"options": {"path": GSM8K}},
}


def test_tasks_come_in_their_shares_and_know_where_they_belong() -> None:
    tasks = envs.get("agentic/Mixed-v1").tasks({"parts": PARTS})
    first = [tasks.task(index) for index in range(100)]
    assert Counter(task.meta["env"] for task in first) == {"agentic/Maze-v1": 75, "agentic/LongCoT-v1": 25}
    assert {(task.meta["env"], task.meta["scenario"]) for task in first} == {
        ("agentic/Maze-v1", "tool_use"),
        ("agentic/LongCoT-v1", "LongCoT"),
    }
    assert first[0].id.startswith("Maze/")


def test_each_task_is_played_by_its_own_rules() -> None:
    env = make_env(
        env_id="agentic/Mixed-v1",
        options={"parts": PARTS},
        sandbox=LOCAL,
        limits=Limits(max_turns=5, max_tool_calls=64, wall_s=60),
        weights={"correct": 2.0},
    )
    try:
        tasks = {task.meta["env"]: task for task in map(env.tasks.task, range(10))}
        maze = env.run(env.areset(0, tasks["agentic/Maze-v1"]))
        assert [tool["function"]["name"] for tool in maze.tools] == ["move"]
        assert (env.limits.max_turns, env.limits.max_calls_per_turn) == (5, 1)
        thinking = env.run(env.areset(0, tasks["agentic/LongCoT-v1"]))
        assert thinking.tools == ()
        assert "<think>" in str(thinking.messages[0]["content"])
        answer = f"<think>hm</think>\\boxed{{{tasks['agentic/LongCoT-v1'].answer}}}"
        end = env.run(env.astep(ModelTurn(text=answer, finish="stop")))
        assert (end.reward, end.terms) == (2.0, {"correct": 1.0, "thought": 1.0})
    finally:
        env.close()


def test_tools_that_come_with_the_tasks_find_a_sandbox_that_works_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment itself names no tools, and its default kind of sandbox is none to start."""

    async def here(spec: SandboxSpec) -> SandboxSpec:
        assert spec.kind == "auto"
        return LOCAL

    monkeypatch.setattr("envs.env.resolve", here)
    env = make_env(env_id="agentic/Mixed-v1", options={"parts": {"agentic/Arithmetic-v1": {}}})
    try:
        env.reset(seed=0)
        assert env.step(env.dialect.written("python", {"code": "print(6 * 7)"}))[0] == "42"
    finally:
        env.close()
    assert envs.get("agentic/Mixed-v1").may_call
    with pytest.raises(ValueError, match="other tools for each task"):
        for_trl("agentic/Mixed-v1", options={"parts": PARTS})


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"parts": {"agentic/Maze-v2": {}}}, "did you mean 'agentic/Maze-v1'"),
        ({"parts": {"agentic/ShortCoT-v1": {}}}, "the environment needs a file"),
        ({"parts": {}}, "give `parts` by id"),
        ({"parts": {"agentic/Maze-v1": {"weight": 0}}}, "greater than 0"),
    ],
)
def test_what_cannot_be_is_named_when_the_tasks_are_loaded(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        envs.get("agentic/Mixed-v1").tasks(options)


def test_rows_of_a_file_name_their_environment_and_their_tools(tmp_path: Path) -> None:
    def tasks_of(*rows: dict[str, object]) -> object:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps({"problem": "p", "answer": "1", **row}) + "\n" for row in rows))
        return envs.get("agentic/Mixed-v1").tasks({"path": str(file)})

    good: list[dict[str, object]] = [
        {"env": "agentic/MathPython-v1", "scenario": "tool_use"},
        {"env": "agentic/MathPython-v1", "tools": []},
        {"env": "agentic/ShortCoT-v1"},
    ]
    env = make_env(env_id="agentic/Mixed-v1", options={"path": str((tasks_of(*good), tmp_path / "rows.jsonl")[1])})
    try:
        offered = [len(env.run(env.areset(0, env.tasks.task(index))).tools) for index in range(3)]
        assert offered == [1, 0, 0]
        assert [env.tasks.task(index).meta["scenario"] for index in range(3)] == ["tool_use", "MathPython", "ShortCoT"]
    finally:
        env.close()
    for row, complaint in (
        ({}, r"rows\.jsonl: task 2: the row has no field env"),
        ({"env": "agentic/MathPyton-v1"}, r"task 2: no environment .* did you mean 'agentic/MathPython-v1'"),
        ({"env": "agentic/MathPython-v1", "tools": ["pythn"]}, r"task 2: .* no tool 'pythn': did you mean 'python'"),
        ({"env": "agentic/MathPython-v1", "tools": "python"}, r"task 2: tools must be a list"),
    ):
        with pytest.raises(ValueError, match=complaint):
            tasks_of(good[0], row)


def test_a_row_may_ask_for_some_tools_alone(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"problem": "p", "answer": "1", "tools": ["shell"]}\n')
    with pytest.raises(ValueError, match="has no tool 'shell': there are python"):
        envs.get("agentic/MathPython-v1").tasks({"path": str(file)})
