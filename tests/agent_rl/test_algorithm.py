"""Methods chosen by name reach the plan: advantages, token weights before STARE, and clear refusals."""

from __future__ import annotations

import pytest
import torch
from test_plan import OPTIONS, controllers, make_batch, statistics_of, trajectory

from agent_rl.algorithm import Algorithm
from agent_rl.config import ConfigError, load_config
from agent_rl.plan import PlanOptions, make_plan, update_batch
from agent_rl.tryout import try_out
from stare.neighbours import METHODS, Tokens

ADVANTAGES = [m.name for m in METHODS.values() if m.hook == "advantage" and m.is_trainable]
WEIGHTS = [m.name for m in METHODS.values() if m.hook == "token weight" and m.is_trainable and m.name != "stare"]
PLAIN = PlanOptions(variant="none")


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_trainable_advantage_makes_a_batch(name: str) -> None:
    trajectories = [
        trajectory(group, member, reward, 4 + member)
        for group in range(3)
        for member, reward in enumerate((1.0, 0.0, 0.0) if group else (1.0, 1.0, 1.0))
    ]
    options = {"pass_at_k": {"k": 2}} if name == "pass_at_k" else {}
    batch = update_batch(trajectories, Algorithm(advantage=name, options=options))
    assert {t.group for t in batch.trajectories} == {1, 2}  # the group without a difference has nothing to say
    assert torch.isfinite(batch.advantage_B).all()
    assert (batch.advantage_B != 0).any()


@pytest.mark.parametrize("name", WEIGHTS)
def test_every_trainable_token_weight_multiplies_the_coefficients(name: str) -> None:
    batch = make_batch()
    scored = statistics_of(batch)
    reference = scored.logp + 0.1
    algorithm = Algorithm(token_weights=(name,))
    plain = make_plan(batch, scored, controllers(), PLAIN)
    weighted = make_plan(batch, scored, controllers(), PLAIN, algorithm=algorithm, reference_logp_T=reference)
    tokens = Tokens(
        logp_T=scored.logp,
        entropy_T=scored.entropy,
        advantage_T=plain.advantage_T,
        row_T=torch.repeat_interleave(torch.arange(len(batch.sequences)), batch.num_tokens_B),
        sampler_logp_T=batch.sampler_logp_T,
        reference_logp_T=reference,
    )
    expected = plain.coefficient_T * METHODS[name].function(tokens)
    torch.testing.assert_close(weighted.coefficient_T, expected.float())


def test_weights_compose_and_what_they_silence_is_not_ranked() -> None:
    batch = make_batch()
    scored = statistics_of(batch)
    algorithm = Algorithm(token_weights=("forking", "steer"), options={"forking": {"fraction": 0.5}})
    plan = make_plan(batch, scored, controllers(target_entropy=9.0), OPTIONS, algorithm=algorithm)
    silenced = plan.advantage_T == 0
    kept = make_plan(batch, scored, controllers(target_entropy=9.0), OPTIONS)
    assert int(silenced.sum()) > int((kept.advantage_T == 0).sum())
    assert (kept.sets.l_plus_T & silenced).any()  # ranked, had it not been silenced
    assert not (plan.sets.l_plus_T & silenced).any()
    assert (plan.omega_T[silenced] == 1).all()
    assert (plan.omega_T != 1).any()


def test_by_name_on_the_command_line() -> None:
    overrides = ["--algorithm.advantage", "pass_at_k", "--algorithm.options.pass_at_k.k", "2"]
    for names in ('["forking", "stapo"]', "forking,stapo", "forking, stapo"):
        config = load_config("quickstart", [*overrides, "--algorithm.token_weights", names])
        assert config.chosen_algorithm == Algorithm(
            advantage="pass_at_k", token_weights=("forking", "stapo"), options={"pass_at_k": {"k": 2}}
        )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--algorithm.advantage", "rlo"], "did you mean 'rloo'"),
        (["--algorithm.advantage", "progrpo"], "cannot be trained with"),
        (["--algorithm.token_weights", '["stare"]'], "always on, by its own section"),
        (["--algorithm.options.rloo.k", "2"], "options for 'rloo', which is not chosen"),
        (["--algorithm.options.grpo.k", "2"], "grpo has no option 'k'"),
        (["--stare.score", "reuse", "--algorithm.token_weights", '["forking"]'], "need stare.score 'exact'"),
    ],
)
def test_what_cannot_be_is_said(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("quickstart", overrides)


EVERY = [
    *ADVANTAGES,
    *WEIGHTS,
    *(m.name for m in METHODS.values() if m.hook in ("ratio", "regulariser", "turn advantage")),
]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("group", [2, 5])
def test_every_method_passes_with_its_own_options(name: str, group: int) -> None:
    field = {"turn advantage": "advantage", "token weight": "token_weights", "regulariser": "regularisers"}
    entry = METHODS[name]
    if entry.needs:
        return
    names = (name,) if entry.hook in ("token weight", "regulariser") else name
    options = {name: {"k": 1}} if name == "pass_at_k" else {}
    try_out(Algorithm(**{field.get(entry.hook, entry.hook): names}, options=options), group)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ("advantage pass_at_k", "pass_at_k: advantage 0 throughout in a group of 4 with one right"),
        ("advantage pass_at_k options.pass_at_k.k two", "pass_at_k with options {'k': 'two'}"),
        ("token_weights forking options.forking.fraction 20", r"fraction must be in \(0, 1\], got 20"),
        ("token_weights steer options.steer.weakest 0", "algorithm's steer with options {'weakest': 0}"),
        ("ratio gspo options.gspo.clip_low yes", "algorithm's gspo with options {'clip_low': 'yes'}"),
        ("regularisers adaptive_entropy options.adaptive_entropy.step x", "algorithm's adaptive_entropy with options"),
        ("correction mis options.mis.most nan", r"mis with options \{'most': nan\}: weight 0 for every token"),
    ],
)
def test_options_that_no_method_can_work_with_are_refused_before_the_run(overrides: str, complaint: str) -> None:
    pairs = [word if i % 2 else f"--algorithm.{word}" for i, word in enumerate(overrides.split())]
    with pytest.raises(ConfigError, match=complaint):
        load_config("quickstart", ["--rollout.group", "4", *pairs])


def test_a_threshold_for_rewards_of_another_scale_is_no_fault() -> None:
    options = {"pass_at_k": {"k": 2, "threshold": 1.5}}
    try_out(Algorithm(advantage="pass_at_k", options=options), 4)
