"""Environments by id: what a trainer, ``gymnasium.make`` and the command line find under a name.

A third-party package adds its own by ``register`` in a function behind the entry point group ``gymnasium.envs``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium

from envs.arithmetic import ArithmeticOptions, ArithmeticTasks
from envs.data import TaskList, TaskSource, load_jsonl
from envs.env import Limits, Resources, ToolEnv
from envs.rewards import Rubric
from envs.tools import Tool, python
from envs.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """How an environment is made from its id and options."""

    id: str
    summary: str  # one line for people
    tasks: Callable[[Mapping[str, Any]], TaskSource]  # from options; ValueError where they are wrong
    tools: Sequence[Tool]
    instruction: str = ""
    weights: Mapping[str, float]  # reward terms by default
    expert: Callable[[Task], str] | None = None  # the program that solves a task, for traces to start from

    def make(
        self,
        tasks: TaskSource,
        *,
        resources: Resources | None = None,
        dialect: str = "hermes",
        weights: Mapping[str, float] | None = None,
        limits: Limits | None = None,
        on_tool_bug: Any = "raise",
    ) -> ToolEnv:
        """One environment; cheap enough for one an episode."""
        return ToolEnv(
            tasks=tasks,
            tools=self.tools,
            rubric=Rubric(weights=self.weights if weights is None else weights),
            limits=limits,
            dialect=dialect,
            instruction=self.instruction,
            resources=resources,
            on_tool_bug=on_tool_bug,
        )


_SPECS: dict[str, EnvSpec] = {}


def register(spec: EnvSpec) -> None:
    """Make ``spec`` known here and to Gymnasium."""
    _SPECS[spec.id] = spec
    if spec.id not in gymnasium.registry:
        gymnasium.register(
            id=spec.id, entry_point="envs.registration:make_env", kwargs={"env_id": spec.id}, order_enforce=True
        )


def make_env(*, env_id: str, options: Mapping[str, Any] | None = None, **kwargs: Any) -> ToolEnv:
    spec = get(env_id)
    return spec.make(spec.tasks(options or {}), **kwargs)


def get(env_id: str) -> EnvSpec:
    """Raises ``ValueError`` with the nearest id when there is no such environment."""
    register_all()
    if env_id not in _SPECS:
        close = difflib.get_close_matches(env_id, _SPECS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(_SPECS))}"
        raise ValueError(f"no environment {env_id!r}: {hint}")
    return _SPECS[env_id]


def ids() -> list[str]:
    register_all()
    return sorted(_SPECS)


def register_all() -> None:
    """Ours; Gymnasium calls this by its entry point."""
    if _SPECS:
        return
    register(
        EnvSpec(
            id="agentic/Arithmetic-v1",
            summary="fresh random arithmetic, made for a model too small to do it without the python tool",
            tasks=lambda options: ArithmeticTasks(ArithmeticOptions.model_validate(options)),
            tools=(python,),
            weights={"correct": 1.0},
            expert=lambda task: f"print({task.meta['expression']})",
        )
    )
    register(
        EnvSpec(
            id="agentic/MathPython-v1",
            summary="word problems from a JSONL file, solved with the python tool, answered in a box",
            tasks=_math_tasks,
            tools=(python,),
            instruction=(
                "Solve the problem with Python. When you know the result, put the final answer within \\boxed{}."
            ),
            weights={"correct": 1.0},
        )
    )


def _math_tasks(options: Mapping[str, Any]) -> TaskSource:
    unknown = set(options) - {"path"}
    if unknown or "path" not in options:
        raise ValueError(
            f"options of agentic/MathPython-v1: `path` of a JSONL file and nothing else, not {dict(options)}"
        )
    return TaskList(load_jsonl(options["path"]))
