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


def room_after(prompt_ids: Sequence[int], *, max_model_len: int, vocabulary: int) -> int:
    """How many tokens may follow the prompt, at least 1.

    Raises:
        ValueError: there is no room, no prompt, or an id that the model does not have.
    """
    wrong = [token for token in prompt_ids if not 0 <= token < vocabulary]
    if wrong or not prompt_ids:
        raise ValueError(f"prompt ids must be at least one, each in [0, {vocabulary}); got {wrong[:3]}")
    room = max_model_len - len(prompt_ids)
    if room < 1:
        raise ValueError(
            f"prompt of {len(prompt_ids)} tokens leaves no room under engine.max_model_len = {max_model_len}: "
            "raise it, or lower rollout.max_episode_tokens"
        )
    return room


class Engine(Protocol):
    """A sampler of token ids. Every implementation passes ``agent_rl.engines.contract``."""

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
            ValueError: the prompt leaves no room under ``max_model_len``, is empty, or has an id out of range.
            EngineFailure: the engine broke or is closed.
        """
        ...

    async def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Use these parameters (names as in ``model.named_parameters()``, tied ones once) for every later token.

        Caches made with older weights are dropped. Completions under way end before; an engine that lets them go on
        with the new weights says in ``Generation.weight_changes`` where these began.

        Raises:
            PublishError: a tensor is missing, unknown or of another shape; the engine then goes on with the old ones.
        """
        ...

    async def sleep(self) -> None:
        """Until ``wake`` no token is sampled, and an engine that was told to gives its memory away."""
        ...

    async def wake(self) -> None:
        """Samples again, with the weights from before."""
        ...

    async def close(self) -> None:
        """May be called twice; requests under way, and all later ones, end with ``EngineFailure``."""
        ...
