"""The shipped conformance suite, over every environment that ships; and that the suite itself bites."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from envs_scripted import call

import envs
from envs import Limits, ModelTurn, Task, TaskList, ToolEnv, TurnResult, tool
from envs.contract import (
    check_determinism,
    check_gold,
    check_hash_seeds,
    check_lifecycle,
    check_roles,
    check_tool_env,
)
from envs.maze import way_out
from envs.registration import make_env
from envs.rewards import Rubric
from sandboxes import SandboxSpec

GSM8K = str(Path(__file__).parents[1] / "data" / "gsm8k_sample.jsonl")
LOCAL = SandboxSpec(kind="local", size=1)
OPTIONS: dict[str, dict[str, Any]] = {
    "agentic/MathPython-v1": {"path": GSM8K},
    "agentic/ShortCoT-v1": {"path": GSM8K},
    "agentic/LongCoT-v1": {"path": GSM8K},
    "agentic/ReasoningGym-v1": {"name": "base_conversion", "size": 10},
    "agentic/Mixed-v1": {
        "parts": {
            "agentic/Arithmetic-v1": {},
            "agentic/Maze-v1": {},
            "agentic/ShortCoT-v1": {"options": {"path": GSM8K}},
        }
    },
}


def boxed(task: Task) -> Sequence[str]:
    return [f"\\boxed{{{task.answer}}}"]


def by_python(task: Task) -> Sequence[str]:
    return [call(code=f"print({task.meta['expression']})"), *boxed(task)]


def by_shell(task: Task) -> Sequence[str]:
    lines = []
    for name, content in task.meta["wanted"].items():
        lines.append(f"rm {name}" if content is None else f"cat > {name} <<'END'\n{content.rstrip()}\nEND")
    return [call("bash", command="\n".join(lines)), "Done."]


def by_walking(task: Task) -> Sequence[str]:
    return [call("move", direction=way) for way in way_out(task.meta["maze"], task.meta["width"])]


SOLVE = {
    "agentic/Arithmetic-v1": by_python,
    "agentic/Bash-v1": by_shell,
    "agentic/LongCoT-v1": boxed,
    "agentic/MathPython-v1": boxed,
    "agentic/Maze-v1": by_walking,
    "agentic/Mixed-v1": lambda task: SOLVE[task.meta["env"]](task),
    "agentic/ReasoningGym-v1": lambda task: [f"<answer>{task.answer}</answer>"],
    "agentic/SearchQA-v1": boxed,
    "agentic/ShortCoT-v1": boxed,
}


@pytest.mark.parametrize("env_id", envs.ids())
def test_every_environment_passes_the_contract(env_id: str) -> None:
    if env_id == "agentic/ReasoningGym-v1" and importlib.util.find_spec("reasoning_gym") is None:
        with pytest.raises(ValueError, match="pip install reasoning-gym"):
            make_env(env_id=env_id, options=OPTIONS[env_id])
        return
    check_tool_env(lambda: make_env(env_id=env_id, options=OPTIONS.get(env_id, {}), sandbox=LOCAL), SOLVE[env_id])


TASKS = TaskList([Task(id="a", prompt="?", answer="1")])


def test_the_contract_catches_an_environment_that_remembers() -> None:
    class Remembers(ToolEnv):
        count = 0

        def reset(self, **settings: Any) -> Any:
            self.count += 1
            text, info = super().reset(**settings)
            return f"{text} {self.count}", info

    with pytest.raises(AssertionError, match="an earlier episode"):
        check_determinism(lambda: Remembers(tasks=TASKS, tools=(), rubric=Rubric(weights={"correct": 1.0})))


def test_the_contract_catches_global_randomness() -> None:
    class Rolls(ToolEnv):
        def reset(self, **settings: Any) -> Any:
            random.random()
            return super().reset(**settings)

    with pytest.raises(AssertionError, match="global random state"):
        check_determinism(lambda: Rolls(tasks=TASKS, tools=(), rubric=Rubric(weights={"correct": 1.0})))


def test_the_contract_catches_an_order_that_hashes_decide() -> None:
    def make() -> ToolEnv:
        first = next(iter({f"word{number}" for number in range(50)}))
        tasks = TaskList([Task(id="a", prompt=first, answer="1")])
        return ToolEnv(tasks=tasks, tools=(), rubric=Rubric(weights={"correct": 1.0}))

    with pytest.raises(AssertionError, match="PYTHONHASHSEED changes what is seen"):
        check_hash_seeds(make)


def test_the_contract_catches_results_in_the_name_of_the_policy() -> None:
    class Speaks(ToolEnv):
        async def astep(self, turn: ModelTurn) -> TurnResult:
            result = await super().astep(turn)
            return replace(result, messages=({"role": "assistant", "content": "well done"},))

    with pytest.raises(AssertionError, match="is written as"):
        check_roles(lambda: Speaks(tasks=TASKS, tools=(), rubric=Rubric(weights={"correct": 1.0})))


def test_the_contract_catches_a_leaked_process() -> None:
    leaked = []

    class Leaks(ToolEnv):
        def close(self) -> None:
            own, self._own_resources = self._own_resources, None
            leaked.append((self._loop, own))

    @tool
    def nothing() -> str:
        """Do nothing."""
        return ""

    def make() -> ToolEnv:
        rubric = Rubric(weights={"own": 1.0}, terms={"own": own})
        return Leaks(tasks=TASKS, tools=(nothing,), rubric=rubric, sandbox=LOCAL)

    async def own(episode: Any, grader: Any) -> float:
        await grader.start()
        return 0.0

    with pytest.raises(AssertionError, match="processes left behind"):
        check_lifecycle(make)
    for loop, resources in leaked:
        if resources is not None:
            loop.run(resources.__aexit__(None, None, None))
            loop.stop()


def test_the_contract_catches_a_reward_for_silence() -> None:
    async def always(episode: Any, grader: Any) -> float:
        return 1.0

    def make() -> ToolEnv:
        rubric = Rubric(weights={"correct": 1.0}, terms={"correct": always})
        return ToolEnv(tasks=TASKS, tools=(), rubric=rubric, limits=Limits())

    with pytest.raises(AssertionError, match="worth as much"):
        check_gold(make, boxed)
