"""The embedded engine: what it samples is what the model says, alone or in a batch, before and after new weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_rl.engines.base import PublishError
from agent_rl.engines.transformers import TransformersEngine
from agent_rl.models import load_model
from agent_rl.types import Generation, Sampling

PROMPTS = [[3, 9, 27, 81, 43], [5], [7, 11, 13, 17, 19, 23, 29, 31], [2, 4]]


def logprobs_of(model: Any, prompt: list[int], generation: Generation, temperature: float) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *generation.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)


async def generate_together(engine: TransformersEngine, sampling: list[Sampling]) -> list[Generation]:
    names = [f"e{i}" for i in range(len(PROMPTS))]
    for name in names:
        engine.join(name)
    calls = [engine.generate(p, s, request_id=n) for p, s, n in zip(PROMPTS, sampling, names, strict=True)]
    results = await asyncio.gather(*calls)
    for name in names:
        engine.leave(name)
    return list(results)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
async def test_logprobs_are_those_of_the_tempered_model(tiny_model: Any, temperature: float) -> None:
    engine = TransformersEngine(tiny_model, max_model_len=64)
    sampling = [Sampling(max_tokens=10, temperature=temperature, seed=i) for i in range(4)]
    for prompt, generation in zip(PROMPTS, await generate_together(engine, sampling), strict=True):
        assert len(generation.token_ids) == 10
        expected = logprobs_of(tiny_model, prompt, generation, temperature)
        torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=2e-5, rtol=0)


async def test_greedy_equals_transformers_generate(tiny_model: Any) -> None:
    engine = TransformersEngine(tiny_model, max_model_len=64)
    results = await generate_together(engine, [Sampling(max_tokens=12, temperature=0, seed=0)] * 4)
    for prompt, generation in zip(PROMPTS, results, strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = tiny_model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert list(generation.token_ids) == out[0, len(prompt) :].tolist()


async def test_same_seed_same_ids_alone_or_in_a_batch(tiny_model: Any) -> None:
    engine = TransformersEngine(tiny_model, max_model_len=64)
    sampling = [Sampling(max_tokens=8, seed=100 + i) for i in range(4)]
    together = await generate_together(engine, sampling)
    alone = [await engine.generate(p, s, request_id="x") for p, s in zip(PROMPTS, sampling, strict=True)]
    assert [g.token_ids for g in together] == [g.token_ids for g in alone]
    other = await engine.generate(PROMPTS[0], Sampling(max_tokens=8, seed=7), request_id="x")
    assert other.token_ids != alone[0].token_ids


async def test_a_stop_id_ends_a_sequence_and_is_kept(tiny_model: Any) -> None:
    engine = TransformersEngine(tiny_model, max_model_len=64)
    free = await engine.generate([3, 9], Sampling(max_tokens=8, seed=1), request_id="a")
    stop = free.token_ids[3]
    stopped = await engine.generate([3, 9], Sampling(max_tokens=8, seed=1, stop_token_ids=(stop,)), request_id="a")
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert (stopped.finish_reason, free.finish_reason) == ("stop", "length")


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


async def test_new_weights_are_used_and_stamped(tiny_model: Any, tiny_folder: Path) -> None:
    engine = TransformersEngine(load_model(tiny_folder, "float32"), max_model_len=64)
    other = load_model(tiny_folder, "float32")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    sampling = Sampling(max_tokens=8, seed=1)
    before = await engine.generate([3, 9], sampling, request_id="a")
    await engine.update_weights(other.named_parameters(), 5)
    after = await engine.generate([3, 9], sampling, request_id="a")
    assert (before.weight_version, after.weight_version) == (0, 5)
    torch.testing.assert_close(torch.tensor(after.logprobs), logprobs_of(other, [3, 9], after, 1.0), atol=2e-5, rtol=0)


async def test_incomplete_or_foreign_weights_are_refused_by_name(tiny_model: Any) -> None:
    engine = TransformersEngine(tiny_model, max_model_len=64)
    tensors = [(name, p.clone()) for name, p in tiny_model.named_parameters()]
    with pytest.raises(PublishError, match=r"1 parameters are missing, first 'model\.norm\.weight'"):
        await engine.update_weights([(n, t) for n, t in tensors if n != "model.norm.weight"], 1)
    with pytest.raises(PublishError, match="no parameter 'surplus'"):
        await engine.update_weights([*tensors, ("surplus", torch.zeros(1))], 1)
    with pytest.raises(PublishError, match="has shape"):
        await engine.update_weights([(n, t[:1]) for n, t in tensors], 1)


async def test_too_long_a_prompt_is_refused_with_the_numbers(tiny_model: Any) -> None:
    engine = TransformersEngine(tiny_model, max_model_len=4)
    with pytest.raises(ValueError, match="prompt of 5 tokens leaves no room under max_model_len 4"):
        await engine.generate([1, 2, 3, 4, 5], Sampling(max_tokens=3, seed=0), request_id="a")
    cut = await engine.generate([1, 2], Sampling(max_tokens=30, seed=0), request_id="a")
    assert (len(cut.token_ids), cut.finish_reason) == (2, "length")


async def test_a_wave_waits_for_every_episode_that_joined(tiny_model: Any) -> None:
    engine = TransformersEngine(tiny_model, max_model_len=64)
    engine.join("slow")
    engine.join("fast")
    fast = asyncio.create_task(engine.generate([3], Sampling(max_tokens=2, seed=0), request_id="fast"))
    await asyncio.sleep(0.05)
    assert not fast.done()
    engine.leave("slow")
    assert len((await fast).token_ids) == 2


async def test_cancelling_a_request_lets_the_others_go_on(tiny_model: Any) -> None:
    engine = TransformersEngine(tiny_model, max_model_len=64)
    for name in ("a", "b", "c"):
        engine.join(name)
    tasks = {n: asyncio.create_task(engine.generate([3], Sampling(max_tokens=2, seed=0), request_id=n)) for n in "ab"}
    await asyncio.sleep(0)
    tasks["a"].cancel()
    await asyncio.sleep(0)
    engine.leave("a")
    engine.leave("c")
    assert len((await tasks["b"]).token_ids) == 2
