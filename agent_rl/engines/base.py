"""The engine contract: prompt ids in, sampled ids and their logprobs out, new weights in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from agent_rl.types import Generation, Sampling

if TYPE_CHECKING:
    import torch


class EngineFailure(Exception):
    """The engine, not the model's text, failed: voids the episode that asked."""


class PublishError(Exception):
    """New weights did not (all) arrive in the engine: the run must stop."""


class Engine(Protocol):
    """A sampler of token ids. Every implementation passes ``tests/agent_rl/test_engines.py``."""

    max_model_len: int  # prompt and completion together
    weight_version: int  # version of the weights now in use; 0 for those loaded at start

    async def start(self) -> None: ...

    def join(self, episode_id: str) -> None:
        """An episode will ask for tokens under this id until it leaves.

        The embedded engine batches repeatably by waiting for all that joined; other engines ignore it.
        """
        ...

    def leave(self, episode_id: str) -> None:
        """The episode asks for no more tokens; every ``join`` is followed by one."""
        ...

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        """Sample one completion. Cancelling the awaiting task frees the slot.

        Raises:
            ValueError: the prompt leaves no room under ``max_model_len``.
            EngineFailure: the engine broke.
        """
        ...

    async def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Use these parameters (names as in ``model.named_parameters()``, tied ones once) for every later token.

        Caches made with older weights are dropped. Completions under way end before; an engine that lets them go on
        with the new weights says in ``Generation.weight_changes`` where these began.

        Raises:
            PublishError: a tensor is missing, unknown or of another shape.
        """
        ...

    async def close(self) -> None: ...
