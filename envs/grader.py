"""Decides whether two answers are equal; what needs algebra runs in a process that is killed when it takes too long.

math-verify cannot run under its own timeout in a thread, and without one a hostile answer freezes the interpreter. So
a server process imports it once and forks a worker for every question that needs it: the worker has a bounded address
space, is killed at its deadline, and takes no warm state with it. The deadline is one of processor time, kept by the
kernel, so that neither a queue nor a busy machine is ever mistaken for a slow answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import select
import signal
import sys
from typing import Any, Literal

from envs.equality import equal, same_exactly

Verdict = Literal["correct", "wrong", "unparsable", "timeout"]
"""``unparsable``: nothing that algebra may be tried on (too long, too deep, unbalanced, no mathematics)."""

TIMEOUT_S = 1.5
PATIENCE = 6
"""Seconds on the clock for every second of processor time, for a worker that does not compute but waits."""
START_S = 60.0
MEMORY_MB = 1024


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
        and not re.search(r"\^\s*\{?[^+*/=,\s}-]*\^", answer)
        and not re.search(r"\d{4}\s*!|[)}\]!]\s*!", answer)
        and not re.search(r"\\binom\s*\{[^}]*(\d{5}|\^)", answer)
    )


class Grader:
    """Verdicts, one at a time; made anew after it breaks. Bound to one event loop; close it when done."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def verdict(self, gold: str, answer: str) -> Verdict:
        """What ``answer`` is worth. Raises ``GraderFailure`` when the server cannot be started or dies twice."""
        exactly = same_exactly(gold, answer)
        if exactly is not None:
            return "correct" if exactly else "wrong"
        if not is_reasonable(answer):
            return "unparsable"
        async with self._turn:
            for attempt in range(2):
                try:
                    return await self._ask(gold, answer)
                except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError) as error:
                    await self._kill()
                    if attempt:
                        raise GraderFailure(
                            f"the grading process failed twice on {answer[:80]!r}: {error!r}"
                        ) from error
                except BaseException:  # cancelled between question and answer: the next reader would get this answer
                    await self._kill()
                    raise
        raise AssertionError("unreachable")

    async def start(self) -> None:
        """The server runs after this; ``verdict`` starts it too, which takes a second."""
        async with self._turn:
            await self._started()

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "envs.grader",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C goes to us, who then close it
            )
            async with asyncio.timeout(START_S):
                await self._line(self._process)
        return self._process

    async def _ask(self, gold: str, answer: str) -> Verdict:
        process = await self._started()
        assert process.stdin is not None
        process.stdin.write((json.dumps([gold, answer, self._timeout_s]) + "\n").encode())
        async with asyncio.timeout(self._timeout_s * PATIENCE + 10):  # the server keeps time; this is for a dead one
            await process.stdin.drain()
            verdict: Verdict = json.loads(await self._line(process))
            return verdict

    async def _line(self, process: asyncio.subprocess.Process) -> bytes:
        assert process.stdout is not None
        return await process.stdout.readuntil(b"\n")

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def close(self) -> None:
        """The server is gone; may be called twice, and the grader used again."""
        await self._kill()


def serve() -> None:
    """The server: a verdict a line for a question a line, until its stdin closes."""
    algebra_equal(r"\frac{x}{2}+1", "1+x/2")  # loads and warms what the workers inherit
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a library prints may look like a verdict
    out.write("ready\n")
    out.flush()
    for line in sys.stdin:
        gold, answer, timeout_s = json.loads(line)
        out.write(json.dumps(_in_worker(gold, answer, timeout_s)) + "\n")
        out.flush()


def _in_worker(gold: str, answer: str, timeout_s: float) -> Verdict:
    reading, writing = os.pipe()
    worker = os.fork()
    if worker == 0:
        verdict: Verdict = "unparsable"
        try:
            os.close(reading)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MB << 20, MEMORY_MB << 20))
            signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which is to die, whatever the interpreter is busy with
            signal.setitimer(signal.ITIMER_PROF, timeout_s)
            verdict = "correct" if equal(gold, answer, algebra_equal) else "wrong"
        except (Exception, RecursionError):  # whatever a parser does with text that nobody vouches for
            verdict = "unparsable"
        finally:
            os.write(writing, verdict.encode())
            os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], timeout_s * PATIENCE)
    if not ready:
        os.kill(worker, signal.SIGKILL)
    word = os.read(reading, 32).decode() if ready else ""
    os.close(reading)
    _, status = os.waitpid(worker, 0)
    if not ready or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF):
        return "timeout"
    return word if word in ("correct", "wrong") else "unparsable"  # type: ignore[return-value]


def algebra_equal(gold: str, answer: str) -> bool:
    """Whether math-verify or numbers to 30 digits say so. Only for a worker: it may take forever, or all memory."""
    from math_verify import parse, verify  # here, so that importing this module stays cheap

    # The server keeps the time; math-verify's own alarm would only add a second clock.
    left, right = (parse(f"\\boxed{{{_in_radians(text)}}}", parsing_timeout=None) for text in (gold, answer))
    if left and right and verify(left, right, timeout_seconds=None):
        return True
    return any(_same_complex(a, b) for a in left[:1] for b in right[:1])


def _in_radians(text: str) -> str:
    """Degrees inside a trigonometric function as radians; math-verify drops the sign for degrees."""
    if not re.search(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])", text):
        return text
    return re.sub(r"(\d+(?:\.\d+)?)\s*\^\s*\\circ", r"(\1\\cdot\\frac{\\pi}{180})", text)


def _same_complex(left: Any, right: Any) -> bool:
    """Equal as complex numbers, ``i`` being the imaginary unit; math-verify takes it for a variable."""
    import sympy

    if not isinstance(left, sympy.Expr) or not isinstance(right, sympy.Expr):
        return False
    constants = {"i": sympy.I, "e": sympy.E}
    if not any(symbol.name == "i" for side in (left, right) for symbol in side.free_symbols):
        return False
    left, right = (
        side.subs({symbol: constants[symbol.name] for symbol in side.free_symbols if symbol.name in constants})
        for side in (left, right)
    )
    if left.free_symbols or right.free_symbols:
        return False
    return bool(abs(sympy.N(left - right, 30)) <= 1e-12 * (1 + abs(sympy.N(left, 30))))


if __name__ == "__main__":
    serve()
