"""The embedded engine: transformers in this process, exactly repeatable, no server.

Which sequences share a forward pass changes float rounding. So a wave is decoded only when every seated episode waits
for tokens: the batches are then the same in every run, whatever the sandboxes' timing. Sampling is by inverse CDF from
a counter-based stream of each request's own seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agent_rl.engines.base import EngineFailure, PublishError, room_after
from agent_rl.types import FinishReason, Generation, Sampling

CLOSED = "the transformers engine is closed"


@dataclass(slots=True, kw_only=True)
class _Request:
    id: str
    prompt_ids: list[int]
    sampling: Sampling
    uniforms: np.ndarray[Any, np.dtype[np.float64]]  # one draw for each token it may sample
    future: asyncio.Future[Generation]
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[tuple[float, ...]]
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
        self._closed = False

    async def start(self) -> None:
        return None

    def join(self, episode_id: str) -> None:
        self._seats.add(episode_id)

    def leave(self, episode_id: str) -> None:
        self._seats.discard(episode_id)
        self._decode_when_all_wait()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        if self._closed:
            raise EngineFailure(CLOSED)
        vocabulary = self.model.config.get_text_config().vocab_size
        room = room_after(prompt_ids, max_model_len=self.max_model_len, vocabulary=vocabulary)
        if request_id in self._waiting:
            raise ValueError(f"request {request_id!r} is already waiting")
        limit = min(sampling.max_tokens, room)
        stream = np.random.Generator(np.random.Philox(key=sampling.seed))
        request = _Request(
            id=request_id,
            prompt_ids=list(prompt_ids),
            sampling=sampling,
            uniforms=stream.random(limit),
            future=asyncio.get_running_loop().create_future(),
            token_ids=[],
            logprobs=[],
            top_logprobs=[],
        )
        self._waiting[request_id] = request
        self._decode_when_all_wait()
        try:
            return await request.future
        finally:
            self._waiting.pop(request_id, None)

    async def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        own = dict(self.model.named_parameters())
        missing = dict(own)
        taken: dict[str, Tensor] = {}  # of the whole set, before any is used: a refused one changes nothing
        for name, tensor in tensors:
            parameter = missing.pop(name, None)
            if parameter is None:
                told = "was given twice" if name in own else "is none of the model's"
                raise PublishError(f"weights version {version}: tensor {name!r} {told}")
            if parameter.shape != tensor.shape:
                shapes = f"{tuple(tensor.shape)} instead of {tuple(parameter.shape)}"
                raise PublishError(f"weights version {version}: {name!r} has shape {shapes}")
            taken[name] = tensor.detach().to(parameter, copy=True)
        if missing:
            raise PublishError(f"weights version {version}: {len(missing)} tensors are missing, first {min(missing)!r}")
        for name, tensor in taken.items():
            own[name].copy_(tensor)
        self.weight_version = version

    async def sleep(self) -> None:
        """It keeps its memory."""

    async def wake(self) -> None:
        """See ``sleep``."""

    async def close(self) -> None:
        self._closed = True
        for request in self._waiting.values():
            if not request.future.done():
                request.future.set_exception(EngineFailure(CLOSED))
        self._waiting.clear()

    def _decode_when_all_wait(self) -> None:
        if not self._waiting or not self._seats <= self._waiting.keys():
            return
        # One that was cancelled just now has not left yet.
        wave = sorted((r for r in self._waiting.values() if not r.future.done()), key=lambda r: r.id)
        self._waiting.clear()
        for start in range(0, len(wave), self.max_num_seqs):
            block = wave[start : start + self.max_num_seqs]
            try:
                self._decode(block)
            except (RuntimeError, MemoryError) as error:  # torch's own, out of memory among them
                hint = "; lower engine.max_num_seqs" if "memory" in f"{type(error).__name__} {error}".lower() else ""
                for request in block:
                    if not request.future.done():
                        request.future.set_exception(EngineFailure(f"transformers engine: {error}{hint}"))
                continue
            for request in block:
                # Not at once: the one that asked last would go on before the others, and which it is depends on the
                # sandboxes. So all of a wave go on in the order of their ids.
                asyncio.get_running_loop().call_soon(_answer, request, self.weight_version)

    @torch.no_grad()
    def _decode(self, requests: list[_Request]) -> None:
        """Fill in ids, logprobs and finish of every request; prompts are padded on the left."""
        from transformers import DynamicCache

        device = self.model.device
        # A group's prompt is read once.
        prompts = list(dict.fromkeys(tuple(r.prompt_ids) for r in requests))
        longest = max(map(len, prompts))
        pads = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
        ids = torch.tensor([(0,) * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
        columns = torch.arange(longest, device=device)
        mask = (columns[None] >= pads[:, None]).long()
        positions = (columns[None] - pads[:, None]).clamp(min=0)
        cache = DynamicCache(config=self.model.config)
        place = {prompt: row for row, prompt in enumerate(prompts)}
        rows = torch.tensor([place[tuple(r.prompt_ids)] for r in requests], device=device)
        alive, draws = requests, _Draws.of(requests, device)
        for step in count():
            output = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            logits = output.logits[:, -1].float()
            if len(logits) < len(alive):  # the prompts have been read
                cache.batch_select_indices(rows)
                logits, mask, positions = logits[rows], mask[rows], positions[rows]
            chosen, logprobs, logp = _sample(logits, draws, step)
            _note_likeliest(logp, alive)
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
                kept = torch.tensor(going, device=device)
                cache.batch_select_indices(kept)
                chosen, mask, positions, draws = chosen[kept], mask[kept], positions[kept], draws[kept]
                alive = [alive[i] for i in going]
            ids = chosen[:, None]
            mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
            positions = positions[:, -1:] + 1


def _answer(request: _Request, weight_version: int) -> None:
    """The request's future has what was sampled, unless it was cancelled meanwhile."""
    if request.future.done():
        return
    request.future.set_result(
        Generation(
            token_ids=tuple(request.token_ids),
            logprobs=tuple(request.logprobs),
            finish_reason=request.finish or "length",
            weight_version=weight_version,
            top_logprobs=tuple(request.top_logprobs) if request.sampling.top_logprobs else None,
        )
    )


def _note_likeliest(logp: Tensor, requests: Sequence[_Request]) -> None:
    """Requests that ask for the most likely ids' logprobs have those of one more place (``logp`` [B, V])."""
    asking = [row for row, request in enumerate(requests) if request.sampling.top_logprobs]
    if not asking:
        return
    most = min(max(requests[row].sampling.top_logprobs for row in asking), logp.shape[-1])
    for row, top in zip(asking, logp[asking].topk(most).values.tolist(), strict=True):
        requests[row].top_logprobs.append(tuple(top[: requests[row].sampling.top_logprobs]))


@dataclass(frozen=True, slots=True)
class _Draws:
    """How the next tokens of some requests are drawn, a row each."""

    temperature: Tensor  # float32 [B], 1 where greedy
    top_p: Tensor | None  # float32 [B]; None where all are 1
    greedy: Tensor | None  # bool [B]; None where none is
    uniforms: Tensor  # float64 [B, longest]

    @staticmethod
    def of(requests: Sequence[_Request], device: torch.device) -> _Draws:
        samplings = [r.sampling for r in requests]
        longest = max(len(r.uniforms) for r in requests)
        uniforms = np.stack([np.pad(r.uniforms, (0, longest - len(r.uniforms))) for r in requests])
        top_p = [s.top_p for s in samplings]
        greedy = [s.temperature == 0 for s in samplings]
        return _Draws(
            torch.tensor([s.temperature or 1.0 for s in samplings], device=device),
            torch.tensor(top_p, device=device) if min(top_p) < 1 else None,
            torch.tensor(greedy, device=device) if any(greedy) else None,
            torch.from_numpy(uniforms).to(device),
        )

    def __getitem__(self, rows: Tensor) -> _Draws:
        top_p = None if self.top_p is None else self.top_p[rows]
        greedy = None if self.greedy is None else self.greedy[rows]
        return _Draws(self.temperature[rows], top_p, greedy, self.uniforms[rows])


def _sample(logits: Tensor, draws: _Draws, place: int) -> tuple[Tensor, Tensor, Tensor]:
    """One id a row, the ``place``-th of its turn, and its logprob [B] and all logprobs [B, V] there."""
    logp = torch.log_softmax(logits / draws.temperature[:, None], dim=-1)
    if draws.top_p is not None:
        ranked, order = logp.sort(dim=-1, descending=True)
        before = ranked.exp().cumsum(-1) - ranked.exp()
        cut = torch.zeros_like(logp, dtype=torch.bool).scatter(-1, order, before >= draws.top_p[:, None])
        logp = torch.log_softmax(logp.masked_fill(cut, -torch.inf), dim=-1)
    cumulative = logp.double().exp().cumsum(-1)
    draw = draws.uniforms[:, place, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, draw, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    if draws.greedy is not None:
        chosen = torch.where(draws.greedy, logits.argmax(-1), chosen)
    return chosen, logp.gather(-1, chosen[:, None]).squeeze(-1), logp
