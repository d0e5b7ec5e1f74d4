"""Episodes on a clock of their own: nobody really waits, and the order of events is the same in every run."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from agent_rl.engines.base import EngineFailure
from agent_rl.types import Generation, Sampling, WeightChange
from envs.types import ModelTurn, Opening, Task, TurnResult

Result = TypeVar("Result")

SECONDS_A_TOKEN = 1.0


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """``asyncio.run`` in which sleeping takes no time. Raises ``RuntimeError`` when all wait for each other."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(main)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: _Loop) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("everybody waits for somebody else")
        if not ready and timeout:
            self.loop.now += timeout
        return ready


class Codec:
    """Every message is one id."""

    stop_token_ids = (1,)

    def open(self, opening: Opening) -> list[int]:
        return [2, 3]

    def extend(self, finish: str, messages: Any) -> list[int]:
        return [4]

    def decode(self, ids: Any, finish: str) -> str:
        return "x"


class Seats:
    """The part of an engine that knows who is here: whoever asks has joined, and is counted while it waits."""

    max_model_len = 1000
    weight_version = 0

    def __init__(self) -> None:
        self.joined: Counter[str] = Counter()
        self.at_once = self.most_at_once = 0

    def join(self, episode_id: str) -> None:
        self.joined[episode_id] += 1

    def leave(self, episode_id: str) -> None:
        self.joined[episode_id] = 0

    @contextmanager
    def asking(self, episode_id: str) -> Iterator[None]:
        assert self.joined[episode_id], "an episode asks that has not joined"
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            yield
        finally:
            self.at_once -= 1


class Engine(Seats):
    """A token a second, by the weights of that second.

    Args:
        tokens: how many a completion of this request has.
        fails: whether this completion fails.
    """

    def __init__(self, tokens: Callable[[str], int], fails: Callable[[str], bool] = lambda request: False) -> None:
        super().__init__()
        self.tokens, self.fails = tokens, fails

    async def generate(self, prompt_ids: Any, sampling: Sampling, *, request_id: str) -> Generation:
        versions = []
        with self.asking(request_id):
            for _ in range(self.tokens(request_id)):
                await asyncio.sleep(SECONDS_A_TOKEN)
                versions.append(self.weight_version)
            if self.fails(request_id):
                raise EngineFailure("injected")
        changes = [WeightChange(i, v) for i, v in enumerate(versions) if i and v != versions[i - 1]]
        return Generation(
            token_ids=(7,) * (len(versions) - 1) + (1,),
            logprobs=tuple(-1.0 - version for version in versions),  # so that each token says whose it is
            finish_reason="stop",
            weight_version=versions[0],
            weight_changes=tuple(changes),
        )


class Env:
    """Some turns long; the reward is the task's business."""

    opened = 0

    def __init__(self, rng: random.Random, turns: int = 1, tool_s: float = 0.0) -> None:
        self.rng, self.left, self.tool_s = rng, turns, tool_s

    async def areset(self, seed: int, task: Task) -> Opening:
        Env.opened += 1
        self.task = task
        return Opening(messages=(), tools=())

    async def astep(self, turn: ModelTurn) -> TurnResult:
        await asyncio.sleep(self.rng.random() * self.tool_s)
        self.left -= 1
        if self.left > 0:
            return TurnResult(messages=({"role": "tool", "content": ""},), reward=None, terms={}, stop=None, calls=())
        reward = self.rng.random() if self.task.answer == "differs" else 1.0
        return TurnResult(messages=(), reward=reward, terms={}, stop="answer", calls=())

    async def aclose(self) -> None:
        await asyncio.sleep(0)
        Env.opened -= 1
