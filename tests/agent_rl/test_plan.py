"""The plan: mini-batches, a target for each scenario, gates per sample and token, reused logprobs, what is recorded."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from agent_rl import checkpoint
from agent_rl.checkpoint import RunState
from agent_rl.config import StareConfig
from agent_rl.entropy_report import change_correlations, chosen_text, correlation, entropy_table
from agent_rl.learner import StepReport
from agent_rl.plan import (
    PlanOptions,
    UpdateBatch,
    frozen_coefficients,
    make_plan,
    mini_batches,
    observe,
    plan_from_sampler,
    update_batch,
)
from agent_rl.records import RunRecords, read_rows, update_metrics
from agent_rl.sampling import SamplingState
from agent_rl.types import Trajectory
from agent_rl.update import start_controllers
from envs.types import Task
from stare import Controller, ControllerConfig, TokenStatistics, token_weights


def trajectory(group: int, member: int, reward: float, length: int, scenario: str | None = None) -> Trajectory:
    """Prompt of two, ``length`` sampled ids, one observed id, one more sampled id."""
    mask = (False, False, *[True] * length, False, True)
    generator = torch.Generator().manual_seed(100 * group + member)
    return Trajectory(
        task=Task(id=f"t{group}", prompt="", answer="", meta={} if scenario is None else {"scenario": scenario}),
        group=group,
        member=member,
        token_ids=tuple(torch.randint(0, 5, (len(mask),), generator=generator).tolist()),
        loss_mask=mask,
        logprobs=tuple(-0.5 - 0.01 * i if flag else 0.0 for i, flag in enumerate(mask)),
        turns=(),
        messages=(),
        reward=reward,
    )


def make_batch(num_groups: int = 4, scenarios: tuple[str | None, ...] = (None,)) -> UpdateBatch:
    rewards = (1.0, 0.0, 0.5)
    return update_batch(
        [
            trajectory(group, member, reward, 3 + (2 * group + member) % 5, scenarios[group % len(scenarios)])
            for group in range(num_groups)
            for member, reward in enumerate(rewards)
        ]
    )


def statistics_of(batch: UpdateBatch, seed: int = 0) -> TokenStatistics:
    generator = torch.Generator().manual_seed(seed)
    logp, entropy = (torch.empty(batch.num_tokens).exponential_(generator=generator) for _ in range(2))
    return TokenStatistics(-logp, entropy, torch.randn(batch.num_tokens, generator=generator))


def controllers(**settings: object) -> dict[str, Controller]:
    return {"default": Controller.start(ControllerConfig(**settings))}  # type: ignore[arg-type]


OPTIONS = PlanOptions(variant="C2", fraction=0.2)


def test_mini_batches_partition_the_batch_by_whole_groups() -> None:
    batch = make_batch(5)
    parts = mini_batches(batch, 3)
    assert [t for part, _ in parts for t in part.trajectories] == list(batch.trajectories)
    assert torch.cat([part.token_T for part, _ in parts]).equal(batch.token_T)
    for part, tokens in parts:
        assert part.token_T.equal(batch.token_T[tokens])
    groups = [{t.group for t in part.trajectories} for part, _ in parts]
    assert sorted(map(len, groups)) == [1, 2, 2]
    assert not groups[0] & groups[1]
    assert len(mini_batches(batch, 50)) == 5  # no part is empty


def test_one_mini_batch_has_the_coefficients_of_the_plan() -> None:
    batch = make_batch()
    plan = make_plan(batch, statistics_of(batch), controllers(target_entropy=9.0), OPTIONS)
    ((part, tokens),) = mini_batches(batch, 1)
    assert torch.equal(frozen_coefficients(plan, part, tokens, "token-mean"), plan.coefficient_T)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_a_frozen_part_is_normalised_by_itself(mode: str) -> None:
    batch = make_batch()
    plan = make_plan(batch, statistics_of(batch), controllers(target_entropy=0.0), replace(OPTIONS, loss_mode=mode))  # type: ignore[arg-type]
    for part, tokens in mini_batches(batch, 2):
        alone = make_plan(part, plan.statistics(tokens), plan.controllers, replace(OPTIONS, loss_mode=mode))  # type: ignore[arg-type]
        # The gate is off, so that the choice does not matter: what is left is advantage and normaliser.
        assert torch.equal(frozen_coefficients(plan, part, tokens, mode), alone.coefficient_T)  # type: ignore[arg-type]


def test_each_scenario_is_held_at_its_own_target() -> None:
    batch = make_batch(4, ("long_cot", "tool_use", None, "unheard_of"))
    config = StareConfig(variant="C2", fraction=0.2, target_entropy=0.0, targets={"long_cot": 9.0, "tool_use": 0.0})
    statistics = statistics_of(batch)
    plan = make_plan(batch, statistics, start_controllers(config), config.plan)
    scenario_T = torch.cat(
        [torch.full((len(s.positions),), t.group) for t, s in zip(batch.trajectories, batch.sequences, strict=True)]
    )
    assert {name: c.gate_on for name, c in plan.controllers.items()} == {
        "default": False,
        "long_cot": True,
        "tool_use": False,
    }
    # The choice is still over the whole batch; only the tokens of the open gate carry their weight.
    whole = token_weights(
        -statistics.logp, plan.advantage_T, gate_on=True, amplify=1.1, attenuate=0.9, fraction=0.2, variant="C2"
    )
    expected = torch.where(scenario_T == 0, whole.omega_T.double(), 1.0)
    torch.testing.assert_close(plan.omega_T, expected)
    for name, groups in (("long_cot", [0]), ("tool_use", [1]), ("default", [2, 3])):
        members = torch.isin(scenario_T, torch.tensor(groups))
        assert plan.scenarios[name].num_tokens == int(members.sum())
        assert plan.scenarios[name].entropy == pytest.approx(statistics.entropy[members].mean().item())


def test_a_scenario_that_a_batch_lacks_keeps_its_state() -> None:
    config = StareConfig(controller="adaptive", targets={"long_cot": 0.5})
    before = start_controllers(config)
    batch = make_batch()
    plan = make_plan(batch, statistics_of(batch), before, config.plan)
    assert plan.controllers["long_cot"] == before["long_cot"]
    assert plan.controllers["default"] != before["default"]
    row = update_metrics(plan, batch, None)
    assert row["entropy/long_cot"] is None
    assert row["tracking_error/long_cot"] is None


@pytest.mark.parametrize("granularity", ["sample", "token"])
def test_a_gate_per_sample_or_token_opens_where_entropy_is_low(granularity: str) -> None:
    batch = make_batch()
    statistics = statistics_of(batch)
    target = statistics.entropy.median().item()
    options = replace(OPTIONS, variant="C1", fraction=1.0, granularity=granularity)  # type: ignore[arg-type]
    plan = make_plan(batch, statistics, controllers(target_entropy=target), options)
    row_T = torch.repeat_interleave(torch.arange(len(batch.sequences)), batch.num_tokens_B)
    for token in range(batch.num_tokens):
        mine = (
            statistics.entropy[token : token + 1]
            if granularity == "token"
            else statistics.entropy[row_T == row_T[token]]
        )
        is_open = bool(mine.double().mean() < target)
        amplified = bool(plan.sets.l_plus_T[token])  # with P = 1, C1 amplifies all of A > 0
        assert plan.omega_T[token].item() == (1.1 if is_open and amplified else 1.0)


@pytest.mark.parametrize("selector", ["surprisal", "phi", "entropy"])
def test_the_selector_decides_what_is_ranked(selector: str) -> None:
    batch = make_batch()
    statistics = statistics_of(batch)
    plan = make_plan(batch, statistics, controllers(), replace(OPTIONS, selector=selector))  # type: ignore[arg-type]
    score = {"surprisal": -statistics.logp, "phi": statistics.phi, "entropy": statistics.entropy}[selector]
    chosen, rest = score[plan.sets.l_plus_T], score[(plan.advantage_T > 0) & ~plan.sets.l_plus_T]
    assert chosen.min() >= rest[rest > 0].max() if selector == "phi" else chosen.min() >= rest.max()
    if selector == "phi":
        assert chosen.min() > 0


def test_reused_logprobs_choose_now_and_steer_the_next_step() -> None:
    batch = make_batch()
    options = replace(OPTIONS, variant="O1")
    before = controllers(kind="adaptive", target_entropy=0.5)
    plan = plan_from_sampler(batch, before, options)
    assert plan.entropy is None
    assert plan.controllers == before
    assert torch.equal(plan.logp_old_T, batch.sampler_logp_T)
    statistics = statistics_of(batch)
    after = observe(batch, plan, statistics, options)
    assert torch.equal(after.coefficient_T, plan.coefficient_T)
    assert after.acting == before
    scored = make_plan(batch, TokenStatistics(batch.sampler_logp_T, *statistics[1:]), before, options)
    assert after.controllers == scored.controllers  # moved by the same entropy, a step later
    row = update_metrics(after, batch, None)
    assert (row["W"], row["entropy"]) == (before["default"].amplify, pytest.approx(statistics.entropy.mean().item()))


def test_the_metrics_of_a_plan_are_strict_json_with_decoded_tokens(tmp_path: Path) -> None:
    batch = make_batch()
    plan = make_plan(batch, statistics_of(batch), controllers(kind="model", target_entropy=9.0), OPTIONS)
    report = StepReport(loss=0.1, grad_norm=1.0, clip_fraction=0.0, lr=1e-6, num_micro_batches=1)
    row = update_metrics(plan, batch, report, entropy_change=-0.01, decode=lambda token: "abcde"[token])
    records = RunRecords(tmp_path, first_step=1)
    records.write(1, row, [])
    records.close()
    (stored,) = read_rows(tmp_path / "metrics.jsonl")
    assert stored == json.loads(json.dumps({"step": 1, **row}))
    assert sum(count for _, count in stored["chosen_tokens"]) == stored["l_plus"]
    assert {text for text, _ in stored["chosen_tokens"]} <= set("abcde")
    drifts = [value for name, value in stored.items() if name.startswith("quadrant/") and name.endswith("/drift")]
    assert len(drifts) == 4
    assert sum(drifts) == pytest.approx(stored["entropy_drift"])
    weight = plan.omega_T * plan.advantage_T
    assert stored["entropy_drift"] == pytest.approx((weight * plan.phi_T).mean().item())
    assert stored["weighted"] == pytest.approx((plan.omega_T != 1).double().mean().item())


def test_controllers_come_back_from_a_checkpoint_as_they_were(tmp_path: Path) -> None:
    config = StareConfig(controller="model", targets={"long_cot": 0.5})
    batch = make_batch(2, ("long_cot", None))
    plan = make_plan(batch, statistics_of(batch), start_controllers(config), config.plan)
    state = RunState(step=3, cursor=8, seed=0, controllers=dict(plan.controllers), sampling=SamplingState())
    folder = checkpoint.save(tmp_path, state, lambda folder: None, keep=1)
    assert checkpoint.read_state(folder) == state
    assert asdict(checkpoint.read_state(folder)) == asdict(state)


def test_the_report_finds_how_well_the_prediction_did() -> None:
    drifts = [0.3, -0.2, 0.1, -0.4, 0.2]
    rows = [
        {"step": i, "lr": 1e-3, "entropy_drift": drift, "entropy_change": 2e-3 * drift, "entropy": 0.3, "W": 1.1}
        for i, drift in enumerate(drifts)
    ]
    found = change_correlations(rows)
    assert found["same batch"] == (pytest.approx(1.0), 5)
    assert found["next batch"] is None  # entropy never moved: there is nothing to correlate with
    assert correlation([(1.0, 2.0), (None, 1.0), (2.0, 1.0)]) is None
    # Square brackets are what tokens may have, and no markup.
    rows[0]["chosen_tokens"], rows[1]["chosen_tokens"] = [["[i", 2], ["]", 1]], [["]", 4], ["[/", 1]]
    assert chosen_text(rows) == "']' 5 '[i' 2 '[/' 1"
    table = entropy_table(rows, target_entropy=0.3)
    assert table is not None
    console = Console(width=140, record=True, quiet=False, file=StringIO())
    console.print(table)
    text = console.export_text()
    assert "1.00 (n = 5)" in text
    assert "most in L+: ']' 5 '[i' 2 '[/' 1" in text
    assert "within 10 % of target" in text
    assert entropy_table([{"step": 1, "entropy": None}], target_entropy=0.3) is None
