"""What an endpoint that answers in text promises: it gives no ids and takes no weights, so it is for evaluation alone.

Each check takes an ``Endpoint`` and raises ``AssertionError`` where a promise is broken, as those in ``contract`` do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from agent_rl.engines.contract import WAIT_S
from agent_rl.engines.openai import Endpoint, PromptTooLong, Reply

ChatCheck = Callable[[Endpoint], Awaitable[None]]


async def a_chat_answers_its_own_caller(endpoint: Endpoint) -> None:
    questions = [f"Count from {number} on." for number in range(6)]
    together = await asyncio.gather(*(_chat(endpoint, question) for question in questions))
    for question, reply in zip(questions, together, strict=True):
        alone = await _chat(endpoint, question)
        assert alone.content == reply.content, f"{question!r}: {alone.content!r} alone, {reply.content!r} among others"
    assert len({reply.content for reply in together}) > 1, "every question got the same answer: this shows nothing"


async def a_chat_keeps_max_tokens(endpoint: Endpoint) -> None:
    reply = await _chat(endpoint, "Count.", max_tokens=3)
    assert (reply.finish, reply.usage.completion_tokens) == ("length", 3), reply


async def a_chat_with_the_same_seed_is_the_same(endpoint: Endpoint) -> None:
    first, second, other = [await _chat(endpoint, "Count.", temperature=1.0, seed=seed) for seed in (7, 7, 8)]
    assert first.content == second.content != other.content, (first, second, other)


async def a_chat_that_does_not_fit_says_so(endpoint: Endpoint) -> None:
    try:
        await _chat(endpoint, "one two three " * 20_000)
    except PromptTooLong:
        return
    raise AssertionError("60,000 words fitted")


async def a_cancelled_chat_gives_its_slot_back(endpoint: Endpoint) -> None:
    tasks = [asyncio.create_task(_chat(endpoint, f"Count {number}.", max_tokens=64)) for number in range(64)]
    await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(WAIT_S):
        assert (await _chat(endpoint, "Count.", max_tokens=2)).finish == "length"


CHAT_CHECKS: tuple[ChatCheck, ...] = (
    a_chat_answers_its_own_caller,
    a_chat_keeps_max_tokens,
    a_chat_with_the_same_seed_is_the_same,
    a_chat_that_does_not_fit_says_so,
    a_cancelled_chat_gives_its_slot_back,
)


async def _chat(
    endpoint: Endpoint, text: str, *, max_tokens: int = 12, temperature: float = 0.0, seed: int = 0
) -> Reply:
    message = {"role": "user", "content": text}
    return await endpoint.chat([message], max_tokens=max_tokens, temperature=temperature, top_p=1.0, seed=seed)
