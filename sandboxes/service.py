"""``agent-rl sandbox serve``: a pool of sandboxes behind HTTP, for other machines and other programs.

| request | what it does |
|---|---|
| ``POST /run_code`` | SandboxFusion's form of one program in a clean sandbox |
| ``POST /v1/run`` | the same in ours (``wire.Call``), with streaming |
| ``PUT /v1/leases/ID`` | a sandbox of one's own until ``DELETE``, or until nothing is asked of it for a while |
| ``POST /v1/leases/ID/run``, ``.../reset`` | a program in it; all that programs left, away |
| ``GET /healthz``, ``GET /metrics`` | without a token: 200, or 503 while draining; Prometheus |
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from pydantic import ValidationError

from sandboxes.base import ExecutionResult, Sandbox, SandboxBusy, SandboxFailure
from sandboxes.pool import SandboxPool
from sandboxes.service_metrics import Metrics
from sandboxes.wire import MAX_BODY_BYTES, Call, FusionCall, fusion_answer, fusion_failure, result_to_json

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True, kw_only=True)
class Lease:
    """A sandbox that one client holds."""

    client: str
    context: AbstractAsyncContextManager[Sandbox]
    box: Sandbox
    used: float  # when last asked for something, by the loop's clock
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    last_id: str | None = None
    last: asyncio.Task[ExecutionResult] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """What clients may ask for."""

    per_client: int = 16  # sandboxes that one client holds, or waits for, at once
    idle_s: float = 300.0  # a lease that nothing is asked of for so long ends
    drain_s: float = 30.0  # what runs at SIGTERM may go on for so long


class Refusal(Exception):
    """An answer that is an error: HTTP status, a word for programs, a sentence for people."""

    def __init__(self, status: int, word: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.word = word


class Service:
    """The handlers, and what they share. ``tokens`` names the client of each bearer token."""

    def __init__(self, pool: SandboxPool, tokens: dict[str, str], limits: ServiceLimits) -> None:
        self.pool = pool
        self.limits = limits
        self.draining = False
        self.leases: dict[str, Lease] = {}
        self.holding: Counter[str] = Counter()  # sandboxes by client, held or waited for
        self.answers: Counter[tuple[str, str, int]] = Counter()  # by client, route and status
        self.expired = 0
        self._tokens = tokens
        self._registry = CollectorRegistry()
        self._registry.register(Metrics(self))

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/healthz", self.healthz),
                web.get("/metrics", self.metrics),
                web.post("/run_code", self.run_code),
                web.post("/v1/run", self.run),
                web.put("/v1/leases/{id}", self.lease),
                web.get("/v1/leases/{id}", self.look),
                web.delete("/v1/leases/{id}", self.end),
                web.post("/v1/leases/{id}/run", self.run_leased),
                web.post("/v1/leases/{id}/reset", self.reset),
            ]
        )
        app.cleanup_ctx.append(self._expiring)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Who asks, what became of it, and every refusal in one form."""
        client = "-"
        route = request.match_info.route.resource.canonical if request.match_info.route.resource else "-"
        response: web.StreamResponse
        try:
            if route not in ("/healthz", "/metrics"):
                client = self._client(request)
            response = await handler(request)
        except Refusal as error:
            response = web.json_response({"error": error.word, "message": str(error)}, status=error.status)
            if error.status in (429, 503):
                response.headers["Retry-After"] = "1"
        except SandboxBusy as error:
            response = web.json_response({"error": "busy", "message": str(error)}, status=429)
            response.headers["Retry-After"] = "1"
        except SandboxFailure as error:
            response = web.json_response({"error": "sandbox", "message": str(error)}, status=502)
        except (ValidationError, ValueError) as error:
            response = web.json_response({"error": "request", "message": _one_line(error)}, status=400)
        except web.HTTPException as error:
            response = web.json_response({"error": "request", "message": error.reason}, status=error.status)
        self.answers[client, route, response.status] += 1
        return response

    def _client(self, request: web.Request) -> str:
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer":
            for token, name in self._tokens.items():
                if hmac.compare_digest(token.encode(), given.strip().encode()):
                    return name
        raise Refusal(401, "token", "a known token is needed: Authorization: Bearer TOKEN")

    async def healthz(self, request: web.Request) -> web.Response:
        counters = self.pool.counters
        state = {
            "status": "draining" if self.draining else "ok",
            "kind": self.pool.spec.kind,
            "isolated": self.pool.spec.kind != "local",
            "size": self.pool.spec.size,
            "per_client": self.limits.per_client,
            "leased": counters.leased,
            "waiting": counters.waiting,
        }
        return web.json_response(state, status=503 if self.draining else 200)

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": "text/plain; version=0.0.4"})

    def _admit(self, client: str) -> None:
        if self.draining:
            raise Refusal(503, "draining", "this service is shutting down: ask another host")
        if self.holding[client] >= self.limits.per_client:
            raise Refusal(429, "busy", f"{client} holds or waits for {self.limits.per_client} sandboxes, its limit")

    async def run_code(self, request: web.Request) -> web.Response:
        call = FusionCall.model_validate(await _json(request)).call()
        self._admit(self._client(request))
        try:
            return web.json_response(fusion_answer(await self._once(self._client(request), call)))
        except SandboxBusy:
            raise
        except SandboxFailure as error:
            return web.json_response(fusion_failure(str(error)))

    async def run(self, request: web.Request) -> web.StreamResponse:
        call = Call.model_validate(await _json(request))
        self._admit(self._client(request))
        if call.session is not None:
            raise ValueError("session: only within a lease")
        return await _answer(request, call, lambda on_output: self._once(self._client(request), call, on_output))

    async def _once(self, client: str, call: Call, on_output: Any = None) -> ExecutionResult:
        self.holding[client] += 1
        try:
            async with self.pool.lease() as box:
                return await box.exec(call.code, **call.arguments(), on_output=on_output)
        finally:
            self.holding[client] -= 1

    async def lease(self, request: web.Request) -> web.Response:
        """The same id again, as after a lost answer, is the same lease."""
        name, client = request.match_info["id"], self._client(request)
        if not 8 <= len(name) <= 64:
            raise ValueError("a lease's id has 8 to 64 characters")
        if name not in self.leases:
            self._admit(client)
            self.holding[client] += 1
            context = self.pool.lease()
            try:
                box = await context.__aenter__()
            except BaseException:
                self.holding[client] -= 1
                raise
            if name in self.leases or self.draining:  # the same was asked for twice while both waited
                self.holding[client] -= 1
                await context.__aexit__(None, None, None)
            if self.draining:
                raise Refusal(503, "draining", "this service is shutting down: ask another host")
            if name not in self.leases:
                self.leases[name] = Lease(client=client, context=context, box=box, used=self._now())
        self._mine(request)
        said = {"id": name, "isolated": self.leases[name].box.isolated, "idle_s": self.limits.idle_s}
        return web.json_response(said, status=201)

    def _mine(self, request: web.Request) -> Lease:
        lease = self.leases.get(request.match_info["id"])
        if lease is None or lease.client != self._client(request):
            raise Refusal(404, "lease", "no such lease: it has ended, or never was")
        lease.used = self._now()
        return lease

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def look(self, request: web.Request) -> web.Response:
        lease = self._mine(request)
        if not lease.turn.locked() and not await lease.box.alive():  # in a call it is alive: the call will tell
            await self._end(request.match_info["id"], SandboxFailure("dead"))
            raise Refusal(404, "lease", "its sandbox has died")
        return web.json_response({"id": request.match_info["id"]})

    async def end(self, request: web.Request) -> web.Response:
        with suppress(Refusal):
            self._mine(request)
            await self._end(request.match_info["id"])
        return web.Response(status=204)

    async def _end(self, name: str, error: SandboxFailure | None = None) -> None:
        """A clean one goes back to the pool, one in use or with an ``error`` is thrown away."""
        lease = self.leases.pop(name, None)
        if lease is None:
            return
        if lease.last is not None and not lease.last.done():
            lease.last.cancel()
            await asyncio.wait([lease.last])
            error = error or SandboxFailure("ended while a program ran")
        try:
            with suppress(SandboxFailure):
                await lease.context.__aexit__(type(error) if error else None, error, None)
        finally:
            self.holding[lease.client] -= 1

    async def run_leased(self, request: web.Request) -> web.StreamResponse:
        call = Call.model_validate(await _json(request))
        lease = self._mine(request)
        name = request.match_info["id"]

        async def result(on_output: Any) -> ExecutionResult:
            if call.id is None or call.id != lease.last_id:
                lease.last_id = call.id
                lease.last = asyncio.create_task(self._in_lease(name, lease, call, on_output))
            assert lease.last is not None
            # Shielded: who lost the connection may ask again for the answer.
            return await asyncio.shield(lease.last)

        return await _answer(request, call, result)

    async def _in_lease(self, name: str, lease: Lease, call: Call, on_output: Any) -> ExecutionResult:
        async with lease.turn:
            try:
                return await lease.box.exec(call.code, **call.arguments(), on_output=on_output)
            except SandboxFailure as error:
                lease.last = None
                await self._end(name, error)
                raise
            finally:
                lease.used = self._now()

    async def reset(self, request: web.Request) -> web.Response:
        lease = self._mine(request)
        async with lease.turn:
            try:
                await lease.box.reset()
            except SandboxFailure as error:
                await self._end(request.match_info["id"], error)
                raise
        lease.last_id = None
        return web.Response(status=204)

    async def _expiring(self, app: web.Application) -> Any:
        """While the application runs, leases that nobody uses end; at its end, all do."""

        async def expire() -> None:
            while True:
                await asyncio.sleep(min(1.0, self.limits.idle_s / 4))
                for name, lease in list(self.leases.items()):
                    if not lease.turn.locked() and self._now() - lease.used > self.limits.idle_s:
                        self.expired += 1
                        await self._end(name)

        task = asyncio.create_task(expire())
        yield
        task.cancel()
        for name in list(self.leases):
            await self._end(name)

    async def drain(self) -> None:
        """No new work; what runs may end, for ``drain_s`` at most."""
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(self.limits.drain_s):
                while any(self.holding.values()):  # noqa: ASYNC110  # counters, not an event
                    await asyncio.sleep(0.05)


async def _answer(
    request: web.Request, call: Call, run: Callable[[Any], Awaitable[ExecutionResult]]
) -> web.StreamResponse:
    if not call.stream:
        return web.json_response(result_to_json(await run(None)))
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    pieces: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def on_output(name: str, data: bytes) -> None:
        pieces.put_nowait({"stream": name, "data": base64.b64encode(data).decode()})

    async def work() -> dict[str, Any]:
        try:
            return {"result": result_to_json(await run(on_output))}
        except (SandboxFailure, ValueError) as error:  # the status line is out: the last line tells
            kind = (
                "busy"
                if isinstance(error, SandboxBusy)
                else "sandbox"
                if isinstance(error, SandboxFailure)
                else "request"
            )
            return {"error": kind, "message": str(error)}
        finally:
            pieces.put_nowait(None)

    working = asyncio.create_task(work())
    try:
        while (piece := await pieces.get()) is not None:
            await response.write(json.dumps(piece).encode() + b"\n")
        await response.write(json.dumps(await working).encode() + b"\n")
    finally:
        working.cancel()
    await response.write_eof()
    return response


async def _json(request: web.Request) -> Any:
    try:
        return await request.json()
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the body is no JSON: {error}") from None


def _one_line(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
    return str(error)


async def serve(service: Service, host: str, port: int, say: Callable[[str], None]) -> None:
    """Until SIGTERM or SIGINT, then drained. ``say`` is told the address once it listens."""
    async with service.pool:
        runner = web.AppRunner(service.app(), handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            stop = asyncio.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
            at, free, *_ = runner.addresses[0]
            where = f"http://[{at}]:{free}" if ":" in at else f"http://{at}:{free}"
            say(f"serving {service.pool.spec.size} {service.pool.spec.kind} sandboxes on {where}")
            await stop.wait()
            say(f"draining: {sum(service.holding.values())} sandboxes in use")
            await service.drain()
        finally:
            await runner.cleanup()
