"""Sampling strategies of a run, by name: which prompts are drawn, how groups grow, which rollouts are learned from, and
what their length costs them.

``rollout.sampling`` names them, ``rollout.options`` has their parameters; they compose. What they remember between
steps is a ``SamplingState``, part of the checkpoint. Branching inside a group is in ``agent_rl.branching``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent_rl.algorithm import Algorithm
from agent_rl.branching import BranchOptions
from agent_rl.methods import chosen
from agent_rl.plan import UpdateBatch, update_batch
from agent_rl.seeds import derive_seed, shuffled_index
from agent_rl.types import Trajectory, Turn, WeightChange
from envs.data import TaskSource
from envs.types import Stop, Task
from stare.neighbours.sampling import (
    VADE_DECAY,
    Difficulty,
    cross_context_replay,
    d3s_samples,
    overlong_penalty,
    vade,
)

MOST_PROMPTS = 1_000_000
"""Of a source that VADE draws from: it draws a success rate for every prompt, in every step."""


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class VadeOptions(_Options):
    """``rollout.options.vade``."""

    decay: float = Field(VADE_DECAY, ge=0, le=1)


class SampleOptions(_Options):
    """``rollout.options.d3s_samples``."""

    keep: int | None = Field(None, ge=2, description="rollouts of each group that are learned from; half if None")

    def keep_of(self, group: int) -> int:
        return self.keep or max(2, group // 2)


class ReplayOptions(_Options):
    """``rollout.options.cross_context_replay``."""

    capacity: int = Field(256, ge=1, description="rollouts remembered, the newest of each prompt and reward")


class OverlongOptions(_Options):
    """``rollout.options.overlong_penalty``; the defaults are in the proportion of the paper's 4,096 of 20,480."""

    most: int | None = Field(
        None, ge=1, description="sampled tokens at which all of it is due; rollout.max_episode_tokens if None"
    )
    buffer: int | None = Field(None, ge=1, description="tokens before that over which it grows; a fifth if None")
    factor: float = Field(1.0, gt=0, description="the whole penalty")

    def within(self, max_episode_tokens: int) -> tuple[int, int]:
        """Where it is whole, and the tokens before that over which it grows.

        Raises:
            ValueError: it begins below 0, or where no episode of this many tokens comes.
        """
        most = self.most or max_episode_tokens
        buffer = self.buffer or max(1, most // 5)
        if not 0 <= most - buffer < max_episode_tokens:
            raise ValueError(
                f"overlong_penalty: most - buffer = {most - buffer} sampled tokens, where it begins, is not between 0 "
                f"and max_episode_tokens = {max_episode_tokens}"
            )
        return most, buffer


AnyOptions = TypeVar("AnyOptions", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategies:
    """The chosen ones with their options; None: not chosen."""

    branching: BranchOptions | None
    vade: VadeOptions | None
    samples: SampleOptions | None
    replay: ReplayOptions | None
    overlong: OverlongOptions | None

    @staticmethod
    def of(
        names: Sequence[str], options: Mapping[str, Mapping[str, Any]], *, group: int, max_episode_tokens: int
    ) -> Strategies:
        """For groups of this size and episodes of at most so many tokens.

        Raises:
            ConfigError: a name that is unknown, of another hook or library only.
            ValueError: an option that is unknown or impossible, or one for a strategy that is not chosen.
        """
        for name in names:
            chosen(name, "sampling")
            if name == "dynamic_sampling":
                raise ValueError("'dynamic_sampling' is always on: rollout.max_rounds says how often prompts are drawn")
        for name in options:
            if name not in names:
                raise ValueError(f"options for {name!r}, which is not chosen")

        def of(name: str, kind: type[AnyOptions]) -> AnyOptions | None:
            if name not in names:
                return None
            try:
                return kind.model_validate(options.get(name, {}))
            except ValidationError as error:
                fault = error.errors(include_url=False)[0]
                option = ".".join(map(str, fault["loc"]))
                if fault["type"] == "extra_forbidden":
                    raise ValueError(f"{name} has no option {option!r}: {', '.join(kind.model_fields)}") from None
                raise ValueError(f"{name}: {option} = {fault['input']!r}: {fault['msg']}") from None

        found = Strategies(
            branching=of("arpo_branching", BranchOptions),
            vade=of("vade", VadeOptions),
            samples=of("d3s_samples", SampleOptions),
            replay=of("cross_context_replay", ReplayOptions),
            overlong=of("overlong_penalty", OverlongOptions),
        )
        if found.overlong:
            found.overlong.within(max_episode_tokens)  # raises where it never acts
        if found.branching and found.branching.initial_of(group) >= group:
            raise ValueError(
                f"arpo_branching: initial = {found.branching.initial} leaves no branch in groups of {group}"
            )
        if found.samples and found.samples.keep_of(group) >= group:
            raise ValueError(f"d3s_samples: keep = {found.samples.keep_of(group)} drops nothing of groups of {group}")
        return found


def with_overlong_penalty(trajectory: Trajectory, options: OverlongOptions, max_episode_tokens: int) -> Trajectory:
    """The penalty added to the reward, and told as its term ``overlong``; a void trajectory as it is.

    Only sampled tokens count: a tool's long answer is not the policy's doing. DAPO, arXiv 2503.14476, Eq. 13.
    """
    if trajectory.reward is None:
        return trajectory
    most, buffer = options.within(max_episode_tokens)
    length = torch.tensor([trajectory.num_sampled])
    penalty = overlong_penalty(length, most=most, buffer=buffer, factor=options.factor).item()
    return replace(trajectory, reward=trajectory.reward + penalty, terms={**trajectory.terms, "overlong": penalty})


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """An earlier rollout, as the checkpoint has it."""

    prompt: int  # number of its task in the source
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the policy that sampled it
    turns: tuple[Turn, ...]
    reward: float
    terms: dict[str, float]
    stop: Stop

    @staticmethod
    def of(trajectory: Trajectory, prompt: int) -> Remembered:
        assert trajectory.reward is not None, "a void rollout is not remembered"
        return Remembered(
            prompt=prompt,
            token_ids=trajectory.token_ids,
            logprobs=trajectory.logprobs,
            turns=trajectory.turns,
            reward=trajectory.reward,
            terms=trajectory.terms,
            stop=trajectory.stop,
        )

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Remembered:
        turns = tuple(
            Turn(
                **{
                    **turn,
                    "call_statuses": tuple(turn["call_statuses"]),
                    "weight_changes": tuple(WeightChange(*change) for change in turn["weight_changes"]),
                }
            )
            for turn in data["turns"]
        )
        columns = {name: tuple(data[name]) for name in ("token_ids", "logprobs")}
        return Remembered(**{**data, **columns, "turns": turns})

    def trajectory(self, task: Task, group: int, member: int) -> Trajectory:
        mask = [False] * len(self.token_ids)
        for turn in self.turns:
            mask[turn.start : turn.end] = [True] * (turn.end - turn.start)
        return Trajectory(
            task=task,
            group=group,
            member=member,
            token_ids=self.token_ids,
            loss_mask=tuple(mask),
            logprobs=self.logprobs,
            turns=self.turns,
            messages=(),
            reward=self.reward,
            terms=self.terms,
            stop=self.stop,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingState:
    """What the strategies remember between steps; empty where none does."""

    beliefs: tuple[tuple[int, float, float], ...] = ()  # number of a prompt, its successes and failures (VADE)
    remembered: tuple[Remembered, ...] = ()  # oldest first (R^3)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> SamplingState:
        beliefs = tuple((int(prompt), float(right), float(wrong)) for prompt, right, wrong in data["beliefs"])
        return SamplingState(beliefs=beliefs, remembered=tuple(map(Remembered.from_dict, data["remembered"])))


class StepSampling:
    """The strategies at work in one step.

    Args:
        strategies: those chosen.
        state: what they remember of the steps before.
        tasks: where prompts come from.
        group: members of a group; a recalled rollout joins as one more.
        seed: of the run; with the step's number it decides every draw.
    """

    def __init__(
        self, strategies: Strategies, state: SamplingState, tasks: TaskSource, *, group: int, seed: int, step: int
    ) -> None:
        self._strategies = strategies
        self._state = state
        self._tasks = tasks
        self._group = group
        self._seed = seed
        self._step = step
        self._prompts: list[int] = []  # number of the task of each group of the step

    def draw(self, cursor: int, count: int) -> list[Task]:
        """The prompts of the next ``count`` groups: in the run's order from ``cursor`` on, or by VADE's belief."""
        size = len(self._tasks)
        if self._strategies.vade is None:
            numbers = [shuffled_index(place, size, self._seed) for place in range(cursor, cursor + count)]
        else:
            first = len(self._prompts)  # of an order that is the same in every round of the step
            belief = self._belief(self._strategies.vade)
            order = vade(belief, first + count, seed=derive_seed(self._seed, "vade", self._step)).tolist()
            numbers = [order[place % size] for place in range(first, first + count)]
        self._prompts += numbers
        return [self._tasks.task(number) for number in numbers]

    def batch(self, trajectories: Sequence[Trajectory], algorithm: Algorithm) -> UpdateBatch:
        """What is learned from: the step's rollouts and recalled ones, less those that D3S drops.

        Advantages are among all members of a group, the recalled and the dropped included.
        """
        batch = update_batch([*trajectories, *self.recalled(trajectories)], algorithm)
        if self._strategies.samples is None or not batch.trajectories:
            return batch
        kept_B = d3s_samples(
            torch.tensor([t.reward for t in batch.trajectories], dtype=torch.float64),
            torch.tensor([t.group for t in batch.trajectories], dtype=torch.int64),
            keep=self._strategies.samples.keep_of(self._group),
        )
        return rows_of(batch, kept_B)

    def recalled(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """For each group without a difference the newest rollout of its prompt with another reward, if there is one."""
        scored = [t for t in trajectories if not t.is_void]
        if self._strategies.replay is None or not scored:
            return []
        groups = sorted({t.group for t in scored})
        pairs = [
            (group, remembered)
            for remembered in reversed(self._state.remembered)
            for group in groups
            if self._prompts[group] == remembered.prompt
        ]
        recalled_R = cross_context_replay(
            torch.tensor([t.reward for t in scored], dtype=torch.float64),
            torch.tensor([t.group for t in scored], dtype=torch.int64),
            torch.tensor([remembered.reward for _, remembered in pairs], dtype=torch.float64),
            torch.tensor([group for group, _ in pairs], dtype=torch.int64),
        )
        return [
            remembered.trajectory(self._tasks.task(remembered.prompt), group, self._group)
            for (group, remembered), is_recalled in zip(pairs, recalled_R.tolist(), strict=True)
            if is_recalled
        ]

    def after(self, trajectories: Sequence[Trajectory]) -> SamplingState:
        """What is remembered for the next step."""
        scored = [t for t in trajectories if not t.is_void]
        beliefs, remembered = self._state.beliefs, self._state.remembered
        if self._strategies.vade is not None:
            belief = self._belief(self._strategies.vade).update(
                torch.tensor([self._prompts[t.group] for t in scored], dtype=torch.int64),
                torch.tensor([is_right(t) for t in scored], dtype=torch.bool),
            )
            known = ((belief.right_Q + belief.wrong_Q) > 0).nonzero().flatten().tolist()
            right, wrong = belief.right_Q.tolist(), belief.wrong_Q.tolist()
            beliefs = tuple((prompt, right[prompt], wrong[prompt]) for prompt in known)
        if self._strategies.replay is not None:
            kept = {(r.prompt, r.reward): r for r in remembered}
            for trajectory in scored:
                if trajectory.num_sampled:
                    new = Remembered.of(trajectory, self._prompts[trajectory.group])
                    kept.pop((new.prompt, new.reward), None)  # so that it moves to the end
                    kept[new.prompt, new.reward] = new
            remembered = tuple(kept.values())[-self._strategies.replay.capacity :]
        return SamplingState(beliefs=beliefs, remembered=remembered)

    def _belief(self, options: VadeOptions) -> Difficulty:
        counts = torch.zeros(2, len(self._tasks), dtype=torch.float64)
        if self._state.beliefs:
            prompts, right, wrong = zip(*self._state.beliefs, strict=True)
            counts[:, list(prompts)] = torch.tensor([right, wrong], dtype=torch.float64)
        return Difficulty(right_Q=counts[0], wrong_Q=counts[1], decay=options.decay)


def is_right(trajectory: Trajectory) -> bool:
    """By the reward term ``correct``, or by the reward where there is none: above one half."""
    assert trajectory.reward is not None
    return trajectory.terms.get("correct", trajectory.reward) > 0.5


def rows_of(batch: UpdateBatch, kept_B: torch.Tensor) -> UpdateBatch:
    """The trajectories of a batch where ``kept_B`` (bool [B]) is True, with the advantages that they have."""
    rows = kept_B.nonzero().flatten().tolist()
    by_turn_T = batch.turn_advantage_T
    return UpdateBatch(
        trajectories=tuple(batch.trajectories[row] for row in rows),
        sequences=tuple(batch.sequences[row] for row in rows),
        advantage_B=batch.advantage_B[rows],
        turn_advantage_T=None if by_turn_T is None else by_turn_T[torch.repeat_interleave(kept_B, batch.num_tokens_B)],
    )
