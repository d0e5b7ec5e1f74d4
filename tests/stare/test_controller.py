"""The controller for every stream of entropies: bounds, monotonicity, the rules for what is unknown, the round trip."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stare import Controller, ControllerConfig, EntropyDynamics, tracking

KINDS = ("fixed", "adaptive", "pi", "model")
unknown = st.sampled_from([None, math.nan, math.inf, -math.inf])
sums = st.floats(-50, 50, allow_nan=False)
dynamics = st.builds(EntropyDynamics, residual=sums, amplified=sums, attenuated=sums, num_tokens=st.integers(0, 1000))
batches = st.lists(st.tuples(st.one_of(unknown, st.floats(0, 5)), st.one_of(st.none(), dynamics)), max_size=40)
configs = st.builds(
    ControllerConfig,
    kind=st.sampled_from(KINDS),
    target_entropy=st.floats(0.05, 2),
    hysteresis=st.floats(0, 0.5),
    alpha=st.floats(0, 0.2),
    gain=st.floats(0, 3),
    integral_gain=st.floats(0, 1),
)


def after(config: ControllerConfig, *entropies: float | None) -> Controller:
    state = Controller.start(config)
    for entropy in entropies:
        state = state.update(entropy)
    return state


@given(configs, batches)
def test_weights_stay_in_bounds_and_what_is_unknown_changes_nothing(
    config: ControllerConfig, batches: list[tuple[float | None, EntropyDynamics | None]]
) -> None:
    state = Controller.start(config)
    for entropy, seen in batches:
        before, state = state, state.update(entropy, seen)
        assert 1.0 <= state.amplify <= config.amplify_max
        assert config.attenuate_min <= state.attenuate <= 1.0
        assert math.isfinite(state.integral)
        if entropy is None or not math.isfinite(entropy):
            assert state == before


@given(configs, batches)
def test_the_state_survives_json_at_every_batch(
    config: ControllerConfig, batches: list[tuple[float | None, EntropyDynamics | None]]
) -> None:
    straight = resumed = Controller.start(config)
    for entropy, seen in batches:
        straight = straight.update(entropy, seen)
        resumed = Controller.from_json(resumed.update(entropy, seen).to_json())
        assert resumed == straight


@given(configs, batches, st.floats(0, 5), st.floats(0, 5), st.one_of(st.none(), dynamics))
def test_a_lower_entropy_never_gets_a_smaller_push(
    config: ControllerConfig,
    past: list[tuple[float | None, EntropyDynamics | None]],
    one: float,
    other: float,
    seen: EntropyDynamics | None,
) -> None:
    state = Controller.start(config)
    for entropy, known in past:
        state = state.update(entropy, known)
    low, high = (state.update(entropy, seen) for entropy in sorted((one, other)))
    assert low.amplify >= high.amplify
    assert low.attenuate <= high.attenuate
    assert low.gate_on >= high.gate_on


@given(st.lists(st.one_of(unknown, st.floats(0, 5)), max_size=40))
def test_the_papers_gate_is_on_exactly_below_the_target(entropies: list[float | None]) -> None:
    state = Controller.start(ControllerConfig())
    for entropy in entropies:
        state = state.update(entropy)
        if entropy is not None and math.isfinite(entropy):
            assert state.gate_on == (entropy < 0.3)
    assert (state.amplify, state.attenuate) == (1.1, 0.9)


def test_hysteresis_holds_the_gate_inside_its_band() -> None:
    config = ControllerConfig(target_entropy=0.3, hysteresis=0.05)
    assert after(config, 0.34).gate_on  # on from the start, and stays
    assert not after(config, 0.36).gate_on
    assert not after(config, 0.36, 0.26).gate_on
    assert after(config, 0.36, 0.24).gate_on
    assert after(config, 0.36, 0.24, 0.34).gate_on


def test_adaptive_moves_by_alpha_towards_the_target() -> None:
    config = ControllerConfig(kind="adaptive", alpha=0.01)
    assert after(config, 0.2, 0.2).amplify == pytest.approx(1.12)
    assert after(config, 0.2, 0.2).attenuate == pytest.approx(0.88)
    assert after(config, 0.4).amplify == pytest.approx(1.09)
    assert after(config, 0.3).amplify == 1.1  # at the target nothing moves


def test_proportional_integral_follows_its_formula_and_does_not_wind_up() -> None:
    config = ControllerConfig(kind="pi", gain=0.2, integral_gain=0.02)
    first = after(config, 0.15)  # e = 0.5
    assert first.integral == pytest.approx(0.01)
    assert first.amplify == pytest.approx(1.1 + 0.2 * 0.5 + 0.01)
    assert first.attenuate == pytest.approx(0.9 - 0.2 * 0.5 - 0.01)
    # Far above the target for long: at its lower bound the weight waits, and rises with the first low batch.
    waiting = after(config, *[3.0] * 500)
    assert (waiting.amplify, waiting.gate_on) == (1.0, False)
    assert waiting.integral >= -0.2
    assert waiting.update(0.03).amplify > 1.0


def test_model_based_puts_the_weight_at_the_batchs_own_critical_value() -> None:
    config = ControllerConfig(kind="model")
    seen = EntropyDynamics(residual=2.0, amplified=40.0, num_tokens=100)
    assert seen.critical_weight == pytest.approx(1.05)
    at_target = Controller.start(config).update(0.3, seen)
    assert at_target.amplify == pytest.approx(1.05)
    assert seen.drift(at_target.amplify, 1.0) == pytest.approx(0.0, abs=1e-12)
    assert Controller.start(config).update(0.2, seen).amplify > 1.05
    # A batch without leverage gives no W*: the last one holds.
    assert at_target.update(0.3, EntropyDynamics(residual=1.0)).amplify == pytest.approx(1.05)
    assert at_target.update(0.3, None).amplify == pytest.approx(1.05)


@given(dynamics)
def test_the_critical_strength_has_no_drift(seen: EntropyDynamics) -> None:
    if seen.critical_weight is not None and abs(seen.critical_weight) < 1e6:
        strength = seen.critical_weight - 1
        assert seen.drift(1 + strength, 1 - strength) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("kind", ["pi", "model"])
def test_on_a_simple_plant_the_steered_weight_reaches_the_target(kind: str) -> None:
    """Entropy falls by Lambda and rises by (W - 1) Gamma; the weight that holds it is not told to the controller."""
    config = ControllerConfig(kind=kind, target_entropy=0.3)  # type: ignore[arg-type]
    state, entropy = Controller.start(config), 0.6
    trace = []
    for _ in range(1500):
        # What the model is told is wrong by half, as a first-order prediction may be.
        state = state.update(entropy, EntropyDynamics(residual=0.5, amplified=10.0, num_tokens=1))
        entropy = max(0.01, entropy + 0.02 * (-1.0 + (state.amplify - 1) * 10.0) * entropy)
        trace.append(entropy)
    held = tracking(trace[-200:], 0.3)
    assert held is not None
    assert held.rms < 0.003
    assert held.within == 1.0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "pid"}, "unknown controller kind 'pid'"),
        ({"kind": "pi", "target_entropy": 0.0}, "target_entropy must be above 0"),
        ({"amplify": 0.9}, "amplify >= 1"),
        ({"kind": "adaptive", "amplify": 2.0}, r"keeps W in \[1, 1.5\] .* cannot start from 2.0"),
        ({"kind": "pi", "attenuate": 0.4}, r"M in \[0.5, 1\]"),
        ({"hysteresis": -0.1}, "hysteresis must not be negative"),
    ],
)
def test_an_impossible_configuration_is_named(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(ControllerConfig(), **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["{}", '{"config": {}}', '{"config": {"knd": 1}}', "[1]", "nonsense"])
def test_a_state_that_is_none_is_refused(text: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        Controller.from_json(text)


def test_tracking_counts_only_what_is_known() -> None:
    held = tracking([0.3, None, 0.32, math.nan, 0.5], 0.3)
    assert held is not None
    assert held.num_batches == 3
    assert held.within == pytest.approx(2 / 3)
    assert held.rms == pytest.approx(math.sqrt((0.02**2 + 0.2**2) / 3))
    assert tracking([None], 0.3) is None
