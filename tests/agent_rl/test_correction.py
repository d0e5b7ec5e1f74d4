"""Tokens of another policy: weights by hand, no change where the policies agree, one choice for the whole batch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan import OPTIONS, controllers, make_batch, statistics_of
from test_regularisers import synthetic_trajectories

from agent_rl.algorithm import Algorithm
from agent_rl.config import LearnerConfig, StareConfig, load_config
from agent_rl.correction import CorrectionName
from agent_rl.learner import Learner
from agent_rl.models import load_model
from agent_rl.plan import UpdateBatch, make_plan, update_batch
from agent_rl.progress import Clock
from agent_rl.records import update_metrics
from agent_rl.update import start_controllers, update

NAMES: tuple[CorrectionName, ...] = ("tis", "mis", "seq_tis", "seq_mis")


def sampled_with(batch: UpdateBatch, logp_T: torch.Tensor) -> UpdateBatch:
    """The batch as if the sampler had given these logprobs."""
    trajectories = []
    for trajectory, part in zip(batch.trajectories, torch.split(logp_T, batch.num_tokens_B.tolist()), strict=True):
        values = iter(part.tolist())
        logprobs = tuple(next(values) if flag else 0.0 for flag in trajectory.loss_mask)
        trajectories.append(replace(trajectory, logprobs=logprobs))
    return replace(batch, trajectories=tuple(trajectories))


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=10)
def test_where_the_policies_agree_nothing_changes_by_a_bit(name: CorrectionName, seed: int) -> None:
    batch = make_batch()
    scored = statistics_of(batch, seed)
    batch = sampled_with(batch, scored.logp)
    plain = make_plan(batch, scored, controllers(), OPTIONS)
    plan = make_plan(batch, scored, controllers(), OPTIONS, algorithm=Algorithm(correction=name))
    assert torch.equal(plan.coefficient_T, plain.coefficient_T)
    assert torch.equal(plan.sets.l_plus_T, plain.sets.l_plus_T)
    row = update_metrics(plan, batch, None)
    assert (row["correction/weight"], row["correction/bounded"]) == (1.0, 0.0)


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=20)
def test_weights_by_hand_multiply_the_coefficients(name: CorrectionName, seed: int) -> None:
    batch = make_batch()
    scored = statistics_of(batch, seed)
    noise_T = 0.5 * torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(seed))
    batch = sampled_with(batch, scored.logp + noise_T)
    plain = make_plan(batch, scored, controllers(target_entropy=0.0), OPTIONS)
    algorithm = Algorithm(correction=name, options={name: {"most": 1.5}})
    plan = make_plan(batch, scored, controllers(target_entropy=0.0), OPTIONS, algorithm=algorithm)
    expected, bounded = [], 0
    logs = [(-n).tolist() for n in torch.split(noise_T.double(), batch.num_tokens_B.tolist())]
    for trajectory, advantage in zip(logs, batch.advantage_B.tolist(), strict=True):
        for log in trajectory:
            ratio = math.exp(sum(trajectory) if name.startswith("seq") else log)
            weight = min(ratio, 1.5)
            if name.endswith("mis") and (ratio > 1.5 or (name == "mis" and ratio < 0.5)):
                weight = 0.0
            expected.append(weight if advantage else 1.0)
            bounded += bool(advantage) and weight != ratio
    assert plan.correction is not None
    assert plan.correction.weight_T.tolist() == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(plan.coefficient_T, plain.coefficient_T * torch.tensor(expected), rtol=1e-5, atol=1e-9)
    row = update_metrics(plan, batch, None)
    assert row["correction/weight"] == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert row["correction/bounded"] == pytest.approx(bounded / len(expected))


def test_what_is_masked_is_not_ranked() -> None:
    batch = make_batch()
    scored = statistics_of(batch)
    kept = make_plan(batch, scored, controllers(target_entropy=9.0), OPTIONS)
    off_T = torch.where(kept.sets.l_plus_T, 3.0, 0.0)  # far from the sampler's at just these
    batch = sampled_with(batch, scored.logp - off_T)
    plan = make_plan(batch, scored, controllers(target_entropy=9.0), OPTIONS, algorithm=Algorithm(correction="mis"))
    assert not (plan.sets.l_plus_T & kept.sets.l_plus_T).any()
    assert plan.sets.l_plus_T.any()


def test_by_itself_it_is_on_where_rollouts_can_be_stale() -> None:
    keep = ["--rollout.leftovers", "keep", "--rollout.oversample", "0.5", "--engine.kind", "vllm"]
    for overrides, expected in (
        ([], "none"),
        (keep, "tis"),
        ([*keep, "--algorithm.correction", "none"], "none"),
        (["--algorithm.correction", "seq_mis", "--algorithm.options.seq_mis.most", "5.0"], "seq_mis"),
    ):
        algorithm = load_config("quickstart", overrides).chosen_algorithm
        assert algorithm.correction == expected, overrides
    assert algorithm.options == {"seq_mis": {"most": 5.0}}


def coefficients(folder: Path, monkeypatch: pytest.MonkeyPatch, refresh: str, most: int | None) -> list[torch.Tensor]:
    """What reached the learner in an update of two steps."""
    seen: list[torch.Tensor] = []
    step = Learner.step

    def noting(self: Learner, packed: Any, coefficient_T: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        seen.append(coefficient_T)
        return step(self, packed, coefficient_T, *arguments, **named)

    settings = LearnerConfig(optimizer="sgd", lr=0.5, max_micro_sequences=most)
    learner = Learner(load_model(folder, "float32"), settings, temperature=1.0)
    batch = update_batch(synthetic_trajectories())
    scored = learner.score(learner.pack(batch.sequences), batch.num_tokens)
    noise_T = 0.5 * torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1))
    config = StareConfig(variant="none", mini_batches=2, refresh=refresh)  # type: ignore[arg-type]
    algorithm = Algorithm(correction="tis", options={"tis": {"most": 1.2}})
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "step", noting)
        update(
            learner,
            sampled_with(batch, scored.logp + noise_T),
            (),
            start_controllers(config),
            config,
            Clock(),
            algorithm=algorithm,
        )
    learner.close()
    return seen


def test_it_is_that_of_the_batch_in_every_mini_batch_and_on_every_cut(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = coefficients(tiny_folder, monkeypatch, "frozen", None)
    assert len(frozen) == 2
    for ours, refreshed in zip(frozen, coefficients(tiny_folder, monkeypatch, "refreshed", None), strict=True):
        assert torch.equal(ours, refreshed)  # the second part meets other weights, the correction does not
    for ours, cut in zip(frozen, coefficients(tiny_folder, monkeypatch, "frozen", 1), strict=True):
        torch.testing.assert_close(cut, ours, rtol=1e-4, atol=1e-7)
