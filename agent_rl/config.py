"""One typed, validated tree per run: a recipe (TOML) plus ``--section.key value``; unknown keys are errors.

Every default stands once, in the class of its section (``agent_rl.sections``).
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, model_validator

from agent_rl.algorithm import Algorithm
from agent_rl.errors import ConfigError as ConfigError
from agent_rl.sections import (
    AlgorithmConfig,
    CheckpointConfig,
    ColdStartConfig,
    EngineConfig,
    EvaluationConfig,
    LearnerConfig,
    LoraSettings,
    ModelConfig,
    RecordsConfig,
    RolloutConfig,
    Section,
    StareConfig,
    TaskConfig,
)
from agent_rl.tryout import try_out
from sandboxes.base import SandboxSpec

__all__ = [
    "LEARNER_MEMORY",
    "AlgorithmConfig",
    "CheckpointConfig",
    "ColdStartConfig",
    "ConfigError",
    "EngineConfig",
    "EvaluationConfig",
    "LearnerConfig",
    "LoraSettings",
    "ModelConfig",
    "RecordsConfig",
    "RolloutConfig",
    "RunConfig",
    "StareConfig",
    "TaskConfig",
    "learner_config",
    "load_config",
    "other_settings",
    "recipe_names",
    "validate",
]

LEARNER_MEMORY = ("layout", "micro_tokens", "max_micro_sequences", "chunk_tokens", "activation_checkpointing")
"""Settings of the learner that trade memory for time: the gradient is the same but for rounding."""

RESUMABLE = frozenset(
    # What it is called, how far it goes and what is kept of it, where it runs, and how much at once.
    "name output steps checkpoint.every checkpoint.keep records.trajectories "
    "engine.urls engine.max_num_seqs engine.kv_cache_gb rollout.concurrency rollout.max_failures sandbox.kind "
    "sandbox.hosts sandbox.size sandbox.warm sandbox.max_uses threads learner.offload_path".split()
) | {f"learner.{name}" for name in LEARNER_MEMORY}
"""Settings in which a continuation may differ from the run that it continues."""


class RunConfig(Section):
    """A run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="of the folder under `output`")
    output: str = "runs"
    seed: int = Field(0, ge=0)
    steps: int = Field(100, ge=1)
    threads: int = Field(0, ge=0, description="of the learner; 0 leaves the choice to torch; 1 repeats bit for bit")
    model: ModelConfig
    task: TaskConfig
    reward: dict[str, float] = Field(default_factory=lambda: {"correct": 1.0}, description="weight of each reward term")
    sandbox: SandboxSpec = SandboxSpec()
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    stare: StareConfig = StareConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    cold_start: ColdStartConfig = ColdStartConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    records: RecordsConfig = RecordsConfig()

    @model_validator(mode="after")
    def _leftovers_fit(self) -> RunConfig:
        if self.rollout.leftovers == "cancel":
            return self
        others = [name for name in self.rollout.sampling if name not in ("d3s_samples", "overlong_penalty")]
        if others:
            raise ValueError(
                f"rollout.leftovers 'keep' takes prompts in order and groups as they are: {others[0]!r} needs 'cancel'"
            )
        if self.engine.sleep:
            raise ValueError("rollout.leftovers 'keep' samples during the update: it needs engine.sleep false")
        if self.engine.kind != "vllm":
            raise ValueError(
                f"rollout.leftovers 'keep' needs engine.kind 'vllm', not {self.engine.kind!r}: it alone takes weights "
                "under running episodes and says which made which token"
            )
        if not self.rollout.oversample:
            raise ValueError("rollout.leftovers 'keep' needs rollout.oversample above 0: without it nothing is left")
        if self.stare.score == "reuse":
            raise ValueError(
                "rollout.leftovers 'keep' needs stare.score 'exact': 'reuse' takes older weights' logprobs for current"
            )
        return self

    @property
    def chosen_algorithm(self) -> Algorithm:
        """The methods around STARE by name, with a correction where rollouts can be older than the weights.

        With reused logprobs the ratio itself is taken against the sampler.
        """
        recalls = "cross_context_replay" in self.rollout.sampling and self.stare.score == "exact"
        return self.algorithm.chosen("tis" if recalls or self.rollout.leftovers == "keep" else "none")

    @model_validator(mode="after")
    def _methods_fit(self) -> RunConfig:
        algorithm = self.chosen_algorithm  # raises where a name or option does not exist
        if self.stare.score == "reuse" and algorithm.needs_scores:
            names = ", ".join(algorithm.needs_scores)
            raise ValueError(f"{names} of algorithm need stare.score 'exact': 'reuse' knows no entropy in time")
        if "kl_cov" in algorithm.regularisers and self.stare.mini_batches == 1:
            raise ValueError("regulariser kl_cov acts from a batch's second step on: it needs stare.mini_batches > 1")
        try_out(algorithm, self.rollout.group)  # raises where a method cannot work with its options
        return self

    @model_validator(mode="after")
    def _lengths_fit(self) -> RunConfig:
        if self.rollout.max_episode_tokens > self.engine.max_model_len:
            raise ValueError(
                f"rollout.max_episode_tokens ({self.rollout.max_episode_tokens}) is above "
                f"engine.max_model_len ({self.engine.max_model_len})"
            )
        return self

    @property
    def folder(self) -> Path:
        return Path(self.output) / self.name


def recipe_names() -> list[str]:
    """Recipes that the package ships."""
    folder = resources.files("agent_rl") / "recipes"
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def load_config(recipe: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The validated tree of a recipe name or TOML file with ``--section.key value`` pairs on top.

    Raises:
        ConfigError: unknown recipe or key (the nearest name is offered), wrong type, impossible value.
    """
    tree = _read_recipe(recipe)
    for key, text in _pairs(overrides):
        _set(tree, key, _parse_value(text))
    tree.setdefault("name", Path(recipe).stem)
    return validate(tree)


def validate(tree: Mapping[str, Any]) -> RunConfig:
    """Raises ``ConfigError`` with one line per fault, joined, naming key, value and what is allowed."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        faults = [_describe(fault) for fault in error.errors(include_url=False)]
        raise ConfigError("; ".join(dict.fromkeys(faults))) from None


def learner_config(overrides: Sequence[str]) -> LearnerConfig:
    """``--learner.key value`` pairs alone, on a learning rate that suits supervised fine-tuning.

    Raises:
        ConfigError: an unknown or impossible setting.
    """
    tree: dict[str, Any] = {"name": "sft", "model": {"path": "-"}, "task": {"env": "-"}, "learner": {"lr": 1e-5}}
    for key, text in _pairs(overrides):
        if not key.startswith("learner."):
            raise ConfigError(f"--{key}: here only settings of the learner are taken, as --learner.key value")
        _set(tree, key, _parse_value(text))
    return validate(tree).learner


def other_settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Dotted keys in which a continuation and its run differ and may not."""
    flat_a, flat_b = _flatten(a), _flatten(b)
    keys = (flat_a.keys() | flat_b.keys()) - RESUMABLE
    return sorted(key for key in keys if flat_a.get(key) != flat_b.get(key))


def _read_recipe(recipe: str) -> dict[str, Any]:
    path = Path(recipe)
    if recipe in recipe_names():
        text = (resources.files("agent_rl") / "recipes" / f"{recipe}.toml").read_text()
    elif path.suffix == ".toml" and path.is_file():
        text = path.read_text()
    else:
        names = recipe_names()
        close = difflib.get_close_matches(recipe, names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}, or give a .toml file"
        raise ConfigError(f"no recipe {recipe!r}: {hint}")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{recipe}: not valid TOML: {error}") from None


def _pairs(overrides: Sequence[str]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    items = iter(overrides)
    for item in items:
        if not item.startswith("--") or len(item) == 2:
            raise ConfigError(f"unexpected argument {item!r}: settings are written --section.key value")
        key, separator, value = item[2:].partition("=")
        if not separator:
            following = next(items, None)
            if following is None or following.startswith("--"):
                raise ConfigError(f"{item} needs a value")
            value = following
        pairs.append((key, value))
    return pairs


def _parse_value(text: str) -> Any:
    """A TOML value where the text is one, else the text itself; no setting is a date, but a name may look like one."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, str | int | float | list | dict) else text


def _set(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *path, last = dotted.replace("-", "_").split(".")
    for part in path:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--{dotted}: {part!r} is a value, not a section")
    tree[last] = value


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _describe(fault: Any) -> str:
    location = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        close = difflib.get_close_matches(location, _all_keys(RunConfig), n=1, cutoff=0.5)
        return f"unknown key {location!r}" + (f": did you mean {close[0]!r}?" if close else "")
    if fault["type"] == "missing":
        return f"{location} is missing: set it in the recipe or by --{location} VALUE"
    message = fault["msg"].removeprefix("Value error, ")
    if isinstance(fault["input"], dict):  # two settings of a section that do not go together: the message names them
        return f"{location}: {message}" if location else message
    return f"{location} = {fault['input']!r}: {message}" if location else message


def _all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += _all_keys(field.annotation, f"{prefix}{name}.")
    return keys
