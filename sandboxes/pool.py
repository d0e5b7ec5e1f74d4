"""A bounded pool of warm sandboxes: handed out in the order of asking, reused only after a reset that proves clean."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType

from sandboxes.base import Sandbox, SandboxFailure, SandboxSpec, SandboxUnavailable


@dataclass(slots=True)
class PoolCounters:
    """What a pool did so far."""

    leases: int = 0
    started: int = 0
    discarded: int = 0  # broken, dead while idle, or not clean after a reset
    wait_s: float = 0.0  # seconds that leases waited for a free place


def make_sandbox(spec: SandboxSpec) -> Sandbox:
    """A sandbox of ``spec.kind``, not yet started; ``auto`` must have been resolved before (``resolve``)."""
    if spec.kind == "docker":
        from sandboxes.container import DockerSandbox

        return DockerSandbox(spec)
    if spec.kind == "local":
        from sandboxes.local import LocalSandbox

        return LocalSandbox(spec)
    raise ValueError(f"sandbox kind {spec.kind!r} is not resolved: call resolve(spec) first")


async def resolve(spec: SandboxSpec, warn: Callable[[str], None] | None = None) -> SandboxSpec:
    """The specification with a kind that works here.

    ``auto`` becomes ``docker`` when an engine answers and has the image, else ``local``. Every ``local`` is
    announced by one line through ``warn`` (standard error by default).

    Raises:
        SandboxUnavailable: ``docker`` was demanded and cannot be had.
    """
    say = warn or (lambda line: print(line, file=sys.stderr))
    kind, reason = spec.kind, "as demanded"
    if kind != "local":
        from sandboxes.container import check_image, connect

        def check() -> None:
            client = connect()
            try:
                check_image(client, spec.image)
            finally:
                client.close()

        try:
            await asyncio.to_thread(check)
            kind = "docker"
        except SandboxUnavailable as error:
            if kind == "docker":
                raise
            kind, reason = "local", str(error)
    if kind == "local":
        say(f"WARNING: sandbox `local` gives NO ISOLATION: model-written code runs as you on this machine ({reason})")
    return spec.model_copy(update={"kind": kind})


class SandboxPool:
    """At most ``spec.size`` sandboxes at once, started when first needed, kept warm between leases.

    Use as ``async with SandboxPool(spec) as pool``, then ``async with pool.lease() as box``.
    """

    def __init__(self, spec: SandboxSpec, factory: Callable[[SandboxSpec], Sandbox] = make_sandbox) -> None:
        self.spec = spec
        self.counters = PoolCounters()
        self._factory = factory
        self._places = asyncio.Semaphore(spec.size)  # wakes waiters first come, first served
        self._idle: list[Sandbox] = []
        self._closed = False

    async def __aenter__(self) -> SandboxPool:
        if self.spec.kind == "docker":
            from sandboxes.reaper import remove_orphans

            await asyncio.to_thread(remove_orphans)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Sandbox]:
        """A clean sandbox for the body's use; it is reset or discarded afterwards, also on errors and cancellation.

        Raises:
            SandboxFailure: none could be started, or the one leased broke in the body.
        """
        if self._closed:
            raise SandboxFailure("the sandbox pool is closed")
        loop = asyncio.get_running_loop()
        asked = loop.time()
        async with self._places:
            self.counters.wait_s += loop.time() - asked
            self.counters.leases += 1
            box = await self._take()
            failed = True
            try:
                yield box
                failed = False
            finally:
                # Shielded and awaited: a cancelled lease must not leave its sandbox between two states.
                returned = asyncio.ensure_future(self._give_back(box, discard=failed))
                try:
                    await asyncio.shield(returned)
                except asyncio.CancelledError:
                    await asyncio.wait([returned])
                    raise

    async def _take(self) -> Sandbox:
        """An idle sandbox that still answers, else a new one."""
        while self._idle:
            box = self._idle.pop()
            try:
                if await box.alive():
                    return box
            except BaseException:
                await asyncio.shield(box.close())
                raise
            self.counters.discarded += 1
            await box.close()
        return await self._start()

    async def _start(self) -> Sandbox:
        box = self._factory(self.spec)
        try:
            await box.start()
        except BaseException:
            await asyncio.shield(box.close())
            raise
        self.counters.started += 1
        return box

    async def _give_back(self, box: Sandbox, *, discard: bool) -> None:
        if not discard and not self._closed:
            try:
                await box.reset()
            except SandboxFailure:
                discard = True
        if discard or self._closed:
            self.counters.discarded += discard
            await box.close()
        else:
            self._idle.append(box)

    async def close(self) -> None:
        """Every idle sandbox is removed; leased ones follow when they are given back. May be called twice."""
        self._closed = True
        idle, self._idle = self._idle, []
        await asyncio.gather(*(box.close() for box in idle))
