"""Advantages per turn and ratio rules chosen by name, from trajectories down to a real learner's step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_plan import controllers, statistics_of, trajectory

from agent_rl.algorithm import Algorithm, RatioRule, tokens_of_turns, turns_of
from agent_rl.config import ConfigError, LearnerConfig, StareConfig, load_config
from agent_rl.learner import Learner
from agent_rl.models import load_model
from agent_rl.pack import SampledSequence
from agent_rl.plan import PlanOptions, make_plan, mini_batches, update_batch
from agent_rl.progress import Clock
from agent_rl.types import Trajectory, Turn
from agent_rl.update import start_controllers, update
from stare.neighbours import METHODS
from stare.neighbours.token_weights import entropy_signal

TURN_ADVANTAGES = [m.name for m in METHODS.values() if m.hook == "turn advantage" and m.is_trainable]
RATIOS = [m.name for m in METHODS.values() if m.hook == "ratio"]


def with_turns(group: int, member: int, reward: float, length: int, *, second: bool = True) -> Trajectory:
    """P P a.. E b, as turns [2, 2 + length) and, with ``second``, [3 + length, 4 + length)."""
    made = trajectory(group, member, reward, length)
    made = replace(made, token_ids=(7, group, *made.token_ids[2:]))
    spans = [(2, 2 + length), (3 + length, 4 + length)]
    turns = tuple(Turn(start=a, end=b, weight_version=0, finish_reason="stop") for a, b in spans)
    if second:
        return replace(made, turns=turns)
    cut = 2 + length
    return replace(
        made,
        turns=turns[:1],
        token_ids=made.token_ids[:cut],
        loss_mask=made.loss_mask[:cut],
        logprobs=made.logprobs[:cut],
    )


def batch_of_turns() -> list[Trajectory]:
    return [
        with_turns(group, member, reward, 3 + member, second=member != 1)
        for group in range(3)
        for member, reward in enumerate((1.0, 0.0, 0.0, 1.0) if group else (1.0, 1.0, 1.0))
    ]


def test_turns_by_hand() -> None:
    first, other = with_turns(4, 0, 1.0, 3), with_turns(4, 1, 0.5, 2, second=False)
    turns = turns_of([first, other])
    assert turns.reward_U.tolist() == [0.0, 1.0, 0.5]
    assert turns.group_U.tolist() == [4, 4, 4]
    assert turns.trajectory_U.tolist() == [0, 0, 1]
    assert turns.number_U.tolist() == [0, 1, 0]
    assert turns.anchor_U.tolist() == [0, 1, 0]
    assert tokens_of_turns(first) == [3, 1]
    assert tokens_of_turns(replace(first, turns=())) == [4]


@pytest.mark.parametrize("name", TURN_ADVANTAGES)
def test_every_trainable_turn_advantage_reaches_its_tokens(name: str) -> None:
    trajectories = batch_of_turns()
    batch = update_batch(trajectories, Algorithm(advantage=name))
    assert {t.group for t in batch.trajectories} == {1, 2}  # the group without a difference has nothing to say
    kept = list(batch.trajectories)
    expected: list[float] = []
    values = METHODS[name].function(turns_of([t for t in trajectories if t.group]))
    turn = 0
    for t in kept:
        for count in tokens_of_turns(t):
            expected += [float(values[turn])] * count
            turn += 1
    if name != "mapo":  # the left-out group takes part in its batch normalisation
        assert batch.advantage_T.tolist() == pytest.approx(expected)
    assert len(batch.advantage_T) == batch.num_tokens
    plan = make_plan(batch, statistics_of(batch), controllers(), PlanOptions(variant="none"))
    assert torch.equal(plan.coefficient_T, (batch.advantage_T / batch.num_tokens).float())
    parts = mini_batches(batch, 2)
    assert torch.equal(torch.cat([part.advantage_T for part, _ in parts]), batch.advantage_T)


def test_segments_of_ratio_rules() -> None:
    kept = batch_of_turns()[:2]
    by_turn, by_trajectory = (Algorithm(ratio=name).ratio_rule(kept) for name in ("turn_ratio", "gspo"))
    assert by_turn is not None
    assert by_trajectory is not None
    assert by_turn.segment_T is not None
    assert by_trajectory.segment_T is not None
    assert by_turn.segment_T.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert by_trajectory.segment_T.tolist() == [0] * 4 + [1] * 4
    assert Algorithm().ratio_rule(kept) is None


SEQUENCES = [
    SampledSequence(token_ids=tuple(range(3, 3 + length)), positions=tuple(range(5, length))) for length in (30, 41, 17)
]
COUNTS = torch.tensor([len(s.positions) for s in SEQUENCES])
SEGMENT = torch.repeat_interleave(torch.arange(3), COUNTS)
COEFFICIENT = torch.tensor([1.0, -0.5, 0.25])[SEGMENT] / len(SEGMENT)


def stepped(folder: Path, name: str, old_T: torch.Tensor | None, **settings: Any) -> dict[str, torch.Tensor]:
    config = LearnerConfig(optimizer="sgd", lr=0.5, grad_clip=1e9, **settings)
    learner = Learner(load_model(folder, "float32"), config, temperature=1.0)
    rule = None
    if name != "default":
        segment = SEGMENT if name in ("gspo", "gmpo", "turn_ratio") else None
        signal = torch.linspace(1, -1, len(SEGMENT)) if name == "hapo_clip" else None
        rule = RatioRule(name=name, options={}, segment_T=segment, signal_T=signal)
    packed = learner.pack(SEQUENCES)
    if old_T is None:
        noise = torch.linspace(-0.3, 0.3, len(SEGMENT))
        old_T = learner.score(packed, len(SEGMENT)).logp + noise
    learner.step(packed, COEFFICIENT, old_T, rule=rule)
    weights = {key: tensor.clone() for key, tensor in learner.named_tensors()}
    learner.close()
    return weights


@pytest.mark.parametrize("name", RATIOS)
def test_a_ratio_rule_moves_a_real_model_the_same_way_however_the_batch_is_cut(tiny_folder: Path, name: str) -> None:
    whole = stepped(tiny_folder, name, None)
    cut = stepped(tiny_folder, name, None, max_micro_sequences=1)
    default = stepped(tiny_folder, "default", None)
    for key, tensor in whole.items():
        torch.testing.assert_close(cut[key], tensor, rtol=1e-4, atol=1e-6)
    same = all(torch.equal(whole[key], default[key]) for key in whole)
    assert same == (name == "dapo")  # the default is the learner's own clip, bit for bit


def test_ratio_and_turn_advantage_on_the_command_line() -> None:
    overrides = ["--algorithm.advantage", "trloo", "--algorithm.ratio", "cispo"]
    config = load_config("quickstart", [*overrides, "--algorithm.options.cispo.clip_high", "5.0"])
    assert config.chosen_algorithm == Algorithm(advantage="trloo", ratio="cispo", options={"cispo": {"clip_high": 5.0}})
    for wrong, message in (
        (["--algorithm.ratio", "cisp"], "did you mean 'cispo'"),
        (["--algorithm.ratio", "rloo"], "is of hook 'advantage', not 'ratio'"),
        (["--algorithm.advantage", "igpo"], "cannot be trained with"),
        (["--algorithm.options.dapo.clip_low", "0.1"], "learner.clip_low"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config("quickstart", wrong)


@pytest.mark.parametrize(("mini", "ratio"), [(1, "gspo"), (2, "gspo"), (2, "hapo_clip")])
def test_a_whole_update_by_other_methods_does_not_depend_on_the_cut(tiny_folder: Path, mini: int, ratio: str) -> None:
    algorithm = Algorithm(advantage="trloo", ratio=ratio, token_weights=("steer",))
    trajectories = batch_of_turns()
    batch = update_batch(trajectories, algorithm)
    config = StareConfig(variant="O1", mini_batches=mini)
    results = []
    for most in (None, 1):
        settings = LearnerConfig(optimizer="sgd", lr=0.5, max_micro_sequences=most)
        learner = Learner(load_model(tiny_folder, "float32"), settings, temperature=1.0)
        before = {key: tensor.clone() for key, tensor in learner.named_tensors()}
        controllers_before = start_controllers(config)
        plan, _ = update(learner, batch, trajectories, controllers_before, config, Clock(), algorithm=algorithm)
        assert plan is not None
        results.append({key: tensor.clone() for key, tensor in learner.named_tensors()})
        learner.close()
    assert any(not torch.equal(results[0][key], before[key]) for key in before)
    for key, tensor in results[0].items():
        torch.testing.assert_close(results[1][key], tensor, rtol=1e-4, atol=1e-6)


def test_the_entropy_that_hapo_clips_by_is_that_of_the_whole_batch(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules: list[RatioRule] = []
    step = Learner.step

    def noting(self: Learner, *arguments: Any, rule: RatioRule, **named: Any) -> Any:
        rules.append(rule)
        return step(self, *arguments, rule=rule, **named)

    monkeypatch.setattr(Learner, "step", noting)
    algorithm = Algorithm(ratio="hapo_clip", options={"hapo_clip": {"alpha": 0.5}})
    batch = update_batch(batch_of_turns(), algorithm)
    learner = Learner(load_model(tiny_folder, "float32"), LearnerConfig(max_micro_sequences=1), temperature=1.0)
    config = StareConfig(mini_batches=2)
    plan, _ = update(learner, batch, (), start_controllers(config), config, Clock(), algorithm=algorithm)
    learner.close()
    assert plan is not None
    assert plan.entropy_T is not None
    signals = [rule.signal_T for rule in rules if rule.signal_T is not None]
    assert len(signals) == 2
    assert torch.equal(torch.cat(signals), entropy_signal(plan.entropy_T))
