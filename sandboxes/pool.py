"""A bounded pool of warm sandboxes: handed out in the order of asking, reused only after a reset that proves clean."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from sandboxes.base import ExecutionResult, Sandbox, SandboxBusy, SandboxFailure, SandboxSpec
from sandboxes.choose import make_sandbox

TEND_S = 30.0
"""Between two rounds of looking after a pool: idle sandboxes are asked whether they answer, dead runs' remains go."""

BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(slots=True)
class Durations:
    """How long something took, as a histogram."""

    count: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * len(BUCKETS_S))  # at most BUCKETS_S[i]; not cumulative

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total_s += seconds
        self.longest_s = max(self.longest_s, seconds)
        for index, bound in enumerate(BUCKETS_S):
            if seconds <= bound:
                self.buckets[index] += 1
                break


@dataclass(slots=True)
class PoolCounters:
    """What a pool did so far, and how it stands."""

    leases: int = 0
    started: int = 0
    discarded: int = 0  # broken, dead while idle, or not clean after a reset
    retired: int = 0  # replaced after their number of uses
    leaked: int = 0  # could not be removed, or were found on the engine after the pool was closed
    refused: int = 0  # leases that the queue had no room for
    waiting: int = 0  # leases in the queue now
    leased: int = 0  # sandboxes in use now
    wait: Durations = field(default_factory=Durations)  # of leases in the queue
    start: Durations = field(default_factory=Durations)  # from nothing to ready
    exec: Durations = field(default_factory=Durations)  # of programs
    results: dict[str, int] = field(default_factory=dict)  # programs by status

    def observe(self, result: ExecutionResult) -> None:
        self.exec.add(result.wall_s)
        self.results[result.status] = self.results.get(result.status, 0) + 1


@dataclass(slots=True, eq=False)
class _Held:
    box: Sandbox
    uses: int = 0


class SandboxPool:
    """At most ``spec.size`` sandboxes at once, ``spec.warm`` of them started ahead, kept between leases.

    Use as ``async with SandboxPool(spec) as pool``, then ``async with pool.lease() as box``.
    """

    def __init__(
        self,
        spec: SandboxSpec,
        factory: Callable[[SandboxSpec], Sandbox] = make_sandbox,
        *,
        max_waiting: int | None = None,
    ) -> None:
        """``max_waiting``: leases that may queue; one more is refused with ``SandboxBusy``. Unbounded when None."""
        self.spec = spec
        self.counters = PoolCounters()
        self._factory = factory
        self._max_waiting = max_waiting
        self._places = asyncio.Semaphore(spec.size)  # wakes waiters first come, first served
        # Starts beyond the cores only slow each other down, up to the time limit of all of them.
        self._starts = asyncio.Semaphore(max(2, os.cpu_count() or 1))
        self._idle: deque[_Held] = deque()
        self._coming: deque[asyncio.Task[_Held]] = deque()  # started ahead, nobody's yet
        self._wanting: deque[asyncio.Future[None]] = deque()  # leases that wait for one to start, told of idle ones
        self._tending: asyncio.Task[None] | None = None
        self._closed = False

    async def __aenter__(self) -> SandboxPool:
        await self._reap()
        self._tending = asyncio.create_task(self._tend())
        self._start_ahead()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Sandbox]:
        """A clean sandbox for the body's use; it is reset or discarded afterwards, also on errors and cancellation.

        Raises:
            SandboxBusy: ``max_waiting`` others wait already.
            SandboxFailure: none could be started, or the one leased broke in the body.
        """
        if self._closed:
            raise SandboxFailure("the sandbox pool is closed")
        if self._max_waiting is not None and self._places.locked() and self.counters.waiting >= self._max_waiting:
            self.counters.refused += 1
            raise SandboxBusy(f"{self.counters.waiting} others wait for one of {self.spec.size} sandboxes")
        await self._take_place()
        try:
            held = await self._take()
            self.counters.leases += 1
            self._start_ahead()
            failed = True
            try:
                yield held.box
                failed = False
            finally:
                # Shielded and awaited: a cancelled lease must not leave its sandbox between two states.
                returned = asyncio.ensure_future(self._give_back(held, discard=failed))
                try:
                    await asyncio.shield(returned)
                except asyncio.CancelledError:
                    await asyncio.wait([returned])
                    raise
        finally:
            self.counters.leased -= 1
            self._places.release()

    async def _take_place(self) -> None:
        loop = asyncio.get_running_loop()
        asked = loop.time()
        self.counters.waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.counters.waiting -= 1
        self.counters.leased += 1
        self.counters.wait.add(loop.time() - asked)

    async def _take(self) -> _Held:
        """An idle sandbox that still answers, else one on its way, else a new one; or what comes back before that."""
        while True:
            while self._idle:
                held = self._idle.pop()
                try:
                    if await held.box.alive():
                        return held
                except BaseException:
                    await asyncio.shield(self._remove(held))
                    raise
                self.counters.discarded += 1
                await self._remove(held)
            is_ours = not self._coming
            coming = asyncio.create_task(self._start()) if is_ours else self._coming.popleft()
            if await self._is_first(coming):
                try:
                    return coming.result()
                except SandboxFailure:
                    if is_ours and not self._idle:
                        raise  # of another's, the next attempt is made, and fails, in our own name

    async def _is_first(self, coming: asyncio.Task[_Held]) -> bool:
        """Whether ``coming`` ends before another sandbox is idle; a service with none to give may let it wait long.

        If not, or when we are cancelled, it is somebody else's, or idle when it arrives.
        """
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wanting.append(told)
        try:
            both: tuple[asyncio.Future[Any], ...] = (coming, told)
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._pass_on(coming)
            if coming.cancelling():
                await asyncio.wait([coming])
            raise
        finally:
            if not told.done():
                self._wanting.remove(told)
            elif coming.done():
                self._wake()  # we were told of one that we do not need
        if not coming.done():
            self._pass_on(coming)
            return False
        return True

    def _pass_on(self, coming: asyncio.Task[_Held]) -> None:
        if self._closed or self._tending is None:
            coming.cancel()  # nobody will come for it
        self._coming.append(coming)
        coming.add_done_callback(self._arrived)

    def _rest(self, held: _Held) -> None:
        self._idle.append(held)
        self._wake()

    def _wake(self) -> None:
        if self._idle and self._wanting:
            self._wanting.popleft().set_result(None)

    async def _start(self) -> _Held:
        loop = asyncio.get_running_loop()
        began = loop.time()
        held = _Held(self._factory(self.spec))
        try:
            async with self._starts:
                await held.box.start()
        except BaseException:
            await asyncio.shield(self._remove(held))
            raise
        self.counters.started += 1
        self.counters.start.add(loop.time() - began)
        held.box.observer = self.counters.observe
        return held

    def _start_ahead(self) -> None:
        """Only in a pool that was entered: one that was not is closed by nobody."""
        while self._tending is not None and len(self._idle) + len(self._coming) < self.spec.warm:
            if self.counters.leased + len(self._idle) + len(self._coming) >= self.spec.size:
                return
            task = asyncio.create_task(self._start())
            self._coming.append(task)
            task.add_done_callback(self._arrived)

    def _arrived(self, task: asyncio.Task[_Held]) -> None:
        if task in self._coming:
            self._coming.remove(task)
            if not task.cancelled() and task.exception() is None:
                self._rest(task.result())
        elif not task.cancelled():
            task.exception()  # seen: who took it over is told

    async def _give_back(self, held: _Held, *, discard: bool) -> None:
        held.uses += 1
        if not discard and not self._closed:
            try:
                await held.box.reset()
            except SandboxFailure:
                discard = True
        is_worn = held.uses >= self.spec.max_uses
        if discard or is_worn or self._closed:
            self.counters.discarded += discard
            self.counters.retired += is_worn and not discard
            await self._remove(held)
        else:
            self._rest(held)

    async def _remove(self, held: _Held) -> None:
        try:
            await held.box.close()
        except SandboxFailure:
            self.counters.leaked += 1

    async def _tend(self) -> None:
        """Until the pool is closed: idle sandboxes that no longer answer are replaced, remains of dead runs removed."""
        while True:
            await asyncio.sleep(TEND_S)
            for _ in range(len(self._idle)):
                if not self._idle:
                    break
                held = self._idle.popleft()
                is_well = False
                try:
                    is_well = await self._is_well(held)
                finally:
                    if is_well:
                        self._rest(held)
                    else:
                        self.counters.discarded += 1
                        await self._remove(held)
            self._start_ahead()
            try:
                await self._reap()
            except SandboxFailure:
                pass  # an engine that is down says so to whoever leases

    async def _is_well(self, held: _Held) -> bool:
        try:
            if await held.box.alive():
                await held.box.reset()
                return True
        except SandboxFailure:
            pass
        return False

    async def _reap(self) -> None:
        if self.spec.kind in ("docker", "local"):
            from sandboxes.reaper import remove_folders, remove_orphans

            await asyncio.to_thread(remove_orphans if self.spec.kind == "docker" else remove_folders)

    async def close(self) -> None:
        """Every idle sandbox is removed; leased ones follow when they are given back. May be called twice."""
        self._closed = True
        if self._tending is not None:
            self._tending.cancel()
            await asyncio.wait([self._tending])
            self._tending = None
        coming, self._coming = list(self._coming), deque()
        for task in coming:
            task.cancel()
        for outcome in await asyncio.gather(*coming, return_exceptions=True):
            if isinstance(outcome, _Held):
                self._idle.append(outcome)
        idle, self._idle = self._idle, deque()
        await asyncio.gather(*(self._remove(held) for held in idle))
