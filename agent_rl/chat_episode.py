"""One episode in message space, for a model whose tokens nobody sees (``engines.openai``).

The server's chat template makes the prompt, or tool calls are written as text by the environment's dialect.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_rl.engines.base import EngineFailure
from agent_rl.engines.openai import Endpoint, PromptTooLong, Reply, Usage
from agent_rl.rollout import Environment, EpisodeLimits, Place
from agent_rl.seeds import derive_seed
from agent_rl.types import Trajectory, Turn
from envs.parsers import Dialect
from envs.types import Failure, Message, ModelTurn, Opening, Stop, Task, TurnResult


@dataclass(slots=True, kw_only=True)
class _Conversation:
    """Messages as the API wants them. ``dialect`` None: calls and results are the API's own; else they are text."""

    dialect: Dialect | None
    messages: list[Message] = field(default_factory=list)
    tools: Sequence[Mapping[str, Any]] = ()

    def open(self, opening: Opening) -> None:
        self.messages = [dict(message) for message in opening.messages]
        if self.dialect is None:
            self.tools = opening.tools
        elif opening.tools:
            text = self.dialect.system_text(opening.tools)
            if self.messages and self.messages[0]["role"] == "system":
                self.messages[0]["content"] += f"\n\n{text}"
            else:
                self.messages.insert(0, {"role": "system", "content": text})
        for message in self.messages:
            if message["role"] == "tool":  # a demonstration's result
                message.update(_as_user([message]))

    def said(self, reply: Reply) -> str:
        """Notes what the model said; returns it as the environment reads it."""
        message: Message = {"role": "assistant", "content": reply.content}
        written = reply.content
        if self.dialect is None and reply.calls:
            message |= {"tool_calls": [dict(call) for call in reply.calls]}
            # What only looks like a call inside the content is none where calls have a place of their own.
            written = "\n".join([written.replace("<tool_call>", "<tool call>"), *map(_as_hermes, reply.calls)])
        self.messages.append(message)
        return f"<think>{reply.reasoning}</think>\n{written}" if reply.reasoning else written

    def heard(self, results: Sequence[Message], reply: Reply) -> None:
        if self.dialect is None and len(results) == len(reply.calls):
            for call, result in zip(reply.calls, results, strict=True):
                self.messages.append({"role": "tool", "tool_call_id": call.get("id"), "content": result["content"]})
        elif results and results[0]["role"] == "tool":
            self.messages.append(_as_user(results))
        else:
            self.messages += results


def _as_user(results: Sequence[Message]) -> Message:
    """Results as one user message, which is what chat templates of the Hermes convention make of the tool role."""
    parts = [f"<tool_response>\n{result['content']}\n</tool_response>" for result in results]
    return {"role": "user", "content": "\n".join(parts)}


def _as_hermes(call: Mapping[str, Any]) -> str:
    """A call of the API as the environment's dialect writes it; its arguments stay as the model wrote them."""
    function = call.get("function") or {}
    arguments = function.get("arguments")
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": {json.dumps(function.get("name"))}, "arguments": {raw or "{}"}}}\n</tool_call>'


async def run_chat_episode(
    env: Environment,
    task: Task,
    place: Place,
    *,
    endpoint: Endpoint,
    dialect: Dialect | None,
    config: EpisodeLimits,
    seed: int,
) -> tuple[Trajectory, Usage]:
    """``agent_rl.rollout.run_episode`` for an endpoint: the same seeds, budgets and ends, in message space.

    Args:
        dialect: of the environment, written as text; None for the API's own tool calls (the environment then reads
            the ``hermes`` dialect).

    Raises:
        ConfigError: the server refuses such requests for good.
    """
    conversation = _Conversation(dialect=dialect)
    turns: list[Turn] = []
    messages: list[Message] = []
    seconds = {"generate": 0.0, "environment": 0.0}
    usage = Usage()
    used = 0  # tokens of the conversation so far, as the server counted them last
    result: TurnResult | None = None
    stop: Stop | None = None
    failure: Failure | None = None
    base = derive_seed(seed, "episode", place.step, place.group, place.member, place.attempt)
    try:
        opening = await env.areset(derive_seed(seed, "task", place.step, place.group), task)
        conversation.open(opening)
        messages += [dict(message) for message in conversation.messages]
        while stop is None:
            reply = None
            room = config.max_episode_tokens - used
            if room >= 1:
                started = time.perf_counter()
                try:
                    reply = await endpoint.chat(
                        conversation.messages,
                        max_tokens=min(config.max_tokens, room),
                        temperature=config.temperature,
                        top_p=config.top_p,
                        seed=derive_seed(base, "turn", len(turns)),
                        tools=conversation.tools,
                    )
                except PromptTooLong:
                    pass
                seconds["generate"] += time.perf_counter() - started
            if reply is None:
                # The environment scores what it has seen: an empty turn that was cut by length.
                result = await env.astep(ModelTurn(text="", finish="length"))
                stop, failure = ("failure" if result.failure else "max_tokens"), result.failure
                break
            usage = usage.plus(reply.usage)
            used = reply.usage.prompt_tokens + reply.usage.completion_tokens
            text = conversation.said(reply)
            messages.append({"role": "assistant", "content": text})
            started = time.perf_counter()
            result = await env.astep(ModelTurn(text=text, finish=reply.finish))
            seconds["environment"] += time.perf_counter() - started
            turns.append(
                Turn(
                    start=0,
                    end=0,
                    weight_version=0,
                    finish_reason=reply.finish,
                    call_statuses=tuple(call.status for call in result.calls),
                )
            )
            messages += result.messages
            conversation.heard(result.messages, reply)
            stop, failure = result.stop, result.failure
    except EngineFailure as error:
        stop, failure = "failure", Failure(kind="engine", where=f"turn {len(turns)}", detail=str(error))
    finally:
        await asyncio.shield(env.aclose())
    trajectory = Trajectory(
        task=task,
        group=place.group,
        member=place.member,
        token_ids=(),
        loss_mask=(),
        logprobs=(),
        turns=tuple(turns),
        messages=tuple(messages),
        reward=None if failure or result is None else result.reward,
        terms={} if failure or result is None else dict(result.terms),
        stop=stop or "failure",
        failure=failure,
        seconds=seconds,
    )
    return trajectory, usage
