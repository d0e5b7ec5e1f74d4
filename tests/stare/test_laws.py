"""What must hold for every input: the identities of the entropy sensitivity, selection, advantage and weights."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stare import (
    group_advantage,
    predicted_entropy_change,
    sensitivity,
    statistics_of_logp,
    surrogate_sum,
    token_scale,
    token_statistics,
    token_weights,
)

finite = st.floats(-8, 8, allow_nan=False, width=32)
logits_lists = st.lists(finite, min_size=2, max_size=12)


def entropy_of(logits: torch.Tensor) -> torch.Tensor:
    logp = torch.log_softmax(logits, -1)
    return -(logp.exp() * logp).sum(-1)


@given(logits_lists)
def test_expected_sensitivity_is_zero(values: list[float]) -> None:
    logits = torch.tensor(values, dtype=torch.float64)
    every_token = torch.arange(len(values))
    phi = sensitivity(logits.expand(len(values), -1), every_token)
    assert abs((torch.softmax(logits, -1) * phi).sum().item()) < 1e-14


@given(logits_lists, st.data())
def test_sensitivity_is_the_derivative_of_entropy_along_the_policy_gradient(
    values: list[float], data: st.DataObject
) -> None:
    token = data.draw(st.integers(0, len(values) - 1))
    logits = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    (entropy_gradient,) = torch.autograd.grad(entropy_of(logits), logits)
    (policy_gradient,) = torch.autograd.grad(torch.log_softmax(logits, -1)[token], logits)
    phi = sensitivity(logits.detach(), torch.tensor(token))
    assert (entropy_gradient * policy_gradient).sum().item() == pytest.approx(phi.item(), abs=1e-12)


def test_predicted_entropy_change_is_what_a_small_step_does() -> None:
    logits = torch.randn(50, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    token = torch.arange(50) % 20
    advantage = torch.linspace(-2, 2, 50, dtype=torch.float64)
    eta = 1e-5
    step = torch.nn.functional.one_hot(token, 20) - torch.softmax(logits, -1)
    measured = entropy_of(logits + eta * advantage[:, None] * step) - entropy_of(logits)
    predicted = predicted_entropy_change(advantage, sensitivity(logits, token), step_size=eta)
    torch.testing.assert_close(measured, predicted, rtol=1e-3, atol=1e-12)


@given(logits_lists)
def test_sensitivity_changes_sign_once_in_surprisal_and_not_above_the_entropy(values: list[float]) -> None:
    logits = torch.tensor(values, dtype=torch.float64)
    stats = token_statistics(logits.expand(len(values), -1), torch.arange(len(values)))
    order = torch.argsort(-stats.logp)
    signs = [s for s in torch.sign(torch.where(stats.phi.abs() < 1e-13, 0, stats.phi))[order].tolist() if s]
    # From unlikely-to-be-negative at low surprisal to positive at high surprisal, at most one change.
    assert signs == sorted(signs)
    assert (stats.phi[-stats.logp > stats.entropy + 1e-9] > -1e-13).all()


def test_statistics_of_logprobs_are_the_same_and_leave_them_alone() -> None:
    logits = torch.randn(40, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    token = torch.arange(40) % 30
    logp = torch.log_softmax(logits, -1)
    kept = logp.detach().clone()
    with torch.no_grad():
        found = statistics_of_logp(logp, token)
        expected = token_statistics(logits, token)
    with_gradient = token_statistics(logits, token)
    for ours, theirs, differentiable in zip(found, expected, with_gradient, strict=True):
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(differentiable.detach(), theirs)
    assert torch.equal(logp.detach(), kept)
    (gradient,) = torch.autograd.grad(with_gradient.entropy.sum(), logits)
    (by_autograd,) = torch.autograd.grad(entropy_of(logits).sum(), logits)
    torch.testing.assert_close(gradient, by_autograd)


def test_statistics_survive_masked_out_logits() -> None:
    stats = token_statistics(torch.tensor([[0.0, 0.0, -math.inf]]), torch.tensor([1]))
    assert stats.logp.item() == pytest.approx(-math.log(2))
    assert stats.entropy.item() == pytest.approx(math.log(2))
    assert stats.phi.item() == pytest.approx(0.0, abs=1e-7)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(finite, st.sampled_from([-1.0, 0.0, 1.0])), min_size=1, max_size=40),
    st.sampled_from(["none", "O1", "C2"]),
)
def test_gate_off_or_neutral_weights_is_exactly_grpo(rows: list[tuple[float, float]], variant: str) -> None:
    logp = torch.tensor([-abs(value) for value, _ in rows], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([a for _, a in rows], dtype=torch.float64)
    scale = token_scale(torch.tensor([len(rows)]), "token-mean")[0]
    (plain,) = torch.autograd.grad(surrogate_sum(logp, logp.detach() - 0.1, advantage * scale).loss, logp)
    for gate_on, amplify, attenuate in [(False, 1.7, 0.3), (True, 1.0, 1.0)]:
        weights = token_weights(
            -logp.detach(),
            advantage,
            gate_on=gate_on,
            amplify=amplify,
            attenuate=attenuate,
            variant=variant,  # type: ignore[arg-type]
        )
        coefficient = weights.omega_T * advantage * scale
        (gradient,) = torch.autograd.grad(surrogate_sum(logp, logp.detach() - 0.1, coefficient).loss, logp)
        assert torch.equal(gradient, plain)


def test_omega_is_one_where_the_advantage_is_zero() -> None:
    weights = token_weights(
        torch.tensor([9.0, 1.0, 9.0]),
        torch.tensor([0.0, 1.0, -1.0]),
        gate_on=True,
        amplify=1.5,
        attenuate=0.5,
        variant="C2",
    )
    assert weights.omega_T.tolist() == [1.0, 1.5, 0.5]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 1.0])), min_size=1, max_size=24))
def test_advantages_of_each_group_sum_to_zero_and_lone_or_constant_groups_are_zero(
    rows: list[tuple[int, float]],
) -> None:
    group = torch.tensor([g for g, _ in rows])
    reward = torch.tensor([r for _, r in rows], dtype=torch.float64)
    advantage = group_advantage(reward, group)
    for g in set(group.tolist()):
        members = advantage[group == g]
        assert abs(members.sum().item()) < 1e-9
        if len(set(reward[group == g].tolist())) == 1:
            assert members.eq(0).all()


def test_advantage_of_a_group_does_not_depend_on_other_groups() -> None:
    reward, group = torch.tensor([0.0, 1.0, 1.0, 5.0, 7.0]), torch.tensor([3, 3, 3, 1, 1])
    assert torch.equal(group_advantage(reward, group)[:3], group_advantage(reward[:3], group[:3]))


def test_an_unscored_reward_is_refused() -> None:
    with pytest.raises(ValueError, match="void"):
        group_advantage(torch.tensor([0.0, math.nan]), torch.tensor([0, 0]))


def test_unknown_loss_mode_is_named() -> None:
    with pytest.raises(ValueError, match="token-median"):
        token_scale(torch.tensor([1]), "token-median")  # type: ignore[arg-type]
