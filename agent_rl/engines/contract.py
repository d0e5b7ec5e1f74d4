"""What every engine promises, as checks that anybody's engine can be put through: ``await check(make, model, ...)``.

Each check takes a ``Bench`` and raises ``AssertionError`` where a promise is broken. What an engine's logprobs must be
is computed as the learner computes them. What applies to an endpoint that answers in text is in ``chat_contract``.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from agent_rl.engines.base import Engine, EngineFailure, PublishError
from agent_rl.pack import SampledSequence, pack
from agent_rl.policy import Policy
from agent_rl.types import Generation, Sampling

TOLERANCE = 1e-3
"""|engine - learner| of a logprob in float32, nats; measured 3e-5 between vLLM and transformers on the CPU."""

TEMPERATURES = (0.6, 1.0, 1.3)

WAIT_S = 120.0
"""From here on an answer is taken to be missing."""

TRIES = 5
"""How often a check is made that shows nothing where the machine stood still in its midst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """An engine under test and what it is measured by. Every check but the last leaves the engine as it found it."""

    engine: Engine  # started, with the weights of ``model``; its max_model_len is at least 160
    model: Any  # a causal language model of transformers
    changed: Any  # the same with every parameter moved, so that logprobs differ by far more than the tolerance
    slots: int  # sequences that the engine decodes at once
    tolerance: float = TOLERANCE

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    def prompt(self, number: int, length: int) -> list[int]:
        """A prompt of its own for every number, the same in every run."""
        return np.random.default_rng(number).integers(3, self.vocabulary, length).tolist()  # type: ignore[no-any-return]

    async def sample(self, prompt: Sequence[int], sampling: Sampling, name: str) -> Generation:
        """One completion of an episode of its own."""
        self.engine.join(name)
        try:
            async with asyncio.timeout(WAIT_S):
                return await self.engine.generate(prompt, sampling, request_id=name)
        except TimeoutError:
            raise AssertionError(f"request {name!r} got no answer within {WAIT_S:g} s") from None
        finally:
            self.engine.leave(name)

    async def sample_together(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]
    ) -> list[Generation]:
        names = [f"together-{number:03d}" for number in range(len(prompts))]
        for name in names:  # before the first one asks: the embedded engine waits for all that joined
            self.engine.join(name)
        calls = [self.sample(p, s, n) for p, s, n in zip(prompts, samplings, names, strict=True)]
        return list(await asyncio.gather(*calls))

    def gap(self, model: Any, prompt: Sequence[int], generation: Generation, temperature: float = 1.0) -> float:
        """Largest |engine - learner| of the completion's logprobs under ``model``, nats."""
        learner = learner_logprobs(model, prompt, generation.token_ids, temperature)
        return float((learner - torch.tensor(generation.logprobs)).abs().max())


Check = Callable[[Bench], Awaitable[None]]


async def check(make: Callable[[], Engine], model: Any, *, slots: int, tolerance: float = TOLERANCE) -> list[str]:
    """Every check on one engine, which is started and closed; returns their names. Takes seconds to minutes.

    Args:
        make: an engine, not yet started, with the weights of ``model``.
        model: a causal language model of transformers; it is not changed.
        slots: sequences that the engine decodes at once.
        tolerance: of logprobs, nats.
    """
    bench = Bench(engine=make(), model=model, changed=moved(model), slots=slots, tolerance=tolerance)
    await bench.engine.start()
    try:
        for one in CHECKS:
            await one(bench)
    finally:
        await bench.engine.close()
    return [one.__name__ for one in CHECKS]


@torch.no_grad()
def moved(model: Any, *, by: float = 0.1) -> Any:
    """A copy of ``model`` with noise on every parameter, ``by`` times that parameter's mean size."""
    other = copy.deepcopy(model).requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    for parameter in other.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        parameter.add_(by * parameter.abs().mean().clamp(min=0.01) * noise)  # biases may all be zero
    return other


@torch.no_grad()
def learner_logprobs(model: Any, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """float32 [L]: what the learner gives ``ids`` after ``prompt`` when ``model`` has its weights."""
    positions = tuple(range(len(prompt), len(prompt) + len(ids)))
    sequence = SampledSequence(token_ids=(*prompt, *ids), positions=positions)
    ((batch,),) = pack([sequence], layout="padded", token_budget=len(sequence.token_ids))
    logp: torch.Tensor = Policy(model.eval(), temperature=temperature)(batch, statistics=False).logp
    return logp.cpu()


async def greedy_ids_are_the_learners(bench: Bench) -> None:
    prompts = [bench.prompt(number, length) for number, length in enumerate((1, 7, 60))]
    greedy = Sampling(max_tokens=16, temperature=0)
    for prompt, result in zip(prompts, await bench.sample_together(prompts, [greedy] * 3), strict=True):
        with torch.no_grad():
            logits = bench.model(torch.tensor([[*prompt, *result.token_ids]])).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(-1, torch.tensor(result.token_ids)[:, None])[:, 0]
        behind = float((logits.max(-1).values - chosen).max())
        assert behind <= bench.tolerance, f"a greedy id lies {behind:.3g} below the learner's best"
        assert len(result.token_ids) == 16, result
        gap = bench.gap(bench.model, prompt, result)
        assert gap <= bench.tolerance, f"greedy logprobs are {gap:.3g} nats from the learner's at temperature 1"


async def logprobs_are_those_of_the_tempered_distribution(bench: Bench) -> None:
    for temperature in TEMPERATURES:
        prompt = bench.prompt(10, 50)
        result = await bench.sample(prompt, Sampling(max_tokens=32, temperature=temperature, seed=11), "tempered")
        assert len(result.logprobs) == len(result.token_ids) == 32, result
        gap = bench.gap(bench.model, prompt, result, temperature)
        assert gap <= bench.tolerance, f"logprobs at temperature {temperature} are {gap:.3g} nats from the learner's"


async def the_same_seed_gives_the_same_ids_alone_and_among_others(bench: Bench) -> None:
    prompts = [bench.prompt(20 + number, 20 + number) for number in range(8)]
    samplings = [Sampling(max_tokens=24, seed=2**62 + number) for number in range(8)]
    together = await bench.sample_together(prompts, samplings)
    alone = await bench.sample(prompts[3], samplings[3], "alone")
    assert alone.token_ids == together[3].token_ids, (alone, together[3])
    other = await bench.sample(prompts[3], Sampling(max_tokens=24, seed=1), "other-seed")
    assert other.token_ids != alone.token_ids, "another seed gave the same ids"


async def every_caller_gets_its_own_answer(bench: Bench) -> None:
    count = bench.slots + 4
    prompts = [bench.prompt(40 + number, 5 + 3 * number) for number in range(count)]
    samplings = [Sampling(max_tokens=3 + number % 7, seed=number) for number in range(count)]
    results = await bench.sample_together(prompts, samplings)
    for prompt, sampling, result in zip(prompts, samplings, results, strict=True):
        assert len(result.token_ids) == sampling.max_tokens, (sampling, result)
        gap = bench.gap(bench.model, prompt, result)
        assert gap <= bench.tolerance, f"an answer is {gap:.3g} nats from what its prompt says"


async def a_stop_id_ends_the_completion_and_is_kept(bench: Bench) -> None:
    prompt, free = bench.prompt(60, 9), Sampling(max_tokens=24, seed=1)
    whole = await bench.sample(prompt, free, "free")
    assert (len(whole.token_ids), whole.finish_reason) == (24, "length"), whole
    stop = whole.token_ids[10]
    place = whole.token_ids.index(stop)
    stopped = await bench.sample(prompt, Sampling(max_tokens=24, seed=1, stop_token_ids=(stop,)), "stopped")
    assert stopped.token_ids == whole.token_ids[: place + 1], (stopped, whole)
    assert (len(stopped.logprobs), stopped.finish_reason) == (place + 1, "stop"), stopped


async def max_tokens_and_max_model_len_are_kept(bench: Bench) -> None:
    one = await bench.sample(bench.prompt(70, 9), Sampling(max_tokens=1, seed=0), "one")
    assert (len(one.token_ids), one.finish_reason) == (1, "length"), one
    full = bench.prompt(71, bench.engine.max_model_len - 2)
    cut = await bench.sample(full, Sampling(max_tokens=9, seed=0), "cut")
    assert (len(cut.token_ids), cut.finish_reason) == (2, "length"), cut


async def a_prompt_without_room_is_refused_with_numbers_and_setting(bench: Bench) -> None:
    limit = bench.engine.max_model_len
    await _refused(bench, bench.prompt(72, limit), (f"prompt of {limit} tokens", f"engine.max_model_len = {limit}"))


async def an_impossible_prompt_is_refused_and_the_engine_lives(bench: Bench) -> None:
    for prompt in ([], [5, bench.vocabulary], [5, -1]):
        await _refused(bench, prompt, (f"at least one, each in [0, {bench.vocabulary})",))
    after = await bench.sample([5], Sampling(max_tokens=2, seed=0), "after")
    assert len(after.token_ids) == 2, after


async def a_cancelled_request_gives_its_slot_back(bench: Bench) -> None:
    """With all slots taken for long, one is cancelled: a short request of that name is answered before any other."""
    for _ in range(TRIES):  # where all stands still for a second the long ones may have ended: that shows nothing
        if await _slot_came_back(bench):
            return
    raise AssertionError("the slot of a cancelled request is still taken")


async def an_episode_that_left_is_not_waited_for(bench: Bench) -> None:
    for name in ("gone", "never-asks"):
        bench.engine.join(name)
    running = asyncio.create_task(bench.sample([5], Sampling(max_tokens=2, seed=0), "stays"))
    await asyncio.sleep(0)
    for name in ("gone", "gone", "never-asks"):
        bench.engine.leave(name)
    assert len((await running).token_ids) == 2


async def an_update_is_used_and_stamped(bench: Bench) -> None:
    prompt, sampling = bench.prompt(90, 20), Sampling(max_tokens=16, seed=4)
    version = bench.engine.weight_version
    async with _weights_of(bench, bench.changed):
        new = await bench.sample(prompt, sampling, "new")
        gap = bench.gap(bench.changed, prompt, new)
        assert gap <= bench.tolerance, f"after an update logprobs are {gap:.3g} nats from the new weights'"
        from_old = bench.gap(bench.model, prompt, new)
        assert from_old > 10 * bench.tolerance, f"only {from_old:.3g} nats between the two models: this shows nothing"
        assert new.weight_version == bench.engine.weight_version == version + 1, new
    old = await bench.sample(prompt, sampling, "old")
    assert (old.weight_version, bench.gap(bench.model, prompt, old) <= bench.tolerance) == (version + 2, True), old


async def nothing_cached_survives_an_update(bench: Bench) -> None:
    prompt, sampling = bench.prompt(91, 140), Sampling(max_tokens=8, seed=4)
    await bench.sample(prompt, sampling, "cached")
    async with _weights_of(bench, bench.changed):
        gap = bench.gap(bench.changed, prompt, await bench.sample(prompt, sampling, "fresh"))
        assert gap <= bench.tolerance, f"a prompt seen before the update is {gap:.3g} nats off: cached with old weights"


async def a_small_update_can_be_told_from_none(bench: Bench) -> None:
    """The canary of ``publish`` needs this: logprobs lie nearer to the new weights' even when those moved little."""
    prompt, sampling = bench.prompt(92, 20), Sampling(max_tokens=8, seed=4)
    slightly = moved(bench.model, by=1e-3)
    async with _weights_of(bench, slightly):
        result = await bench.sample(prompt, sampling, "slightly")
        new, old = bench.gap(slightly, prompt, result), bench.gap(bench.model, prompt, result)
        assert new < old / 2, f"{new:.3g} nats from the new weights' logprobs, {old:.3g} from the old ones'"


async def a_wrong_set_of_tensors_is_named_and_changes_nothing(bench: Bench) -> None:
    whole = list(bench.changed.named_parameters())
    name, tensor = whole[len(whole) // 2]
    others = [item for item in whole if item[0] != name]
    faults = [
        (others, f"missing, first {name!r}"),
        ([*whole, ("surplus", tensor)], "'surplus' is none of the model's"),
        ([*others, (name, tensor[:-1])], f"{name!r} has shape"),
        ([*whole, (name, tensor)], f"{name!r} was given twice"),
    ]
    prompt, version = bench.prompt(93, 20), bench.engine.weight_version
    for tensors, told in faults:
        said = await _error_of(bench.engine.update_weights(tensors, version + 1), PublishError)
        assert said is not None, f"a set of tensors went in of which {told}"
        assert told in said, f"{said!r} does not say {told!r}"
        result = await bench.sample(prompt, Sampling(max_tokens=8, seed=2), "still")
        assert result.weight_version == bench.engine.weight_version == version, result
        gap = bench.gap(bench.model, prompt, result)
        assert gap <= bench.tolerance, f"a refused update ({told}) moved logprobs by {gap:.3g} nats"


async def a_nap_changes_no_answer(bench: Bench) -> None:
    prompt, sampling = bench.prompt(94, 20), Sampling(max_tokens=16, seed=4)
    before = await bench.sample(prompt, sampling, "before")
    await bench.engine.sleep()
    await bench.engine.wake()
    after = await bench.sample(prompt, sampling, "after")
    assert (after.token_ids, after.weight_version) == (before.token_ids, before.weight_version), (before, after)


async def closing_ends_what_runs_and_may_happen_twice(bench: Bench) -> None:
    """The last: the engine is of no use afterwards."""
    bench.engine.join("never-asks")  # so that the embedded engine is still waiting
    sampling = Sampling(max_tokens=bench.engine.max_model_len, seed=0)
    running = [  # the last ones for seconds, behind the others
        asyncio.create_task(bench.sample([5], sampling, f"running-{number:03d}")) for number in range(8 * bench.slots)
    ]
    await asyncio.sleep(0.05)
    await bench.engine.close()
    await bench.engine.close()
    ended = await asyncio.gather(*running, bench.sample([5], sampling, "late"), return_exceptions=True)
    for last in ended[-2:]:
        assert isinstance(last, EngineFailure), f"a closed engine answered, or said nothing: {last!r}"
    for one in ended:
        assert isinstance(one, Generation | EngineFailure), f"closing ended a request by {one!r}"


CHECKS: tuple[Check, ...] = (
    greedy_ids_are_the_learners,
    logprobs_are_those_of_the_tempered_distribution,
    the_same_seed_gives_the_same_ids_alone_and_among_others,
    every_caller_gets_its_own_answer,
    a_stop_id_ends_the_completion_and_is_kept,
    max_tokens_and_max_model_len_are_kept,
    a_prompt_without_room_is_refused_with_numbers_and_setting,
    an_impossible_prompt_is_refused_and_the_engine_lives,
    a_cancelled_request_gives_its_slot_back,
    an_episode_that_left_is_not_waited_for,
    an_update_is_used_and_stamped,
    nothing_cached_survives_an_update,
    a_small_update_can_be_told_from_none,
    a_wrong_set_of_tensors_is_named_and_changes_nothing,
    a_nap_changes_no_answer,
    closing_ends_what_runs_and_may_happen_twice,
)


async def _slot_came_back(bench: Bench) -> bool:
    """Whether the short request was the first; False also where the long ones ended too early."""
    room = bench.engine.max_model_len - 9
    names = [f"long-{number:03d}" for number in range(bench.slots)]
    for name in (*names, "asks-later"):  # who keeps the embedded engine from answering them at once
        bench.engine.join(name)
    tasks = {
        name: asyncio.create_task(bench.sample(bench.prompt(80 + i, 9), Sampling(max_tokens=room, seed=i), name))
        for i, name in enumerate(names)
    }
    try:
        await asyncio.sleep(0.1)  # all are in the engine
        cancelled = tasks[names[0]]
        if cancelled.done():
            cancelled.result()  # raises if it failed
            return False
        cancelled.cancel()
        await asyncio.wait([cancelled], timeout=WAIT_S)
        if not cancelled.cancelled():
            assert cancelled.done(), "cancelling did not end the request"
            cancelled.result()
            return False
        short = asyncio.create_task(bench.sample(bench.prompt(79, 9), Sampling(max_tokens=2, seed=0), names[0]))
        tasks[names[0]] = short
        await asyncio.sleep(0)
        bench.engine.leave("asks-later")
        first, _ = await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
        assert not short.done() or short.exception() is None, f"its name is still taken: {short.exception()}"
        return short in first
    finally:
        bench.engine.leave("asks-later")
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


@asynccontextmanager
async def _weights_of(bench: Bench, model: Any) -> AsyncIterator[None]:
    await bench.engine.update_weights(model.named_parameters(), bench.engine.weight_version + 1)
    try:
        yield
    finally:
        await bench.engine.update_weights(bench.model.named_parameters(), bench.engine.weight_version + 1)


async def _refused(bench: Bench, prompt: Sequence[int], told: Sequence[str]) -> None:
    said = await _error_of(bench.sample(prompt, Sampling(max_tokens=1, seed=0), "refused"), ValueError)
    assert said is not None, f"a prompt of {len(prompt)} ids was taken: {prompt[:3]}"
    for part in told:
        assert part in said, f"{said!r} does not say {part!r}"


async def _error_of(call: Awaitable[object], kind: type[Exception]) -> str | None:
    """What the ``kind`` of error said that ``call`` raised; None if it raised nothing."""
    try:
        await call
    except kind as error:
        return str(error)
    return None
