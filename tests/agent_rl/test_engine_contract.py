"""The shipped contract over every engine, and that it finds engines that break it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_rl.config import ConfigError, load_config
from agent_rl.engines import contract
from agent_rl.engines.base import Engine
from agent_rl.engines.chat_contract import CHAT_CHECKS, ChatCheck
from agent_rl.engines.contract import CHECKS, TOLERANCE, Bench, Check, check, moved
from agent_rl.engines.openai import Endpoint
from agent_rl.engines.transformers import TransformersEngine
from agent_rl.engines.vllm import VllmEngine
from agent_rl.engines.vllm_server import VllmServerEngine
from agent_rl.models import load_model
from agent_rl.types import Generation, Sampling

SLOTS = 8
MAX_MODEL_LEN = 320

NEEDS_VLLM = [pytest.mark.slow, pytest.mark.vllm]


def make_engine(kind: str, folder: Path, server: str = "") -> Engine:
    if kind == "vllm":
        return VllmEngine(model=folder, max_model_len=MAX_MODEL_LEN, max_num_seqs=SLOTS, kv_cache_gb=0.2)
    if kind == "vllm_server":
        return VllmServerEngine([server], model=folder, max_model_len=MAX_MODEL_LEN)
    return TransformersEngine(load_model(folder, "float32"), max_model_len=MAX_MODEL_LEN, max_num_seqs=SLOTS)


@pytest.fixture(
    scope="module",
    params=["transformers", pytest.param("vllm", marks=NEEDS_VLLM), pytest.param("vllm_server", marks=NEEDS_VLLM)],
)
def running(request: pytest.FixtureRequest, tiny_folder: Path) -> Iterator[tuple[asyncio.Runner, Bench]]:
    """One engine for all checks, which leave it as they found it."""
    server = request.getfixturevalue("vllm_server")[0] if request.param == "vllm_server" else ""
    model = load_model(tiny_folder, "float32")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other beside a busy engine are far slower than one
    with asyncio.Runner() as runner:
        engine = make_engine(request.param, tiny_folder, server)
        runner.run(engine.start())
        tolerance = 5e-5 if request.param == "transformers" else TOLERANCE
        yield runner, Bench(engine=engine, model=model, changed=moved(model), slots=SLOTS, tolerance=tolerance)
        runner.run(engine.close())
    torch.set_num_threads(threads)


@pytest.mark.parametrize("one", CHECKS, ids=lambda one: one.__name__)
def test_contract(running: tuple[asyncio.Runner, Bench], one: Check) -> None:
    runner, bench = running
    runner.run(one(bench))


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("one", CHAT_CHECKS, ids=lambda one: one.__name__)
async def test_what_applies_to_an_endpoint(vllm_server: tuple[str, int], one: ChatCheck) -> None:
    async with Endpoint(f"{vllm_server[0]}/v1", concurrency=SLOTS) as endpoint:
        await one(endpoint)


def test_an_endpoint_is_refused_for_training() -> None:
    with pytest.raises(ConfigError, match=r"engine\.kind = 'openai': .* for evaluation only"):
        load_config("quickstart", ["--engine.kind", "openai"])


class Wrong(TransformersEngine):
    """Breaks one promise in each subclass below; what is asked comes through here."""

    async def ask(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        return await super().generate(prompt_ids, sampling, request_id=request_id)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        return await self.ask(prompt_ids, sampling, request_id)


class Greedless(Wrong):
    async def ask(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        return await super().ask(prompt_ids, replace(sampling, temperature=sampling.temperature or 1.0), request_id)


class Untempered(Wrong):
    """Logprobs at temperature 1, whatever was sampled from (vLLM's default)."""

    async def ask(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        result = await super().ask(prompt_ids, sampling, request_id)
        raw = contract.learner_logprobs(self.model, prompt_ids, result.token_ids)
        return replace(result, logprobs=tuple(raw.tolist()))


class Unrepeatable(Wrong):
    count = 0

    async def ask(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        self.count += 1
        return await super().ask(prompt_ids, replace(sampling, seed=self.count), request_id)


class Misrouted(Wrong):
    """Every answer after the first is that of the question before."""

    last: Sequence[int] = ()

    async def ask(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        before, self.last = self.last or prompt_ids, prompt_ids
        return await super().ask(before, sampling, request_id)


class Stopless(Wrong):
    """Leaves the stop id out, as engines that give text do."""

    async def ask(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        result = await super().ask(prompt_ids, sampling, request_id)
        kept = len(result.token_ids) - (result.finish_reason == "stop")
        return replace(result, token_ids=result.token_ids[:kept], logprobs=result.logprobs[:kept])


class Misnamed(Wrong):
    async def ask(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        return replace(await super().ask(prompt_ids, sampling, request_id), finish_reason="stop")


class Truncating(Wrong):
    """Takes prompts of any length and cuts them."""

    async def ask(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        return await super().ask(prompt_ids[-self.max_model_len + sampling.max_tokens :], sampling, request_id)


class Wrapping(Wrong):
    async def ask(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        return await super().ask([token % 100 for token in prompt_ids], sampling, request_id)


class Shielding(Wrong):
    """Goes on with what nobody waits for any more."""

    async def ask(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        return await asyncio.shield(asyncio.ensure_future(super().ask(prompt_ids, sampling, request_id)))


class Faithful(Wrong):
    def leave(self, episode_id: str) -> None:
        """Waits for ever."""


class Deaf(Wrong):
    """Says that it took the weights."""

    async def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self.weight_version = version


class Unstamped(Wrong):
    async def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        before = self.weight_version
        await super().update_weights(tensors, version)
        self.weight_version = before


class Remembering(Wrong):
    """Answers a question that it knows from memory."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.known: dict[tuple[int, ...], Generation] = {}

    async def ask(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        if tuple(prompt_ids) not in self.known:
            self.known[tuple(prompt_ids)] = await super().ask(prompt_ids, sampling, request_id)
        return self.known[tuple(prompt_ids)]


class Careless(Wrong):
    """Takes what fits of any set."""

    async def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        own, given = dict(self.model.named_parameters()), dict(tensors)
        await super().update_weights([(n, given[n] if n in given else own[n].clone()) for n in own], version)


class Drowsy(Wrong):
    """Has lost its weights when it wakes."""

    async def wake(self) -> None:
        for parameter in self.model.parameters():
            parameter.zero_()


class Undying(Wrong):
    async def close(self) -> None:
        """Nothing happens."""


@pytest.mark.parametrize(
    ("wrong", "one"),
    [
        (Greedless, contract.greedy_ids_are_the_learners),
        (Untempered, contract.logprobs_are_those_of_the_tempered_distribution),
        (Unrepeatable, contract.the_same_seed_gives_the_same_ids_alone_and_among_others),
        (Misrouted, contract.every_caller_gets_its_own_answer),
        (Stopless, contract.a_stop_id_ends_the_completion_and_is_kept),
        (Misnamed, contract.max_tokens_and_max_model_len_are_kept),
        (Truncating, contract.a_prompt_without_room_is_refused_with_numbers_and_setting),
        (Wrapping, contract.an_impossible_prompt_is_refused_and_the_engine_lives),
        (Shielding, contract.a_cancelled_request_gives_its_slot_back),
        (Faithful, contract.an_episode_that_left_is_not_waited_for),
        (Deaf, contract.an_update_is_used_and_stamped),
        (Unstamped, contract.an_update_is_used_and_stamped),
        (Remembering, contract.nothing_cached_survives_an_update),
        (Deaf, contract.a_small_update_can_be_told_from_none),
        (Careless, contract.a_wrong_set_of_tensors_is_named_and_changes_nothing),
        (Drowsy, contract.a_nap_changes_no_answer),
        (Undying, contract.closing_ends_what_runs_and_may_happen_twice),
    ],
    ids=lambda value: value.__name__,
)
async def test_an_engine_that_breaks_a_promise_is_found(
    tiny_model: Any, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, wrong: type[Wrong], one: Check
) -> None:
    monkeypatch.setattr(contract, "WAIT_S", 0.5)
    engine = wrong(load_model(tiny_folder, "float32"), max_model_len=MAX_MODEL_LEN, max_num_seqs=SLOTS)
    with pytest.raises(AssertionError):
        await one(Bench(engine=engine, model=tiny_model, changed=moved(tiny_model), slots=SLOTS))


async def test_the_whole_contract_in_one_call(tiny_model: Any, tiny_folder: Path) -> None:
    names = await check(lambda: make_engine("transformers", tiny_folder), tiny_model, slots=SLOTS)
    assert names == [one.__name__ for one in CHECKS]
