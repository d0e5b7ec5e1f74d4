"""An endpoint is asked politely, believed only as far as it goes, and never told a secret twice."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import pytest
from served import completion, failing, serving, slowly

from agent_rl.chat_episode import run_chat_episode
from agent_rl.engines.base import EngineFailure
from agent_rl.engines.openai import Endpoint, PromptTooLong, RateLimit
from agent_rl.errors import ConfigError
from agent_rl.rollout import Place
from envs import Limits, Resources, Rubric, Task, TaskList, ToolEnv, tool
from envs.parsers import get_dialect
from sandboxes import SandboxSpec

QUESTION = [{"role": "user", "content": "6*7?"}]
ASKED: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "top_p": 1.0}


@dataclass(frozen=True)
class Limited:
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 64
    max_episode_tokens: int = 1000


@tool(host=True)
async def double(value: int) -> str:
    """Double a number.

    Args:
        value: the number
    """
    if value < 0:
        raise RuntimeError("a bug")
    return str(2 * value)


TASK = Task(id="t", prompt="twice 21?", answer="42")


def make_env() -> ToolEnv:
    return ToolEnv(
        tasks=TaskList([TASK]),
        tools=[double],
        rubric=Rubric(weights={"correct": 1.0}),
        limits=Limits(),
        instruction="Be brief.",
        resources=Resources(SandboxSpec(kind="local", size=1)),
        on_tool_bug="void",
    )


async def play(url: str, *, dialect: str | None = None, **limits: Any) -> Any:
    async with Endpoint(url, max_wait_s=0.05, max_tries=3) as endpoint:
        return await run_chat_episode(
            make_env(),
            TASK,
            Place(step=0, group=0, member=0),
            endpoint=endpoint,
            dialect=None if dialect is None else get_dialect(dialect),
            config=Limited(**limits),
            seed=0,
        )


def in_turn(*answers: Any) -> Any:
    left = list(answers)
    return lambda body: left.pop(0) if len(left) > 1 else left[0]


async def test_the_only_model_is_found_and_several_must_be_chosen_from() -> None:
    async with serving(lambda body: "42", models=["a"]) as served, Endpoint(served.url) as endpoint:
        assert endpoint.model == "a"
        assert (await endpoint.chat(QUESTION, **ASKED)).content == "42"
        assert served.bodies[0]["model"] == "a"
    async with serving(lambda body: "42", models=["a", "b"]) as served:
        with pytest.raises(ConfigError, match=r"2 models \(a, b\): choose one with --served-name"):
            await Endpoint(served.url).__aenter__()
    with pytest.raises(ConfigError, match="does not answer"):
        await Endpoint("http://127.0.0.1:9/v1", max_tries=2, max_wait_s=0.01).__aenter__()
    with pytest.raises(ConfigError, match="begins with http"):
        Endpoint("localhost:8000")


@pytest.mark.parametrize("status", [429, 500, 503, 408])
async def test_what_another_try_may_mend_is_tried_again_and_counted(status: int) -> None:
    async with serving(in_turn(failing(status), failing(status), "42")) as served:
        async with Endpoint(served.url, max_wait_s=0.01) as endpoint:
            reply = await endpoint.chat(QUESTION, **ASKED)
        assert (reply.content, reply.usage.retries, len(served.bodies)) == ("42", 2, 3)


async def test_a_server_that_never_recovers_fails_the_episode_only() -> None:
    async with serving(lambda body: failing(503, "down for good")) as served:
        async with Endpoint(served.url, max_tries=3, max_wait_s=0.01) as endpoint:
            with pytest.raises(EngineFailure, match=r"3 tries failed, the last: HTTP 503: down for good"):
                await endpoint.chat(QUESTION, **ASKED)
        trajectory, _ = await play(served.url)
        assert trajectory.reward is None
        assert trajectory.failure is not None
        assert trajectory.failure.kind == "engine"


async def test_the_server_may_say_how_long_to_wait() -> None:
    async with serving(in_turn(failing(429, "slow down", **{"Retry-After": "0.3"}), "42")) as served:
        async with Endpoint(served.url, max_wait_s=5) as endpoint:
            started = time.monotonic()
            await endpoint.chat(QUESTION, **ASKED)
            assert time.monotonic() - started >= 0.3


@pytest.mark.parametrize(
    "garbage", ["<html>gateway</html>", {"choices": []}, {"choices": [{"message": None}]}, {"choices": [[]]}]
)
async def test_an_answer_that_is_no_completion_is_tried_again(garbage: Any) -> None:
    from aiohttp import web

    def answer(body: Any) -> Any:
        if isinstance(garbage, str):
            return web.Response(text=garbage)
        return garbage

    async with serving(answer) as served, Endpoint(served.url, max_tries=2, max_wait_s=0.01) as endpoint:
        with pytest.raises(EngineFailure, match="2 tries failed"):
            await endpoint.chat(QUESTION, **ASKED)


async def test_the_key_comes_from_the_environment_and_shows_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-secret")
    async with serving(lambda body: failing(401, "no such key")) as served:
        async with Endpoint(served.url, key_variable="SOME_KEY") as endpoint:
            with pytest.raises(ConfigError, match=r"HTTP 401: the key in \$SOME_KEY is refused") as refused:
                await endpoint.chat(QUESTION, **ASKED)
        assert served.keys == ["Bearer sk-secret"]
        assert "sk-secret" not in str(refused.value) + repr(vars(endpoint))
    monkeypatch.delenv("SOME_KEY")
    async with serving(lambda body: failing(401)) as served, Endpoint(served.url, key_variable="SOME_KEY") as endpoint:
        with pytest.raises(ConfigError, match=r"the key in \$SOME_KEY is not set"):
            await endpoint.chat(QUESTION, **ASKED)
        assert served.keys == [None]


async def test_no_more_requests_at_a_time_than_allowed() -> None:
    async with serving(slowly("42", 0.05)) as served, Endpoint(served.url, concurrency=3) as endpoint:
        await asyncio.gather(*(endpoint.chat(QUESTION, **ASKED) for _ in range(12)))
        assert served.most_in_flight == 3


async def test_requests_and_tokens_keep_to_their_rates() -> None:
    async with serving(lambda body: "42") as served:
        async with Endpoint(served.url, requests_per_minute=1200) as endpoint:
            started = time.monotonic()
            await asyncio.gather(*(endpoint.chat(QUESTION, **ASKED) for _ in range(9)))
            assert time.monotonic() - started >= 8 * 60 / 1200 - 0.01  # the first is free
        async with Endpoint(served.url, tokens_per_minute=60 * 15 / 0.2) as endpoint:  # 15 tokens a reply: 0.2 s each
            started = time.monotonic()
            for _ in range(3):
                await endpoint.chat(QUESTION, **ASKED)
            assert time.monotonic() - started >= 0.4 - 0.01


async def test_a_rate_serves_in_order_of_asking() -> None:
    limit, order = RateLimit(3000), []

    async def ask(number: int) -> None:
        await limit.wait(1)
        order.append(number)

    await asyncio.gather(*map(ask, range(8)))
    assert order == list(range(8))


async def test_extra_fields_replace_ours_and_null_takes_them_out() -> None:
    extra = {"max_tokens": None, "max_completion_tokens": 99, "reasoning_effort": "low"}
    async with serving(lambda body: "42") as served, Endpoint(served.url, extra=extra) as endpoint:
        await endpoint.chat(QUESTION, seed=2**60 + 5, **ASKED)
        body = served.bodies[0]
        assert "max_tokens" not in body
        assert (body["max_completion_tokens"], body["reasoning_effort"], body["seed"]) == (99, "low", 5)


async def test_a_request_that_does_not_fit_asks_for_less_before_it_gives_up() -> None:
    def answer(body: Any) -> Any:
        fits = body["max_tokens"] <= 300
        return "42" if fits else failing(400, "This model's maximum context length is 400 tokens, you requested more")

    async with serving(answer) as served, Endpoint(served.url) as endpoint:
        reply = await endpoint.chat(QUESTION, **{**ASKED, "max_tokens": 1000})
        assert reply.content == "42"
        assert [body["max_tokens"] for body in served.bodies] == [1000, 500, 250]
    async with serving(lambda body: failing(400, "prompt is too long")) as served:
        async with Endpoint(served.url) as endpoint:
            with pytest.raises(PromptTooLong):
                await endpoint.chat(QUESTION, **{**ASKED, "max_tokens": 1000})
        trajectory, _ = await play(served.url)
        assert (trajectory.stop, trajectory.reward) == ("max_tokens", 0.0)  # the model's own end, not our failure


async def test_other_refusals_end_the_evaluation_with_a_hint() -> None:
    async with serving(lambda body: failing(400, '"auto" tool choice requires --enable-auto-tool-choice')) as served:
        with pytest.raises(ConfigError, match=r"HTTP 400: .*--dialect hermes"):
            await play(served.url)


def api_call(name: str, arguments: str, identity: str = "c1") -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


async def test_native_calls_are_run_and_their_results_go_back_by_id() -> None:
    calls = [api_call("double", '{"value": 21}', "c1"), api_call("double", '{"value": "x"}', "c2")]
    first = completion({"content": "Let me see.", "tool_calls": calls}, finish="tool_calls", prompt=50, sampled=20)
    async with serving(in_turn(first, completion("\\boxed{42}", prompt=90, sampled=4))) as served:
        trajectory, usage = await play(served.url)
    assert (trajectory.reward, trajectory.stop) == (1.0, "answer")
    assert [turn.call_statuses for turn in trajectory.turns] == [("ok", "invalid_args"), ()]
    assert (usage.prompt_tokens, usage.completion_tokens, usage.requests) == (140, 24, 2)
    opening, later = served.bodies
    assert [message["role"] for message in opening["messages"]] == ["system", "user"]
    assert opening["messages"][0]["content"] == "Be brief."
    assert opening["tools"][0]["function"]["name"] == "double"
    said, one, two = later["messages"][2:]
    assert (said["content"], [call["id"] for call in said["tool_calls"]]) == ("Let me see.", ["c1", "c2"])
    assert (one["role"], one["tool_call_id"], one["content"]) == ("tool", "c1", "42")
    assert two["tool_call_id"] == "c2"
    assert "value" in two["content"]


@pytest.mark.parametrize(
    ("call", "status"),
    [
        (api_call("double", '{"value": 21'), "invalid_json"),
        (api_call("halve", '{"value": 21}'), "unknown_tool"),
        (api_call("double", ""), "invalid_args"),
        ({"id": "c1", "type": "function", "function": {}}, None),
    ],
)
async def test_a_bad_native_call_is_the_models_fault(call: dict[str, Any], status: str | None) -> None:
    async with serving(in_turn({"content": None, "tool_calls": [call]}, "\\boxed{42}")) as served:
        trajectory, _ = await play(served.url)
    assert trajectory.reward == 1.0
    assert len(trajectory.turns[0].call_statuses) == 1
    assert trajectory.turns[0].call_statuses[0] != "ok"
    if status:
        assert trajectory.turns[0].call_statuses == (status,)


async def test_what_only_looks_like_a_call_is_none_where_calls_have_their_own_place() -> None:
    text = '<tool_call>\n{"name": "double", "arguments": {"value": 1}}\n</tool_call>'
    message = {"content": text, "tool_calls": [api_call("double", '{"value": 21}')]}
    async with serving(in_turn(message, "\\boxed{42}")) as served:
        trajectory, _ = await play(served.url)
        assert trajectory.turns[0].call_statuses == ("ok",)
        assert served.bodies[1]["messages"][-1]["content"] == "42"


async def test_a_dialect_in_text_describes_tools_and_hands_results_to_the_user_role() -> None:
    call = json.dumps({"name": "double", "arguments": {"value": 21}})
    async with serving(in_turn(f"<tool_call>\n{call}\n</tool_call>", "\\boxed{42}")) as served:
        trajectory, _ = await play(served.url, dialect="hermes")
    assert trajectory.reward == 1.0
    assert "tools" not in served.bodies[0]
    assert served.bodies[0]["messages"][0]["content"].startswith("Be brief.")
    assert "double" in served.bodies[0]["messages"][0]["content"]
    assert served.bodies[1]["messages"][-1] == {"role": "user", "content": "<tool_response>\n42\n</tool_response>"}


async def test_reasoning_is_kept_apart_and_an_answer_inside_it_is_none() -> None:
    message = {"content": "no idea", "reasoning_content": "\\boxed{42}"}
    async with serving(lambda body: message) as served:
        trajectory, _ = await play(served.url)
    assert trajectory.reward == 0.0
    assert "<think>" in trajectory.messages[-1]["content"]


async def test_the_episodes_tokens_are_bounded_as_the_server_counts_them() -> None:
    call = {"content": "", "tool_calls": [api_call("double", '{"value": 1}')]}
    turns = completion(call, prompt=300, sampled=60), completion(call, prompt=390, sampled=10)
    async with serving(in_turn(*turns)) as served:
        trajectory, _ = await play(served.url, max_episode_tokens=400)
        assert [body["max_tokens"] for body in served.bodies] == [64, 40]
        assert (trajectory.stop, trajectory.reward) == ("max_tokens", 0.0)


async def test_a_bug_in_a_tool_voids() -> None:
    async with serving(lambda body: {"content": "", "tool_calls": [api_call("double", '{"value": -1}')]}) as served:
        trajectory, _ = await play(served.url)
    assert trajectory.reward is None
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "tool_bug"


async def test_same_seed_same_requests() -> None:
    bodies = []
    for _ in range(2):
        async with serving(lambda body: "\\boxed{1}") as served:
            await play(served.url)
            bodies.append(served.bodies)
    assert bodies[0] == bodies[1]
    assert isinstance(bodies[0][0]["seed"], int)
