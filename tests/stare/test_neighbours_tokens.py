"""Token weights, ratios, regularisers and sampling against second, naive implementations; laws over the registry."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stare import surrogate_sum
from stare.neighbours import METHODS, Tokens, ratios, regularisers, sampling
from stare.neighbours import token_weights as weights

seeds = st.integers(0, 10_000)


def tokens(seed: int, size: int = 40) -> Tokens:
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(size, dtype=torch.float64, generator=generator)

    row = torch.sort(torch.randint(0, 5, (size,), generator=generator)).values
    advantage = torch.tensor([1.2, -0.8, 0.0, 6.0, -0.3], dtype=torch.float64)[row]
    logp = uniform(-7, -0.01)
    return Tokens(
        logp_T=logp,
        entropy_T=uniform(0, 3),
        advantage_T=advantage,
        row_T=row,
        sampler_logp_T=logp + uniform(-1, 1),
        reference_logp_T=logp + uniform(-1, 1),
    )


def largest(scores: list[float], count: int) -> set[int]:
    return set(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count])


def listed(batch: Tokens) -> list[tuple[float, float, float]]:
    return list(zip(batch.logp_T.tolist(), batch.entropy_T.tolist(), batch.advantage_T.tolist(), strict=True))


def with_ones(batch: Tokens, values: list[float]) -> list[float]:
    return [v if a else 1.0 for v, a in zip(values, batch.advantage_T.tolist(), strict=True)]


@given(seed=seeds)
@settings(max_examples=25)
def test_selections_over_the_batch_are_those_of_a_full_sort(seed: int) -> None:
    batch = tokens(seed)
    table = listed(batch)
    kept = largest([h for _, h, _ in table], 8)
    expected = [40 / 8 * (i in kept) for i in range(40)]
    assert weights.forking(batch).tolist() == pytest.approx(with_ones(batch, expected))
    kept = largest([abs(a) * h for _, h, a in table], 20)
    expected = [2.0 * (i in kept) for i in range(40)]
    assert weights.d3s_tokens(batch).tolist() == pytest.approx(with_ones(batch, expected))
    least = largest([-logp for logp, _, _ in table], 4)
    expected_mask = [i in least and a < 0 for i, (_, _, a) in enumerate(table)]
    assert weights.lp_reg_tokens(batch, fraction=0.1).tolist() == expected_mask
    cut = sorted(h for _, h, _ in table)[9]  # the lowest quarter
    silent = [a > 0 and logp < math.log(0.05) and h <= cut for logp, h, a in table]
    expected = [40 / (40 - sum(silent)) * (not s) for s in silent]
    got = weights.stapo(batch, low_probability=0.05, entropy_quantile=0.25)
    assert got.tolist() == pytest.approx(with_ones(batch, expected))


@given(seed=seeds)
@settings(max_examples=25)
def test_covariance_methods(seed: int) -> None:
    batch = tokens(seed)
    table = listed(batch)
    mean_logp, mean_a = statistics.mean(r[0] for r in table), statistics.mean(r[2] for r in table)
    cov = [(logp - mean_logp) * (a - mean_a) for logp, _, a in table]
    assert weights.covariance(batch).tolist() == pytest.approx(cov)
    candidates = {i for i, c in enumerate(cov) if 1 < c < 5}
    weight = weights.clip_cov(batch, fraction=0.1, seed=seed)
    silenced = set((weight == 0).nonzero().flatten().tolist())
    assert silenced <= candidates
    acting = {i for i in candidates if table[i][2]}
    if acting == candidates:  # a chosen token without advantage keeps weight 1
        assert len(silenced) == min(4, len(candidates))
    assert torch.equal(weight, weights.clip_cov(batch, fraction=0.1, seed=seed))
    chosen = [i in largest(cov, 4) and table[i][2] != 0 for i in range(40)]
    assert weights.kl_cov_tokens(batch, fraction=0.1).tolist() == chosen


@given(seed=seeds)
@settings(max_examples=25)
def test_weights_per_token_are_their_formulas(seed: int) -> None:
    batch = tokens(seed)
    table = listed(batch)
    added = [(a + min(0.4 * h, abs(a) / 2)) / a if a else 1.0 for _, h, a in table]
    assert weights.entropy_advantage(batch).tolist() == pytest.approx(added)
    moved = [abs(a * (1 - math.exp(logp)) * (logp + h)) for logp, h, a in table]
    k = -math.log(0.8) / max(*moved, 0.02)
    got = weights.steer(batch)
    assert got.tolist() == pytest.approx(with_ones(batch, [math.exp(-k * m) for m in moved]))
    assert float(got.min()) == pytest.approx(0.8)
    logs = [math.log(h) for _, h, _ in table]
    middle, top, bottom = sorted(logs)[31], max(logs), min(logs)
    signal = [(x - middle) / (top - middle if x > middle else middle - bottom) for x in logs]
    expected = [1.0 if abs(a) >= 5 else 1 + s for s, (_, _, a) in zip(signal, table, strict=True)]
    assert weights.hapo(batch).tolist() == pytest.approx(with_ones(batch, expected))
    factors = sampling.hapo_temperature(batch.entropy_T, batch.entropy_T)
    assert factors.tolist() == pytest.approx([1 + 0.05 * s for s in signal])
    beyond = torch.tensor([0.0, 1e9], dtype=torch.float64)
    assert sampling.hapo_temperature(beyond, batch.entropy_T).tolist() == pytest.approx([0.95, 1.05])
    assert sampling.hapo_temperature(beyond, beyond[:0]).tolist() == [1.0, 1.0]


@given(seed=seeds)
@settings(max_examples=25)
def test_weights_from_other_policies(seed: int) -> None:
    batch = tokens(seed)
    logp, sampler = batch.logp_T.tolist(), batch.needed("sampler_logp_T").tolist()
    reference, rows = batch.needed("reference_logp_T").tolist(), batch.row_T.tolist()
    ratio = [math.exp(a - b) for a, b in zip(logp, sampler, strict=True)]
    assert weights.truncated_importance(batch).tolist() == pytest.approx(with_ones(batch, [min(r, 2.0) for r in ratio]))
    inside = [r if 0.5 <= r <= 2 else 0.0 for r in ratio]
    assert weights.masked_importance(batch).tolist() == pytest.approx(with_ones(batch, inside))
    mean = {
        row: math.exp(statistics.mean(math.log(r) for r, i in zip(ratio, rows, strict=True) if i == row))
        for row in set(rows)
    }
    whole = [r if 0.9 <= mean[i] <= 1.1 else 0.0 for r, i in zip(ratio, rows, strict=True)]
    got = weights.masked_importance(batch, least=0.9, most=1.1, sequence=True)
    assert got.tolist() == pytest.approx(with_ones(batch, whole))
    product = {row: math.prod(r for r, i in zip(ratio, rows, strict=True) if i == row) for row in set(rows)}
    got = weights.sequence_truncated_importance(batch, most=1.5)
    assert got.tolist() == pytest.approx(with_ones(batch, [min(product[i], 1.5) for i in rows]))
    whole = [product[i] if 0.2 <= product[i] <= 1.5 else 0.0 for i in rows]
    got = weights.sequence_masked_importance(batch, least=0.2, most=1.5)
    assert got.tolist() == pytest.approx(with_ones(batch, whole))
    shift = {row: sum(a - b for a, b, i in zip(logp, reference, rows, strict=True) if i == row) for row in set(rows)}
    softplus = [
        1 + math.log1p(math.exp(shift[i])) if a < 0 else 1.0
        for i, a in zip(rows, batch.advantage_T.tolist(), strict=True)
    ]
    assert weights.ace(batch).tolist() == pytest.approx(softplus)


def test_a_missing_column_is_named() -> None:
    bare = Tokens(logp_T=torch.zeros(1), entropy_T=torch.zeros(1), advantage_T=torch.ones(1), row_T=torch.zeros(1))
    with pytest.raises(ValueError, match="sampler_logp_T"):
        weights.truncated_importance(bare)


WEIGHTS = [m for m in METHODS.values() if m.hook == "token weight" and m.name != "stare"]


@pytest.mark.parametrize("name", [m.name for m in WEIGHTS])
@given(seed=seeds)
@settings(max_examples=10)
def test_weights_are_finite_one_without_advantage_and_follow_the_tokens(name: str, seed: int) -> None:
    batch = tokens(seed)
    got = METHODS[name].function(batch)
    assert got.dtype == torch.float64
    assert torch.isfinite(got).all()
    assert (got >= 0).all()
    assert (got[batch.advantage_T == 0] == 1).all()
    if name == "clip_cov":  # its draw is by place
        return
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
    columns = {
        field: getattr(batch, field)[order]
        for field in ("logp_T", "entropy_T", "advantage_T", "row_T", "sampler_logp_T", "reference_logp_T")
    }
    assert torch.allclose(METHODS[name].function(Tokens(**columns)), got[order])


@pytest.mark.parametrize("name", [m.name for m in WEIGHTS])
def test_an_empty_batch_has_no_weights(name: str) -> None:
    none = torch.empty(0, dtype=torch.float64)
    empty = Tokens(
        logp_T=none,
        entropy_T=none,
        advantage_T=none,
        row_T=torch.empty(0, dtype=torch.int64),
        sampler_logp_T=none,
        reference_logp_T=none,
    )
    assert METHODS[name].function(empty).shape == (0,)


# --- ratios ----------------------------------------------------------------------------------------------------------


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def naive_dapo(rho: float, c: float) -> float:
    loss = -min(rho * c, clip(rho, 0.8, 1.28) * c)
    return min(loss, -10 * c) if c < 0 else loss


def naive_dual_clip(rho: float, c: float) -> float:
    loss = -min(rho * c, clip(rho, 0.8, 1.2) * c)
    return min(loss, -3 * c) if c < 0 else loss


def naive_sapo(rho: float, c: float) -> float:
    tau = 1.0 if c > 0 else 1.05
    return -c * 4 / tau / (1 + math.exp(-tau * (rho - 1)))


def naive_ce(rho: float, c: float) -> float:
    if c < 0 and rho < 0.8:
        return -0.75 * 0.8 * c
    return -1.28 * c if c > 0 and rho > 1.28 else -rho * c


def naive_aspo(rho: float, c: float) -> float:
    if c > 0:
        return -min(1 / rho, 3.0) * c
    return min(-min(rho * c, clip(rho, 0.8, 1.4) * c), -3 * c)


VALUES: dict[str, Callable[[float, float], float]] = {
    "ppo": lambda rho, c: -min(rho * c, clip(rho, 0.8, 1.2) * c),
    "dapo": naive_dapo,
    "dual_clip": naive_dual_clip,
    "sapo": naive_sapo,
    "ce_gppo": naive_ce,
    "aspo": naive_aspo,
}

# d loss / d ln pi of one token.
SLOPES: dict[str, Callable[[float, float], float]] = {
    "ppo": lambda rho, c: 0.0 if (c > 0 and rho > 1.2) or (c < 0 and rho < 0.8) else -rho * c,
    "dapo": lambda rho, c: 0.0 if (c > 0 and rho > 1.28) or (c < 0 and (rho < 0.8 or rho > 10)) else -rho * c,
    "cispo": lambda rho, c: -min(rho, 1.2) * c,
    "ce_gppo": naive_ce,  # its value is its slope: everything is rho times a constant
    "aspo": lambda rho, c: (
        (0.0 if rho > 1.4 else -min(1 / rho, 3.0) * c) if c > 0 else (0.0 if rho < 0.8 or rho > 3 else -rho * c)
    ),
}


def ratio_case(seed: int, size: int = 30) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(size, dtype=torch.float64, generator=generator)
    new = old + 1.6 * torch.rand(size, dtype=torch.float64, generator=generator) - 0.8
    segment = torch.sort(torch.randint(0, 4, (size,), generator=generator)).values
    coefficient = torch.tensor([0.5, -0.25, 1.0, -2.0], dtype=torch.float64)[segment]
    return new.requires_grad_(), old, coefficient, segment


@given(seed=seeds)
@settings(max_examples=25)
def test_ratio_rules_per_token_are_their_formulas(seed: int) -> None:
    new, old, coefficient, _ = ratio_case(seed)
    pairs = list(zip((new.detach() - old).exp().tolist(), coefficient.tolist(), strict=True))
    for name, formula in VALUES.items():
        loss = METHODS[name].function(new, old, coefficient).loss
        assert loss.item() == pytest.approx(sum(formula(rho, c) for rho, c in pairs)), name
    for name, slope in SLOPES.items():
        (gradient,) = torch.autograd.grad(METHODS[name].function(new, old, coefficient).loss, new)
        assert gradient.tolist() == pytest.approx([slope(rho, c) for rho, c in pairs], abs=1e-12), name


@given(seed=seeds)
@settings(max_examples=25)
def test_ratio_rules_per_segment_are_their_formulas(seed: int) -> None:
    new, old, coefficient, segment = ratio_case(seed)
    gspo = ratios.gspo(new, old, coefficient, segment_M=segment, clip_low=0.1, clip_high=0.2)
    gmpo = ratios.gmpo(new, old, coefficient, segment_M=segment)
    expected_gspo = expected_gmpo = 0.0
    for number in set(segment.tolist()):
        here = segment == number
        shift, c = (new.detach() - old)[here].tolist(), float(coefficient[here][0])
        s = math.exp(statistics.mean(shift))
        expected_gspo += len(shift) * -min(s * c, clip(s, 0.9, 1.2) * c)
        bounded = [min(x, 0.4) if c > 0 else max(x, -0.4) for x in shift]
        expected_gmpo += len(shift) * -c * math.exp(statistics.mean(bounded))
    assert gspo.loss.item() == pytest.approx(expected_gspo)
    assert gmpo.loss.item() == pytest.approx(expected_gmpo)
    signal = [-1.0, -0.4, 0.0, 1.0]
    hapo = ratios.hapo_clip(new, old, coefficient, signal_M=torch.tensor(signal, dtype=torch.float64)[segment])
    expected_hapo = 0.0
    for rho, c, number in zip((new.detach() - old).exp().tolist(), coefficient.tolist(), segment.tolist(), strict=True):
        h = signal[number]
        low, high = 0.2 * (1 - min(h, 0)), 0.2 * (1 + max(h, 0))
        loss = -min(rho * c, clip(rho, 1 - low, 1 + high) * c)
        expected_hapo += min(loss, -10 * c) if c < 0 else loss
    assert hapo.loss.item() == pytest.approx(expected_hapo)
    turn = ratios.turn_ratio(new, old, coefficient, segment_M=segment, clip_low=0.1, clip_high=0.2)
    assert torch.equal(turn.loss, gspo.loss)


@pytest.mark.parametrize("name", [m.name for m in METHODS.values() if m.hook == "ratio"])
@given(seed=seeds)
@settings(max_examples=10)
def test_at_the_old_policy_every_rule_has_the_plain_gradient_and_zero_stays_zero(name: str, seed: int) -> None:
    new, _, coefficient, segment = ratio_case(seed)
    extra = {"segment_M": segment} if name in ("gspo", "gmpo", "turn_ratio") else {}
    extra |= {"signal_M": torch.linspace(-1, 1, len(new))} if name == "hapo_clip" else {}
    result = METHODS[name].function(new, new.detach(), coefficient, **extra)
    (gradient,) = torch.autograd.grad(result.loss, new)
    assert torch.allclose(gradient, -coefficient)
    nothing = METHODS[name].function(new, new.detach() + 1, 0 * coefficient, **extra)
    assert nothing.loss.item() == 0
    (gradient,) = torch.autograd.grad(nothing.loss, new)
    assert not gradient.any()


@given(seed=seeds)
@settings(max_examples=10)
def test_the_default_rule_is_the_surrogate_bit_for_bit_and_split_by_segment_nothing_changes(seed: int) -> None:
    new, old, coefficient, segment = ratio_case(seed)
    assert torch.equal(ratios.dapo(new, old, coefficient).loss, surrogate_sum(new, old, coefficient).loss)
    for name in ("gspo", "gmpo", "cispo", "sapo"):
        extra = name in ("gspo", "gmpo")

        def loss(here: Tensor, name: str = name, extra: bool = extra) -> float:
            more = {"segment_M": segment[here]} if extra else {}
            return METHODS[name].function(new[here], old[here], coefficient[here], **more).loss.item()

        everything = loss(torch.ones_like(segment, dtype=torch.bool))
        assert sum(loss(segment == number) for number in segment.unique()) == pytest.approx(everything)


# --- regularisers and sampling ---------------------------------------------------------------------------------------


def test_divergence_estimators_against_the_exact_divergence() -> None:
    logits = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    other = torch.log_softmax(torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(4)), -1)
    logp = torch.log_softmax(logits, -1)
    exact = (logp.exp() * (logp - other)).sum()
    p = logp.exp().detach()
    for estimator in (regularisers.k1, regularisers.k3):  # unbiased
        assert (p * estimator(logp, other)).sum().item() == pytest.approx(exact.item())
    assert (regularisers.k2(logp, other) >= 0).all()
    assert (regularisers.k3(logp, other) >= -1e-12).all()
    (right,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (k2,) = torch.autograd.grad((p * regularisers.k2(logp, other)).sum(), logits, retain_graph=True)
    (k1,) = torch.autograd.grad((p * regularisers.k1(logp, other)).sum(), logits)
    assert torch.allclose(k2, right)
    assert torch.allclose(k1, torch.zeros_like(k1), atol=1e-12)


def test_penalties_by_hand() -> None:
    new, old = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert regularisers.kl_cov(new, old, torch.tensor([True, False])).tolist() == [0.5, 0.0]
    assert regularisers.entropy_bonus(torch.tensor([0.5])).tolist() == [-0.5]
    entropy = torch.tensor([0.5, 1.0, 1.5], requires_grad=True)
    penalty = regularisers.epo_smoothing(entropy, [0.5, 1.5])
    assert penalty.tolist() == pytest.approx([0.03, 0.0, 0.03])
    (gradient,) = torch.autograd.grad(penalty.sum(), entropy)
    assert gradient.tolist() == pytest.approx([-0.1, 0.0, 0.1])
    assert not regularisers.epo_smoothing(entropy, []).any()


def test_the_adaptive_coefficient_rises_below_the_target_and_falls_above() -> None:
    state = regularisers.CoefficientState(target=0.2, step=0.5)
    used = []
    for entropy in (0.1, 0.1, math.nan, 0.3, 0.1, 0.3, 0.3):
        state, coefficient = state.update(entropy)
        used.append(coefficient)
    assert used == [0.0, 0.5, 0.0, 0.0, 0.5, 0.0, 0.0]
    assert state.coefficient == 0.0


@given(seed=seeds)
@settings(max_examples=15)
def test_lp_reg_is_a_divergence_from_the_denoised_old_policy(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    new, old = (3 * torch.randn(5, 7, dtype=torch.float64, generator=generator) for _ in range(2))
    token = torch.randint(0, 7, (5,), generator=generator)
    protected = torch.tensor([True, True, True, True, False])
    got = regularisers.lp_reg(new, old, token, protected, min_p=0.1).tolist()
    for i in range(5):
        p_old, p_new = torch.softmax(old[i], -1).tolist(), torch.softmax(new[i], -1).tolist()
        kept = [p if p >= 0.1 * max(p_old) else 0.0 for p in p_old]
        proxy = [p / sum(kept) for p in kept]
        divergence = sum(q * math.log(q / p) for q, p in zip(proxy, p_new, strict=True) if q)
        acts = bool(protected[i]) and p_new[int(token[i])] < proxy[int(token[i])]
        assert got[i] == pytest.approx(divergence if acts else 0.0, abs=1e-9)


def test_groups_to_keep_and_the_length_penalty() -> None:
    reward, group = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1, 2])
    assert sampling.dynamic_sampling(reward, group).tolist() == [True, True, False, False, False]
    penalty = sampling.overlong_penalty(torch.tensor([10, 60, 80, 100, 200]), most=100, buffer=40)
    assert penalty.tolist() == pytest.approx([0.0, 0.0, -0.5, -1.0, -1.0])


@given(st.lists(st.sampled_from([0.0, 0.2, 0.5, 1.0]), min_size=2, max_size=7), st.integers(2, 5))
@settings(max_examples=40)
def test_d3s_keeps_the_subset_of_largest_variance(rewards: list[float], keep: int) -> None:
    kept = sampling.d3s_samples(torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards)), keep=keep)
    if len(rewards) <= keep or len(set(rewards)) == 1:
        assert kept.all()
        return
    best = max(statistics.pvariance([rewards[i] for i in chosen]) for chosen in combinations(range(len(rewards)), keep))
    got = statistics.pvariance([r for r, k in zip(rewards, kept.tolist(), strict=True) if k])
    assert int(kept.sum()) == keep
    assert got == pytest.approx(best)


def test_vade_learns_which_prompts_are_neither_easy_nor_impossible() -> None:
    belief = sampling.Difficulty.start(3)
    for _ in range(20):
        prompts = torch.arange(3).repeat_interleave(8)
        right = torch.cat((torch.ones(8), torch.tensor([1.0, 0] * 4), torch.zeros(8))).bool()
        belief = belief.update(prompts, right)
    assert belief.right_Q.tolist() == pytest.approx([8 * (1 - 0.9**20) / 0.1, 4 * (1 - 0.9**20) / 0.1, 0.0])
    first = [int(sampling.vade(belief, 1, seed=seed)[0]) for seed in range(50)]
    assert first.count(1) == 50
    assert sampling.vade(belief, 3, seed=0).tolist() == sampling.vade(belief, 3, seed=0).tolist()


def test_hints_replay_and_branching_by_hand() -> None:
    assert sampling.adhint_ratio(torch.tensor([0.0, 0.5, 1.0])).tolist() == pytest.approx([0.8, 0.4, 0.0])
    recalled = sampling.cross_context_replay(
        torch.tensor([0.0, 0.0, 0.0, 1.0]),
        torch.tensor([0, 0, 1, 1]),
        torch.tensor([0.0, 1.0, 1.0, 1.0]),
        torch.tensor([0, 0, 0, 1]),
    )
    assert recalled.tolist() == [False, True, False, False]
    assert sampling.branch_after_tool(0.9, 0.4, 0.6)
    assert not sampling.branch_after_tool(0.4, 0.4, 0.6)
    uniform = torch.full((3, 4), math.log(0.25))
    assert sampling.normalised_entropy(uniform, 4) == pytest.approx(1.0)
