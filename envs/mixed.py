"""Several environments as one: each task is played in its own, with its own tools, rewards and limits.

A task says which in ``meta["env"]``, and ``meta["scenario"]`` names its kind for whoever treats kinds apart (targets of
entropy by scenario, for one).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from envs.data import Mixture, TaskList, TaskSource, check_row_tools, load_tasks
from envs.env import Limits, ToolEnv
from envs.registration import EnvSpec, get
from envs.rewards import TERMS, Rubric
from envs.types import Opening, Task


class Part(BaseModel):
    """One of the environments."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weight: float = Field(1.0, gt=0, description="share of the tasks, beside the others' weights")
    options: dict[str, Any] = Field(default_factory=dict, description="of its tasks")
    scenario: str | None = Field(None, description="name of its kind; that of the environment when None")


class MixedOptions(BaseModel):
    """Which environments: by id, each with tasks of its own, or one file whose rows name theirs in ``env``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    parts: dict[str, Part] = Field(default_factory=dict, description="by environment id")
    path: str | None = Field(None, description="instead of parts: rows with env, and perhaps scenario and tools")


class _Labelled:
    """Tasks that know where they belong."""

    def __init__(self, source: TaskSource, env_id: str, scenario: str) -> None:
        self._source, self._env_id, self._scenario = source, env_id, scenario

    def __len__(self) -> int:
        return len(self._source)

    def task(self, index: int) -> Task:
        task = self._source.task(index)
        meta = {"scenario": self._scenario, **task.meta, "env": self._env_id}
        return replace(task, id=f"{short_name(self._env_id)}/{task.id}", meta=meta)


def short_name(env_id: str) -> str:
    """``agentic/MathPython-v1`` -> ``MathPython``."""
    return env_id.rsplit("/", 1)[-1].rsplit("-v", 1)[0]


def mixed_tasks(given: Mapping[str, Any]) -> TaskSource:
    """A mixture from ``MixedOptions``. Raises ``ValueError`` for an unknown environment or tool, or refused options."""
    options = MixedOptions.model_validate(given)
    parts = options.parts
    if (options.path is None) == (not parts):
        raise ValueError(
            "agentic/Mixed-v1 needs environments: give `parts` by id, or `path` of a file with env in its rows"
        )
    if options.path is not None:
        return TaskList([_row_task(task, options.path) for task in load_tasks(options.path)])
    sources = [
        _Labelled(get(env_id).tasks(part.options), env_id, part.scenario or short_name(env_id))
        for env_id, part in parts.items()
    ]
    return Mixture(sources, [part.weight for part in parts.values()])


def _row_task(task: Task, path: str) -> Task:
    if "env" not in task.meta:
        raise ValueError(f"{path}: task {task.id}: the row has no field env")
    try:
        spec = get(str(task.meta["env"]))
    except ValueError as error:
        raise ValueError(f"{path}: task {task.id}: {error}") from None
    check_row_tools(task, [tool.name for tool in spec.tools], path)
    return replace(task, meta={"scenario": short_name(spec.id), **task.meta})


class MixedEnv(ToolEnv):
    """Becomes the environment that each task names. Its own limits bound theirs; its weights go before theirs."""

    brings_tools = True

    def __init__(self, *, rubric: Rubric, **settings: Any) -> None:
        super().__init__(rubric=rubric, **settings)
        self._weights, self._bounds = rubric.weights, self.limits

    async def areset(self, seed: int, task: Task) -> Opening:
        spec: EnvSpec = get(str(task.meta["env"]))
        known = {**TERMS, **spec.terms}
        given = {name: weight for name, weight in self._weights.items() if name in known}
        self.all_tools = {tool.name: tool for tool in spec.tools}
        self.rubric = Rubric(weights={**spec.weights, **given}, gates=spec.gates, terms=spec.terms)
        own, bounds = spec.limits.model_dump(), self._bounds.model_dump()
        self.limits = Limits(**{name: min(value, bounds[name]) for name, value in own.items()})
        self.instruction = spec.instruction
        return await super().areset(seed, task)


MIXED = EnvSpec(
    id="agentic/Mixed-v1",
    summary="several environments as one, each task in its own",
    tasks=mixed_tasks,
    kind=MixedEnv,
    limits=Limits(max_turns=64, max_tool_calls=64, wall_s=3600),
    example={"parts": {"agentic/Arithmetic-v1": {}, "agentic/Maze-v1": {"weight": 0.5}}},
)
