"""An OpenAI-compatible server of the test's own: it answers by a function, and fails when it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Answer = Callable[[dict[str, Any]], Any]
"""Request body -> text, a message (dict), a ``web.Response``, or an awaitable of one."""


def completion(message: str | Mapping[str, Any], *, finish: str = "stop", prompt: int = 10, sampled: int = 5) -> Any:
    full = {"role": "assistant", "content": message} if isinstance(message, str) else {"role": "assistant", **message}
    return {
        "choices": [{"index": 0, "message": full, "finish_reason": finish}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled},
    }


def failing(status: int, text: str = "busy", **headers: str) -> web.Response:
    body = json.dumps({"error": {"message": text}})
    return web.Response(status=status, text=body, content_type="application/json", headers=headers)


class Served:
    """What the server saw."""

    def __init__(self, answer: Answer, models: Sequence[str]) -> None:
        self.answer = answer
        self.models = list(models)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.url = ""

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            answer = self.answer(body)
            if isinstance(answer, Awaitable):
                answer = await answer
        finally:
            self.in_flight -= 1
        if isinstance(answer, web.Response):
            return answer
        if isinstance(answer, str) or "choices" not in answer:
            answer = completion(answer)
        return web.json_response(answer)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in self.models]})


@asynccontextmanager
async def serving(answer: Answer, models: Sequence[str] = ("scripted",)) -> Any:
    """A running ``Served``; its ``url`` is the base of the endpoint."""
    served = Served(answer, models)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", served._chat)
    app.router.add_get("/v1/models", served._models)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        served.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        yield served
    finally:
        await runner.cleanup()


def slowly(answer: str, seconds: float) -> Answer:
    async def wait() -> str:
        await asyncio.sleep(seconds)
        return answer

    return lambda body: wait()
