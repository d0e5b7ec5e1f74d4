"""The ``remote`` backend: sandboxes of our service on other hosts, spread over them, moved when one dies.

What is asked twice is only what may be: a lease and its end (by an id of ours), and a program whose answer was lost,
which the service answers again by the call's id instead of running it again. A program is run anew on another host only
when it is the first of its lease and has no network: nothing outside can then tell that it ran twice.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from sandboxes.base import ExecutionResult, Limits, OnOutput, SandboxFailure, SandboxSpec, SandboxUnavailable
from sandboxes.link import GRACE_S, START_S, refused, request_of, within
from sandboxes.wire import TOKEN_VARIABLE, result_from_json

CONNECT_S = 5.0
ATTEMPTS = 3
IDLE_S = 300.0  # what a service that does not say lets a lease lie unused
NETWORK_ERRORS = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError)


class _Gone(Exception):
    """The host does not answer, or no longer knows the lease."""


class _Refused(Exception):
    """The host answers, but has no sandbox for us now."""


@dataclass(slots=True, eq=False)
class Host:
    """What this process knows of one service."""

    url: str
    leases: int = 0  # ours, now
    failures: int = 0  # in a row
    rests_until: float = 0.0  # by the monotonic clock

    def failed(self) -> None:
        self.failures += 1
        self.rests_until = time.monotonic() + min(30.0, 0.5 * 2 ** min(self.failures, 6))

    def answered(self) -> None:
        self.failures, self.rests_until = 0, 0.0


_known: dict[str, Host] = {}


def hosts_of(spec: SandboxSpec) -> list[Host]:
    """The services in the order to try: rested ones before failing ones, then by how many sandboxes we hold there."""
    if not spec.hosts:
        raise SandboxUnavailable("sandbox kind remote needs --sandbox.hosts, such as http://box1:8088")
    hosts = [_known.setdefault(url.rstrip("/"), Host(url.rstrip("/"))) for url in spec.hosts]
    random.shuffle(hosts)
    return sorted(hosts, key=lambda host: (host.rests_until > time.monotonic(), host.leases))


def _session() -> aiohttp.ClientSession:
    token = os.environ.get(TOKEN_VARIABLE)
    if not token:
        raise SandboxUnavailable(f"sandbox kind remote needs the service's token in the variable {TOKEN_VARIABLE}")
    return aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"})


async def check_hosts(spec: SandboxSpec) -> int:
    """How many sandboxes the services that are well give one client; ``SandboxUnavailable`` when none of them is."""
    said: list[str] = []
    given = 0

    async def look(host: Host, session: aiohttp.ClientSession) -> None:
        nonlocal given
        try:
            timeout = aiohttp.ClientTimeout(total=CONNECT_S)
            async with session.get(f"{host.url}/healthz", timeout=timeout) as answer:
                if answer.status == 200:
                    state = await answer.json()
                    given += min(state["size"], state.get("per_client", state["size"]))
                else:
                    said.append(f"{host.url} is {(await answer.text())[:100]}")
        except (
            *NETWORK_ERRORS,
            aiohttp.InvalidURL,
            aiohttp.ContentTypeError,
            ValueError,
            KeyError,
            TypeError,
        ) as error:
            said.append(f"{host.url}: {type(error).__name__} {error}")

    async with _session() as session:
        await asyncio.gather(*(look(host, session) for host in hosts_of(spec)))
    if not given:
        raise SandboxUnavailable(f"no sandbox service answers: {'; '.join(said)}")
    return given


class RemoteSandbox:
    """A lease on one of the hosts."""

    kind = "remote"
    isolated = True  # as far as the service says
    observer: Callable[[ExecutionResult], None] | None = None

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.host: Host | None = None
        self.broken = False
        self._session: aiohttp.ClientSession | None = None
        self._id = ""
        self._keeping: asyncio.Task[None] | None = None
        self._is_clean = True  # no program has run since the beginning or the last reset

    async def start(self) -> None:
        if self._session is None:
            self._session = _session()
        deadline = time.monotonic() + START_S
        while True:
            said = []
            for host in hosts_of(self.spec):
                try:
                    await self._lease(host)
                    return
                except (_Gone, _Refused) as error:
                    said.append(f"{host.url}: {error}")
                except SandboxUnavailable:
                    raise
                except SandboxFailure as error:  # it cannot start one
                    host.failed()
                    said.append(f"{host.url}: {error}")
            if time.monotonic() > deadline or all(host.failures for host in hosts_of(self.spec)):
                raise SandboxUnavailable(f"no sandbox service gives a sandbox: {'; '.join(said)}")
            await asyncio.sleep(0.2)

    async def _lease(self, host: Host) -> None:
        self._id = secrets.token_hex(12)
        self.host = host
        host.leases += 1
        try:
            answer = await self._again("PUT", "", START_S)
        except asyncio.CancelledError:
            raise  # it may be ours there all the same: close() ends it
        except BaseException:
            self._leave()
            raise
        self.isolated = bool(answer.get("isolated"))
        self.broken, self._is_clean = False, True
        self._keeping = asyncio.create_task(self._keep(answer.get("idle_s", IDLE_S) / 4))

    async def _keep(self, every_s: float) -> None:
        """While the lease is ours its service hears of us: a model may think for longer than a lease may lie unused."""
        while True:
            await asyncio.sleep(every_s)
            await self._is_known()

    async def _again(self, method: str, path: str, timeout_s: float, **options: Any) -> Any:
        """The answer to a request that may be repeated: asked up to three times.

        Raises:
            _Gone: no answer, or the lease is not known there; the host is marked.
            _Refused: busy or draining.
            SandboxFailure: its sandbox failed. ValueError: it finds the request wrong.
        """
        assert self.host is not None
        for attempt in range(ATTEMPTS):
            try:
                answer = await within(timeout_s, self._ask(method, path, **options))
                self.host.answered()
                return answer
            except (_Gone, _Refused):
                self.host.answered()  # if not as we wished
                raise
            except NETWORK_ERRORS as error:
                reason = f"{type(error).__name__} {error}".strip()
                if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ServerTimeoutError):
                    break  # all the time there was is spent, not only that for a connection
            if attempt < ATTEMPTS - 1:
                await asyncio.sleep(0.1 * 2**attempt)
        self.host.failed()
        raise _Gone(reason)

    async def _ask(self, method: str, path: str, on_output: OnOutput | None = None, body: Any = None) -> Any:
        assert self.host is not None
        assert self._session is not None
        url = f"{self.host.url}/v1/leases/{self._id}{path}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with self._session.request(method, url, json=body, timeout=timeout) as answer:
            if answer.status == 204:
                return {}
            if answer.content_type == "application/x-ndjson":
                return await _read_stream(answer, on_output)
            try:
                said = await answer.json()
            except (aiohttp.ContentTypeError, ValueError):
                said = {"message": f"status {answer.status}, no answer of a sandbox service"}
            return _outcome(answer.status, said)

    async def exec(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        stdin: str | None = None,
        files: dict[str, bytes] | None = None,
        session: str | None = None,
        environment: dict[str, str] | None = None,
        fetch: Sequence[str] = (),
        language: str = "python",
        limits: Limits | None = None,
        on_output: OnOutput | None = None,
    ) -> ExecutionResult:
        if self.host is None or self.broken:
            raise SandboxFailure("the sandbox is broken")
        refusal = refused(code, isolated=self.isolated)
        if refusal is not None:
            return refusal
        body = request_of(
            self.spec,
            code,
            timeout_s=timeout_s,
            stdin=stdin,
            files=files,
            session=session,
            environment=environment,
            fetch=fetch,
            language=language,
            limits=limits,
            stream=on_output is not None,
        )
        body["id"] = secrets.token_hex(8)
        self.broken = True  # until there is an answer; a cancelled call leaves a program running there
        was_clean, self._is_clean = self._is_clean, False
        wait_s = body["timeout_s"] + 2 * GRACE_S
        try:
            said = await self._again("POST", "/run", wait_s, body=body, on_output=on_output)
        except _Gone as error:
            if not was_clean or self.spec.network:
                raise SandboxFailure(f"{self.host.url} is gone with what ran there: {error}") from error
            await self._move()
            try:
                said = await self._again("POST", "/run", wait_s, body=body, on_output=on_output)
            except (_Gone, _Refused) as second:
                raise SandboxFailure(f"two hosts in a row failed: {error}; {second}") from second
        except _Refused as error:
            raise SandboxFailure(f"{self.host.url}: {error}") from error
        except ValueError:
            self.broken, self._is_clean = False, was_clean  # nothing ran
            raise
        self.broken = False
        result = result_from_json(said)
        if self.observer is not None:
            self.observer(result)
        return result

    async def _move(self) -> None:
        """A lease on a host that answers, in place of one on a host that does not."""
        self._leave()
        await self.start()
        self.broken, self._is_clean = True, False

    def _leave(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None
        if self.host is not None:
            self.host.leases -= 1
            self.host = None

    async def reset(self) -> None:
        if self.host is None or self.broken:
            raise SandboxFailure("the sandbox is broken")
        try:
            await self._again("POST", "/reset", START_S)
        except (_Gone, _Refused) as error:
            self.broken = True
            raise SandboxFailure(f"{self.host.url}: {error}") from error
        except SandboxFailure:
            self.broken = True
            raise
        self._is_clean = True

    async def alive(self) -> bool:
        return self.host is not None and not self.broken and await self._is_known()

    async def _is_known(self) -> bool:
        """Whether the service has our lease still, which counts as a use of it."""
        try:
            await self._again("GET", "", 2 * CONNECT_S)
        except (_Gone, _Refused, SandboxFailure):
            return False
        return True

    async def close(self) -> None:
        """A host that does not answer ends the lease by itself, after its idle time."""
        if self._session is None:
            return
        try:
            if self.host is not None:
                await self._again("DELETE", "", 2 * CONNECT_S)
        except (_Gone, _Refused, SandboxFailure):
            pass
        finally:
            self._leave()
            session, self._session = self._session, None
            if session is not None:
                await session.close()


async def _read_stream(answer: aiohttp.ClientResponse, on_output: OnOutput | None) -> Any:
    pending = b""
    async for data in answer.content.iter_any():  # lines may be longer than aiohttp's own reading of lines allows
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            piece = json.loads(line)
            if "result" in piece:
                return piece["result"]
            if "error" in piece:
                return _outcome({"sandbox": 502, "busy": 429}.get(piece["error"], 400), piece)
            if on_output is not None:
                on_output(piece["stream"], base64.b64decode(piece["data"]))
    raise aiohttp.ServerDisconnectedError("the stream ended before the result")


def _outcome(status: int, said: Any) -> Any:
    if status < 300:
        return said
    message = str(said.get("message", said))
    if status == 400:
        raise ValueError(message)
    if status in (429, 503):
        raise _Refused(message)
    if status == 404:
        raise _Gone(message)
    if status == 401:
        raise SandboxUnavailable(f"the service refuses our token: {message}")
    raise SandboxFailure(message)
