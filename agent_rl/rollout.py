"""Episodes: policy and environment take turns in token space, under budgets; failures stay with their trajectory."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from agent_rl.engines.base import EngineFailure
from agent_rl.seeds import derive_seed
from agent_rl.types import Generation, Prefix, Sampling, Trajectory, Turn, WeightChange
from envs.types import Failure, Message, ModelTurn, Opening, Stop, Task, TurnResult

if TYPE_CHECKING:
    from agent_rl.codec import ChatCodec


class Environment(Protocol):
    """What an episode needs of an environment; ``envs.ToolEnv`` is one."""

    async def areset(self, seed: int, task: Task) -> Opening: ...

    async def astep(self, turn: ModelTurn) -> TurnResult: ...

    async def aclose(self) -> None: ...


class Sampler(Protocol):
    """What an episode needs of an engine."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation: ...


class EpisodeLimits(Protocol):
    """How tokens of an episode are drawn, and how many; ``RolloutConfig`` is one."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def max_episode_tokens(self) -> int: ...


class TooManyFailures(Exception):
    """Our side lost so many episodes in a row that going on would only burn time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which rollout this is; with the run's seed it decides every random choice of the episode."""

    step: int
    group: int
    member: int
    attempt: int = 0

    @property
    def episode_id(self) -> str:
        return f"{self.step:06d}-{self.group:04d}-{self.member:03d}-{self.attempt}"


class Branching(Protocol):
    """Asked around every turn; ``agent_rl.branching.MemberBranching`` is one."""

    @property
    def prefix(self) -> Prefix | None:
        """Where the episode starts; None: from the prompt."""
        ...

    @property
    def top_logprobs(self) -> int:
        """What it wants to know of the next turn."""
        ...

    def after_turn(self, before: Prefix, generation: Generation) -> None:
        """This was sampled after that. Called where ``top_logprobs`` was above 0."""
        ...


async def run_episode(
    env: Environment,
    task: Task,
    place: Place,
    *,
    engine: Sampler,
    codec: ChatCodec,
    config: EpisodeLimits,
    seed: int,
    watch: Callable[[int], None] = lambda num_tokens: None,
    generate_s: float | None = None,
    branching: Branching | None = None,
) -> Trajectory:
    """One episode to its end. Our failures come back as a void trajectory; bugs raise.

    The caller has joined the engine under ``place.episode_id`` and leaves it; the environment is closed here.
    Cancelling frees the engine's slot and the sandbox. ``watch`` is told the number of tokens whenever it has grown.
    A completion that takes more than ``generate_s`` seconds voids the episode: tokens are bounded, so the engine hangs.
    With ``branching.prefix`` the environment is brought there by its earlier turns; where that fails (what it answers
    now is not what it answered then), the episode starts from the prompt.
    """
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    turns: list[Turn] = []
    messages: list[Message] = []
    seconds = {"generate": 0.0, "environment": 0.0}
    result: TurnResult | None = None
    stop: Stop | None = None
    failure: Failure | None = None
    trunk: int | None = None
    base = derive_seed(seed, "episode", place.step, place.group, place.member, place.attempt)

    def append(new_ids: Sequence[int], new_logprobs: Sequence[float] | None = None) -> None:
        ids.extend(new_ids)
        mask.extend([new_logprobs is not None] * len(new_ids))
        logprobs.extend([0.0] * len(new_ids) if new_logprobs is None else new_logprobs)
        watch(len(ids))

    try:
        task_seed = derive_seed(seed, "task", place.step, place.group)
        opening = await env.areset(task_seed, task)
        prefix = branching.prefix if branching else None
        if prefix is not None:
            started = time.perf_counter()
            result = await _replayed(env, opening, prefix, codec)
            trunk = 0 if result is None else len(prefix.token_ids)
            if result is None:
                opening = await env.areset(task_seed, task)
            else:
                stop, failure = result.stop, result.failure
            seconds["environment"] += time.perf_counter() - started
        if prefix is not None and trunk:
            ids += prefix.token_ids
            mask += prefix.loss_mask
            logprobs += prefix.logprobs
            turns += prefix.turns
            messages += prefix.messages
            watch(len(ids))
        else:
            messages += opening.messages
            append(codec.open(opening))
        while stop is None:
            room = config.max_episode_tokens - len(ids)
            if room < 1:
                # The environment scores what it has seen: an empty turn that was cut by length.
                result = await env.astep(ModelTurn(text="", finish="length"))
                stop, failure = ("failure" if result.failure else "max_tokens"), result.failure
                break
            sampling = Sampling(
                max_tokens=min(config.max_tokens, room),
                temperature=config.temperature,
                top_p=config.top_p,
                seed=derive_seed(base, "turn", len(turns)),
                stop_token_ids=codec.stop_token_ids,
                top_logprobs=branching.top_logprobs if branching else 0,
            )
            started = time.perf_counter()
            try:
                async with asyncio.timeout(generate_s):
                    generation = await engine.generate(ids, sampling, request_id=place.episode_id)
            except TimeoutError:
                detail = (
                    f"no completion within {generate_s:g} s (rollout.wall_s), the wait for a place in the engine "
                    "included: raise it, or lower rollout.concurrency"
                )
                stop, failure = "failure", Failure(kind="time", where=f"turn {len(turns)}", detail=detail)
                break
            seconds["generate"] += time.perf_counter() - started
            if not generation.token_ids or not all(map(math.isfinite, generation.logprobs)):
                raise EngineFailure(
                    f"turn {len(turns)}: {len(generation.token_ids)} ids, not all with a finite logprob"
                )
            if branching is not None and generation.top_logprobs is not None:
                before = Prefix(
                    token_ids=tuple(ids),
                    loss_mask=tuple(mask),
                    logprobs=tuple(logprobs),
                    turns=tuple(turns),
                    messages=tuple(messages),
                )
                branching.after_turn(before, generation)
            start = len(ids)
            append(generation.token_ids, generation.logprobs)
            text = codec.decode(generation.token_ids, generation.finish_reason)
            messages.append({"role": "assistant", "content": text})

            started = time.perf_counter()
            result = await env.astep(ModelTurn(text=text, finish=generation.finish_reason))
            seconds["environment"] += time.perf_counter() - started
            turns.append(
                Turn(
                    start=start,
                    end=len(ids),
                    weight_version=generation.weight_version,
                    finish_reason=generation.finish_reason,
                    call_statuses=tuple(call.status for call in result.calls),
                    weight_changes=tuple(WeightChange(start + p, v) for p, v in generation.weight_changes),
                )
            )
            messages += result.messages
            stop, failure = result.stop, result.failure
            if stop is None:
                append(codec.extend(generation.finish_reason, result.messages))
    except EngineFailure as error:
        stop, failure = "failure", Failure(kind="engine", where=f"turn {len(turns)}", detail=str(error))
    finally:
        # Shielded: a cancelled episode still gives its sandbox back.
        await asyncio.shield(env.aclose())
    return Trajectory(
        task=task,
        group=place.group,
        member=place.member,
        token_ids=tuple(ids),
        loss_mask=tuple(mask),
        logprobs=tuple(logprobs),
        turns=tuple(turns),
        messages=tuple(messages),
        reward=None if failure or result is None else result.reward,
        terms={} if failure or result is None else dict(result.terms),
        stop=stop or "failure",
        failure=failure,
        seconds=seconds,
        trunk=trunk,
    )


async def _replayed(env: Environment, opening: Opening, prefix: Prefix, codec: ChatCodec) -> TurnResult | None:
    """The environment, just opened, after the turns of ``prefix``; None if it now shows other ids than it did then.

    The result is the last turn's; one with a failure voids the episode.
    """
    assert prefix.turns, "without a turn there is nothing to replay"
    expected = tuple(codec.open(opening))
    for turn in prefix.turns:
        if prefix.token_ids[: turn.start] != expected:
            return None
        sampled = prefix.token_ids[turn.start : turn.end]
        finish = turn.finish_reason
        result = await env.astep(ModelTurn(text=codec.decode(sampled, finish), finish=finish))
        if result.failure is not None:
            return result
        if result.stop is not None:
            return None
        expected += (*sampled, *codec.extend(finish, result.messages))
    return result if prefix.token_ids == expected else None
