"""The embedded engine: transformers in this process, exactly repeatable, no server.

Which sequences share a forward pass changes float rounding. So a wave is decoded only when every seated episode waits
for tokens: the batches are then the same in every run, whatever the sandboxes' timing. Sampling is by inverse CDF from
a counter-based stream of each request's own seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agent_rl.engines.base import EngineFailure, PublishError
from agent_rl.types import FinishReason, Generation, Sampling


@dataclass(slots=True, kw_only=True)
class _Request:
    id: str
    prompt_ids: list[int]
    sampling: Sampling
    uniforms: np.ndarray[Any, np.dtype[np.float64]]  # one draw for each token it may sample
    future: asyncio.Future[Generation]
    token_ids: list[int]
    logprobs: list[float]
    finish: FinishReason | None = None


class TransformersEngine:
    """Samples from a model of its own; new weights arrive by ``update_weights`` as in any engine.

    Args:
        model: a causal language model, not the learner's.
        max_model_len: prompt and completion together, tokens.
        max_num_seqs: sequences of one forward pass.
    """

    def __init__(self, model: Any, *, max_model_len: int, max_num_seqs: int = 64) -> None:
        self.model = model.eval().requires_grad_(False)
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.weight_version = 0
        self._seats: set[str] = set()
        self._waiting: dict[str, _Request] = {}

    async def start(self) -> None:
        return None

    def join(self, episode_id: str) -> None:
        self._seats.add(episode_id)

    def leave(self, episode_id: str) -> None:
        self._seats.discard(episode_id)
        self._decode_when_all_wait()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        room = self.max_model_len - len(prompt_ids)
        if room < 1:
            raise ValueError(
                f"prompt of {len(prompt_ids)} tokens leaves no room under max_model_len {self.max_model_len}"
            )
        if request_id in self._waiting:
            raise ValueError(f"request {request_id!r} is already waiting")
        count = min(sampling.max_tokens, room)
        stream = np.random.Generator(np.random.Philox(key=sampling.seed))
        request = _Request(
            id=request_id,
            prompt_ids=list(prompt_ids),
            sampling=sampling,
            uniforms=stream.random(count),
            future=asyncio.get_running_loop().create_future(),
            token_ids=[],
            logprobs=[],
        )
        self._waiting[request_id] = request
        self._decode_when_all_wait()
        try:
            return await request.future
        finally:
            self._waiting.pop(request_id, None)

    async def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        own = dict(self.model.named_parameters())
        for name, tensor in tensors:
            parameter = own.pop(name, None)
            if parameter is None:
                raise PublishError(f"weights version {version}: the engine has no parameter {name!r}")
            if parameter.shape != tensor.shape:
                shapes = f"{tuple(tensor.shape)} instead of {tuple(parameter.shape)}"
                raise PublishError(f"weights version {version}: {name!r} has shape {shapes}")
            parameter.copy_(tensor)
        if own:
            raise PublishError(f"weights version {version}: {len(own)} parameters are missing, first {min(own)!r}")
        self.weight_version = version

    async def close(self) -> None:
        for request in self._waiting.values():
            request.future.cancel()
        self._waiting.clear()

    def _decode_when_all_wait(self) -> None:
        if not self._waiting or not self._seats <= self._waiting.keys():
            return
        wave = sorted(self._waiting.values(), key=lambda r: r.id)
        self._waiting.clear()
        for start in range(0, len(wave), self.max_num_seqs):
            block = wave[start : start + self.max_num_seqs]
            try:
                self._decode(block)
            except RuntimeError as error:  # torch's own, out of memory among them
                for request in block:
                    if not request.future.done():
                        request.future.set_exception(EngineFailure(f"transformers engine: {error}"))
                continue
            for request in block:
                if not request.future.done():
                    request.future.set_result(
                        Generation(
                            token_ids=tuple(request.token_ids),
                            logprobs=tuple(request.logprobs),
                            finish_reason=request.finish or "length",
                            weight_version=self.weight_version,
                        )
                    )

    @torch.no_grad()
    def _decode(self, requests: list[_Request]) -> None:
        """Fill in ids, logprobs and finish of every request; prompts are padded on the left."""
        from transformers import DynamicCache

        device = self.model.device
        longest = max(len(r.prompt_ids) for r in requests)
        pads = torch.tensor([longest - len(r.prompt_ids) for r in requests], device=device)
        ids = torch.tensor([[0] * (longest - len(r.prompt_ids)) + r.prompt_ids for r in requests], device=device)
        columns = torch.arange(longest, device=device)
        mask = (columns[None] >= pads[:, None]).long()
        positions = (columns[None] - pads[:, None]).clamp(min=0)
        cache = DynamicCache(config=self.model.config)
        alive = requests
        while True:
            output = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            chosen, logprobs = _sample(output.logits[:, -1].float(), alive)
            for request, token, logprob in zip(alive, chosen.tolist(), logprobs.tolist(), strict=True):
                request.token_ids.append(token)
                request.logprobs.append(logprob)
                if token in request.sampling.stop_token_ids:
                    request.finish = "stop"
                elif len(request.token_ids) == len(request.uniforms):
                    request.finish = "length"
            going = [i for i, request in enumerate(alive) if request.finish is None]
            if not going:
                return
            if len(going) < len(alive):
                rows = torch.tensor(going, device=device)
                cache.batch_select_indices(rows)
                chosen, mask, positions = chosen[rows], mask[rows], positions[rows]
                alive = [alive[i] for i in going]
            ids = chosen[:, None]
            mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
            positions = positions[:, -1:] + 1


def _sample(logits: Tensor, requests: list[_Request]) -> tuple[Tensor, Tensor]:
    """One id a row and its logprob under the distribution that it was drawn from (float32 [B])."""
    temperature = torch.tensor([r.sampling.temperature or 1.0 for r in requests], device=logits.device)
    top_p = torch.tensor([r.sampling.top_p for r in requests], device=logits.device)
    logp = torch.log_softmax(logits / temperature[:, None], dim=-1)
    if bool((top_p < 1).any()):
        ranked, order = logp.sort(dim=-1, descending=True)
        before = ranked.exp().cumsum(-1) - ranked.exp()
        cut = torch.zeros_like(logp, dtype=torch.bool).scatter(-1, order, before >= top_p[:, None])
        logp = torch.log_softmax(logp.masked_fill(cut, -torch.inf), dim=-1)
    draws = torch.tensor([r.uniforms[len(r.token_ids)] for r in requests], device=logits.device)
    cumulative = logp.double().exp().cumsum(-1)
    drawn = torch.searchsorted(cumulative, (draws * cumulative[:, -1])[:, None], right=True).squeeze(-1)
    greedy = torch.tensor([r.sampling.temperature == 0 for r in requests], device=logits.device)
    chosen = torch.where(greedy, logits.argmax(-1), drawn.clamp(max=logits.shape[-1] - 1))
    return chosen, logp.gather(-1, chosen[:, None]).squeeze(-1)
