"""A sampler that says what it is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_rl.codec import ChatCodec
from agent_rl.types import Generation, Sampling


class ScriptedEngine:
    """Returns the given ids or texts in order, and remembers every prompt."""

    max_model_len = 4096
    weight_version = 0

    def __init__(self, codec: ChatCodec, script: Sequence[Any]) -> None:
        self.codec = codec
        self.script = list(script)
        self.prompts: list[tuple[int, ...]] = []
        self.completions: list[Generation] = []

    def join(self, episode_id: str) -> None: ...

    def leave(self, episode_id: str) -> None: ...

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        self.prompts.append(tuple(prompt_ids))
        item = self.script[min(len(self.completions), len(self.script) - 1)]
        if isinstance(item, BaseException):
            raise item
        if isinstance(item, str):
            item = (*self.codec.encode_text(item), self.codec.end_of_turn)
        finish = "stop" if item[-1] in self.codec.stop_token_ids else "length"
        generation = Generation(
            token_ids=tuple(item), logprobs=(-0.5,) * len(item), finish_reason=finish, weight_version=0
        )
        self.completions.append(generation)
        return generation
