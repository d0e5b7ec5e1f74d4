"""Our environments for TRL's ``GRPOTrainer(environment_factory=...)``; imports nothing of TRL.

TRL renders and parses the calls, and hands them to methods; every one goes through the environment's own ``astep``, so
limits, failures and grading are the same as in our trainer. One call is one turn here, because TRL makes them singly.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.data import TaskSource
from envs.env import ToolEnv
from envs.registration import EnvSpec, get
from envs.tools import Tool
from envs.types import ModelTurn, TurnResult
from envs.wire import TASK

LOST = "The tool is not available."
"""What a model reads after a failure of ours; TRL cannot end an episode in its middle. The reward is None then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlParts:
    """What to give to the trainer: ``train_dataset``, ``environment_factory`` and ``reward_funcs``."""

    rows: Callable[[int], list[dict[str, Any]]]  # the first so many tasks as rows of a data set
    factory: Callable[[], Any]
    reward: Callable[..., list[float | None]]


def for_trl(env_id: str, *, options: Mapping[str, Any] | None = None, **settings: Any) -> TrlParts:
    """The environment's parts for TRL.

    ::

        parts = for_trl("agentic/Arithmetic-v1")
        trainer = GRPOTrainer(model, reward_funcs=parts.reward, environment_factory=parts.factory,
                              train_dataset=Dataset.from_list(parts.rows(1000)), args=...)

    Args:
        options: of the tasks.
        settings: as in ``EnvSpec.make``: ``sandbox``, ``limits``, ``weights``.

    Raises:
        ValueError: an unknown id or option, a tool without a Python signature (of an MCP server), or tools that come
            with each task.
    """
    spec = get(env_id)
    if spec.kind.brings_tools:
        raise ValueError(f"{env_id} has other tools for each task; TRL reads one set for all of them")
    tasks = spec.tasks(options or {})
    members: dict[str, Any] = {tool.name: _method(tool) for tool in spec.tools}
    kind = type("ToolEnvironment", (_Environment,), members)

    def rows(count: int) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": spec.instruction}] if spec.instruction else []
        return [
            {"prompt": [*system, {"role": "user", "content": task.prompt}], "task": TASK.dump_json(task).decode()}
            for task in map(tasks.task, range(min(count, len(tasks))))
        ]

    return TrlParts(rows=rows, factory=lambda: kind(spec, tasks, settings), reward=reward)


def reward(completions: Sequence[Any], environments: Sequence[Any], **columns: Any) -> list[float | None]:
    """Each episode's reward by its last turn; None (TRL leaves it out) for one that was lost on our side."""
    return [environment._finish(completion) for completion, environment in zip(completions, environments, strict=True)]


class _Environment:
    """One episode at a time. TRL takes every public method but ``reset`` for a tool, so the others are private."""

    def __init__(self, spec: EnvSpec, tasks: TaskSource, settings: Mapping[str, Any]) -> None:
        self._env: ToolEnv = spec.make(tasks, **settings)
        self._end: TurnResult | None = None
        weakref.finalize(self, self._env.close)  # TRL has no hook for the end of a run

    def reset(self, *, task: str, **columns: Any) -> None:
        self._end = None
        self._env.run(self._env.areset(0, TASK.validate_json(task)))

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        if self._end is not None:
            return LOST
        result = self._step(self._env.dialect.written(name, arguments))
        return str(result.messages[0]["content"]) if result.messages else LOST

    def _step(self, text: str) -> TurnResult:
        result = self._env.run(self._env.astep(ModelTurn(text=text, finish="stop")))
        if result.stop is not None:
            self._end = result
        return result

    def _finish(self, completion: Any) -> float | None:
        if self._end is None:
            self._step(_last_text(completion))
        if self._end is None:  # the last turn calls again: what it would be told is of no use to anyone
            self._end = self._env.run(self._env.astep(ModelTurn(text="", finish="length")))
        return self._end.reward


def _last_text(completion: Any) -> str:
    """What the policy wrote in the end; empty when the last word was a tool's."""
    if isinstance(completion, str):
        return completion
    last = completion[-1] if completion else {}
    return str(last.get("content") or "") if last.get("role") == "assistant" else ""


def _method(tool: Tool) -> Callable[..., str]:
    """The tool as a method with the signature and docstring that TRL reads its schema from."""
    if not tool.parameters and tool.schema["function"]["parameters"]["properties"]:
        raise ValueError(f"tool {tool.name} has no Python signature, which TRL reads")

    def method(self: _Environment, **arguments: Any) -> str:
        return self._call(tool.name, arguments)

    described = tool.schema["function"]["parameters"]["properties"]
    lines = [f"    {name}: {form['description']}" for name, form in described.items()]
    method.__name__ = method.__qualname__ = tool.name
    method.__doc__ = "\n".join([tool.schema["function"]["description"], "", *(["Args:", *lines] if lines else [])])
    method.__annotations__ = {p.name: p.annotation for p in tool.parameters} | {"return": str}
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__signature__ = inspect.Signature([own, *tool.parameters])  # type: ignore[attr-defined]
    return method
