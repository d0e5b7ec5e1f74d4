"""``evaluate(settings)``: from a model and a suite to a folder of episodes and results."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from agent_rl.engines.openai import Endpoint
from agent_rl.errors import ConfigError
from agent_rl.evaluation import contamination
from agent_rl.evaluation.collect import (
    EndpointPlayer,
    EnginePlayer,
    EpisodeBudget,
    Player,
    Stage,
    collect,
    missing_jobs,
)
from agent_rl.evaluation.progress import EvaluationProgress, plan_lines
from agent_rl.evaluation.report import remarks, rich_table, write_results
from agent_rl.evaluation.settings import Settings
from agent_rl.evaluation.store import Row, Store
from agent_rl.evaluation.suites import SCENARIOS, SUITES, Budget, Part, limits_of, load_suite
from agent_rl.evaluation.targets import LocalModel, find_model
from agent_rl.evaluation.transcripts import write_page
from envs import Limits, Resources
from envs.parsers import get_dialect, guess_dialect
from sandboxes import resolve

ENVIRONMENT_BUDGET = Budget(env="", max_tokens=2048, max_episode_tokens=8192, max_turns=0)
"""Tokens of an environment that is no named scenario; its turns are its own."""


def evaluate(settings: Settings, console: Console | None = None, *, dry: bool = False) -> Path:
    """Play what is missing and write the results; the same call again goes on where it stopped.

    Args:
        dry: say what would be done, and do nothing.

    Returns:
        the folder, with ``evaluation.json``, ``episodes.jsonl``, ``results.json``, ``.md``, ``.csv`` and
        ``transcripts.html``.

    Raises:
        ConfigError: something the user gave is wrong; no episode was played.
        EngineFailure: the engine did not start.
        TooManyFailures: engine or sandbox failed too often in a row; what was finished is kept.
    """
    return asyncio.run(_evaluate(settings, console or Console(), dry))


async def _evaluate(settings: Settings, console: Console, dry: bool) -> Path:
    def tell(line: str) -> None:
        console.print(line, soft_wrap=True, highlight=False)

    parts = load_suite(
        settings.suite,
        scenario=settings.scenario,
        data=settings.data,
        options=settings.options,
        k=settings.k,
        limit=settings.limit,
        seed=settings.seed,
    )
    model = None if settings.is_endpoint else find_model(settings.model, tell)
    dialect = _dialect(settings, model)
    limits, budgets, notes = _budgets(settings, parts, model)
    overlap = contamination.check(parts, settings.train_data) if settings.train_data else None
    if overlap:
        notes += contamination.summary(overlap, parts)
    folder = Path(settings.output) / settings.folder_name
    identity = _identity(settings, model, parts, limits, budgets, dialect)
    more: dict[str, Any] = {
        "title": _title(settings, parts),
        "parts": [
            {
                "name": part.name,
                "k": part.k,
                "digest": part.digest,
                "path": str(part.path) if part.path else None,
                "ids": [problem.task.id for problem in part.problems],
            }
            for part in parts
        ],
        "notes": [note for part in parts for note in part.notes] + notes,
        "tokenizer": str(model.folder) if model else None,
        **({"contamination": overlap} if overlap else {}),
    }
    for note in more["notes"]:
        tell(f"[yellow]note[/yellow]: {note}")
    if dry:
        from agent_rl.evaluation.store import read_rows  # here: only a look

        rows = [row for row, _ in read_rows(folder)]
        for line in plan_lines(parts, budgets, limits, rows, settings):
            tell(line)
        return folder
    started = time.perf_counter()
    with Store(folder) as store:
        rows = store.open(identity, more)  # a refused folder stays as it is
        try:
            for line in plan_lines(parts, budgets, limits, rows, settings):
                tell(line)
            if missing_jobs(parts, rows):
                await _play(settings, parts, limits, budgets, model, dialect, store, rows, console)
        finally:
            # Also when it was stopped: what there is, with what is missing said.
            tree = write_results(folder, wall_s=time.perf_counter() - started)
            write_page(folder, tree, _tokenizer(model))
    console.print(rich_table(tree))
    for line in remarks(tree):
        tell(line)
    tell(f"folder  {folder}")
    return folder


async def _play(
    settings: Settings,
    parts: Sequence[Part],
    limits: Mapping[str, Limits],
    budgets: Mapping[str, EpisodeBudget],
    model: LocalModel | None,
    dialect: str,
    store: Store,
    rows: list[Row],
    console: Console,
) -> None:
    native = dialect == "native"
    uses_sandbox = any(part.env.may_call for part in parts)
    concurrency = settings.concurrency or (16 if model is None else 64)
    spec = settings.sandbox
    if uses_sandbox:
        spec = await resolve(spec, lambda line: console.print(f"[bold yellow]{line}", soft_wrap=True))
    async with Resources(spec) as resources:
        stage = Stage(
            resources=resources,
            dialect=get_dialect("hermes" if native else dialect),
            shots=settings.shots,
            limits=limits,
            budgets=budgets,
        )
        async with _player(settings, stage, model, native, concurrency, console) as player:
            if isinstance(player, EndpointPlayer):
                store.serves(player.model)
            jobs = missing_jobs(parts, rows)
            with EvaluationProgress(console, parts, rows, len(jobs), settings) as progress:

                def finished(row: Row, transcript: Mapping[str, Any]) -> None:
                    store.add(row, transcript)
                    rows.append(row)
                    progress.ended(row)

                await collect(
                    jobs,
                    player,
                    stage,
                    seed=settings.seed,
                    concurrency=concurrency,
                    max_refills=settings.max_refills,
                    max_failures=settings.max_failures,
                    finished=finished,
                    cost=settings.cost,
                    go_on=progress.within_cost,
                )


@asynccontextmanager
async def _player(
    settings: Settings, stage: Stage, model: LocalModel | None, native: bool, concurrency: int, console: Console
) -> AsyncIterator[Player]:
    if model is None:
        async with Endpoint(
            settings.model,
            model=settings.served_name,
            key_variable=settings.key_variable,
            concurrency=concurrency,
            requests_per_minute=settings.requests_per_minute,
            tokens_per_minute=settings.tokens_per_minute,
            timeout_s=settings.timeout_s,
            extra=settings.extra,
        ) as endpoint:
            yield EndpointPlayer(stage, endpoint, native=native)
        return
    # Here: these import torch, which a served model does without.
    from agent_rl.codec import ChatCodec
    from agent_rl.config import EngineConfig
    from agent_rl.engines import make_engine
    from agent_rl.models import load_tokenizer

    kind = settings.engine or ("vllm" if importlib.util.find_spec("vllm") else "transformers")
    longest = max(budget.max_episode_tokens for budget in stage.budgets.values())
    config = EngineConfig(
        kind=kind,
        max_model_len=longest,
        max_num_seqs=min(concurrency, 256),
        kv_cache_gb=settings.kv_cache_gb or _free_gb(model.folder),
    )
    codec = ChatCodec(load_tokenizer(model.folder), system_text=stage.dialect.system_text)
    console.print(f"starting {kind} with {model.folder}", soft_wrap=True, highlight=False)
    engine = make_engine(config, model.folder, settings.dtype or _dtype(), seed=settings.seed)
    try:
        await engine.start()
        yield EnginePlayer(stage, engine, codec)
    finally:
        await engine.close()


def _free_gb(folder: Path) -> float:
    """For keys and values: 1 GiB on a CPU; on a GPU what is free but for the weights and a seventh."""
    import torch  # here: see ``_player``

    if not torch.cuda.is_available():
        return 1.0
    free, _ = torch.cuda.mem_get_info()
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return max(1.0, (0.85 * free - 1.2 * weights) / 2**30)


def _dtype() -> str:
    import torch  # here: see ``_player``

    return "bfloat16" if torch.cuda.is_available() else "float32"


def _tokenizer(model: LocalModel | None) -> Any:
    if model is None:
        return None
    from agent_rl.models import load_tokenizer  # here: see ``_player``

    return load_tokenizer(model.folder)


def _dialect(settings: Settings, model: LocalModel | None) -> str:
    """As asked; else what the run trained in, what the chat template writes, hermes, or the API's own calls."""
    if settings.dialect is not None:
        if settings.dialect == "native":
            if model is not None:
                raise ConfigError("--dialect native: only an endpoint has tool calls of its own")
            return "native"
        try:
            return get_dialect(settings.dialect).name
        except ValueError as error:
            raise ConfigError(str(error)) from None
    if model is None:
        return "native"
    if model.dialect is not None:
        return model.dialect
    from agent_rl.models import chat_template  # here: see ``_player``

    guessed = guess_dialect(chat_template(model.folder))
    return guessed.name if guessed else "hermes"


def _budgets(
    settings: Settings, parts: Sequence[Part], model: LocalModel | None
) -> tuple[dict[str, Limits], dict[str, EpisodeBudget], list[str]]:
    notes: list[str] = []
    scenario = None
    if settings.suite in SUITES:
        scenario = SCENARIOS[settings.scenario or "short_cot"]
    budget = scenario or ENVIRONMENT_BUDGET
    episode = settings.max_episode_tokens or budget.max_episode_tokens
    positions = model.max_positions if model else None
    if positions is not None and episode > positions:
        notes.append(f"the model has {positions} positions: episodes end there instead of at {episode} tokens")
        episode = positions
    tokens = min(settings.max_tokens or budget.max_tokens, episode)
    changes = {
        "max_turns": settings.max_turns,
        "max_tool_calls": settings.max_tool_calls,
        "wall_s": settings.wall_s,
    }
    try:
        limits = {part.name: limits_of(part.env, scenario, changes) for part in parts}
    except ValidationError as error:
        raise ConfigError(" ".join(str(error).split())) from None
    one = EpisodeBudget(
        temperature=settings.temperature, top_p=settings.top_p, max_tokens=tokens, max_episode_tokens=episode
    )
    return limits, {part.name: one for part in parts}, notes


def _identity(
    settings: Settings,
    model: LocalModel | None,
    parts: Sequence[Part],
    limits: Mapping[str, Limits],
    budgets: Mapping[str, EpisodeBudget],
    dialect: str,
) -> dict[str, Any]:
    """What must agree for episodes to be samples of one thing. ``k`` and ``limit`` may grow."""
    tools = any(part.env.may_call for part in parts)
    budget = next(iter(budgets.values()))
    return {
        # A named model may be served elsewhere tomorrow.
        "model": model.fingerprint if model else settings.served_name or settings.model,
        "suite": settings.suite,
        "scenario": settings.scenario,
        "options": settings.options,
        "environments": {part.name: part.env.id for part in parts},
        "data": {part.name: _source_digest(part) for part in parts},
        "seed": settings.seed,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "budgets": [budget.max_tokens, budget.max_episode_tokens],
        "limits": {name: own.model_dump() for name, own in limits.items()},
        "dialect": dialect if tools else None,
        "shots": settings.shots,
        "extra": settings.extra,
    }


def _source_digest(part: Part) -> str | None:
    """Of the whole source; None for a generator, whose options say what it makes."""
    if part.path is None and len(part.source) > 20_000:
        return None
    tasks = (part.source.task(place) for place in range(len(part.source)))
    text = json.dumps([[task.id, task.prompt, task.answer] for task in tasks])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _title(settings: Settings, parts: Sequence[Part]) -> str:
    model = settings.served_name or settings.model
    if not settings.is_endpoint and os.sep in model:
        model = "/".join(Path(model).parts[-2:])
    scenario = f", {settings.scenario or 'short_cot'}" if settings.suite in SUITES else ""
    sampling = f"temperature {settings.temperature:g}, top-p {settings.top_p:g}, seed {settings.seed}"
    limited = " (a sample of the problems)" if settings.limit else ""
    return f"{model} on {settings.suite}{scenario}{limited}: {sampling}"
