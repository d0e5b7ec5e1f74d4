"""A model behind an OpenAI-compatible chat endpoint, as a policy for evaluation: text in, text out, no tokens.

Nothing that it samples can be trained on (the ids are the server's secret), so it is no ``Engine``: ``chat_episode``
plays with it. Requests are bounded in number and rate, and tried again with backoff when the server is at fault.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import aiohttp
import tenacity

from agent_rl.engines.base import EngineFailure
from agent_rl.errors import ConfigError
from agent_rl.types import FinishReason
from envs.types import Message

KEY_VARIABLE = "OPENAI_API_KEY"
AGAIN = {408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529}
"""HTTP answers that another try may mend."""
TOO_LONG = ("context length", "context window", "maximum context", "too long", "max_model_len", "maximum length")
"""What servers say when a prompt does not fit; the episode then ends by its length."""
LEAST_TOKENS = 16
"""Of a completion that is still worth asking for."""


class PromptTooLong(Exception):
    """The conversation no longer fits into the model's context."""


class _Again(Exception):
    """The server's fault; ``wait_s`` is what it asked for."""

    def __init__(self, text: str, wait_s: float | None = None) -> None:
        super().__init__(text)
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What an episode took, as the server counts it."""

    prompt_tokens: int = 0  # of all requests together: the history counts again with every turn
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompt tokens
    requests: int = 0
    retries: int = 0

    def plus(self, other: Usage) -> Usage:
        return Usage(**{name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One completion."""

    content: str
    reasoning: str
    calls: tuple[Mapping[str, Any], ...]  # as the API has them: id, function.name, function.arguments (text)
    finish: FinishReason
    usage: Usage


class RateLimit:
    """So many units a minute, in order of asking: a bucket that may go into debt and is waited for.

    Costs may be known only afterwards (tokens): ``spend`` then takes them, and the next ``wait`` is longer.
    """

    def __init__(self, per_minute: float | None) -> None:
        self._rate = None if per_minute is None else per_minute / 60
        self._free_at = 0.0  # on the monotonic clock: when the bucket is out of debt

    async def wait(self, units: float = 0.0) -> None:
        """Returns when it is this caller's turn; ``units`` are spent at once."""
        if self._rate is None:
            return
        now = time.monotonic()
        delay = max(0.0, self._free_at - now)
        self.spend(units)
        if delay:
            await asyncio.sleep(delay)

    def spend(self, units: float) -> None:
        if self._rate is not None:
            self._free_at = max(self._free_at, time.monotonic()) + units / self._rate


class Endpoint:
    """Client of ``URL/chat/completions``. Use as ``async with``.

    Args:
        url: base, with its version: ``http://localhost:8000/v1``.
        model: name at the endpoint; the only one on offer when None.
        key_variable: environment variable with the key; none is sent where it is not set. Keys are read from nowhere
            else, and neither logged nor stored.
        concurrency: requests in flight.
        requests_per_minute: more wait.
        tokens_per_minute: prompt and completion together.
        timeout_s: of one request.
        max_tries: of one request, with exponential backoff and jitter, or when the server says.
        extra: fields of the request body; a value of None takes a field of ours out.

    Raises:
        ConfigError: not an http(s) URL.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        key_variable: str = KEY_VARIABLE,
        concurrency: int = 16,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        timeout_s: float = 600.0,
        max_tries: int = 8,
        max_wait_s: float = 60.0,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"endpoint {url!r}: an address begins with http:// or https://")
        self.url = url.rstrip("/").removesuffix("/chat/completions")
        self.model = model
        self._key_variable = key_variable
        self._slots = asyncio.Semaphore(concurrency)
        self._concurrency = concurrency
        self._requests = RateLimit(requests_per_minute)
        self._tokens = RateLimit(tokens_per_minute)
        self._timeout_s = timeout_s
        self._max_tries = max_tries
        self._max_wait_s = max_wait_s
        self._extra = dict(extra or {})
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Endpoint:
        """The endpoint answers and ``model`` is its name there.

        Raises:
            ConfigError: it does not answer, refuses the key, or offers other models.
        """
        key = os.environ.get(self._key_variable, "").strip()
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=30),
            connector=aiohttp.TCPConnector(limit=self._concurrency + 4),
        )
        try:
            if self.model is None:
                self.model = await self._only_model()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Reply:
        """One completion.

        Raises:
            ConfigError: the server will never take such a request (a refused key, an unknown field).
            PromptTooLong: the conversation does not fit.
            EngineFailure: every try failed.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "temperature": temperature,
            "top_p": top_p,
        }
        if seed is not None:
            body["seed"] = seed % 2**31  # some servers hold it in 32 bits
        if tools:
            body["tools"] = list(tools)
        retries = 0
        while True:
            request = {"max_tokens": max_tokens} | body | self._extra
            request = {name: value for name, value in request.items() if value is not None}
            try:
                reply, tried = await self._completion(request)
                return replace(reply, usage=replace(reply.usage, retries=retries + tried - 1))
            except PromptTooLong:
                # Many servers say so too when prompt and max_tokens together do not fit.
                if max_tokens <= LEAST_TOKENS:
                    raise
                max_tokens = max(LEAST_TOKENS, max_tokens // 2)
                retries += 1

    async def _completion(self, body: Mapping[str, Any]) -> tuple[Reply, int]:
        """The completion and how many tries it took."""
        tries = 0

        async def once() -> Reply:
            nonlocal tries
            tries += 1
            await self._tokens.wait()
            await self._requests.wait(1)
            async with self._slots:
                answer = await self._request("POST", "chat/completions", json=body)
            reply = _reply(answer)
            self._tokens.spend(reply.usage.prompt_tokens + reply.usage.completion_tokens)
            return reply

        try:
            return await self._trying()(once), tries
        except _Again as error:
            raise EngineFailure(f"{self.url}: {tries} tries failed, the last: {error}") from error

    def _trying(self) -> tenacity.AsyncRetrying:
        backoff = tenacity.wait_random_exponential(multiplier=0.5, max=self._max_wait_s)

        def wait(state: tenacity.RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            asked = error.wait_s if isinstance(error, _Again) else None
            return min(asked, self._max_wait_s) if asked is not None else backoff(state)

        return tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self._max_tries),
            wait=wait,
            retry=tenacity.retry_if_exception_type(_Again),
            reraise=True,
        )

    async def _request(self, method: str, path: str, **arguments: Any) -> Any:
        assert self._session is not None, "use the endpoint as `async with`"
        try:
            async with self._session.request(method, f"{self.url}/{path}", **arguments) as response:
                text = await response.text(errors="replace")
                self._check(response, text)
                try:
                    return json.loads(text)
                except json.JSONDecodeError:
                    raise _Again(f"no JSON came back: {text[:200]!r}") from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _Again(f"{type(error).__name__}: {error}") from error

    def _check(self, response: aiohttp.ClientResponse, text: str) -> None:
        status = response.status
        if status < 400:
            return
        told = " ".join(_told(text).split())[:300]
        if status in AGAIN:
            raise _Again(f"HTTP {status}: {told}", _seconds(response.headers.get("Retry-After")))
        if status in (400, 413, 422) and any(mark in told.lower() for mark in TOO_LONG):
            raise PromptTooLong(told)
        if status in (401, 403):
            how = "is refused" if os.environ.get(self._key_variable) else "is not set"
            raise ConfigError(f"{self.url}: HTTP {status}: the key in ${self._key_variable} {how}: {told}")
        hint = ""
        if "tool" in told.lower():
            hint = " (a server that takes no tools is evaluated with --dialect hermes or another one in text)"
        raise ConfigError(f"{self.url}: HTTP {status}: {told}{hint}")

    async def _only_model(self) -> str:
        try:
            listed: Any = await self._trying()(self._request, "GET", "models")
            names = [str(entry["id"]) for entry in listed["data"]]
        except _Again as error:
            raise ConfigError(f"{self.url} does not answer: {error}") from None
        except (LookupError, TypeError):
            raise ConfigError(f"{self.url}/models does not list models: say --served-name NAME") from None
        if len(names) != 1:
            some = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise ConfigError(f"{self.url} has {len(names)} models ({some}): choose one with --served-name NAME")
        return names[0]


def _reply(answer: Any) -> Reply:
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        usage = answer.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        return Reply(
            content=message.get("content") or "",
            reasoning=message.get("reasoning_content") or message.get("reasoning") or "",
            calls=tuple(message.get("tool_calls") or ()),
            finish="length" if choice.get("finish_reason") == "length" else "stop",
            usage=Usage(
                prompt_tokens=int(usage.get("prompt_tokens") or 0),
                completion_tokens=int(usage.get("completion_tokens") or 0),
                cached_tokens=int(details.get("cached_tokens") or 0),
                requests=1,
            ),
        )
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise _Again(f"an answer that is no chat completion ({error!r}): {str(answer)[:200]}") from None


def _told(text: str) -> str:
    """The message of an error answer."""
    try:
        tree = json.loads(text)
        error = tree.get("error", tree) if isinstance(tree, dict) else tree
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (json.JSONDecodeError, AttributeError):
        return text


def _seconds(header: str | None) -> float | None:
    try:
        return None if header is None else max(0.0, float(header))
    except ValueError:
        return None  # a date: backoff does as well
