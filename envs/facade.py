"""Gymnasium's synchronous ``step`` and ``close`` over an asynchronous core, inside and outside a running event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import gymnasium
import numpy as np

from envs.types import ModelTurn, TurnResult

T = TypeVar("T")


class TextSpace(gymnasium.spaces.Space[str]):
    """Any text. (``gymnasium.spaces.Text`` refuses blanks and newlines by default.)"""

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__((), np.str_, seed)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        words = self.np_random.integers(0, 1000, size=int(self.np_random.integers(1, 6)))
        return " ".join(map(str, words))

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextSpace)

    def __hash__(self) -> int:
        return hash(TextSpace)


class MessageEnv(gymnasium.Env[str, str]):
    """What a subclass with ``astep`` and its own ``reset`` needs to be a ``gymnasium.Env`` of texts."""

    metadata: dict[str, Any] = {  # noqa: RUF012  # Gymnasium's own declaration
        "render_modes": []
    }

    def __init__(self) -> None:
        self.observation_space = TextSpace()
        self.action_space = TextSpace()
        self._loop: LoopThread | None = None

    async def astep(self, turn: ModelTurn) -> TurnResult:
        raise NotImplementedError

    async def _open(self) -> None:
        """What the core needs is there after this; called before every use."""
        raise NotImplementedError

    async def _shut(self) -> None:
        """The episode and what ``_open`` made are gone after this."""
        raise NotImplementedError

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """One turn of the model (as if ended by its stop token); the observation is the tools' results as text.

        ``info["reward_valid"]`` is False where our side failed: the reward of 0.0 then means nothing.
        """
        result = self.run(self.astep(ModelTurn(text=str(action), finish="stop")))
        info = {
            "messages": list(result.messages),
            "calls": [call.status for call in result.calls],
            "stop": result.stop or "",
            "terms": result.terms,
            "reward_valid": result.failure is None,
        }
        text = "\n".join(str(message["content"]) for message in result.messages)
        return text, float(result.reward or 0.0), result.terminated, result.truncated, info

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, from the loop that ``reset`` and ``step`` use (``areset`` and ``astep`` for one)."""
        if self._loop is None:
            self._loop = LoopThread()
        self._loop.run(self._open())
        return self._loop.run(coroutine)

    def close(self) -> None:
        """May be called twice, and without a reset."""
        if self._loop is not None:
            self._loop.run(self._shut())
            self._loop.stop()
            self._loop = None


class LoopThread:
    """An event loop in a thread, so that the synchronous side works inside and outside a running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tool-env", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
