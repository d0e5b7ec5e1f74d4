"""vLLM servers of this machine over HTTP: token ids in, token ids and logprobs out, new weights in place.

A server is started with our half of the weight transfer and with vLLM's routes for reinforcement learning::

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs --generation-config vllm \\
        --no-enable-chunked-prefill --weight-transfer-config '{"backend": "agent-rl-file"}' \\
        --worker-extension-cls agent_rl.engines.vllm_worker.WorkerExtension

Weights travel as in ``VllmEngine``, through shared memory, so servers run on this machine and as this user.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch

from agent_rl.engines.base import EngineFailure, PublishError, room_after
from agent_rl.engines.vllm import SharedFile, parameter_shapes, write_tensors
from agent_rl.errors import ConfigError
from agent_rl.types import FinishReason, Generation, Sampling

CONNECT_S = 10.0
MAX_TRIES = 3
KEEP_S = 2.0
"""A connection that was idle for longer is not used again. vLLM ends one after 5 s, which we may not have heard yet."""


@dataclass(slots=True)
class _Server:
    url: str
    model: str = ""  # its name there
    in_flight: int = 0
    fault: str = ""  # why it is not used any more


def check_urls(urls: Sequence[str]) -> None:
    """Raises ``ConfigError`` where there are none."""
    if not urls:
        raise ConfigError(
            "engine.urls is empty: name the vLLM servers, e.g. --engine.urls '[\"http://localhost:8000\"]'"
        )


class VllmServerEngine:
    """Samples with one or several servers of one model; each request goes to the one with the fewest.

    A request that fails is made again, at another server if its own has died: it has its own seed, so nothing is lost
    or counted twice. A server that does not answer is left out from then on, and so is one that has other weights than
    ours, as after a new start.

    Args:
        urls: of the servers, without ``/v1``.
        model: folder that the servers were started with; its config says what the weights are.
        max_model_len: prompt and completion together, tokens; at most that of the servers.
    """

    def __init__(self, urls: Sequence[str], *, model: str | Path, max_model_len: int) -> None:
        check_urls(urls)
        self.max_model_len = max_model_len
        self.weight_version = 0
        self._servers = [_Server(url.rstrip("/").removesuffix("/v1")) for url in urls]
        self._model = str(model)
        self._vocabulary = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._file = SharedFile()
        self._session: aiohttp.ClientSession | None = None
        self._admits = asyncio.Event()  # new requests, but while weights change
        self._admits.set()
        self._ended = asyncio.Event()  # one has, since this was cleared last

    async def start(self) -> None:
        """Raises ``ConfigError`` when a server does not answer or was started without what training needs."""
        from transformers import AutoConfig

        self._vocabulary = AutoConfig.from_pretrained(self._model).get_text_config().vocab_size
        self._shapes = parameter_shapes(self._model)
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)
        for server in self._servers:
            try:
                card = (await self._call(server, "GET", "/v1/models"))["data"][0]
                await self._call(server, "GET", "/weight_info")
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise ConfigError(f"no vLLM server answers at {server.url} ({error!r})") from None
            except (_Refused, KeyError, IndexError, TypeError) as error:
                raise ConfigError(
                    f"the server at {server.url} cannot take weights ({error}): start it with VLLM_SERVER_DEV_MODE=1 "
                    "and the arguments that agent_rl/engines/vllm_server.py names"
                ) from None
            server.model = card["id"]
            if (card.get("max_model_len") or self.max_model_len) < self.max_model_len:
                raise ConfigError(
                    f"engine.max_model_len = {self.max_model_len}: "
                    f"the server at {server.url} has {card['max_model_len']}"
                )
        for server in self._servers:
            await self._call(server, "POST", "/update_weight_version", json={"new_version": "0"})

    def join(self, episode_id: str) -> None:
        """vLLM batches whatever is there."""

    def leave(self, episode_id: str) -> None:
        """See ``join``."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        room = room_after(prompt_ids, max_model_len=self.max_model_len, vocabulary=self._vocabulary)
        body = {
            "prompt": list(prompt_ids),
            "max_tokens": min(sampling.max_tokens, room),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,  # only the given ids stop
            "logprobs": sampling.top_logprobs,  # beside that of the sampled id
            "return_tokens_as_token_ids": True,  # ids of the same text would share a place among the most likely
            "return_token_ids": True,
            "request_id": request_id,
        }
        failed = 0
        while True:
            await self._admits.wait()
            server = min(self._alive(), key=lambda server: server.in_flight)
            server.in_flight += 1
            version = self.weight_version
            try:
                answer = await self._call(server, "POST", "/v1/completions", json={"model": server.model, **body})
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                failed += 1
                if not await self._has_our_weights(server):
                    server.fault = server.fault or f"{server.url}: {error!r}"
                elif failed >= MAX_TRIES:
                    raise EngineFailure(f"{failed} tries failed, the last at {server.url}: {error!r}") from error
                continue
            except _Refused as error:
                raise EngineFailure(f"{server.url} refuses the request: {error}") from error
            finally:
                server.in_flight -= 1
                self._ended.set()
            return _generation(answer, version, server.url, sampling.top_logprobs)

    async def _has_our_weights(self, server: _Server) -> bool:
        """Whether it answers, and with the version that it was given last."""
        try:
            async with asyncio.timeout(CONNECT_S):
                info = await self._call(server, "GET", "/weight_info")
        except (aiohttp.ClientError, TimeoutError, OSError, _Refused):
            return False
        return bool(info.get("weight_version") == str(self.weight_version))

    async def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Requests under way finish with the old weights first, later ones wait for the new; on every server at once.

        A server that is gone is left out from then on; one that answers and does not load them is a ``PublishError``.
        """
        with self._file.rewritten() as (file, path):
            layout = await write_tensors(file, tensors, self._shapes, version)
            update = {"update_info": {"path": path, "tensors": layout}}

            async def load(server: _Server) -> None:
                try:
                    await self._call(server, "POST", "/pause?mode=wait&clear_cache=true")
                    await self._call(server, "POST", "/start_weight_update")
                    await self._call(server, "POST", "/update_weights", json=update)
                    await self._call(server, "POST", "/finish_weight_update", json={"weight_version": str(version)})
                    await self._call(server, "POST", "/resume")
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    server.fault = f"{server.url}: {error!r}"
                except _Refused as error:
                    server.fault = f"{server.url}: weights version {version} did not load: {error}"
                    raise PublishError(server.fault) from error

            async with self._nothing_under_way():
                await asyncio.gather(*(load(server) for server in self._alive()))
                self._alive()
                self.weight_version = version

    @asynccontextmanager
    async def _nothing_under_way(self) -> AsyncIterator[None]:
        """Requests have ended, and later ones wait: two of ours may reach a server in another order than they were
        sent in, and each completion is stamped with the version that it asked."""
        self._admits.clear()
        try:
            while any(server.in_flight for server in self._servers):
                self._ended.clear()
                await self._ended.wait()
            yield
        finally:
            self._admits.set()

    async def sleep(self) -> None:
        """Servers have GPUs of their own."""

    async def wake(self) -> None:
        """See ``sleep``."""

    async def close(self) -> None:
        """The servers stay; may be called twice."""
        self._file.close()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _alive(self) -> list[_Server]:
        alive = [server for server in self._servers if not server.fault]
        if not alive:
            raise EngineFailure("no vLLM server is left: " + "; ".join(server.fault for server in self._servers))
        return alive

    async def _call(self, server: _Server, method: str, path: str, **settings: Any) -> Any:
        if self._session is None:
            raise EngineFailure("the vLLM server engine is closed, or was not started")
        async with self._session.request(method, server.url + path, **settings) as response:
            if response.status >= 500 and path == "/v1/completions":
                # A dying engine answers so; another server may still do it.
                raise aiohttp.ClientResponseError(response.request_info, (), status=response.status)
            if response.status >= 400:
                raise _Refused(f"{path}: HTTP {response.status}: {(await response.text())[:300]}")
            return await response.json(content_type=None)


class _Refused(Exception):
    """The server answered, and not with what was asked for."""


def _generation(answer: Any, version: int, url: str, num_top: int = 0) -> Generation:
    """Raises ``EngineFailure`` if ids or finite logprobs are missing."""
    top = None
    try:
        choice = answer["choices"][0]
        ids = tuple(map(int, choice["token_ids"]))
        logprobs = tuple(map(float, choice["logprobs"]["token_logprobs"]))
        reason = choice["finish_reason"]
        if num_top:
            places = choice["logprobs"]["top_logprobs"]
            top = tuple(tuple(sorted(map(float, place.values()), reverse=True)[:num_top]) for place in places)
    except (KeyError, IndexError, TypeError) as error:
        raise EngineFailure(f"{url} answered without token ids or logprobs ({error!r})") from error
    if reason not in ("stop", "length") or len(ids) != len(logprobs) or not all(map(math.isfinite, logprobs)):
        raise EngineFailure(f"{url} ended by {reason!r} with {len(ids)} ids and {len(logprobs)} logprobs")
    finish: FinishReason = "stop" if reason == "stop" else "length"
    return Generation(token_ids=ids, logprobs=logprobs, finish_reason=finish, weight_version=version, top_logprobs=top)
