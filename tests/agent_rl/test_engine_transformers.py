"""The embedded engine, beyond the contract: it draws from the distribution, in waves of all who joined."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from agent_rl.engines.base import EngineFailure
from agent_rl.engines.transformers import TransformersEngine
from agent_rl.types import Generation, Sampling

PROMPTS = [[3, 9, 27, 81, 43], [5], [7, 11, 13, 17, 19, 23, 29, 31], [2, 4]]


async def generate_together(engine: TransformersEngine, sampling: list[Sampling]) -> list[Generation]:
    names = [f"e{i}" for i in range(len(PROMPTS))]
    for name in names:
        engine.join(name)
    calls = [engine.generate(p, s, request_id=n) for p, s, n in zip(PROMPTS, sampling, names, strict=True)]
    results = await asyncio.gather(*calls)
    for name in names:
        engine.leave(name)
    return list(results)


async def test_the_most_likely_logprobs_come_when_asked_for_and_change_nothing(tiny_model: Any) -> None:
    engine = TransformersEngine(tiny_model, max_model_len=64)
    sampling = [Sampling(max_tokens=10, temperature=0.7, seed=i, top_logprobs=k) for i, k in enumerate((5, 0, 3, 5000))]
    asked = await generate_together(engine, sampling)
    plain = await generate_together(engine, [Sampling(max_tokens=10, temperature=0.7, seed=i) for i in range(4)])
    for prompt, settings, generation, other in zip(PROMPTS, sampling, asked, plain, strict=True):
        assert (generation.token_ids, generation.logprobs) == (other.token_ids, other.logprobs)
        assert other.top_logprobs is None
        if not settings.top_logprobs:
            assert generation.top_logprobs is None
            continue
        with torch.no_grad():
            logits = tiny_model(input_ids=torch.tensor([[*prompt, *generation.token_ids]])).logits[
                0, len(prompt) - 1 : -1
            ]
        logp = torch.log_softmax(logits.float() / 0.7, -1)
        expected = logp.topk(min(settings.top_logprobs, logp.shape[-1])).values
        torch.testing.assert_close(torch.tensor(generation.top_logprobs), expected, atol=2e-5, rtol=1e-4)


async def test_frequencies_follow_the_distribution(tiny_model: Any) -> None:
    engine = TransformersEngine(tiny_model, max_model_len=64, max_num_seqs=256)
    names = [f"{i:04d}" for i in range(2000)]
    for name in names:
        engine.join(name)
    draws = [Sampling(max_tokens=1, seed=i, temperature=0.2) for i in range(2000)]
    results = await asyncio.gather(
        *(engine.generate([3, 9, 27], s, request_id=n) for s, n in zip(draws, names, strict=True))
    )
    with torch.no_grad():
        p = torch.softmax(tiny_model(input_ids=torch.tensor([[3, 9, 27]])).logits[0, -1].float() / 0.2, -1)
    top = int(p.argmax())
    share = sum(g.token_ids[0] == top for g in results) / 2000
    assert share == pytest.approx(p[top].item(), abs=0.04)  # 3.6 standard errors at most


async def test_a_wave_waits_for_every_episode_that_joined(tiny_model: Any) -> None:
    engine = TransformersEngine(tiny_model, max_model_len=64)
    engine.join("slow")
    engine.join("fast")
    fast = asyncio.create_task(engine.generate([3], Sampling(max_tokens=2, seed=0), request_id="fast"))
    await asyncio.sleep(0.05)
    assert not fast.done()
    engine.leave("slow")
    assert len((await fast).token_ids) == 2


async def test_nothing_is_decoded_for_requests_that_were_just_cancelled(tiny_model: Any) -> None:
    """As when enough groups differ inside: the last episode cancels the others, then leaves."""
    engine = TransformersEngine(tiny_model, max_model_len=64)
    decoded: list[str] = []
    engine._decode = lambda requests: decoded.extend(r.id for r in requests)  # type: ignore[method-assign]
    for name in ("a", "b", "last"):
        engine.join(name)
    others = [asyncio.create_task(engine.generate([5], Sampling(max_tokens=3), request_id=n)) for n in ("a", "b")]
    await asyncio.sleep(0)
    for other in others:
        other.cancel()
    engine.leave("last")
    await asyncio.gather(*others, return_exceptions=True)
    assert decoded == []


async def test_running_out_of_memory_names_the_setting_and_the_engine_goes_on(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TransformersEngine(tiny_model, max_model_len=64)

    def full(**inputs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "model", full)
        patch.setattr(full, "config", tiny_model.config, raising=False)
        patch.setattr(full, "device", tiny_model.device, raising=False)
        with pytest.raises(EngineFailure, match=r"Tried to allocate 20 GiB; lower engine\.max_num_seqs"):
            await engine.generate([3], Sampling(max_tokens=2, seed=0), request_id="a")
    assert len((await engine.generate([3], Sampling(max_tokens=2, seed=0), request_id="a")).token_ids) == 2
