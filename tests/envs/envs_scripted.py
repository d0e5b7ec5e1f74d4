"""A scripted policy and a sandbox of the test's own, for episodes that take microseconds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from envs import Limits, Resources, Rubric, Task, TaskList, Tool, ToolEnv, TurnResult
from envs.types import ModelTurn
from sandboxes import ExecutionResult, SandboxFailure, SandboxPool, SandboxSpec

TASK = Task(id="t", prompt="6*7=?", answer="42")


class Box:
    """A sandbox that answers by a function of the program; raises what the function raises."""

    kind = "fake"
    isolated = False
    closed = 0
    resets = 0

    def __init__(self, answer: Callable[[str], str | ExecutionResult]) -> None:
        self.answer = answer
        self.programs: list[str] = []
        self.files: dict[str, bytes] = {}

    async def start(self) -> None: ...

    async def exec(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        stdin: str | None = None,
        files: dict[str, bytes] | None = None,
        **how: Any,
    ) -> ExecutionResult:
        self.files |= files or {}
        self.programs.append(code)
        if code == "sleep":
            await asyncio.sleep(60)
        answer = self.answer(code)
        return answer if isinstance(answer, ExecutionResult) else done(answer)

    async def reset(self) -> None:
        self.resets += 1
        self.files = {}

    async def alive(self) -> bool:
        return True

    async def close(self) -> None:
        self.closed += 1


def done(stdout: str = "", stderr: str = "", exit_code: int | None = 0, status: Any = "ok") -> ExecutionResult:
    return ExecutionResult(stdout=stdout, stderr=stderr, exit_code=exit_code, status=status)


def breaks(code: str) -> str:
    raise SandboxFailure("worker 7 on host secret-name died")


class FakeResources(Resources):
    """Resources over ``Box``; the boxes that were made are kept for the test to look at."""

    def __init__(
        self, answer: Callable[[str], str | ExecutionResult] = lambda code: f"ran {code}", size: int = 2
    ) -> None:
        super().__init__(SandboxSpec(kind="local", size=size))
        self.boxes: list[Box] = []

        def make(spec: SandboxSpec) -> Any:
            self.boxes.append(Box(answer))
            return self.boxes[-1]

        self.pool = SandboxPool(self.pool.spec, factory=make)


def make_env(resources: Resources | None, tools: Sequence[Tool], **settings: Any) -> ToolEnv:
    settings.setdefault("rubric", Rubric(weights={"correct": 1.0}))
    settings.setdefault("limits", Limits())
    return ToolEnv(tasks=TaskList([TASK]), tools=tools, resources=resources, **settings)


def call(name: str = "python", /, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def play(env: ToolEnv, *turns: str, task: Task = TASK, finish: Any = "stop") -> list[TurnResult]:
    """The results of the turns, up to the end of the episode; ``finish`` is that of the last turn."""
    await env.areset(0, task)
    results = []
    for number, text in enumerate(turns, start=1):
        results.append(await env.astep(ModelTurn(text=text, finish=finish if number == len(turns) else "stop")))
        if results[-1].stop is not None:
            break
    await env.aclose()
    return results
