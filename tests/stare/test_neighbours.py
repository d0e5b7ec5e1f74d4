"""Advantages per trajectory and per turn against second, naive implementations written from the formulas."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from itertools import combinations, permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stare.neighbours import METHODS, Turns
from stare.neighbours import turns as turn_methods
from stare.neighbours.advantages import (
    a_grae,
    dr_grpo,
    grpo,
    ngrpo,
    nsr,
    pass_at_k,
    progrpo,
    psr,
    qae,
    reinforce_pp_baseline,
    rloo,
    unlikeliness,
    w_reinforce,
)

Rows = list[tuple[int, float]]
rows = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.0, 0.25, 1.0])), min_size=1, max_size=24)


def columns(pairs: Rows) -> tuple[Tensor, Tensor]:
    return torch.tensor([r for _, r in pairs], dtype=torch.float64), torch.tensor([g for g, _ in pairs])


def by_group(pairs: Rows, advantage: Callable[[list[float], int], float]) -> list[float]:
    """What a function of a group's rewards and a member's place says, 0 for groups without a difference."""
    result = []
    for place, (group, _) in enumerate(pairs):
        members = [i for i, (g, _) in enumerate(pairs) if g == group]
        rewards = [pairs[i][1] for i in members]
        result.append(0.0 if len(set(rewards)) < 2 else advantage(rewards, members.index(place)))
    return result


def naive_qae(rewards: list[float], place: int) -> float:
    baseline = min(v for v in rewards if sum(r <= v for r in rewards) >= 0.4 * len(rewards) - 1e-9)
    return (rewards[place] - baseline) / (statistics.stdev(rewards) + 1e-6)


def naive_ngrpo(rewards: list[float], place: int) -> float:
    extended = [*rewards, 1.0]
    return (rewards[place] - statistics.mean(extended)) / (statistics.stdev(extended) + 1e-6)


NAIVE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[list[float], int], float]]] = {
    "grpo": (grpo, lambda r, i: (r[i] - statistics.mean(r)) / (statistics.stdev(r) + 1e-6)),
    "dr_grpo": (dr_grpo, lambda r, i: r[i] - statistics.mean(r)),
    "rloo": (rloo, lambda r, i: r[i] - statistics.mean(r[:i] + r[i + 1 :])),
    "w_reinforce": (w_reinforce, lambda r, i: 0.1 if r[i] > 0.5 else -1.0),
    "psr": (psr, lambda r, i: 1.0 if r[i] > 0.5 else 0.0),
    "nsr": (nsr, lambda r, i: 0.0 if r[i] > 0.5 else -1.0),
    "ngrpo": (ngrpo, naive_ngrpo),
    "qae": (qae, naive_qae),
}


@pytest.mark.parametrize("name", NAIVE)
@given(pairs=rows)
@settings(max_examples=40)
def test_advantage_is_the_formula(name: str, pairs: Rows) -> None:
    ours, formula = NAIVE[name]
    assert ours(*columns(pairs)).tolist() == pytest.approx(by_group(pairs, formula), abs=1e-9)


@given(pairs=rows)
def test_reinforce_pp_divides_by_the_batch(pairs: Rows) -> None:
    centred = by_group(pairs, lambda r, i: r[i] - statistics.mean(r))
    spread = statistics.stdev(centred) + 1e-8 if len(centred) > 1 else 1.0
    expected = [c / spread for c in centred]
    assert reinforce_pp_baseline(*columns(pairs)).tolist() == pytest.approx(expected, abs=1e-8)


@given(rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=4, max_size=8), k=st.integers(1, 4))
@settings(max_examples=40)
def test_pass_at_k_is_the_mean_over_all_sets_of_k(rewards: list[float], k: int) -> None:
    """Brute force: a set's reward is its best member's; a member's advantage is the mean over the sets it is in."""
    got = pass_at_k(torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards)), k=k).tolist()
    sets = list(combinations(range(len(rewards)), k))
    best = [max(rewards[i] for i in chosen) for chosen in sets]
    mean = statistics.mean(best)
    spread = math.sqrt(mean * (1 - mean))
    for i, value in enumerate(got):
        mine = [b for b, chosen in zip(best, sets, strict=True) if i in chosen]
        expected = 0.0 if spread == 0 or len(set(rewards)) < 2 else (statistics.mean(mine) - mean) / spread
        assert value == pytest.approx(expected, abs=1e-9)


def test_pass_at_k_of_a_group_that_lost_members_is_zero() -> None:
    """An infrastructure failure may leave fewer than k: that group says nothing, and the others go on."""
    reward_B, group_B = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1, 1, 1, 1])
    found = pass_at_k(reward_B, group_B)
    assert found[:2].tolist() == [0.0, 0.0]
    assert torch.equal(found[2:], pass_at_k(reward_B[2:], group_B[2:]))
    assert (found[2:] != 0).any()
    with pytest.raises(ValueError, match="k >= 1, got 0"):
        pass_at_k(reward_B, group_B, k=0)


@given(pairs=rows, seed=st.integers(0, 99))
@settings(max_examples=30)
def test_unlikeliness_ranks_by_logprob(pairs: Rows, seed: int) -> None:
    logp = torch.randn(len(pairs), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    shaped: Rows = []
    for place, (group, reward) in enumerate(pairs):
        members = [i for i, (g, _) in enumerate(pairs) if g == group]
        rank = sorted(members, key=lambda i: float(logp[i])).index(place)
        shaped.append((group, reward * (1 - 0.25 * rank / len(members))))
    expected = by_group(shaped, lambda r, i: (r[i] - statistics.mean(r)) / (statistics.stdev(r) + 1e-6))
    plain = by_group(pairs, lambda r, i: 1.0)
    expected = [e * p for e, p in zip(expected, plain, strict=True)]
    got = unlikeliness(*columns(pairs), sequence_logp_B=logp)
    assert got.tolist() == pytest.approx(expected, abs=1e-9)


@given(pairs=rows)
@settings(max_examples=30)
def test_a_grae_and_progrpo_are_their_formulas(pairs: Rows) -> None:
    reward, group = columns(pairs)
    course = statistics.mean(r for _, r in pairs)

    def asymmetric(rewards: list[float], place: int) -> float:
        mean = statistics.mean(rewards)
        value = (rewards[place] - mean) / (statistics.stdev(rewards) + 1e-6)
        value *= 2 * ((1 - course) * mean + course * (1 - mean))
        return 0.5 * value if value > 0 else value

    assert a_grae(reward, group).tolist() == pytest.approx(by_group(pairs, asymmetric), abs=1e-9)
    prompt, answer = torch.full_like(reward, 0.7), reward / 2
    expected = by_group(
        pairs,
        lambda r, i: (r[i] - statistics.mean(r)) / (statistics.stdev(r) + 1e-6) + 0.3 * (0.7 - r[i] / 2),
    )
    got = progrpo(reward, group, prompt_confidence_B=prompt, answer_confidence_B=answer)
    assert got.tolist() == pytest.approx(expected, abs=1e-9)


def test_the_papers_push_on_groups_without_a_difference_comes_back_by_name() -> None:
    reward, group = torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    assert w_reinforce(reward, group, constant_groups=True).tolist() == pytest.approx([-1, -1, 0.1, 0.1])
    assert nsr(reward, group, constant_groups=True).tolist() == [-1, -1, 0, 0]
    virtual = ngrpo(reward.double(), group, constant_groups=True).tolist()
    assert virtual == pytest.approx([-1 / 3 / (math.sqrt(1 / 3) + 1e-6)] * 2 + [0, 0])


def test_an_unscored_reward_is_refused_everywhere() -> None:
    for method in METHODS.values():
        if method.hook == "advantage":
            extra = extra_columns(method.name, 2)
            with pytest.raises(ValueError, match="void"):
                method.function(torch.tensor([0.0, math.nan]), torch.tensor([0, 0]), **extra)


def extra_columns(name: str, size: int) -> dict[str, object]:
    column = torch.linspace(0.1, 0.9, size, dtype=torch.float64)
    return {
        "unlikeliness": {"sequence_logp_B": -column},
        "progrpo": {"prompt_confidence_B": column, "answer_confidence_B": column.flip(0)},
        "pass_at_k": {"k": 1},
    }.get(name, {})


# One group of one, one of equal rewards (that a mean in floats may miss), one that differs.
LONE = [0.1]
EQUAL = [0.1] * 3
DIFFERS = [0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("name", [m.name for m in METHODS.values() if m.hook == "advantage"])
@given(level=st.sampled_from([0.0, 0.1, 0.3, 1.0]), size=st.integers(2, 9), order=st.randoms(use_true_random=False))
@settings(max_examples=20)
def test_a_group_of_one_and_an_equal_group_have_advantage_zero(
    name: str, level: float, size: int, order: object
) -> None:
    rounded = level * (1 + 2**-52)  # as 0.1 + 0.2 is 0.3
    pairs = [(0, level), (1, rounded)] + [(1, level)] * size + [(2, r) for r in DIFFERS]
    order.shuffle(pairs)  # type: ignore[attr-defined]
    reward, group = columns(pairs)
    advantage = METHODS[name].function(reward, group, **extra_columns(name, len(pairs)))
    assert advantage.dtype == reward.dtype
    assert (advantage[group < 2] == 0).all()
    assert (advantage[group == 2] != 0).any()


# --- turns -----------------------------------------------------------------------------------------------------------

Episode = tuple[int, list[float], list[int]]  # group, reward of each turn, anchor of each turn
episodes = st.lists(
    st.integers(1, 4).flatmap(
        lambda n: st.tuples(
            st.integers(0, 2),
            st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=n, max_size=n),
            st.lists(st.integers(0, 2), min_size=n, max_size=n),
        )
    ),
    min_size=1,
    max_size=9,
)


def turns_of(batch: list[Episode]) -> Turns:
    table = [
        (reward, group, number, turn, anchor)
        for number, (group, rewards, anchors) in enumerate(batch)
        for turn, (reward, anchor) in enumerate(zip(rewards, anchors, strict=True))
    ]
    reward, group, trajectory, turn, anchor = zip(*table, strict=True)
    return Turns(
        reward_U=torch.tensor(reward, dtype=torch.float64),
        group_U=torch.tensor(group),
        trajectory_U=torch.tensor(trajectory),
        number_U=torch.tensor(turn),
        anchor_U=torch.tensor(anchor),
    )


def places(batch: list[Episode]) -> list[tuple[int, int]]:
    return [(i, t) for i, (_, rewards, _) in enumerate(batch) for t in range(len(rewards))]


def naive_return(batch: list[Episode], i: int, t: int, discount: float) -> float:
    return sum(discount ** (j - t) * r for j, r in enumerate(batch[i][1]) if j >= t)


def z(value: float, values: list[float], *, biased: bool = False) -> float:
    if len(set(values)) < 2:
        return 0.0
    spread = statistics.pstdev(values) if biased else statistics.stdev(values)
    return (value - statistics.mean(values)) / (spread + 1e-6)


def differing(batch: list[Episode], i: int) -> bool:
    return len({sum(rewards) for group, rewards, _ in batch if group == batch[i][0]}) > 1


def expected_turns(batch: list[Episode], formula: Callable[[int, int], float]) -> list[float]:
    return [formula(i, t) if differing(batch, i) else 0.0 for i, t in places(batch)]


def peers(batch: list[Episode], i: int, t: int, same: Callable[[int, int], bool]) -> list[tuple[int, int]]:
    return [(j, u) for j, u in places(batch) if batch[j][0] == batch[i][0] and same(j, u)]


@given(batch=episodes)
@settings(max_examples=50)
def test_trloo_leaves_one_out_per_turn(batch: list[Episode]) -> None:
    def formula(i: int, t: int) -> float:
        others = [naive_return(batch, j, u, 1.0) for j, u in peers(batch, i, t, lambda j, u: u == t) if j != i]
        return naive_return(batch, i, t, 1.0) - statistics.mean(others) if others else 0.0

    assert turn_methods.trloo(turns_of(batch)).tolist() == pytest.approx(expected_turns(batch, formula), abs=1e-9)


@given(batch=episodes)
@settings(max_examples=50)
def test_turn_normalisation_and_mapo(batch: list[Episode]) -> None:
    everyone = [naive_return(batch, j, u, 0.9) for j, u in places(batch)]

    def per_turn(i: int, t: int) -> float:
        values = [naive_return(batch, j, u, 0.9) for j, u in peers(batch, i, t, lambda j, u: u == t)]
        return z(naive_return(batch, i, t, 0.9), values)

    got = turn_methods.turn_norm(turns_of(batch), discount=0.9)
    assert got.tolist() == pytest.approx(expected_turns(batch, per_turn), abs=1e-6)
    mixed = turn_methods.mapo(turns_of(batch), discount=0.9, turn_share=0.25)
    expected = expected_turns(
        batch, lambda i, t: 0.25 * per_turn(i, t) + 0.75 * z(naive_return(batch, i, t, 0.9), everyone)
    )
    assert mixed.tolist() == pytest.approx(expected, abs=1e-6)


@given(batch=episodes)
@settings(max_examples=50)
def test_gigpo_adds_a_comparison_among_equal_states(batch: list[Episode]) -> None:
    def formula(i: int, t: int) -> float:
        totals = [sum(rewards) for group, rewards, _ in batch if group == batch[i][0]]
        same = peers(batch, i, t, lambda j, u: batch[j][2][u] == batch[i][2][t])
        step = z(naive_return(batch, i, t, 0.95), [naive_return(batch, j, u, 0.95) for j, u in same])
        return z(sum(batch[i][1]), totals) + 2.0 * step

    got = turn_methods.gigpo(turns_of(batch), weight=2.0)
    assert got.tolist() == pytest.approx(expected_turns(batch, formula), abs=1e-6)


@given(batch=episodes)
@settings(max_examples=50)
def test_hgpo_weighs_groups_of_longer_common_history_more(batch: list[Episode]) -> None:
    def history(j: int, u: int, k: int) -> list[int]:
        return [batch[j][2][u - back] if u - back >= 0 else -1 for back in range(k)]

    def formula(i: int, t: int) -> float:
        weighted = weights = 0.0
        for k in (1, 2, 3):
            same = peers(batch, i, t, lambda j, u, k=k: history(j, u, k) == history(i, t, k))
            values = [naive_return(batch, j, u, 0.95) for j, u in same]
            a = z(naive_return(batch, i, t, 0.95), values, biased=True)
            if abs(a) > 1e-9:
                weighted, weights = weighted + (k + 1) * a, weights + k + 1
        return weighted / weights if weights else 0.0

    assert turn_methods.hgpo(turns_of(batch)).tolist() == pytest.approx(expected_turns(batch, formula), abs=1e-6)


@given(batch=episodes)
@settings(max_examples=50)
def test_igpo_normalises_gains_and_outcomes_apart(batch: list[Episode]) -> None:
    def is_last(j: int, u: int) -> bool:
        return u == len(batch[j][1]) - 1

    def normalised(i: int, t: int) -> float:
        same = peers(batch, i, t, lambda j, u: is_last(j, u) == is_last(i, t))
        return z(batch[i][1][t], [batch[j][1][u] for j, u in same])

    def formula(i: int, t: int) -> float:
        return sum(0.9 ** (u - t) * normalised(i, u) for u in range(t, len(batch[i][1])))

    got = turn_methods.igpo(turns_of(batch), discount=0.9)
    assert got.tolist() == pytest.approx(expected_turns(batch, formula), abs=1e-6)


def test_information_gain_by_hand() -> None:
    gain = turn_methods.information_gain(torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.5]).log())
    assert gain.tolist() == pytest.approx([0.25, -0.25])


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 999))
@settings(max_examples=40)
def test_call_matching_is_the_best_of_all_assignments(predicted: int, gold: int, seed: int) -> None:
    similarity = torch.rand(predicted, gold, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    reward = turn_methods.call_match_rewards(similarity)
    best = max(
        sum(float(similarity[p, c]) for p, c in zip(chosen, range(gold), strict=False))
        if gold <= predicted
        else sum(float(similarity[p, c]) for p, c in enumerate(chosen))
        for chosen in (
            permutations(range(predicted), gold) if gold <= predicted else permutations(range(gold), predicted)
        )
    )
    assert float(reward.sum()) == pytest.approx(best)
    assert (reward == 0).sum() == max(0, predicted - gold)


def test_a_greedy_match_is_not_the_best_one() -> None:
    reward = turn_methods.call_match_rewards(torch.tensor([[0.9, 0.8], [0.8, 0.1]]))
    assert reward.tolist() == pytest.approx([0.8, 0.8])


@given(batch=episodes, outcomes=st.lists(st.sampled_from([0.0, 1.0]), min_size=9, max_size=9))
@settings(max_examples=50)
def test_match_tir_is_the_mean_of_two_advantages(batch: list[Episode], outcomes: list[float]) -> None:
    outcome = torch.tensor([outcomes[i] for i, _ in places(batch)], dtype=torch.float64)
    got = turn_methods.match_tir(turns_of(batch), outcome_U=outcome)
    for value, (i, t) in zip(got.tolist(), places(batch), strict=True):
        members = [j for j, (group, _, _) in enumerate(batch) if group == batch[i][0]]
        whole = z(outcomes[i], [outcomes[j] for j in members])
        same = peers(batch, i, t, lambda j, u: u == t)  # noqa: B023
        turn = z(naive_return(batch, i, t, 0.9), [naive_return(batch, j, u, 0.9) for j, u in same])
        differs = differing(batch, i) or len({outcomes[j] for j in members}) > 1
        assert value == pytest.approx((whole + turn) / 2 if differs else 0.0, abs=1e-6)


def test_spo_chain_by_hand() -> None:
    value = torch.tensor([0.25, 0.5, 0.75])
    assert turn_methods.spo_chain(value, torch.tensor([0.5, 0.75, 1.0])).tolist() == [0.25, 0.25, 0.25]


COMPARED = [m.name for m in METHODS.values() if m.hook == "turn advantage" and m.name not in ("spo_chain",)]


@pytest.mark.parametrize("name", COMPARED)
@given(batch=episodes, level=st.sampled_from([0.0, 0.1, 1.0]))
@settings(max_examples=30)
def test_turns_of_a_lone_or_equal_group_have_advantage_zero(name: str, batch: list[Episode], level: float) -> None:
    """Outcome rewards, which are all the loop has: nothing before the last turn."""
    final = [(group, [0.0] * (len(r) - 1) + [level], anchors) for group, r, anchors in batch]
    with_one = [*final, (7, [0.0, 1.0], [0, 0])]  # a group of one
    turns = turns_of(with_one)
    extra = {"outcome_U": turns.totals()} if name == "match_tir" else {}
    if name == "match_tir":  # no call matched anything
        turns = turns_of([(g, [0.0] * len(r), a) for g, r, a in with_one])
    assert (METHODS[name].function(turns, **extra) == 0).all()
