"""Our environments as a ``verifiers.MultiTurnEnv`` (Prime Intellect's package, versions 0.1.14 to 0.3).

Calls travel in the assistant's text, so any OpenAI-compatible endpoint and any model will do. Every turn goes through
the environment's own ``astep``: limits, failures and grading are the same as in our trainer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import verifiers as vf
from datasets import Dataset

from envs.data import TaskSource
from envs.env import Resources, ToolEnv
from envs.registration import EnvSpec, get
from envs.types import Finish, Message, ModelTurn, Opening, TurnResult
from envs.wire import TASK
from sandboxes import SandboxSpec, resolve


def for_verifiers(
    env_id: str,
    *,
    options: Mapping[str, Any] | None = None,
    count: int = 1000,
    sandbox: SandboxSpec | None = None,
    dialect: str = "hermes",
    **settings: Any,
) -> vf.MultiTurnEnv:
    """The environment for ``evaluate``, ``generate`` and trainers on verifiers.

    ::

        env = for_verifiers("agentic/Arithmetic-v1", count=100)
        results = await env.evaluate(client=vf.ClientConfig(api_base_url=...), model=...)

    Args:
        options: of the tasks.
        count: the first so many tasks become its data set.
        sandbox: where programs run; what works here when None.
        dialect: how the model is told to write calls.
        settings: as in ``EnvSpec.make``: ``limits``, ``weights``.

    Raises:
        ValueError: an unknown id, dialect or option.
    """
    spec = get(env_id)
    tasks = spec.tasks(options or {})
    rows = [
        {
            # The question again as the environment opens it comes in setup_state; verifiers wants a prompt in each row.
            "prompt": [{"role": "user", "content": task.prompt}],
            "answer": task.answer or "",
            "info": {"agentic_task": TASK.dump_json(task).decode()},
        }
        for task in map(tasks.task, range(min(count, len(tasks))))
    ]
    settings = {"dialect": dialect, "on_tool_bug": "void", **settings}
    return _ToolEnv(spec, tasks, sandbox, settings, dataset=Dataset.from_list(rows))


class _ToolEnv(vf.MultiTurnEnv):  # type: ignore[misc]
    def __init__(
        self, spec: EnvSpec, tasks: TaskSource, sandbox: SandboxSpec | None, settings: dict[str, Any], **kwargs: Any
    ) -> None:
        rubric = vf.Rubric(funcs=[reward], weights=[1.0])
        for name in spec.weights:
            rubric.add_metric(_term(name))
        super().__init__(max_turns=-1, rubric=rubric, env_id=spec.id, **kwargs)  # our own limits hold
        self._spec, self._tasks, self._settings = spec, tasks, settings
        self._sandbox = sandbox or SandboxSpec()
        self._resources: Resources | None = None
        self._opening = asyncio.Lock()  # many episodes begin at once, and share what the first one opens

    async def setup_state(self, state: vf.State) -> vf.State:
        async with self._opening:
            if self._resources is None:
                spec = await resolve(self._sandbox) if self._spec.may_call else self._sandbox
                self._resources = await Resources(spec).__aenter__()
        env = self._spec.make(self._tasks, resources=self._resources, **self._settings)
        opening = await env.areset(
            int(state["input"].get("example_id", 0)), TASK.validate_json(state["info"]["agentic_task"])
        )
        state["agentic_env"], state["agentic_end"] = env, None
        state["prompt"] = vf.utils.message_utils.normalize_messages(_opened(env, opening), field_name="prompt")
        return state

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        """What follows from the last turn; after the end nothing, and verifiers stops.

        Raises:
            vf.InfraError: the episode was lost on our side, which verifiers keeps apart from a wrong answer.
        """
        text = str(messages[-1].content or "")
        finish: Finish = "length" if state["trajectory"][-1]["is_truncated"] else "stop"
        result: TurnResult = await state["agentic_env"].astep(ModelTurn(text=text, finish=finish))
        if result.failure is not None:
            raise vf.InfraError(f"{result.failure.where} ({result.failure.kind}): {result.failure.detail}")
        if result.stop is not None:
            state["agentic_end"] = result
            state["final_env_response"] = []
        return [_said(message) for message in result.messages]

    @vf.cleanup  # type: ignore[untyped-decorator]
    async def leave_episode(self, state: vf.State) -> None:
        env = state.pop("agentic_env", None)
        if env is not None:
            await env.aclose()

    @vf.teardown  # type: ignore[untyped-decorator]
    async def close_resources(self) -> None:
        resources, self._resources = self._resources, None
        if resources is not None:
            await resources.__aexit__(None, None, None)


async def reward(state: vf.State) -> float:
    """The episode's reward; 0 where it was lost, whose ``error`` says so."""
    end = state.get("agentic_end")
    return 0.0 if end is None or end.reward is None else float(end.reward)


def _term(name: str) -> Any:
    async def term(state: vf.State) -> float:
        end = state.get("agentic_end")
        return 0.0 if end is None else float(end.terms.get(name, 0.0))

    term.__name__ = f"term_{name}"
    return term


def _opened(env: ToolEnv, opening: Opening) -> list[Message]:
    """The opening with the tools described in the system message, since no chat template will do it."""
    told = env.dialect.system_text(list(opening.tools)) if opening.tools else ""
    messages = list(opening.messages)
    system = str(messages.pop(0)["content"]) if messages[0]["role"] == "system" else ""
    text = "\n\n".join(part for part in (system, told) if part)
    head: list[Message] = [{"role": "system", "content": text}] if text else []
    return [*head, *(_said(message) for message in messages)]


def _said(message: Message) -> Message:
    """Results in the user's name: a ``tool`` message would need the id of a call that the endpoint never saw."""
    if message["role"] != "tool":
        return message
    return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
