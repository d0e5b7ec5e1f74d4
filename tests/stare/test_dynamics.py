"""Weights and entropy: what each variant does to the four sets, and the first-order predictions against real steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stare import (
    OPERATIONS,
    EntropyDynamics,
    Variant,
    entropy_dynamics,
    most_chosen,
    omega,
    quadrants,
    selection_report,
    surrogate_sum,
    token_gate,
    token_sets,
    token_statistics,
    token_weights,
)

VARIANTS = tuple(OPERATIONS)
tokens = st.lists(st.tuples(st.floats(0, 9), st.sampled_from([-1.5, -0.5, 0.0, 1.0])), min_size=1, max_size=50)


def batch(num_positions: int = 400, vocabulary: int = 30, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Logits, sampled tokens (by their own distribution) and advantages of a random batch, float64."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2.5 * torch.randn(num_positions, vocabulary, dtype=torch.float64, generator=generator)
    token = torch.multinomial(torch.softmax(logits, -1), 1, generator=generator).flatten()
    advantage = torch.randn(num_positions, dtype=torch.float64, generator=generator)
    return logits, token, advantage


def entropy_of(logits: torch.Tensor) -> torch.Tensor:
    logp = torch.log_softmax(logits, -1)
    return -(logp.exp() * logp).sum(-1)


def test_each_variant_weighs_its_sets_and_nothing_else() -> None:
    #                          L+   U+   U+   L-    U-    U-    none
    surprisal = torch.tensor([3.0, 1.0, 0.5, 3.0, 1.0, 0.2, 9.0])
    advantage = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 0.0])
    expected: dict[Variant, list[float]] = {
        "none": [1, 1, 1, 1, 1, 1, 1],
        "O1": [2, 1, 1, 1, 1, 1, 1],
        "O2": [1, 0.5, 0.5, 1, 1, 1, 1],
        "O3": [1, 1, 1, 1, 2, 2, 1],
        "O4": [1, 1, 1, 0.5, 1, 1, 1],
        "C1": [2, 1, 1, 1, 2, 2, 1],
        "C2": [2, 1, 1, 0.5, 1, 1, 1],
        "C3": [1, 0.5, 0.5, 1, 2, 2, 1],
        "C4": [1, 0.5, 0.5, 0.5, 1, 1, 1],
    }
    assert set(expected) == set(VARIANTS)
    for variant, weights in expected.items():
        got = token_weights(
            surprisal, advantage, gate_on=True, amplify=2.0, attenuate=0.5, fraction=0.1, variant=variant
        )
        assert got.omega_T.tolist() == weights, variant


@given(tokens, st.sampled_from(VARIANTS), st.booleans(), st.floats(0.02, 1))
def test_weights_are_positive_so_every_gradient_keeps_its_sign(
    rows: list[tuple[float, float]], variant: Variant, gate_on: bool, fraction: float
) -> None:
    logp = torch.tensor([-s for s, _ in rows], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([a for _, a in rows], dtype=torch.float64)
    weights = token_weights(
        -logp.detach(), advantage, gate_on=gate_on, amplify=1.4, attenuate=0.6, fraction=fraction, variant=variant
    )
    assert (weights.omega_T > 0).all()
    old = logp.detach()
    (plain,) = torch.autograd.grad(surrogate_sum(logp, old, advantage).loss, logp)
    (weighted,) = torch.autograd.grad(surrogate_sum(logp, old, weights.omega_T * advantage).loss, logp)
    assert torch.equal(weighted.sign(), plain.sign())


@given(st.sampled_from(VARIANTS), st.integers(0, 50))
def test_every_variant_pushes_entropy_up_when_ranked_by_its_exact_sensitivity(variant: Variant, seed: int) -> None:
    """Amplified sets raise entropy on the whole and attenuated ones lower it: a positive leverage, so a W*."""
    logits, token, advantage = batch(seed=seed)
    phi = token_statistics(logits, token).phi
    dynamics = entropy_dynamics(advantage, phi, token_sets(phi, advantage, 1.0, above=0.0), variant)
    assert dynamics.amplified >= 0 >= dynamics.attenuated
    assert (dynamics.leverage > 0) == (variant != "none")


def test_quadrant_signs_and_sum() -> None:
    logits, token, advantage = batch(2000)
    phi = token_statistics(logits, token).phi
    parts = quadrants(advantage, phi)
    assert parts["plus_high"].drift > 0
    assert parts["minus_low"].drift > 0
    assert parts["plus_low"].drift < 0
    assert parts["minus_high"].drift < 0
    assert sum(part.share for part in parts.values()) == pytest.approx(1.0)
    assert sum(part.drift for part in parts.values()) == pytest.approx((advantage * phi).mean().item())


@pytest.mark.parametrize("variant", VARIANTS)
def test_predicted_drift_is_what_a_small_step_does_to_mean_entropy(variant: Variant) -> None:
    logits, token, advantage = batch()
    stats = token_statistics(logits, token)
    sets = token_sets(-stats.logp, advantage, 0.1)
    dynamics = entropy_dynamics(advantage, stats.phi, sets, variant)
    weight = omega(sets, variant, gate=True, amplify=1.3, attenuate=0.6, dtype=torch.float64)
    eta = 1e-6
    step = torch.nn.functional.one_hot(token, logits.shape[1]) - torch.softmax(logits, -1)
    after = entropy_of(logits + eta * (weight * advantage)[:, None] * step)
    measured = (after - entropy_of(logits)).mean().item() / eta
    assert dynamics.drift(1.3, 0.6) == pytest.approx(measured, rel=1e-4)
    parts = quadrants(weight * advantage, stats.phi)
    assert sum(part.drift for part in parts.values()) == pytest.approx(measured, rel=1e-4)


def test_at_the_critical_weight_a_step_leaves_mean_entropy_alone_and_beyond_it_the_sign_turns() -> None:
    logits, token, _ = batch(4000)
    # Good where the token is likely: the residual then pulls entropy down, as in the paper.
    stats = token_statistics(logits, token)
    advantage = torch.where(stats.logp > -1.0, 0.6, 0.5).double()
    sets = token_sets(-stats.logp, advantage, 0.1)
    dynamics = entropy_dynamics(advantage, stats.phi, sets, "O1")
    assert dynamics.residual > 0
    assert dynamics.critical_weight is not None
    step = torch.nn.functional.one_hot(token, logits.shape[1]) - torch.softmax(logits, -1)
    changes = []
    for amplify in (1.0, dynamics.critical_weight, 2 * dynamics.critical_weight - 1):
        weight = omega(sets, "O1", gate=True, amplify=amplify, attenuate=1.0, dtype=torch.float64)
        after = entropy_of(logits + 1e-7 * (weight * advantage)[:, None] * step)
        changes.append((after - entropy_of(logits)).mean().item() / 1e-7)
    assert changes[0] < 0 < changes[2]
    assert abs(changes[1]) < 1e-3 * abs(changes[0])


def test_ranked_by_phi_nothing_is_chosen_that_moves_entropy_the_other_way() -> None:
    phi = torch.tensor([0.2, -0.1, -0.3, -0.4, 0.1, -0.2])
    advantage = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0])
    sets = token_sets(phi, advantage, 0.5, above=0.0)
    assert sets.l_plus_T.tolist() == [True, False, False, False, False, False]
    assert sets.l_minus_T.tolist() == [False, False, False, False, True, False]
    assert sets.named("u_plus").tolist() == [False, True, True, True, False, False]


def test_a_gate_that_a_token_does_not_pass_takes_its_leverage() -> None:
    logits, token, advantage = batch()
    phi = token_statistics(logits, token).phi
    sets = token_sets(phi, advantage, 0.2)
    gate = torch.arange(len(phi)) % 2 == 0
    halved = entropy_dynamics(advantage, phi, sets, "O1", gate=gate)
    assert halved.residual == entropy_dynamics(advantage, phi, sets, "O1").residual
    assert halved.amplified == pytest.approx((advantage * phi)[sets.l_plus_T & gate].sum().item())


def test_an_empty_batch_has_no_dynamics() -> None:
    none = torch.empty(0)
    sets = token_sets(none, none)
    assert entropy_dynamics(none, none, sets, "C2") == EntropyDynamics()
    assert EntropyDynamics().critical_weight is None
    assert EntropyDynamics().drift(1.1, 0.9) == 0.0
    assert all(part.share == part.drift == 0.0 for part in quadrants(none, none).values())
    assert selection_report(sets, none, none).high_entropy is None


def test_gates_per_sample_and_token_by_hand() -> None:
    entropy = torch.tensor([0.1, 0.7, 0.2, 0.2, float("nan"), 0.1])
    sample = torch.tensor([0, 0, 1, 1, 2, 2])
    assert token_gate(entropy, 0.3, "token").tolist() == [True, False, True, True, False, True]
    assert token_gate(entropy, 0.3, "sample", sample).tolist() == [False, False, True, True, False, False]
    with pytest.raises(ValueError, match="sample_T"):
        token_gate(entropy, 0.3, "sample")


def test_selection_report_by_hand() -> None:
    #                        L+    plus  L-    minus
    score = torch.tensor([5.0, 1.0, 5.0, 1.0])
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    sets = token_sets(score, advantage, 0.5)
    report = selection_report(sets, torch.tensor([9.0, 1.0, 2.0, 1.0]), torch.tensor([0.1, -0.1, -0.1, 0.1]))
    assert (report.l_plus_rising, report.l_minus_falling, report.high_entropy) == (1.0, 0.0, 0.5)


def test_most_chosen_counts_and_breaks_ties_by_id() -> None:
    token = torch.tensor([7, 7, 3, 3, 5, 9])
    assert most_chosen(token, torch.tensor([True] * 5 + [False]), 2) == [(3, 2), (7, 2)]
    assert most_chosen(token, torch.zeros(6, dtype=torch.bool)) == []
