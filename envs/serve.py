"""Environments over HTTP: ``agent-rl envs serve`` on the machine with the sandboxes, ``envs.remote`` anywhere.

A session is one episode at a time; one that is left alone is closed. Every request carries the token. What the server's
side loses comes back as a failure of ours, never as text for a model.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from envs.data import TaskSource
from envs.env import Limits, Resources, ToolEnv
from envs.registration import EnvSpec, get, ids
from envs.wire import TASK, TURN, to_json

MAX_REQUEST_BYTES = 16 << 20
SESSION_FIELDS = ("env", "options", "dialect", "weights", "limits")
"""What a session may be asked to be."""


@dataclass(slots=True)
class Session:
    """One client's environment."""

    env: ToolEnv
    tasks: TaskSource
    used: float  # ``time.monotonic()`` of the last request
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class EnvServer:
    """The application's handlers and what they share.

    Args:
        resources: sandboxes and grader of all sessions; the caller opens and closes them.
        token: what clients must show.
        idle_s: a session that nobody asked anything for so long is closed.
        max_sessions: more are refused.
    """

    def __init__(self, resources: Resources, *, token: str, idle_s: float = 600.0, max_sessions: int = 1024) -> None:
        self._resources = resources
        self._token = token
        self._idle_s = idle_s
        self._max_sessions = max_sessions
        self._sessions: dict[str, Session] = {}
        self._tasks: dict[str, tuple[EnvSpec, TaskSource]] = {}

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=[self._checked])
        app.router.add_get("/envs", self._list)
        app.router.add_post("/sessions", self._create)
        app.router.add_get("/sessions/{session}/tasks/{index}", self._task)
        app.router.add_post("/sessions/{session}/reset", self._reset)
        app.router.add_post("/sessions/{session}/step", self._step)
        app.router.add_delete("/sessions/{session}", self._delete)
        app.cleanup_ctx.append(self._lifetime)
        return app

    @web.middleware
    async def _checked(self, request: web.Request, handler: Any) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(shown.encode(), self._token.encode()):
            return web.json_response({"error": "wrong or missing token"}, status=401)
        try:
            response: web.StreamResponse = await handler(request)
            return response
        except (ValueError, KeyError, RuntimeError) as error:  # ValidationError and JSON errors are ValueErrors
            text = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else str(error)
            return web.json_response({"error": text}, status=400)

    async def _lifetime(self, app: web.Application) -> AsyncIterator[None]:
        async def sweep() -> None:
            while True:
                await asyncio.sleep(min(self._idle_s / 4, 10))
                now = time.monotonic()
                for name, session in list(self._sessions.items()):
                    if now - session.used > self._idle_s and not session.turn.locked():
                        del self._sessions[name]
                        await session.env.aclose()

        sweeper = asyncio.create_task(sweep())
        yield
        sweeper.cancel()
        with suppress(asyncio.CancelledError):
            await sweeper
        for session in self._sessions.values():
            await session.env.aclose()
        self._sessions.clear()

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response({env_id: get(env_id).summary for env_id in ids()})

    async def _create(self, request: web.Request) -> web.Response:
        if len(self._sessions) >= self._max_sessions:
            return web.json_response({"error": f"all {self._max_sessions} sessions are taken"}, status=503)
        asked = await request.json()
        for name in asked:
            if name not in SESSION_FIELDS:
                raise ValueError(f"a session has no setting {name!r}; there are {', '.join(SESSION_FIELDS)}")
        spec, tasks = await self._source(str(asked["env"]), dict(asked.get("options") or {}))
        limits = asked.get("limits")
        env = spec.make(
            tasks,
            resources=self._resources,
            dialect=str(asked.get("dialect", "hermes")),
            weights=asked.get("weights"),
            limits=Limits.model_validate(limits) if limits else None,
            on_tool_bug="void",
        )
        name = secrets.token_urlsafe(12)
        self._sessions[name] = Session(env=env, tasks=tasks, used=time.monotonic())
        return web.json_response({"session": name, "num_tasks": len(tasks)})

    async def _source(self, env_id: str, options: Mapping[str, Any]) -> tuple[EnvSpec, TaskSource]:
        key = f"{env_id} {sorted(options.items())}"
        if key not in self._tasks:
            spec = get(env_id)
            self._tasks[key] = (spec, await asyncio.to_thread(spec.tasks, options))
        return self._tasks[key]

    def _session(self, request: web.Request) -> Session:
        session = self._sessions.get(request.match_info["session"])
        if session is None:
            raise web.HTTPNotFound(text='{"error": "no such session; it may have been idle for too long"}')
        session.used = time.monotonic()
        return session

    async def _task(self, request: web.Request) -> web.Response:
        session, index = self._session(request), int(request.match_info["index"])
        if not 0 <= index < len(session.tasks):
            raise ValueError(f"there are tasks 0 to {len(session.tasks) - 1}, not {index}")
        return web.json_response(to_json(session.tasks.task(index)))

    async def _reset(self, request: web.Request) -> web.Response:
        session, asked = self._session(request), await request.json()
        async with session.turn:
            opening = await session.env.areset(int(asked["seed"]), TASK.validate_python(asked["task"]))
        return web.json_response(to_json(opening))

    async def _step(self, request: web.Request) -> web.Response:
        session, turn = self._session(request), TURN.validate_python(await request.json())
        async with session.turn:
            result = await session.env.astep(turn)
        session.used = time.monotonic()
        return web.json_response(to_json(result))

    async def _delete(self, request: web.Request) -> web.Response:
        session = self._session(request)
        async with session.turn:
            self._sessions.pop(request.match_info["session"], None)
            await session.env.aclose()
        return web.json_response({})
