"""The client of ``envs.serve``: an environment that lives on another machine, and is a ``gymnasium.Env`` here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp

from envs.env import Limits
from envs.facade import MessageEnv
from envs.types import Failure, ModelTurn, Opening, Task, TurnResult
from envs.wire import OPENING, RESULT, TASK, to_json
from sandboxes import SandboxFailure

TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=900)


class RemoteEnv(MessageEnv):
    """One session of a server; bound to the event loop in which it is first used.

    Args:
        url: of the server, like ``http://host:8700``.
        token: that the server was started with.
        env: id of the environment.
        options: of its tasks.
        settings: ``dialect``, ``weights``, ``limits``, as in ``EnvSpec.make``.
    """

    def __init__(
        self, url: str, token: str, env: str, *, options: Mapping[str, Any] | None = None, **settings: Any
    ) -> None:
        super().__init__()
        self._url = url.rstrip("/")
        self._token = token
        plain = {name: value.model_dump() if isinstance(value, Limits) else value for name, value in settings.items()}
        self._asked = {"env": env, "options": dict(options or {}), **plain}
        self._http: aiohttp.ClientSession | None = None
        self._session = ""
        self._turns = 0
        self.num_tasks = 0  # known after the first contact

    async def atask(self, index: int) -> Task:
        """Task ``index`` of the environment."""
        return TASK.validate_python(await self._begin("GET", f"tasks/{index}"))

    async def areset(self, seed: int, task: Task) -> Opening:
        """A new episode, in a new session where the server has closed the one that there was.

        Raises ``SandboxFailure`` when the server is out of reach, ``ValueError`` when it refuses.
        """
        self._turns = 0
        return OPENING.validate_python(await self._begin("POST", "reset", {"seed": seed, "task": to_json(task)}))

    async def astep(self, turn: ModelTurn) -> TurnResult:
        """What follows from one turn; a server that is gone is a failure of ours, which voids the episode."""
        self._turns += 1
        try:
            return RESULT.validate_python(await self._ask("POST", f"/sessions/{self._session}/step", to_json(turn)))
        except SandboxFailure as error:
            failure = Failure(kind="sandbox", where=f"turn {self._turns}, server {self._url}", detail=str(error))
            return TurnResult(messages=(), reward=None, terms={}, stop="failure", calls=(), failure=failure)

    async def aclose(self) -> None:
        """The session is given back; may be called at any time, and when the server is gone."""
        session, self._session = self._session, ""
        http, self._http = self._http, None
        if http is None:
            return
        try:
            if session:
                async with http.delete(f"{self._url}/sessions/{session}"):
                    pass
        except aiohttp.ClientError:
            pass  # the server closes what nobody asks for
        finally:
            await http.close()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """As ``ToolEnv.reset``: the same seed gives the same task as the environment on the spot."""
        super().reset(seed=seed)
        task = (options or {}).get("task")
        if task is None:
            self.run(self._open())
            task = self.run(self.atask(int(self.np_random.integers(self.num_tasks))))
        opening = self.run(self.areset(int(self.np_random.integers(2**31)), task))
        return task.prompt, {"messages": list(opening.messages), "tools": list(opening.tools), "task_id": task.id}

    async def _open(self) -> None:
        if self._http is None:
            headers = {"Authorization": f"Bearer {self._token}"}
            self._http = aiohttp.ClientSession(headers=headers, timeout=TIMEOUT)
        if not self._session:
            created = await self._ask("POST", "/sessions", self._asked)
            self._session, self.num_tasks = created["session"], created["num_tasks"]

    async def _shut(self) -> None:
        await self.aclose()

    async def _begin(self, method: str, path: str, body: Any = None) -> Any:
        await self._open()
        try:
            return await self._ask(method, f"/sessions/{self._session}/{path}", body)
        except _SessionGone:  # idle for longer than the server keeps it, or the server began anew
            self._session = ""
            await self._open()
            return await self._ask(method, f"/sessions/{self._session}/{path}", body)

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        assert self._http is not None, "reset first"
        try:
            async with self._http.request(method, self._url + path, json=body) as response:
                if response.status == 400:
                    raise ValueError(f"{self._url}: {(await response.json())['error']}")
                if response.status == 404:
                    raise _SessionGone(f"{self._url}: {(await response.text())[:200]}")
                if response.status != 200:
                    raise SandboxFailure(f"{self._url} answers {response.status}: {(await response.text())[:200]}")
                return await response.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise SandboxFailure(f"cannot reach {self._url}: {error!r}") from error


class _SessionGone(SandboxFailure):
    """The server knows of no such session (any more)."""
