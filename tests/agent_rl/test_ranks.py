"""Learner ranks as Ray actors: the same numbers as one process, and one line when a rank dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from agent_rl.config import LearnerConfig
from agent_rl.errors import LearnerFailure
from agent_rl.learner import Learner
from agent_rl.models import load_model, load_tokenizer
from agent_rl.pack import SampledSequence
from agent_rl.ranks import LearnerRanks, make_learner
from agent_rl.regularisers import Penalty
from stare.neighbours.regularisers import entropy_bonus, k2

SEQUENCES = [
    SampledSequence(token_ids=tuple(range(3, 3 + length)), positions=tuple(range(5, length))) for length in (30, 41, 17)
]
NUM_TOKENS = sum(len(s.positions) for s in SEQUENCES)
COEFFICIENT = torch.linspace(-1, 1, NUM_TOKENS) / NUM_TOKENS
TERMS = [
    Penalty(
        name=name,
        coefficient=0.1,
        function=function,
        of_entropy=name == "entropy_bonus",
        scale_T=torch.full((NUM_TOKENS,), 1 / NUM_TOKENS),
        columns=columns,
        options={},
    )
    for name, function, columns in (
        ("kl_k2", k2, {"reference_logp_T": torch.full((NUM_TOKENS,), -3.0)}),
        ("entropy_bonus", entropy_bonus, {}),
    )
]
CONFIG = {"lr": 0.5, "optimizer": "sgd", "max_micro_sequences": 1, "grad_clip": 1e9}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def ranks(tiny_folder: Path) -> Iterator[LearnerRanks]:
    config = LearnerConfig(ranks=2, **CONFIG)
    made = make_learner(tiny_folder, "float32", config, temperature=1.0, threads=1, keep_reference=True)
    assert isinstance(made, LearnerRanks)
    yield made
    made.close()


def test_two_ranks_do_what_one_does(ranks: LearnerRanks, tiny_folder: Path, tmp_path: Path) -> None:
    alone = make_learner(tiny_folder, "float32", LearnerConfig(**CONFIG), temperature=1.0, keep_reference=True)
    reports = []
    for learner in (alone, ranks):
        packed = learner.pack(SEQUENCES)
        scored = learner.score(packed, NUM_TOKENS)
        torch.testing.assert_close(learner.reference_logp(packed, NUM_TOKENS), scored.logp, rtol=0, atol=1e-5)
        reports.append(learner.step(packed, COEFFICIENT, scored.logp, penalties=TERMS))
    assert reports[1].penalties == pytest.approx(reports[0].penalties, rel=1e-5)
    ours, theirs = (dict(learner.named_tensors()) for learner in (alone, ranks))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-5, atol=1e-6)

    # What they save, they load; what they export, one process computes the same with.
    ranks.save(tmp_path / "state")
    ranks.export(tmp_path / "model", load_tokenizer(tiny_folder))
    expected = ranks.score(ranks.pack(SEQUENCES), NUM_TOKENS).logp
    ranks.step(ranks.pack(SEQUENCES), COEFFICIENT, None)
    assert not torch.equal(ranks.score(ranks.pack(SEQUENCES), NUM_TOKENS).logp, expected)
    ranks.load(tmp_path / "state")
    assert ranks.steps_taken == 1
    torch.testing.assert_close(ranks.score(ranks.pack(SEQUENCES), NUM_TOKENS).logp, expected, rtol=0, atol=0)
    again = Learner(load_model(tmp_path / "model", "float32"), LearnerConfig(), temperature=1.0)
    torch.testing.assert_close(again.score(again.pack(SEQUENCES), NUM_TOKENS).logp, expected, rtol=0, atol=1e-5)
    alone.close()
    again.close()


def test_a_rank_that_dies_is_named_and_the_others_do_not_hang(ranks: LearnerRanks) -> None:
    import ray

    process = ray.get(ranks._ranks[1].process.remote())
    os.kill(process, signal.SIGKILL)
    with pytest.raises(LearnerFailure, match="learner rank 1 of 2 died"):
        ranks.step(ranks.pack(SEQUENCES), COEFFICIENT, None)
    with pytest.raises(LearnerFailure, match="ranks are gone"):
        ranks.score(ranks.pack(SEQUENCES), NUM_TOKENS)


def test_a_broken_checkpoint_is_named(ranks: LearnerRanks, tmp_path: Path) -> None:
    with pytest.raises((LearnerFailure, ValueError), match="checkpoint"):
        ranks.load(tmp_path)
