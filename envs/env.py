"""``ToolEnv``: a ``gymnasium.Env`` in which a language model works on a task with tools, turn by turn.

The core is asynchronous (``areset``, ``astep``, ``aclose``), for trainers with many episodes in flight. ``reset``,
``step`` and ``close`` are Gymnasium's, over the same core on a loop of their own.

Three kinds of failure are told apart. The model's becomes an observation. Ours (sandbox, grader) voids the episode and
is never shown. A bug in a tool raises ``ToolBug``, or voids where the caller asks for that.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from envs.answers import final_answer
from envs.data import TaskSource
from envs.facade import MessageEnv
from envs.grader import Grader, GraderFailure
from envs.parsers import get_dialect
from envs.rewards import Episode, Rubric
from envs.tools import HeldSandbox, Tool, ToolBug, ToolContext, ToolOutput
from envs.types import Demonstration, Failure, Message, ModelTurn, Opening, Stop, Task, ToolCall, TurnResult
from sandboxes import SandboxFailure, SandboxPool, SandboxSpec, resolve


class Limits(BaseModel):
    """Budgets of one episode; each end is labelled with its own ``Stop``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_turns: int = Field(4, ge=1, description="turns of the model; a call in the last one is not run")
    max_tool_calls: int = Field(8, ge=0, description="calls that run; a turn that would go over it ends the episode")
    max_calls_per_turn: int = Field(8, ge=1, description="calls of one turn that run; the others are told so")
    max_result_chars: int = Field(4096, ge=64, description="of one tool result; the middle is left out, and said so")
    wall_s: float = Field(
        300.0,
        gt=0,
        description="seconds of an episode's calls together, the model's own time aside; a call that runs when they "
        "are over is stopped, one that waits for a sandbox then is void",
    )


class Resources:
    """What environments share: sandboxes and a grader. Use as ``async with Resources(spec) as resources``."""

    def __init__(self, spec: SandboxSpec) -> None:
        self.pool = SandboxPool(spec)
        self.grader = Grader()

    def held(self, files: Mapping[str, str] | None = None) -> HeldSandbox:
        """A sandbox to keep, leased when first used, with these files in it."""
        return HeldSandbox(self.pool, files)

    async def __aenter__(self) -> Resources:
        await self.pool.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            await self.grader.close()
        finally:  # also when who leaves is cancelled
            await self.pool.close()


class ToolEnv(MessageEnv):
    """One episode at a time.

    Args:
        tasks: where ``reset`` draws tasks from.
        tools: on offer.
        rubric: how an episode is scored.
        limits: budgets.
        dialect: how calls are written.
        instruction: system message; none when empty.
        demonstrations: solved problems shown before the question, in the dialect's own writing.
        resources: sandboxes and grader, shared and owned by the caller; when None, ``reset`` makes its own.
        sandbox: of the resources that the environment makes for itself; what works here when None.
        on_tool_bug: ``raise`` a ``ToolBug``, or ``void`` the episode.
        approve: asked before each call that would run; one that it refuses is told so.
    """

    brings_tools: ClassVar[bool] = False
    """Whether its tasks bring tools along that ``tools`` does not name, so that it may need a sandbox all the same."""

    def __init__(
        self,
        *,
        tasks: TaskSource,
        tools: Sequence[Tool],
        rubric: Rubric,
        limits: Limits | None = None,
        dialect: str = "hermes",
        instruction: str = "",
        demonstrations: Sequence[Demonstration] = (),
        resources: Resources | None = None,
        sandbox: SandboxSpec | None = None,
        on_tool_bug: Literal["raise", "void"] = "raise",
        approve: Callable[[ToolCall], Awaitable[bool]] | None = None,
    ) -> None:
        super().__init__()
        self.tasks = tasks
        self.all_tools = {tool.name: tool for tool in tools}
        self.tools = self.all_tools  # those on offer in this episode: a task may name some of them alone
        self.rubric = rubric
        self.limits = limits or Limits()
        self.dialect = get_dialect(dialect)
        self.instruction = instruction
        self.demonstrations = tuple(demonstrations)
        self._resources = resources
        self._sandbox = sandbox or SandboxSpec(size=1)
        self._on_tool_bug = on_tool_bug
        self._own_resources: Resources | None = None
        self._task: Task | None = None
        self._approve = approve
        self._held = HeldSandbox(None)

    # The asynchronous core.

    async def areset(self, seed: int, task: Task) -> Opening:
        """A new episode on ``task``. No sandbox is taken before the first call runs."""
        await self._held.release()
        named = task.meta.get("tools")
        self.tools = {name: tool for name, tool in self.all_tools.items() if named is None or name in named}
        self._task = task
        self._turns: list[str] = []
        self._calls: list[ToolCall] = []
        self._succeeded: list[bool] = []
        self._submitted: str | None = None
        self._stop: Stop | None = None
        self._seconds_left = self.limits.wall_s
        pool = self._resources.pool if self._resources else None
        self._held = HeldSandbox(pool, task.meta.get("files"))
        self._context = ToolContext(
            task=task,
            pool=pool,
            state={"seed": seed},
            rng=random.Random(seed),
            held=self._held,
        )
        system: list[Message] = [{"role": "system", "content": self.instruction}] if self.instruction else []
        return Opening(
            messages=(*system, *self._shown(), {"role": "user", "content": task.prompt}),
            tools=tuple(tool.schema for tool in self.tools.values()),
        )

    def _shown(self) -> list[Message]:
        messages: list[Message] = []
        for shown in self.demonstrations:
            messages += [
                {"role": "user", "content": shown.prompt},
                {"role": "assistant", "content": self.dialect.written(shown.tool, shown.arguments)},
                self.dialect.result_message(shown.tool, shown.output),
                {"role": "assistant", "content": shown.answer},
            ]
        return messages

    async def astep(self, turn: ModelTurn) -> TurnResult:
        """What follows from one turn of the model; after the end, and before a reset, a ``RuntimeError``."""
        if self._task is None or self._stop is not None:
            raise RuntimeError("the episode is over: call reset first")
        self._turns.append(turn.text)
        calls = self.dialect.parse(turn.text, turn.finish, self.tools) if self.tools else ()
        self._calls += calls
        stop = self._stop_before(turn, calls)
        if stop is not None:
            return await self._end(stop, calls)
        self._held.starved = False
        # The clock stands still between turns: a policy is not scored on how long it waited for the engine.
        self._context = replace(self._context, deadline=time.monotonic() + self._seconds_left)
        try:
            async with asyncio.timeout(self._seconds_left) as limit:
                outputs = await self._run_all(calls)
        except _Lost as lost:
            if isinstance(lost.error, ToolBug) and self._on_tool_bug == "raise":
                raise lost.error from lost.error.__cause__
            return await self._void(lost.failure, calls)
        except TimeoutError:
            if not limit.expired():
                raise
            if self._held.starved:
                wait = f"no sandbox was free before the episode's {self.limits.wall_s:g} s were over"
                detail = f"{wait}: more are wanted at once than the pool may have (its size)"
                return await self._void(Failure(kind="sandbox", where=f"turn {len(self._turns)}", detail=detail), calls)
            return await self._end("time", calls)
        finally:
            self._seconds_left = max(0.0, self._context.deadline - time.monotonic())
        answers = [output.answer for output in outputs if output.answer is not None]
        if answers:
            self._submitted = answers[0]
            return await self._end("answer", calls)
        if len(self._turns) >= self.limits.max_turns:
            return await self._end("max_turns", calls)
        messages = tuple(
            self.dialect.result_message(call.name or "", shortened(output.text, self._budget(call)))
            for call, output in zip(calls, outputs, strict=True)
        )
        return TurnResult(messages=messages, reward=None, terms={}, stop=None, calls=tuple(calls))

    async def aclose(self) -> None:
        """The episode's sandbox, if it took one, is given back; may be called at any time, and twice."""
        await self._held.release()

    def _budget(self, call: ToolCall) -> int:
        own = self.tools[call.name].max_chars if call.name in self.tools else None
        return min(own or self.limits.max_result_chars, self.limits.max_result_chars)

    def _stop_before(self, turn: ModelTurn, calls: Sequence[ToolCall]) -> Stop | None:
        """Why the episode ends with this turn, if it does; its calls then do not run."""
        if turn.finish == "length":
            return "length"
        if not calls:
            return "answer" if final_answer(turn.text) is not None else "no_call"
        if len(self._turns) >= self.limits.max_turns and not self._may_end(calls):
            return "max_turns"
        running = sum(call.status == "ok" for call in calls[: self.limits.max_calls_per_turn])
        if len(self._succeeded) + running > self.limits.max_tool_calls:
            return "max_tool_calls"
        return "time" if not self._seconds_left else None

    def _may_end(self, calls: Sequence[ToolCall]) -> bool:
        """Whether one of the calls could hand in an answer, which the last turn must still be able to do."""
        return any(call.status == "ok" and call.name in self.tools and self.tools[call.name].ends for call in calls)

    async def _run_all(self, calls: Sequence[ToolCall]) -> list[ToolOutput]:
        """One output for each attempt, in order; neighbours whose tools allow it run at the same time."""
        outputs: list[ToolOutput] = []
        numbered = list(enumerate(calls, start=1))
        for overlapping, batch in groupby(numbered, key=lambda pair: self._may_overlap(pair[1])):
            if not overlapping:
                outputs += [await self._run(call, number, len(calls)) for number, call in batch]
                continue
            running = [asyncio.ensure_future(self._run(call, number, len(calls))) for number, call in batch]
            try:
                outputs += await asyncio.gather(*running)
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
        return outputs

    def _may_overlap(self, call: ToolCall) -> bool:
        return call.status == "ok" and call.name is not None and self.tools[call.name].parallel

    async def _run(self, call: ToolCall, number: int, of: int) -> ToolOutput:
        """Raises ``_Lost`` when the call was lost on our side."""
        if call.status != "ok" or call.name is None:
            return ToolOutput(text=f"Error: {call.error}", succeeded=False)
        if number > self.limits.max_calls_per_turn:
            text = f"Error: only the first {self.limits.max_calls_per_turn} calls of a turn are run; this one was not"
            return ToolOutput(text=text, succeeded=False)
        if self._approve is not None and not await self._approve(call):
            return ToolOutput(text=f"Error: this call of {call.name} was not approved", succeeded=False)
        where = f"turn {len(self._turns)}, call {number} of {of}, tool {call.name}"
        try:
            output = await self.tools[call.name].call(self._context, call.arguments or {})
        except SandboxFailure as error:
            raise _Lost(error, Failure(kind="sandbox", where=where, detail=str(error))) from error
        except ToolBug as error:
            raise _Lost(error, Failure(kind="tool_bug", where=where, detail=str(error))) from error
        except Exception as error:  # the boundary of a tool: whatever else it raises is its bug
            bug = ToolBug(f"tool {call.name} raised {type(error).__name__}: {error}")
            bug.__cause__ = error
            raise _Lost(bug, Failure(kind="tool_bug", where=where, detail=str(bug))) from error
        self._succeeded.append(output.succeeded)
        return output

    async def _end(self, stop: Stop, calls: Sequence[ToolCall]) -> TurnResult:
        assert self._task is not None
        episode = Episode(
            task=self._task,
            turns=tuple(self._turns),
            calls=tuple(self._calls),
            succeeded=tuple(self._succeeded),
            stop=stop,
            submitted=self._submitted,
            state=self._context.state,
            sandbox=self._held,
        )
        grader = self._resources.grader if self._resources else Grader()
        try:
            reward, terms = await self.rubric.score(episode, grader)
        except GraderFailure as error:
            return await self._void(Failure(kind="grader", where="scoring", detail=str(error)), calls)
        except SandboxFailure as error:
            return await self._void(Failure(kind="sandbox", where="scoring", detail=str(error)), calls)
        finally:
            if self._resources is None:
                await grader.close()
            await self._held.release()
        self._stop = stop
        return TurnResult(messages=(), reward=reward, terms=terms, stop=stop, calls=tuple(calls))

    async def _void(self, failure: Failure, calls: Sequence[ToolCall]) -> TurnResult:
        self._stop = "failure"
        await self._held.release()
        return TurnResult(messages=(), reward=None, terms={}, stop="failure", calls=tuple(calls), failure=failure)

    # Gymnasium's side.

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """The question as text; ``options={"task": Task}`` chooses it, else it is drawn by the seed."""
        super().reset(seed=seed)
        task = (options or {}).get("task")
        if task is None:
            task = self.tasks.task(int(self.np_random.integers(len(self.tasks))))
        opening = self.run(self.areset(int(self.np_random.integers(2**31)), task))
        return task.prompt, {"messages": list(opening.messages), "tools": list(opening.tools), "task_id": task.id}

    async def _open(self) -> None:
        if self._resources is None:
            may_call = self.all_tools or self.brings_tools
            spec = await resolve(self._sandbox) if may_call else self._sandbox
            self._own_resources = self._resources = await Resources(spec).__aenter__()

    async def _shut(self) -> None:
        await self.aclose()
        own, self._own_resources = self._own_resources, None
        if own is not None:
            self._resources = None
            await own.__aexit__(None, None, None)


class _Lost(Exception):
    """A call was lost on our side: with the error that it raises, or the failure that it leaves."""

    def __init__(self, error: Exception, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.error = error
        self.failure = failure


def shortened(text: str, limit: int) -> str:
    """The text within ``limit`` characters: head and tail kept, the cut stated in between."""
    if len(text) <= limit:
        return text
    note = f"\n[... {len(text) - limit} characters left out ...]\n"
    half = max(1, (limit - len(note)) // 2)
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
