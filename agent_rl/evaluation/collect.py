"""Plays the episodes that are still missing, several at a time, and hands over each one as it ends."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from agent_rl.chat_episode import run_chat_episode
from agent_rl.engines.base import Engine
from agent_rl.engines.openai import Endpoint, Usage
from agent_rl.evaluation.store import Row
from agent_rl.evaluation.suites import Part, Problem
from agent_rl.rollout import Place, TooManyFailures, run_episode
from agent_rl.seeds import derive_seed
from agent_rl.types import Trajectory
from envs import Limits, Resources, Tool
from envs.answers import final_answer
from envs.grader import Grader, GraderFailure
from envs.parsers import Dialect


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeBudget:
    """An ``EpisodeLimits`` of ``agent_rl.rollout``."""

    temperature: float
    top_p: float
    max_tokens: int
    max_episode_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One episode to play. Its random choices come from the run's seed, its part, its problem's id and its numbers."""

    part: Part
    problem: Problem
    sample: int
    attempt: int = 0

    @property
    def place(self) -> Place:
        step = derive_seed("part", self.part.name) % 1_000_000  # keeps the parts' episode ids apart
        return Place(step=step, group=self.problem.place, member=self.sample, attempt=self.attempt)

    @property
    def episode_id(self) -> str:
        return self.place.episode_id


def missing_jobs(parts: Sequence[Part], rows: Sequence[Row]) -> list[Job]:
    """What is not scored yet, first samples of all problems first; a sample that was void is tried afresh."""
    scored = {row.key for row in rows if not row.is_void}
    tries = Counter(row.key for row in rows)
    return [
        Job(part=part, problem=problem, sample=sample, attempt=tries[part.name, problem.task.id, sample])
        for sample in range(max((part.k for part in parts), default=0))
        for part in parts
        if sample < part.k
        for problem in part.problems
        if (part.name, problem.task.id, sample) not in scored
    ]


class Player(Protocol):
    """Who plays an episode."""

    async def play(self, job: Job, seed: int) -> tuple[Trajectory, Usage | None]: ...

    def join(self, episode_id: str) -> None: ...

    def leave(self, episode_id: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What every episode of an evaluation is played with."""

    resources: Resources
    dialect: Dialect
    shots: int
    limits: Mapping[str, Limits]  # by part
    budgets: Mapping[str, EpisodeBudget]  # by part

    def make_env(self, part: Part) -> Any:
        return part.env.make(
            part.source,
            resources=self.resources,
            dialect=self.dialect.name,
            shots=self.shots,
            limits=self.limits[part.name],
            on_tool_bug="void",  # else one bug would keep a long evaluation from ever ending; counted by kind
        )


class EnginePlayer:
    """Plays in token space, exactly as training does."""

    def __init__(self, stage: Stage, engine: Engine, codec: Any) -> None:
        self._stage = stage
        self._engine = engine
        self._codec = codec
        self.join = engine.join
        self.leave = engine.leave

    async def play(self, job: Job, seed: int) -> tuple[Trajectory, Usage | None]:
        trajectory = await run_episode(
            self._stage.make_env(job.part),
            job.problem.task,
            job.place,
            engine=self._engine,
            codec=self._codec,
            config=self._stage.budgets[job.part.name],
            seed=_seed_of(job, seed),
        )
        return trajectory, None


class EndpointPlayer:
    """Plays in message space. ``native``: with the API's own tool calls instead of the dialect's text."""

    def __init__(self, stage: Stage, endpoint: Endpoint, *, native: bool) -> None:
        self._stage = stage
        self._endpoint = endpoint
        self._native = native

    @property
    def model(self) -> str:
        """Its name at the endpoint."""
        assert self._endpoint.model is not None, "not opened"
        return self._endpoint.model

    def join(self, episode_id: str) -> None:
        """A server batches whatever is there."""

    def leave(self, episode_id: str) -> None:
        """See ``join``."""

    async def play(self, job: Job, seed: int) -> tuple[Trajectory, Usage | None]:
        return await run_chat_episode(
            self._stage.make_env(job.part),
            job.problem.task,
            job.place,
            endpoint=self._endpoint,
            dialect=None if self._native else self._stage.dialect,
            config=self._stage.budgets[job.part.name],
            seed=_seed_of(job, seed),
        )


def _seed_of(job: Job, seed: int) -> int:
    return derive_seed(seed, job.part.name, job.problem.task.id)


Finished = Callable[[Row, Mapping[str, Any]], None]


async def collect(
    jobs: Sequence[Job],
    player: Player,
    stage: Stage,
    *,
    seed: int,
    concurrency: int,
    max_refills: int,
    max_failures: int,
    finished: Finished,
    cost: Callable[[float, float], float | None] = lambda prompt, completion: None,
    go_on: Callable[[], bool] = lambda: True,
) -> None:
    """Every job is played, a void one up to ``max_refills`` times again, each episode handed to ``finished`` at once.

    Args:
        concurrency: episodes at a time.
        max_failures: void ones in a row that stop everything.
        cost: dollars of prompt and completion tokens.
        go_on: asked before every episode; after the first no, those under way end and no other starts.

    Raises:
        TooManyFailures: see ``max_failures``.
    """
    queue = deque((job, 0) for job in jobs)
    running: dict[asyncio.Task[tuple[Row, Mapping[str, Any]]], tuple[Job, int]] = {}
    lost_in_a_row = 0

    def start_more() -> None:
        # All that start together join before any of them asks for tokens: the embedded engine's wave then holds them.
        while queue and len(running) < concurrency and go_on():
            job, refill = queue.popleft()
            player.join(job.episode_id)
            running[asyncio.create_task(_episode(job, player, stage, seed, cost))] = (job, refill)

    try:
        start_more()
        while running:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            ended = []
            errors: list[BaseException] = []
            for task in sorted(done, key=lambda task: running[task][0].episode_id):
                job, refill = running.pop(task)
                ended.append(job)
                if error := task.exception():
                    errors.append(error)  # after the others of this moment are safe
                    continue
                row, transcript = task.result()
                finished(row, transcript)
                if row.is_void:
                    lost_in_a_row += 1
                    if lost_in_a_row >= max_failures:
                        told = f"{lost_in_a_row} episodes in a row failed on our side, last: {row.failure}"
                        errors.append(TooManyFailures(told))
                    elif refill < max_refills:
                        queue.appendleft((replace(job, attempt=job.attempt + 1), refill + 1))
                else:
                    lost_in_a_row = 0
            if errors:
                raise errors[0]
            start_more()  # before the seats are given back, so that no wave starts without the newcomers
            for job in ended:
                player.leave(job.episode_id)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for job, _ in running.values():
            player.leave(job.episode_id)


async def _episode(
    job: Job, player: Player, stage: Stage, seed: int, cost: Callable[[float, float], float | None]
) -> tuple[Row, Mapping[str, Any]]:
    started = time.perf_counter()
    trajectory, usage = await player.play(job, seed)
    answer = answer_of(trajectory, stage.dialect, {tool.name: tool for tool in job.part.env.tools})
    correct, verdict = await judged(trajectory, answer, stage.resources.grader, own="correct" in job.part.env.terms)
    if usage is None:
        prompt_tokens = sum(turn.start for turn in trajectory.turns)
        sampled, requests, retries = trajectory.num_sampled, 0, 0
    else:
        prompt_tokens, sampled = usage.prompt_tokens, usage.completion_tokens
        requests, retries = usage.requests, usage.retries
    row = Row(
        part=job.part.name,
        problem=job.problem.task.id,
        place=job.problem.place,
        sample=job.sample,
        attempt=job.attempt,
        gold=job.problem.task.answer,
        answer=answer,
        verdict=verdict,
        correct=correct,
        reward=trajectory.reward,
        terms=trajectory.terms,
        stop=trajectory.stop,
        failure=None if trajectory.failure is None else _one_line(trajectory),
        turns=len(trajectory.turns),
        calls=dict(Counter(status for turn in trajectory.turns for status in turn.call_statuses)),
        prompt_tokens=prompt_tokens,
        sampled_tokens=sampled,
        context_tokens=len(trajectory.token_ids),
        seconds=round(time.perf_counter() - started, 3),
        generate_s=round(trajectory.seconds.get("generate", 0.0), 3),
        requests=requests,
        retries=retries,
        cost=cost(prompt_tokens, sampled),
    )
    transcript = {
        "messages": trajectory.messages,
        "token_ids": trajectory.token_ids,
        "spans": [[turn.start, turn.end] for turn in trajectory.turns],
    }
    return row, transcript


def _one_line(trajectory: Trajectory) -> str:
    assert trajectory.failure is not None
    failure = trajectory.failure
    return f"{failure.kind} at {failure.where}: {' '.join(failure.detail.split())[:300]}"


def answer_of(trajectory: Trajectory, dialect: Dialect, tools: Mapping[str, Tool]) -> str | None:
    """What the episode's last turn answers: a box, or what it handed in by a tool that ends the episode."""
    if trajectory.stop != "answer":
        return None
    said = [str(message["content"]) for message in trajectory.messages if message["role"] == "assistant"]
    if not said:
        return None
    for call in reversed(dialect.parse(said[-1], "stop", tools) if tools else ()):
        if call.status == "ok" and call.name is not None and call.name in tools and tools[call.name].ends:
            values = list((call.arguments or {}).values())
            return str(values[0]) if len(values) == 1 else json.dumps(call.arguments)
    return final_answer(said[-1])


async def judged(trajectory: Trajectory, answer: str | None, grader: Grader, *, own: bool) -> tuple[bool | None, str]:
    """Whether the episode is right, as its environment says, and the verdict that says why not.

    ``own``: the environment has its own idea of what is right, which no answer explains.
    """
    if trajectory.reward is None:
        return None, "void"
    if trajectory.terms.get("correct", trajectory.reward) >= 1.0:
        return True, "correct"
    if answer is None:
        return False, "unparsable"
    if own or trajectory.task.answer is None:
        return False, "wrong"
    try:
        verdict = await grader.verdict(trajectory.task.answer, answer)
    except GraderFailure:
        return False, "wrong"
    # It was not right when the environment asked: only a deadline can make the difference.
    return False, "timeout" if verdict == "correct" else verdict
