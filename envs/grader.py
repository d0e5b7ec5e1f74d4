"""Decides whether two answers are equal; what needs algebra runs in a process that is killed when it takes too long.

math-verify cannot run under its own timeout in a thread, and without one a hostile answer freezes the interpreter. So
it lives in a child process with a bounded address space, reading one JSON line and writing one.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import sys
from typing import Literal

from envs.answers import same_exactly

Verdict = Literal["correct", "wrong", "timeout"]

TIMEOUT_S = 2.0
START_S = 60.0
MEMORY_MB = 2048


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
        and deepest <= 16
        and answer.count("^") + answer.count("**") <= 8
        and "!" not in answer
        and not re.search(r"\d{40}", answer)
        and not re.search(r"\^\s*\{?\s*\(?\s*-?\d{4}", answer)
        and not re.search(r"\^[^+*/=,\s-]*\^", answer)
    )


class Grader:
    """Verdicts, one at a time from one child process; made anew after a kill. Bound to one event loop."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def verdict(self, gold: str, answer: str) -> Verdict:
        """Raises ``GraderFailure`` when the child cannot be started or breaks twice on innocent input."""
        exactly = same_exactly(gold, answer)
        if exactly is not None:
            return "correct" if exactly else "wrong"
        if not is_reasonable(answer):
            return "wrong"
        async with self._turn:
            try:
                return await self._ask(gold, answer)
            except TimeoutError:
                await self.close()
                return "timeout"
            except (OSError, ValueError, asyncio.IncompleteReadError):
                # Out of memory, most likely, and by this answer: a second child tells.
                await self.close()
            try:
                return await self._ask(gold, answer)
            except TimeoutError:
                await self.close()
                return "timeout"
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:
                await self.close()
                raise GraderFailure(f"the grading process died twice on {answer[:80]!r}") from error

    async def _ask(self, gold: str, answer: str) -> Verdict:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "envs.grader",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
            async with asyncio.timeout(START_S):
                await self._line()
        assert self._process.stdin is not None
        self._process.stdin.write((json.dumps([gold, answer]) + "\n").encode())
        async with asyncio.timeout(self._timeout_s):
            await self._process.stdin.drain()
            return "correct" if json.loads(await self._line()) else "wrong"

    async def _line(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        return await self._process.stdout.readuntil(b"\n")

    async def close(self) -> None:
        """The child is gone; may be called twice, and the grader used again."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


def serve() -> None:
    """The child: equal or not, a line a pair, until its stdin closes."""
    from math_verify import parse, verify

    out = sys.stdout
    sys.stdout = sys.stderr  # nothing that a library prints may look like an answer
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MB << 20, MEMORY_MB << 20))
    out.write("ready\n")
    out.flush()
    for line in sys.stdin:
        gold, answer = json.loads(line)
        try:
            # The parent keeps the time; math-verify's own alarm would only add a second clock.
            parsed = [
                parse(f"\\boxed{{{text}}}", parsing_timeout=None, raise_on_error=False) for text in (gold, answer)
            ]
            equal = bool(verify(parsed[0], parsed[1], timeout_seconds=None, raise_on_error=False))
        except (Exception, RecursionError):  # whatever a parser does with text that nobody vouches for
            equal = False
        out.write(json.dumps(equal) + "\n")
        out.flush()


if __name__ == "__main__":
    serve()
