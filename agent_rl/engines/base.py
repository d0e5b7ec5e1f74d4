"""The engine contract: prompt ids in, sampled ids and their logprobs out, new weights in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
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

    def seat(self, request_id: str) -> AbstractAsyncContextManager[None]:
        """Held by an episode from its first to its last request.

        The embedded engine batches deterministically by waiting for all seated episodes; others may ignore it.
        """
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

        Caches made with older weights are dropped.

        Raises:
            PublishError: a tensor is missing, unknown or of another shape.
        """
        ...

    async def close(self) -> None: ...
