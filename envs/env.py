"""``ToolEnv``: a ``gymnasium.Env`` in which a language model works on a task with tools, turn by turn.

The core is asynchronous (``areset``, ``astep``, ``aclose``), for trainers with many episodes in flight. ``reset``,
``step`` and ``close`` are Gymnasium's, over the same core on a loop of their own.

Three kinds of failure are told apart. The model's becomes an observation. Ours (sandbox, grader) voids the episode and
is never shown. A bug in a tool raises ``ToolBug``, or voids where the caller asks for that.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal, TypeVar

import gymnasium
import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from envs.answers import final_answer
from envs.data import TaskSource
from envs.grader import Grader, GraderFailure
from envs.parsers import get_dialect
from envs.rewards import Episode, Rubric
from envs.tools import Tool, ToolBug, ToolContext, ToolOutput
from envs.types import Failure, Message, ModelTurn, Opening, Stop, Task, ToolCall, TurnResult
from sandboxes import SandboxFailure, SandboxPool, SandboxSpec, resolve

T = TypeVar("T")


class Limits(BaseModel):
    """Budgets of one episode; each end is labelled with its own ``Stop``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_turns: int = Field(4, ge=1, description="turns of the model; a call in the last one is not run")
    max_tool_calls: int = Field(8, ge=0, description="calls that ran")
    max_result_chars: int = Field(4096, ge=64, description="of one tool result; the middle is left out, and said so")
    wall_s: float = Field(300.0, gt=0, description="seconds from reset, looked at between turns")


class Resources:
    """What environments share: sandboxes and a grader. Use as ``async with Resources(spec) as resources``."""

    def __init__(self, spec: SandboxSpec) -> None:
        self.pool = SandboxPool(spec)
        self.grader = Grader()

    async def __aenter__(self) -> Resources:
        await self.pool.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.grader.close()
        await self.pool.close()


class TextSpace(gymnasium.spaces.Space[str]):
    """Any text. (``gymnasium.spaces.Text`` refuses blanks and newlines by default.)"""

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__((), np.str_, seed)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        words = self.np_random.integers(0, 1000, size=int(self.np_random.integers(1, 6)))
        return " ".join(map(str, words))

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextSpace)

    def __hash__(self) -> int:
        return hash(TextSpace)


class ToolEnv(gymnasium.Env[str, str]):
    """One episode at a time.

    Args:
        tasks: where ``reset`` draws tasks from.
        tools: on offer.
        rubric: how an episode is scored.
        limits: budgets.
        dialect: how calls are written.
        instruction: system message; none when empty.
        resources: sandboxes and grader; made and owned by the environment when None.
        on_tool_bug: ``raise`` a ``ToolBug``, or ``void`` the episode.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012  # Gymnasium's own declaration
        "render_modes": []
    }

    def __init__(
        self,
        *,
        tasks: TaskSource,
        tools: Sequence[Tool],
        rubric: Rubric,
        limits: Limits | None = None,
        dialect: str = "hermes",
        instruction: str = "",
        resources: Resources | None = None,
        on_tool_bug: Literal["raise", "void"] = "raise",
    ) -> None:
        self.tasks = tasks
        self.tools = {tool.name: tool for tool in tools}
        self.rubric = rubric
        self.limits = limits or Limits()
        self.dialect = get_dialect(dialect)
        self.instruction = instruction
        self.observation_space = TextSpace()
        self.action_space = TextSpace()
        self._resources = resources
        self._on_tool_bug = on_tool_bug
        self._loop: _LoopThread | None = None
        self._own_resources: Resources | None = None
        self._task: Task | None = None

    # The asynchronous core.

    async def areset(self, seed: int, task: Task) -> Opening:
        """A new episode on ``task``. No sandbox is taken before the first call runs."""
        self._task = task
        self._turns: list[str] = []
        self._calls: list[ToolCall] = []
        self._succeeded: list[bool] = []
        self._deadline = time.monotonic() + self.limits.wall_s
        self._state: dict[str, Any] = {"seed": seed}
        self._stop: Stop | None = None
        system: list[Message] = [{"role": "system", "content": self.instruction}] if self.instruction else []
        return Opening(
            messages=(*system, {"role": "user", "content": task.prompt}),
            tools=tuple(tool.schema for tool in self.tools.values()),
        )

    async def astep(self, turn: ModelTurn) -> TurnResult:
        """What follows from one turn of the model; after the end, and before a reset, a ``RuntimeError``."""
        if self._task is None or self._stop is not None:
            raise RuntimeError("the episode is over: call reset first")
        self._turns.append(turn.text)
        calls = self.dialect.parse(turn.text, turn.finish, self.tools)
        self._calls += calls
        stop = self._stop_before(turn, calls)
        if stop is not None:
            return await self._end(stop, calls)
        messages: list[Message] = []
        for number, call in enumerate(calls):
            try:
                output = await self._run(call)
            except (SandboxFailure, ToolBug) as error:
                if isinstance(error, ToolBug) and self._on_tool_bug == "raise":
                    raise
                where = f"turn {len(self._turns)}, call {number + 1} of {len(calls)}, tool {call.name}"
                kind: Literal["sandbox", "tool_bug"] = "sandbox" if isinstance(error, SandboxFailure) else "tool_bug"
                return self._void(Failure(kind=kind, where=where, detail=str(error)), calls)
            text = shortened(output.text, self.limits.max_result_chars)
            messages.append(self.dialect.result_message(call.name or "", text))
        return TurnResult(messages=tuple(messages), reward=None, terms={}, stop=None, calls=calls)

    async def aclose(self) -> None:
        """Nothing is held between turns, so there is nothing to give back; may be called at any time."""

    def _stop_before(self, turn: ModelTurn, calls: Sequence[ToolCall]) -> Stop | None:
        """Why the episode ends with this turn, if it does; its calls then do not run."""
        if turn.finish == "length":
            return "length"
        if not calls:
            return "answer" if final_answer(turn.text) is not None else "no_call"
        if len(self._turns) >= self.limits.max_turns:
            return "max_turns"
        if len(self._succeeded) + sum(call.status == "ok" for call in calls) > self.limits.max_tool_calls:
            return "max_tool_calls"
        return "time" if time.monotonic() > self._deadline else None

    async def _run(self, call: ToolCall) -> ToolOutput:
        if call.status != "ok" or call.name is None:
            return ToolOutput(text=f"Error: {call.error}", succeeded=False)
        assert self._task is not None
        pool = self._resources.pool if self._resources else None
        ctx = ToolContext(task=self._task, pool=pool, state=self._state)
        try:
            output = await self.tools[call.name].call(ctx, call.arguments or {})
        except (SandboxFailure, ToolBug):
            raise
        except Exception as error:  # the boundary of a tool: whatever else it raises is its bug
            raise ToolBug(f"tool {call.name} raised {type(error).__name__}: {error}") from error
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
        )
        grader = self._resources.grader if self._resources else Grader()
        try:
            reward, terms = await self.rubric.score(episode, grader)
        except GraderFailure as error:
            return self._void(Failure(kind="grader", where="scoring", detail=str(error)), calls)
        finally:
            if self._resources is None:
                await grader.close()
        self._stop = stop
        return TurnResult(messages=(), reward=reward, terms=terms, stop=stop, calls=tuple(calls))

    def _void(self, failure: Failure, calls: Sequence[ToolCall]) -> TurnResult:
        self._stop = "failure"
        return TurnResult(messages=(), reward=None, terms={}, stop="failure", calls=tuple(calls), failure=failure)

    # Gymnasium's side.

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """The question as text; ``options={"task": Task}`` chooses it, else it is drawn by the seed."""
        super().reset(seed=seed)
        task = (options or {}).get("task")
        if task is None:
            task = self.tasks.task(int(self.np_random.integers(len(self.tasks))))
        opening = self._wait(lambda: self.areset(int(self.np_random.integers(2**31)), task))
        return task.prompt, {"messages": list(opening.messages), "tools": list(opening.tools), "task_id": task.id}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """One turn of the model (as if ended by its stop token); the observation is the tools' results as text.

        ``info["reward_valid"]`` is False where our side failed: the reward of 0.0 then means nothing.
        """
        result = self._wait(lambda: self.astep(ModelTurn(text=str(action), finish="stop")))
        info = {
            "messages": list(result.messages),
            "calls": [call.status for call in result.calls],
            "stop": result.stop or "",
            "terms": result.terms,
            "reward_valid": result.failure is None,
        }
        text = "\n".join(str(message["content"]) for message in result.messages)
        return text, float(result.reward or 0.0), result.terminated, result.truncated, info

    def close(self) -> None:
        if self._loop is not None:
            own, self._own_resources = self._own_resources, None
            if own is not None:
                self._loop.run(own.__aexit__(None, None, None))
                self._resources = None
            self._loop.stop()
            self._loop = None

    def _wait(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self._loop is None:
            self._loop = _LoopThread()
        if self._resources is None:
            self._own_resources = self._resources = self._loop.run(_open_resources())
        return self._loop.run(make())


async def _open_resources() -> Resources:
    return await Resources(await resolve(SandboxSpec(size=1))).__aenter__()


class _LoopThread:
    """An event loop in a thread, so that the synchronous side works inside and outside a running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tool-env", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def shortened(text: str, limit: int) -> str:
    """The text within ``limit`` characters: head and tail kept, the cut stated in between."""
    if len(text) <= limit:
        return text
    note = f"\n[... {len(text) - limit} characters left out ...]\n"
    half = max(1, (limit - len(note)) // 2)
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
