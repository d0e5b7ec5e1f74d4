"""Groups that outlive the step which began them: what is left over goes on beside the update and is trained later.

A step begins as many new prompts as are missing to ``prompts * (1 + oversample)`` groups in play, and takes the oldest
complete ones. It waits for a group under way that would be too stale in the next step: a long episode is late, never
lost for being long. Too stale become only complete groups, where so many are left over that their turn does not come
(``rollout.oversample`` above ``rollout.max_staleness``). They are dropped, and their prompts begun anew.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import TracebackType

from agent_rl.collect import Collected, Collector
from agent_rl.config import RolloutConfig
from agent_rl.engines.base import Engine
from agent_rl.rollout import Place
from agent_rl.types import Trajectory
from envs.types import Task


@dataclass(slots=True, kw_only=True, eq=False)
class _Group:
    """The rollouts of one prompt, on their way."""

    cursor: int  # place of its prompt in the run's order
    task: Task
    step: int  # that began it
    begun_version: int  # of the weights then: no token is older
    missing: int  # members that have not ended
    trajectories: list[Trajectory] = field(default_factory=list)  # ended, lost attempts too
    under_way: dict[str, int] = field(default_factory=dict)  # tokens of episodes that have begun and not ended

    @property
    def is_complete(self) -> bool:
        return self.missing == 0

    @property
    def is_informative(self) -> bool:
        """Complete, with a difference in reward."""
        return self.is_complete and len({t.reward for t in self.trajectories if t.reward is not None}) > 1

    @property
    def version(self) -> int:
        """Of the weights that made its oldest token; before it is complete, at most that."""
        if not self.is_complete:
            return self.begun_version
        versions = (t.weight_versions for t in self.trajectories if not t.is_void)
        return min((min(v) for v in versions if v), default=self.begun_version)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every rollout, as far as it is."""
        return [len(t.token_ids) for t in self.trajectories] + list(self.under_way.values())


class Leftovers:
    """The groups in play. Use as ``async with``: at its end, however it ends, no episode is left.

    Args:
        collector: plays single episodes.
        task_at: the task at a place of the run's order.
        engine: its ``weight_version`` is the one that new episodes begin with.
        config: of the rollouts.
        cursor: first place of the run's order that was never begun.
        pending: places before it that were begun and not consumed (by a run that this one goes on from), oldest first.
    """

    def __init__(
        self,
        collector: Collector,
        *,
        task_at: Callable[[int], Task],
        engine: Engine,
        config: RolloutConfig,
        cursor: int,
        pending: Iterable[int] = (),
    ) -> None:
        self._collector = collector
        self._task_at = task_at
        self._engine = engine
        self._config = config
        self._cursor = cursor
        self._again = deque(pending)  # to be begun before the cursor moves on
        self._groups: list[_Group] = []  # in the order in which they were begun
        self._members: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None  # of the first member that failed, and not as an episode may
        self._changed = asyncio.Event()
        # Hands out in order: older groups first.
        self._lanes: AbstractAsyncContextManager[None] = nullcontext()
        if config.concurrency:
            self._lanes = asyncio.Semaphore(config.concurrency)

    async def __aenter__(self) -> Leftovers:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    @property
    def cursor(self) -> int:
        """First place of the run's order that was never begun."""
        return self._cursor

    @property
    def pending(self) -> tuple[int, ...]:
        """Places before the cursor that are not consumed, in the order in which a resumed run is to begin them."""
        return (*(group.cursor for group in self._groups), *self._again)

    async def collect(self, step: int, *, is_last: bool = False) -> Collected:
        """``config.prompts`` groups with a difference inside, oldest first, and all complete ones without one.

        Fewer, where ``config.max_rounds`` rounds of new prompts do not give so many. Groups are numbered in this order.

        Args:
            is_last: nothing is to go on afterwards: the rest is cancelled. Its prompts stay pending.

        Raises:
            TooManyFailures: ``config.max_failures`` episodes in a row were lost on our side, also since the last call.
        """
        wanted, version = self._config.prompts, self._engine.weight_version
        dropped = [g for g in self._groups if g.is_complete and version - g.version > self._config.max_staleness]
        self._leave(dropped)
        self._again.extendleft(group.cursor for group in reversed(dropped))
        begun = 0
        for _ in range(self._config.max_rounds):
            in_play = sum(not group.is_complete or group.is_informative for group in self._groups)
            number = max(0, math.ceil(wanted * (1 + self._config.oversample)) - in_play)
            for place in range(begun, begun + number):
                self._begin(step, place, version)
            begun += number
            await self._until_enough(wanted, version)
            if self._num_informative >= wanted:
                break
        by_age = sorted(self._groups, key=lambda group: group.version)  # stable: of one age, in order of beginning
        waiting = [group for group in by_age if group.is_informative][wanted:]
        taken = [group for group in by_age if group.is_complete and group not in waiting]
        self._leave(taken)
        trajectories = [
            replace(trajectory, group=number)
            for number, group in enumerate(taken)
            for trajectory in sorted(group.trajectories, key=lambda t: t.member)  # stable: attempts in order
        ]
        cancelled: list[int] = []
        if is_last:
            cancelled = [tokens for group in self._groups for tokens in group.lengths]
            await self._stop()
        return Collected(
            trajectories=tuple(trajectories),
            cancelled_tokens=tuple(cancelled),
            groups_carried=sum(group.step < step for group in taken),
            groups_waiting=len(self._groups),
            groups_dropped=len(dropped),
            dropped_tokens=tuple(tokens for group in dropped for tokens in group.lengths),
        )

    @property
    def _num_informative(self) -> int:
        return sum(group.is_informative for group in self._groups)

    def _begin(self, step: int, number: int, version: int) -> None:
        """The next prompt's members are on their way; ``number`` is the group's in this step, for its seeds."""
        if self._again:
            cursor = self._again.popleft()
        else:
            cursor, self._cursor = self._cursor, self._cursor + 1
        group = _Group(
            cursor=cursor,
            task=self._task_at(cursor),
            step=step,
            begun_version=version,
            missing=self._config.group,
        )
        self._groups.append(group)
        for member in range(self._config.group):
            task = asyncio.create_task(self._member(group, Place(step=step, group=number, member=member)))
            self._members.add(task)
            task.add_done_callback(self._member_ended)

    async def _member(self, group: _Group, place: Place) -> None:
        """One member to its end; one that our side loses is tried again."""
        async with self._lanes:
            for attempt in range(1 + self._config.max_refills):
                place = replace(place, attempt=attempt)
                self._engine.join(place.episode_id)
                try:
                    trajectory = await self._collector.episode(group.task, place, group.under_way)
                finally:
                    self._engine.leave(place.episode_id)
                group.trajectories.append(trajectory)
                if not trajectory.is_void:
                    break
            group.missing -= 1

    def _member_ended(self, task: asyncio.Task[None]) -> None:
        self._members.discard(task)
        if not task.cancelled() and self._error is None:
            self._error = task.exception()
        self._changed.set()

    async def _until_enough(self, wanted: int, version: int) -> None:
        """Enough groups differ inside and none under way would be too stale in the next step; or none is under way."""
        while True:
            if self._error is not None:
                raise self._error
            under_way = [group for group in self._groups if not group.is_complete]
            is_due = any(version + 1 - group.begun_version > self._config.max_staleness for group in under_way)
            if not under_way or (self._num_informative >= wanted and not is_due):
                return
            self._changed.clear()
            await self._changed.wait()

    def _leave(self, groups: Iterable[_Group]) -> None:
        leaving = list(groups)
        self._groups = [group for group in self._groups if group not in leaving]

    async def _stop(self) -> None:
        """No episode runs: sandboxes and engine slots are free. The prompts of all groups are pending."""
        members = list(self._members)
        for member in members:
            member.cancel()
        await asyncio.gather(*members, return_exceptions=True)
        self._again.extendleft(group.cursor for group in reversed(self._groups))
        self._groups = []
