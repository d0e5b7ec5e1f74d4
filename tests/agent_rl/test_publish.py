"""After every publish the engine samples with the learner's weights, and a publish that did not happen is noticed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_rl.codec import ChatCodec
from agent_rl.config import LearnerConfig
from agent_rl.engines.base import PublishError
from agent_rl.engines.transformers import TransformersEngine
from agent_rl.learner import Learner
from agent_rl.models import load_model
from agent_rl.pack import SampledSequence
from agent_rl.publish import Publisher
from agent_rl.types import Generation


class DeafEngine(TransformersEngine):
    """Says that it took the weights; ``hears`` decides whether it did."""

    hears = True
    tells_version = True

    async def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        if self.hears:
            await super().update_weights(tensors, version)
        elif self.tells_version:
            self.weight_version = version


@pytest.fixture
def learner(request: pytest.FixtureRequest, tiny_folder: Path) -> Iterator[Learner]:
    made = Learner(
        load_model(tiny_folder, "float32"), LearnerConfig(lr=getattr(request, "param", 1e-2)), temperature=0.8
    )
    yield made
    made.close()


def take_step(learner: Learner) -> None:
    sequence = SampledSequence(token_ids=tuple(range(3, 40)), positions=tuple(range(5, 37)))
    learner.step(learner.pack([sequence]), torch.full((32,), 1 / 32), None)


def make_engine(tiny_folder: Path) -> DeafEngine:
    return DeafEngine(load_model(tiny_folder, "float32"), max_model_len=200)


async def test_after_every_publish_the_canary_is_the_learners(
    learner: Learner, codec: ChatCodec, tiny_folder: Path
) -> None:
    engine = make_engine(tiny_folder)
    publisher = Publisher(engine, learner, codec, temperature=0.8)
    for version in range(4):
        assert await publisher.publish(version) < 1e-3
        assert engine.weight_version == version
        take_step(learner)


@pytest.mark.parametrize(("tells_version", "message"), [(False, "samples with version 0, not 1"), (True, "differ by")])
async def test_a_publish_that_did_not_happen_stops_the_run(
    learner: Learner, codec: ChatCodec, tiny_folder: Path, tells_version: bool, message: str
) -> None:
    engine = make_engine(tiny_folder)
    publisher = Publisher(engine, learner, codec, temperature=0.8)
    await publisher.publish(0)
    engine.hears, engine.tells_version = False, tells_version
    take_step(learner)
    with pytest.raises(PublishError, match=message):
        await publisher.publish(1)


@pytest.mark.parametrize("learner", [1e-6], indirect=True)
async def test_a_missing_publish_is_noticed_below_the_tolerance(
    learner: Learner, codec: ChatCodec, tiny_folder: Path
) -> None:
    """One small step moves the canary by less than 1e-3, but the engine's logprobs are still exactly the old ones."""
    engine = make_engine(tiny_folder)
    publisher = Publisher(engine, learner, codec, temperature=0.8)
    await publisher.publish(0)
    engine.hears = False
    take_step(learner)
    with pytest.raises(PublishError, match="still those of the version before"):
        await publisher.publish(1)


async def test_rounding_is_not_taken_for_a_missing_publish(codec: ChatCodec, tiny_folder: Path) -> None:
    """In bfloat16 a small step moves logprobs by less than rounding does; here the engine is in float32."""
    learner = Learner(load_model(tiny_folder, "bfloat16"), LearnerConfig(lr=1e-5), temperature=0.8)
    engine = make_engine(tiny_folder)
    publisher = Publisher(engine, learner, codec, temperature=0.8)
    gaps = []
    for version in range(12):
        gaps.append(await publisher.publish(version))
        take_step(learner)
    assert 1e-4 < max(gaps) < 0.15
    learner.close()


@pytest.mark.parametrize(("off_by", "is_rounding"), [(0.33, True), (1.0, False)])
async def test_bfloat16_is_as_far_off_as_it_was_measured(
    codec: ChatCodec, tiny_folder: Path, off_by: float, is_rounding: bool
) -> None:
    """Of 64 canaries with vLLM, SmolLM2-135M and temperature 0.7 half were off by 0.15 nats, the worst by 0.33."""

    class OffEngine(TransformersEngine):
        async def generate(self, *arguments: Any, **settings: Any) -> Generation:
            generation = await super().generate(*arguments, **settings)
            first, *others = generation.logprobs
            return replace(generation, logprobs=(first - off_by, *others))

    learner = Learner(load_model(tiny_folder, "bfloat16"), LearnerConfig(lr=1e-5), temperature=0.7)
    engine = OffEngine(load_model(tiny_folder, "bfloat16"), max_model_len=200)
    publisher = Publisher(engine, learner, codec, temperature=0.7)
    with nullcontext() if is_rounding else pytest.raises(PublishError, match=r"differ by 1 nats .*allowed 0\.71"):
        await publisher.publish(0)
    learner.close()


async def test_a_lost_parameter_is_noticed(learner: Learner, codec: ChatCodec, tiny_folder: Path) -> None:
    engine = make_engine(tiny_folder)
    publisher = Publisher(engine, learner, codec, temperature=0.8)
    await publisher.publish(0)
    take_step(learner)
    names: list[Any] = [name for name, _ in learner.named_tensors()]
    whole = engine.update_weights

    async def without_embeddings(tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        old = dict(engine.model.named_parameters())
        await whole([(n, old[n].clone() if n == names[0] else t) for n, t in tensors], version)

    engine.update_weights = without_embeddings  # type: ignore[method-assign]
    with pytest.raises(PublishError, match="weight sync failed"):
        await publisher.publish(1)
