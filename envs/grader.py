"""Decides whether two answers are equal; what needs algebra runs in a process that is killed when it takes too long.

math-verify cannot run under its own timeout in a thread, and without one a hostile answer freezes the interpreter. So
a server process imports it once and forks a worker for every question that needs it, as many at a time as there are
processors: the worker has a bounded address space beside what it inherits, is killed at its deadline, and takes no warm
state with it. The deadline is one of processor time, kept by the kernel, so that neither a queue nor a busy machine is
ever mistaken for a slow answer. The server says that it is ready after it has seen a worker judge rightly.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import selectors
import signal
import sys
import time
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal

from envs.algebra import FORMS, algebra_equal, warm
from envs.equality import equal, same_exactly

Verdict = Literal["correct", "wrong", "unparsable", "timeout"]
"""``unparsable``: nothing that algebra may be tried on (too long, too deep, unbalanced, no mathematics)."""

TIMEOUT_S = 1.5
PATIENCE = 6
"""Seconds on the clock for every second of processor time, after which a worker that has not computed is given up."""
START_S = 60.0
MEMORY_MB = 1024
"""Of address space, beside what a worker inherits: libraries reserve gigabytes for the threads of a large machine."""
KNOWN = ("x^2+2x+1", "(x+1)^2")
"""Equal, and only algebra can tell."""
SERVER = "import sys; sys.path[:] = sys.argv[1:]; from envs.grader import serve; serve()"
"""With our own path as arguments: ``-m`` would look in the working folder first, for ``envs`` as for everything."""
REMEMBERED = 4096
"""Verdicts kept by a grader: the samples of a problem often agree. A timeout is not kept."""


class GraderFailure(Exception):
    """The grader, not the answer, failed: the episode is void."""


def is_reasonable(answer: str) -> bool:
    """Whether algebra may be tried at all: no towers of powers, huge numbers or deep nesting."""
    depth = deepest = 0
    for character in answer:
        depth += {"{": 1, "(": 1, "}": -1, ")": -1}.get(character, 0)
        deepest = max(deepest, depth)
    return (
        len(answer) <= 512
        and deepest <= 12
        and answer.count("^") + answer.count("**") <= 12
        and not re.search(r"\d{40}", answer)
        and not re.search(r"\^\s*[{(\s]*-?\d{4}", answer)
        and not re.search(r"\^\s*\{?[^+*/=,\s})-]*\^", answer)
        and not re.search(r"\d{4}[\s)}\]]*!|!\s*!", answer)
        and not re.search(r"\\binom\s*\{[^}]*(\d{5}|\^)", answer)
    )


class Grader:
    """Verdicts, many at a time; made anew after it breaks. Bound to one event loop; close it when done."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future[Verdict]] = {}
        self._numbers = count()
        self._known: OrderedDict[tuple[str, str], Verdict] = OrderedDict()

    async def verdict(self, gold: str, answer: str) -> Verdict:
        """What ``answer`` is worth. Raises ``GraderFailure`` when the server cannot be started or dies twice."""
        exactly = same_exactly(gold, answer)
        if exactly is not None:
            return "correct" if exactly else "wrong"
        if not is_reasonable(answer):
            return "unparsable"
        known = self._known.get((gold, answer))
        if known is not None:
            return known
        for attempt in range(2):
            try:
                verdict = await self._ask(gold, answer)
                break
            except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError) as error:
                if attempt:
                    raise GraderFailure(f"the grading process failed twice on {answer[:80]!r}: {error!r}") from error
        if verdict != "timeout":
            self._known[gold, answer] = verdict
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return verdict

    async def start(self) -> None:
        """The server runs after this; ``verdict`` starts it too, which takes a second."""
        await self._started()

    async def _started(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is None:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-c",
                    SERVER,
                    *sys.path,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C goes to us, who then close it
                    env={**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")},  # it forks
                )
                try:
                    assert process.stdout is not None
                    async with asyncio.timeout(START_S):
                        await process.stdout.readuntil(b"\n")
                except BaseException:
                    await _gone(process)
                    raise
                self._process = process
                self._reader = asyncio.create_task(self._read(process))
            return self._process

    async def _ask(self, gold: str, answer: str) -> Verdict:
        process = await self._started()
        assert process.stdin is not None
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            process.stdin.write((json.dumps([number, gold, answer, self._timeout_s]) + "\n").encode())
            await process.stdin.drain()
            verdict: Verdict = await future
            return verdict
        finally:
            self._waiting.pop(number, None)  # an answer that nobody waits for any more is dropped by the reader

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Hands out answers by their number until the server ends; those who still wait then hear of it."""
        assert process.stdout is not None
        fault: Exception = ValueError("it ended")
        try:
            while line := await process.stdout.readline():
                number, verdict = json.loads(line)
                future = self._waiting.get(number)
                if future is None or future.done():
                    continue
                if verdict is None:
                    future.set_exception(ValueError("its process got no processor time"))
                else:
                    future.set_result(verdict)
        except (OSError, ValueError) as error:
            fault = error
        finally:
            if self._process is process:
                self._process = None
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(ValueError(f"the server stopped: {fault}"))
            await _gone(process)

    async def close(self) -> None:
        """The server is gone; may be called twice, and the grader used again."""
        process, self._process = self._process, None
        reader, self._reader = self._reader, None
        if process is not None:
            await _gone(process)
        if reader is not None:
            await asyncio.gather(reader, return_exceptions=True)


async def _gone(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):  # `process.kill` would reap it, and asyncio warn that it is not there
            os.kill(process.pid, signal.SIGKILL)
    await process.wait()


@dataclass(slots=True, kw_only=True)
class _Worker:
    """A forked process and the question that it works on."""

    number: int
    pid: int
    reading: int  # its verdict comes out here
    patience_s: float
    looked_at: float  # on the monotonic clock: the next look whether it computes
    ticks: int = 0  # of processor time at the last look


def serve() -> None:
    """The server: ``[number, verdict]`` a line for a question a line, in any order, until its stdin closes.

    The verdict is null for a worker that was given up. Raises ``RuntimeError`` when no worker can judge here.
    """
    equal(r"\frac{x}{2}+1", "1+x/2", algebra_equal)  # loads and warms what the workers inherit
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a library prints may look like a verdict
    if (verdict := _ended(_forked(0, *KNOWN, START_S), answered=True)) != "correct":
        raise RuntimeError(f"a grading process says {verdict} of {KNOWN}: it has no memory, or its packages are broken")
    out.write("ready\n")
    out.flush()
    places = len(os.sched_getaffinity(0))
    questions: deque[tuple[int, str, str, float]] = deque()
    working: dict[int, _Worker] = {}  # by the descriptor that its verdict comes out of
    pending, is_open, warmed = b"", True, 0
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        while is_open or working or questions:
            deadline = min((worker.looked_at for worker in working.values()), default=None)
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = {key.fd for key, _ in selector.select(wait)}
            if 0 in ready:
                chunk = os.read(0, 1 << 20)
                if not chunk:
                    selector.unregister(0)
                    is_open = False
                *lines, pending = (pending + chunk).split(b"\n")
                questions += [tuple(json.loads(line)) for line in lines]
            now = time.monotonic()
            for worker in list(working.values()):
                if worker.reading in ready or (worker.looked_at <= now and not _computes(worker, now)):
                    selector.unregister(worker.reading)
                    del working[worker.reading]
                    out.write(json.dumps([worker.number, _ended(worker, worker.reading in ready)]) + "\n")
            out.flush()
            if ready and warmed < len(FORMS):  # a little with every question: nobody waits seconds for the first
                warm(warmed)
                warmed += 1
            while questions and len(working) < places:
                worker = _forked(*questions.popleft())
                working[worker.reading] = worker
                selector.register(worker.reading, selectors.EVENT_READ)


def _forked(number: int, gold: str, answer: str, timeout_s: float) -> _Worker:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        verdict: Verdict = "unparsable"
        try:
            os.close(reading)
            most = (MEMORY_MB << 20) + int(_proc("self", "statm")[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which is to die, whatever the interpreter is busy with
            signal.setitimer(signal.ITIMER_PROF, timeout_s)
            verdict = "correct" if equal(gold, answer, algebra_equal) else "wrong"
        except (Exception, RecursionError):  # whatever a parser does with text that nobody vouches for
            verdict = "unparsable"
        finally:
            os.write(writing, verdict.encode())
            os._exit(0)
    os.close(writing)
    patience_s = timeout_s * PATIENCE
    return _Worker(
        number=number, pid=pid, reading=reading, patience_s=patience_s, looked_at=time.monotonic() + patience_s
    )


def _computes(worker: _Worker, now: float) -> bool:
    """Whether it had processor time since the last look; it is then looked at again after the same time."""
    user, system = _proc(str(worker.pid), "stat")[11:13]
    before, worker.ticks = worker.ticks, int(user) + int(system)
    worker.looked_at = now + worker.patience_s
    return worker.ticks > before


def _proc(process: str, name: str) -> list[str]:
    """The fields of a file of ``/proc``, without the process's number and name."""
    return (Path("/proc") / process / name).read_text().rpartition(")")[2].split()


def _ended(worker: _Worker, answered: bool) -> Verdict | None:
    """The verdict of a worker that has written one or died; None for one that is killed here. It is reaped."""
    if not answered:
        os.kill(worker.pid, signal.SIGKILL)
    word = os.read(worker.reading, 32).decode() if answered else ""
    os.close(worker.reading)
    _, status = os.waitpid(worker.pid, 0)
    if not answered:
        return None
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return "timeout"
    return word if word in ("correct", "wrong") else "unparsable"  # type: ignore[return-value]
