"""``train(config)``: the loop, which reads like the algorithm.

Everything that can be wrong with what the user gave is found before the run folder is touched (``agent_rl.setup``).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from agent_rl import checkpoint
from agent_rl.checkpoint import RunState
from agent_rl.codec import ChatCodec
from agent_rl.cold_start import starting_model
from agent_rl.collect import Collected, Collector
from agent_rl.config import RunConfig
from agent_rl.engines import make_engine
from agent_rl.evaluation.training import TrainingEvaluation
from agent_rl.leftovers import Leftovers
from agent_rl.models import load_tokenizer
from agent_rl.plan import Plan, UpdateBatch
from agent_rl.progress import Clock, StepProgress
from agent_rl.publish import Publisher
from agent_rl.ranks import AnyLearner, make_learner
from agent_rl.records import RunRecords, leftover_metrics, rollout_metrics, trajectory_record
from agent_rl.regularisers import RegulariserState
from agent_rl.sampling import StepSampling
from agent_rl.setup import Setup, keep_tokenizer, open_run, preflight
from agent_rl.types import Trajectory
from agent_rl.update import start_controllers, update

Result = TypeVar("Result")


def train(config: RunConfig, console: Console | None = None) -> Path:
    """Train until ``config.steps`` are done, going on from the last checkpoint if there is one; returns the run folder.

    Raises:
        ConfigError: something the user gave is wrong; nothing was written.
        PublishError: new weights did not arrive in the engine.
        TooManyFailures: sandbox or engine failed too often in a row.
    """
    console = console or Console()
    setup = asyncio.run(preflight(config, console))
    with open_run(config):
        return asyncio.run(_train(config, setup, console))


async def _train(config: RunConfig, setup: Setup, console: Console) -> Path:
    if config.threads:
        torch.set_num_threads(config.threads)
    folder = config.folder
    async with AsyncExitStack() as stack:
        resources = await stack.enter_async_context(setup.resources())
        source = await starting_model(config, setup, resources, console)
        keep_tokenizer(source, folder)
        tokenizer = load_tokenizer(source)
        codec = ChatCodec(tokenizer, system_text=setup.system_text)
        learner = make_learner(
            source,
            config.model.dtype,
            config.learner,
            temperature=config.rollout.temperature,
            threads=config.threads,
            keep_reference=config.chosen_algorithm.needs_reference,
        )
        stack.callback(learner.close)
        state = restore(folder, config, learner, console)
        keeps = config.rollout.leftovers == "keep"
        # Left before the learner is closed: a step that was interrupted ends first.
        beside = stack.enter_context(ThreadPoolExecutor(1, "learner")) if keeps else None
        engine = make_engine(config.engine, source, config.model.dtype, seed=config.seed, change_midway=keeps)
        stack.push_async_callback(engine.close)
        await engine.start()
        publisher = Publisher(engine, learner, codec, temperature=config.rollout.temperature)
        # Also before the first step: after a resume the engine has the starting weights, not the checkpoint's.
        await publisher.publish(state.step)
        records = RunRecords(folder, first_step=state.step + 1)
        stack.callback(records.close)
        progress = stack.enter_context(StepProgress(console, total=config.steps, done=state.step))
        collector = Collector(
            lambda: setup.make_env(resources),
            engine=engine,
            codec=codec,
            config=config.rollout,
            seed=config.seed,
            on_episode=progress.episode_done,
        )
        leftovers: Leftovers | None = None
        if keeps:
            leftovers = await stack.enter_async_context(
                Leftovers(
                    collector,
                    task_at=setup.task,
                    engine=engine,
                    config=config.rollout,
                    cursor=state.cursor,
                    pending=state.pending,
                )
            )
        evaluation = TrainingEvaluation(
            config,
            setup.evaluation,
            resources=resources,
            dialect=setup.dialect,
            engine=engine,
            codec=codec,
            console=console,
            last_step=state.step,
        )

        def export(target: Path) -> None:
            learner.export(target, tokenizer)

        if evaluation.is_due(state.step):
            await evaluation.look(state.step, export)
        while state.step < config.steps and not evaluation.has_stalled:
            step, clock = state.step + 1, Clock()
            progress.start_episodes(config.rollout.prompts * config.rollout.group)
            sampling = StepSampling(
                config.rollout.strategies,
                state.sampling,
                setup.tasks,
                group=config.rollout.group,
                seed=config.seed,
                step=step,
            )
            if leftovers is None:
                collected, cursor = await collect(collector, sampling, config, step, state.cursor)
            else:
                collected = await leftovers.collect(step, is_last=step == config.steps)
                cursor = leftovers.cursor
            trajectories = collected.trajectories
            clock.lap("rollout")
            batch = sampling.batch(trajectories, config.chosen_algorithm)
            learn = partial(
                update,
                learner,
                batch,
                trajectories,
                state.controllers,
                config.stare,
                clock,
                algorithm=config.chosen_algorithm,
                regularisers=state.regularisers,
                decode=tokenizer.decode,
            )
            await engine.sleep()
            plan, row = await done_by(beside, learn)
            await engine.wake()
            row |= {"canary_gap": await publisher.publish(step), "cursor": cursor}
            clock.lap("sync")
            if evaluation.is_due(step):
                row |= await evaluation.look(step, export)
                clock.lap("evaluation")
            if plan:
                state = replace(state, controllers=dict(plan.controllers), regularisers=plan.regularisers)
            pending = leftovers.pending if leftovers else ()
            state = replace(state, step=step, cursor=cursor, pending=pending, sampling=sampling.after(trajectories))
            if leftovers is not None:
                row |= leftover_metrics(batch, collected, version=step - 1)
            row = rollout_metrics(trajectories, batch, collected.cancelled_tokens) | row | clock.row()
            records.write(step, row, sampled_records(trajectories, batch, plan, step, config.records.trajectories))
            if step % config.checkpoint.every == 0 or step == config.steps or evaluation.has_stalled:
                save = partial(
                    checkpoint.save, folder / "checkpoints", state, learner.save, keep=config.checkpoint.keep
                )
                await done_by(beside, save)
            progress.step_done(step, row)
        learner.export(folder / "model", tokenizer)
    return folder


async def done_by(thread: Executor | None, work: Callable[[], Result]) -> Result:
    """What ``work`` returns: done here and now, or in ``thread`` while the episodes of this event loop go on."""
    return work() if thread is None else await asyncio.get_running_loop().run_in_executor(thread, work)


def restore(folder: Path, config: RunConfig, learner: AnyLearner, console: Console) -> RunState:
    """The state to go on from; weights and optimizer are loaded into ``learner``."""
    found = checkpoint.folders(folder / "checkpoints")
    if not found:
        return RunState(
            step=0,
            cursor=0,
            seed=config.seed,
            controllers=start_controllers(config.stare),
            regularisers=RegulariserState.start(config.chosen_algorithm),
        )
    state = checkpoint.read_state(found[-1])
    learner.load(found[-1])
    console.print(f"going on after step {state.step}, from {found[-1]}", soft_wrap=True)
    return state


async def collect(
    collector: Collector, sampling: StepSampling, config: RunConfig, step: int, cursor: int
) -> tuple[Collected, int]:
    """Rollouts of one step and the cursor behind the prompts that they took.

    New prompts are drawn, at most ``max_rounds`` times, until ``prompts`` groups have a difference inside.
    """
    trajectories: list[Trajectory] = []
    cancelled: list[int] = []
    groups = 0
    for _ in range(config.rollout.max_rounds):
        missing = config.rollout.prompts - len(
            {t.group for t in sampling.batch(trajectories, config.chosen_algorithm).trajectories}
        )
        if missing <= 0:
            break
        begun = math.ceil(missing * (1 + config.rollout.oversample))
        tasks = sampling.draw(cursor, begun)
        enough = missing if begun > missing else None
        collected = await collector.groups(tasks, step, first_group=groups, enough=enough)
        trajectories += collected.trajectories
        cancelled += collected.cancelled_tokens
        groups, cursor = groups + begun, cursor + begun
    return Collected(trajectories=tuple(trajectories), cancelled_tokens=tuple(cancelled)), cursor


def sampled_records(
    trajectories: Sequence[Trajectory], batch: UpdateBatch, plan: Plan | None, step: int, count: int
) -> list[Mapping[str, Any]]:
    """The first ``count`` trajectories of the step, with advantage and coefficients where they are in the loss."""
    coefficients: dict[tuple[int, int], tuple[float, list[float]]] = {}
    if plan is not None and batch.trajectories:
        parts = torch.split(plan.coefficient_T, batch.num_tokens_B.tolist())
        for trajectory, advantage, part in zip(batch.trajectories, batch.advantage_B.tolist(), parts, strict=True):
            coefficients[trajectory.group, trajectory.member] = (advantage, part.tolist())
    chosen = list(trajectories[:count])
    chosen += [t for t in trajectories[count:] if t.is_void][:count]
    records: list[Mapping[str, Any]] = []
    for trajectory in chosen:
        place = (trajectory.group, trajectory.member)
        advantage, values = coefficients.get(place, (None, None)) if not trajectory.is_void else (None, None)
        records.append(trajectory_record(trajectory, step, advantage=advantage, coefficients=values))
    return records
