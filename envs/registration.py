"""Environments by id: what a trainer, ``gymnasium.make`` and the command line find under a name.

Importing ``envs`` registers ours with Gymnasium. A third-party package calls ``register`` in a function behind the
entry point group ``agentic.envs``; it is called when an id is asked for that is not ours. (Gymnasium's own plug-in
group went with its version 1.0; ``gymnasium.make("package:its/Id-v0")`` imports the package first.)
"""

from __future__ import annotations

import difflib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium

from envs.data import TaskSource
from envs.env import Limits, ToolEnv
from envs.rewards import Rubric, Term
from envs.tools import Tool
from envs.types import Demonstration, Task

PLUGINS = "agentic.envs"
"""Entry point group of packages that bring environments along."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """How an environment is made from its id and options."""

    id: str
    summary: str  # one line for people
    tasks: Callable[[Mapping[str, Any]], TaskSource]  # from options; ValueError where they are wrong
    tools: Sequence[Tool] = ()
    instruction: str = ""  # system message
    weights: Mapping[str, float] = field(default_factory=lambda: {"correct": 1.0})  # reward terms by default
    gates: Sequence[str] = ()  # terms that must be positive
    terms: Mapping[str, Term] = field(default_factory=dict)  # reward terms of its own
    limits: Limits = field(default_factory=Limits)  # by default
    demonstrations: Sequence[Demonstration] = ()  # solved problems that may be shown
    expert: Callable[[Task], str] | None = None  # the program that solves a task, for traces to start from
    example: Mapping[str, Any] = field(default_factory=dict)  # options to try it with, where it needs some
    kind: type[ToolEnv] = ToolEnv  # what is made; takes what ``ToolEnv`` takes

    @property
    def may_call(self) -> bool:
        """Whether its episodes may offer tools, so that a sandbox must be there."""
        return bool(self.tools) or self.kind.brings_tools

    def make(
        self,
        tasks: TaskSource,
        *,
        weights: Mapping[str, float] | None = None,
        limits: Limits | None = None,
        shots: int = 0,
        **settings: Any,
    ) -> ToolEnv:
        """One environment; cheap enough for one an episode. ``settings`` are those of ``ToolEnv``.

        Raises:
            ValueError: more ``shots`` (demonstrations before the question) than there are.
        """
        if shots > len(self.demonstrations):
            raise ValueError(f"{self.id} has {len(self.demonstrations)} demonstrations to show, not {shots}")
        weights = self.weights if weights is None else weights
        return self.kind(
            tasks=tasks,
            tools=self.tools,
            rubric=Rubric(weights=weights, gates=self.gates, terms=self.terms),
            limits=self.limits if limits is None else limits,
            instruction=self.instruction,
            demonstrations=self.demonstrations[:shots],
            **settings,
        )


_SPECS: dict[str, EnvSpec] = {}


def register(spec: EnvSpec) -> None:
    """Make ``spec`` known here and to Gymnasium; a spec of the same id is replaced."""
    _SPECS[spec.id] = spec
    if spec.id not in gymnasium.registry:
        gymnasium.register(id=spec.id, entry_point="envs.registration:make_env", kwargs={"env_id": spec.id})


def make_env(*, env_id: str, options: Mapping[str, Any] | None = None, **settings: Any) -> ToolEnv:
    """An environment by id; ``options`` choose its tasks, ``settings`` are those of ``EnvSpec.make``."""
    spec = get(env_id)
    return spec.make(spec.tasks(options or {}), **settings)


def get(env_id: str) -> EnvSpec:
    """Raises ``ValueError`` with the nearest id when there is no such environment."""
    if env_id not in _SPECS:
        _load_plugins()
    if env_id not in _SPECS:
        close = difflib.get_close_matches(env_id, _SPECS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(_SPECS))}"
        raise ValueError(f"no environment {env_id!r}: {hint}")
    return _SPECS[env_id]


def ids() -> list[str]:
    _load_plugins()
    return sorted(_SPECS)


def register_all() -> None:
    """Ours, with what packages bring along."""
    from envs.catalog import SPECS  # here, because these are made of this module's parts
    from envs.mixed import MIXED

    for spec in (*SPECS, MIXED):
        register(spec)


def _load_plugins() -> None:
    for point in importlib.metadata.entry_points(group=PLUGINS):
        if point.name not in _LOADED:
            _LOADED.add(point.name)
            point.load()()


_LOADED: set[str] = set()
