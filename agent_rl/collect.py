"""The episodes of a step: admitted in order, refilled when our side loses one, stopped when there are enough."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from agent_rl.branching import Branches
from agent_rl.codec import ChatCodec
from agent_rl.config import RolloutConfig
from agent_rl.engines.base import Engine
from agent_rl.rollout import Environment, Place, TooManyFailures, run_episode
from agent_rl.sampling import with_overlong_penalty
from agent_rl.types import Trajectory
from envs.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What came of the tasks."""

    trajectories: tuple[Trajectory, ...]  # by group, member and attempt; the lost attempts among them (void)
    cancelled_tokens: tuple[int, ...] = ()  # tokens that each rollout had when it was no longer wanted
    # Of ``rollout.leftovers = "keep"`` (``agent_rl.leftovers``) alone:
    groups_carried: int = 0  # groups among the trajectories that an earlier step began
    groups_waiting: int = 0  # groups begun and not among them: left over for a later step
    groups_dropped: int = 0  # groups too stale to be trained, begun anew
    dropped_tokens: tuple[int, ...] = ()  # tokens of each of their rollouts


@dataclass(slots=True, kw_only=True)
class _Run:
    """The state of one call of ``groups``."""

    missing: dict[int, int]  # members that each group waits for
    enough: int | None
    done: list[tuple[Place, Trajectory]] = field(default_factory=list)
    rewards: dict[int, set[float]] = field(default_factory=lambda: defaultdict(set))  # distinct ones of each group
    informative: int = 0  # complete groups with a difference in reward
    under_way: dict[str, int] = field(default_factory=dict)  # tokens of episodes that have begun and not ended
    lanes: list[asyncio.Task[None]] = field(default_factory=list)
    busy: int = 0  # lanes that have not ended
    begin: Callable[[Task, Place], None] = lambda task, place: None  # in a lane of its own, or as soon as one is free
    branches: Branches | None = None

    def completes_enough(self, trajectory: Trajectory) -> bool:
        """Count a member that will not be tried again; whether no more groups are wanted."""
        group = trajectory.group
        self.missing[group] -= 1
        if trajectory.reward is not None:
            self.rewards[group].add(trajectory.reward)
        self.informative += self.missing[group] == 0 and len(self.rewards[group]) > 1
        return self.has_enough

    @property
    def has_enough(self) -> bool:
        """Whether no more groups are wanted."""
        return self.enough is not None and self.informative >= self.enough

    def cancel_others(self) -> None:
        for lane in self.lanes:
            if lane is not asyncio.current_task():
                lane.cancel()


class Collector:
    """Runs groups of episodes.

    Args:
        make_env: a new environment for one episode.
        on_episode: called with every finished trajectory (for progress bars).
    """

    def __init__(
        self,
        make_env: Callable[[], Environment],
        *,
        engine: Engine,
        codec: ChatCodec,
        config: RolloutConfig,
        seed: int,
        on_episode: Callable[[Trajectory], None] = lambda trajectory: None,
    ) -> None:
        self._make_env = make_env
        self._engine = engine
        self._codec = codec
        self._config = config
        self._seed = seed
        self._on_episode = on_episode
        self._failures_in_a_row = 0
        self._overlong = config.strategies.overlong

    async def groups(
        self, tasks: Sequence[Task], step: int, *, first_group: int = 0, enough: int | None = None
    ) -> Collected:
        """``config.group`` rollouts of every task; void ones only where every refill failed too.

        Args:
            enough: as soon as so many groups are complete and have a difference in reward, the rest is cancelled, and
                groups that are not complete are left out: what has ended of them are their shortest episodes. That
                favours groups whose episodes are short, so the lengths of what was cancelled are returned.

        Raises:
            TooManyFailures: ``config.max_failures`` episodes in a row were lost on our side.
        """
        task_of = dict(enumerate(tasks, start=first_group))
        run = _Run(missing=dict.fromkeys(task_of, self._config.group), enough=enough)
        options = self._config.strategies.branching
        if options is not None:
            run.branches = Branches(
                options=options,
                group=self._config.group,
                vocabulary=len(self._codec.tokenizer),
                seed=self._seed,
                begin=lambda place: run.begin(task_of[place.group], place),
            )
            run.branches.start(task_of)
        members = self._config.group if options is None else options.initial_of(self._config.group)
        places = [(group, member) for group in task_of for member in range(members)]
        while places and not run.has_enough:
            await self._in_lanes([(task_of[g], Place(step=step, group=g, member=m)) for g, m in places], run)
            # Not before all have ended: at any earlier moment, which of them is next would depend on the sandboxes.
            places = run.branches.missing() if run.branches else []
        ordered = sorted(run.done, key=lambda pair: (pair[0].group, pair[0].member, pair[0].attempt))
        whole = [trajectory for place, trajectory in ordered if not run.missing[place.group]]
        cut = [len(trajectory.token_ids) for place, trajectory in ordered if run.missing[place.group]]
        return Collected(trajectories=tuple(whole), cancelled_tokens=(*run.under_way.values(), *cut))

    async def _in_lanes(self, episodes: Sequence[tuple[Task, Place]], run: _Run) -> None:
        """All of these, and those that they begin, as many at once as ``config.concurrency`` allows."""
        waiting: deque[tuple[Task, Place]] = deque()
        started: list[Place] = []
        try:
            async with asyncio.TaskGroup() as group:

                def begin(task: Task, place: Place) -> None:
                    if self._config.concurrency is not None and run.busy >= self._config.concurrency:
                        waiting.append((task, place))
                        return
                    run.busy += 1
                    started.append(place)
                    # It joins before it starts, so that the embedded engine's next wave holds all that begin together.
                    self._engine.join(place.episode_id)
                    run.lanes.append(group.create_task(self._lane(task, place, waiting, run)))

                run.begin = begin
                for task, place in episodes:
                    begin(task, place)
        except* TooManyFailures as errors:
            raise errors.exceptions[0] from None
        finally:
            run.busy = 0
            for place in started:
                self._engine.leave(place.episode_id)

    async def _lane(self, task: Task, place: Place, waiting: deque[tuple[Task, Place]], run: _Run) -> None:
        """One episode after the other, until none waits; a lost one is tried again before the next."""
        following: tuple[Task, Place] | None = (task, place)
        while following is not None:
            task, place = following
            try:
                trajectory = await self.episode(task, place, run.under_way, branches=run.branches)
                run.done.append((place, trajectory))
                if trajectory.is_void and place.attempt < self._config.max_refills:
                    following = (task, replace(place, attempt=place.attempt + 1))
                elif run.completes_enough(trajectory):
                    waiting.clear()
                    run.cancel_others()
                    following = None
                else:
                    following = waiting.popleft() if waiting else None
                if following is not None:
                    self._engine.join(following[1].episode_id)  # before the other leaves: no wave without this lane
            finally:
                self._engine.leave(place.episode_id)
        run.busy -= 1

    async def episode(
        self, task: Task, place: Place, under_way: dict[str, int], *, branches: Branches | None = None
    ) -> Trajectory:
        """One rollout, lost or not; the caller has joined the engine under its id, and leaves it.

        Args:
            under_way: has the episode's number of tokens under its id until it ends by itself.
            branches: what the episode may start from, and begin.

        Raises:
            TooManyFailures: with this one, ``config.max_failures`` episodes in a row were lost on our side.
        """

        def watch(num_tokens: int) -> None:
            under_way[place.episode_id] = num_tokens

        trajectory = await run_episode(
            self._make_env(),
            task,
            place,
            engine=self._engine,
            codec=self._codec,
            config=self._config,
            seed=self._seed,
            watch=watch,
            generate_s=self._config.wall_s,
            branching=branches.of(place) if branches else None,
        )
        under_way.pop(place.episode_id, None)
        if self._overlong is not None:
            trajectory = with_overlong_penalty(trajectory, self._overlong, self._config.max_episode_tokens)
        self._failures_in_a_row = self._failures_in_a_row + 1 if trajectory.is_void else 0
        if self._failures_in_a_row >= self._config.max_failures and trajectory.failure is not None:
            failure = trajectory.failure
            raise TooManyFailures(
                f"{self._failures_in_a_row} episodes in a row failed on our side, last at {failure.where} "
                f"({failure.kind}): {failure.detail}"
            )
        self._on_episode(trajectory)
        return trajectory
