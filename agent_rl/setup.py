"""From a validated config to the parts that a run is made of; everything that can be wrong is found here, before a
run folder is touched."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from agent_rl.config import ConfigError, RunConfig, other_settings, validate
from agent_rl.evaluation.suites import Part
from agent_rl.evaluation.training import evaluation_parts
from agent_rl.machine import check_engine, check_learner
from agent_rl.models import chat_template, check_model_folder
from agent_rl.sampling import MOST_PROMPTS
from agent_rl.seeds import shuffled_index
from envs import EnvSpec, Limits, Resources, Task, TaskSource, ToolEnv, get
from envs.parsers import Dialect, get_dialect, guess_dialect
from sandboxes import SandboxSpec, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The parts that depend on the config alone."""

    config: RunConfig
    spec: EnvSpec
    tasks: TaskSource
    dialect: Dialect
    sandbox: SandboxSpec  # with its kind resolved
    evaluation: tuple[Part, ...] = ()  # what evaluations of the run are about

    def task(self, cursor: int) -> Task:
        """The task at this place of the run's endless, seeded order."""
        return self.tasks.task(shuffled_index(cursor, len(self.tasks), self.config.seed))

    def resources(self) -> Resources:
        return Resources(self.sandbox)

    def make_env(self, resources: Resources) -> ToolEnv:
        rollout = self.config.rollout
        return self.spec.make(
            self.tasks,
            resources=resources,
            dialect=self.dialect.name,
            shots=self.config.task.shots,
            weights=self.config.reward,
            limits=Limits(max_turns=rollout.max_turns, max_tool_calls=rollout.max_tool_calls, wall_s=rollout.wall_s),
            on_tool_bug="void",
        )

    def system_text(self, schemas: Sequence[dict[str, Any]]) -> str:
        return self.dialect.system_text(schemas)


async def preflight(config: RunConfig, console: Console) -> Setup:
    """Everything checked that can be without writing.

    Raises:
        ConfigError: unknown environment, dialect or reward term, bad data row, missing model, a run that differs.
        SandboxUnavailable: Docker was demanded and is not there.
    """
    try:
        if config.model.path not in ("tiny", "smollm2"):
            check_model_folder(config.model.path)
        spec = get(config.task.env)
        tasks = spec.tasks(config.task.options)
        dialect = chosen_dialect(config)
        spec.make(tasks, dialect=dialect.name, shots=config.task.shots, weights=config.reward)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = ".".join(("task.options", *map(str, fault["loc"])))
        raise ConfigError(f"{key} = {fault['input']!r}: {fault['msg']}") from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if config.model.path == "tiny" and (spec.expert is None or not config.cold_start.steps):
        raise ConfigError(
            "model.path = 'tiny' starts from nothing: it needs cold_start.steps > 0 and agentic/Arithmetic-v1"
        )
    if config.cold_start.steps and spec.expert is None:
        raise ConfigError(f"cold_start.steps = {config.cold_start.steps}: {spec.id} has no expert to write traces")
    check_engine(config.engine)
    check_learner(config.learner, config.model.dtype)
    if config.rollout.strategies.vade and len(tasks) > MOST_PROMPTS:
        raise ConfigError(
            f"rollout.sampling 'vade' draws a success rate for each of its prompts, at most {MOST_PROMPTS:,}: "
            f"{spec.id} has {len(tasks):,} here, so bound them by task.options"
        )
    check_continues(config)
    parts = tuple(evaluation_parts(config, console, tasks))
    sandbox = await resolve(config.sandbox, lambda line: console.print(f"[bold yellow]{line}", soft_wrap=True))
    return Setup(config=config, spec=spec, tasks=tasks, dialect=dialect, sandbox=sandbox, evaluation=parts)


def chosen_dialect(config: RunConfig) -> Dialect:
    """The named one, else the one that the model's chat template writes; Hermes where it knows no calls."""
    if config.task.dialect != "auto":
        return get_dialect(config.task.dialect)
    template = "" if config.model.path in ("tiny", "smollm2") else chat_template(Path(config.model.path))
    return guess_dialect(template) or get_dialect("hermes")


def check_continues(config: RunConfig) -> None:
    """Raises ``ConfigError`` when the run folder holds a run with other settings."""
    stored = config.folder / "config.json"
    if not stored.is_file():
        return
    before = read_run_config(config.folder)
    if differing := other_settings(config.model_dump(mode="json"), before.model_dump(mode="json")):
        raise ConfigError(
            f"{config.folder} holds a run with other settings ({', '.join(differing)}): "
            "choose another --name, or remove the folder"
        )


def read_run_config(folder: Path) -> RunConfig:
    """The settings that a run was started with. Raises ``ConfigError`` when the folder holds no run."""
    try:
        return validate(json.loads((folder / "config.json").read_text()))
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{folder} is not a run folder: its config.json cannot be read ({error})") from None


@contextmanager
def open_run(config: RunConfig) -> Iterator[None]:
    """The run folder exists, holds the settings, and is ours alone while the body runs.

    Raises:
        ConfigError: another process is working on this run.
    """
    folder = config.folder
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go of it when we die, however we die
        except OSError:
            raise ConfigError(f"{folder}: another process is working on this run") from None
        aside = folder / "config.partial"
        aside.write_text(config.model_dump_json(indent=2))
        aside.rename(folder / "config.json")
        yield


def keep_tokenizer(source: Path, folder: Path) -> None:
    """Beside the records, so that a run can be read without the model that it started from."""
    target = folder / "tokenizer"
    if target.is_dir():
        return
    aside = folder / "tokenizer.partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja", ".txt", ".model"):  # not all have a tokenizer.json
            shutil.copy(file, aside / file.name)
    aside.rename(target)
