"""The entropy controller: a small state that one batch at a time moves (arXiv 2606.19236, Sec. 4.3-4.4, and beyond).

Four kinds. All start from the configured W and M; those that move them stay inside ``[1, amplify_max]`` and
``[attenuate_min, 1]``:

    fixed     the paper's default: W and M are constants, the gate decides whether they act
    adaptive  the paper's Sec. 4.4: W moves by alpha sgn(H_tgt - H) after every batch, M the other way
    pi        proportional-integral: W = 1 + u, M = 1 - u with u = W_0 - 1 + K_p e + K_i sum(e), e = 1 - H / H_tgt
    model     the same feedback around the batch's own critical weight: u = (W* - 1) + K_p e + K_i sum(e)

For ``fixed`` and ``adaptive`` the gate is on below the target (with hysteresis: on below ``target - h``, off from
``target + h``, unchanged between). ``pi`` and ``model`` need no gate: what holds entropy at its target is a weight
somewhat above 1, which a gate would switch off there; their gate is on whenever u > 0.

Rules: a batch without tokens and a non-finite entropy leave the whole state as it was. ``model`` keeps the last known
W* where this batch gives none (no leverage, no diagnostics). The integral stands still while the weight is at the bound
that it pushes against.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from stare.diagnostics import EntropyDynamics

ControllerKind = Literal["fixed", "adaptive", "pi", "model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """Set-point and schedule. Entropies in nats."""

    kind: ControllerKind = "fixed"
    target_entropy: float = 0.3  # H_tgt: the gate is on below it
    hysteresis: float = 0.0  # half-width of the band around the target in which the gate stays as it is
    amplify: float = 1.1  # W at the start
    attenuate: float = 0.9  # M at the start
    alpha: float = 0.01  # step of `adaptive`
    gain: float = 0.2  # K_p of `pi` and `model`: weight per relative error
    integral_gain: float = 0.02  # K_i: weight per relative error and batch
    amplify_max: float = 1.5  # W stays in [1, amplify_max]
    attenuate_min: float = 0.5  # M stays in [attenuate_min, 1]

    def __post_init__(self) -> None:
        if self.kind not in ("fixed", "adaptive", "pi", "model"):
            raise ValueError(f"unknown controller kind {self.kind!r}: fixed, adaptive, pi or model")
        if self.kind in ("pi", "model") and not self.target_entropy > 0:
            raise ValueError(f"controller {self.kind!r} steers by relative error: target_entropy must be above 0")
        if not (1 <= self.amplify and 0 < self.attenuate <= 1):
            raise ValueError(f"need amplify >= 1 >= attenuate > 0, got {self.amplify} and {self.attenuate}")
        if self.kind != "fixed" and not (self.amplify <= self.amplify_max and self.attenuate >= self.attenuate_min):
            raise ValueError(
                f"controller {self.kind!r} keeps W in [1, {self.amplify_max}] and M in [{self.attenuate_min}, 1] "
                f"(amplify_max, attenuate_min): it cannot start from {self.amplify} and {self.attenuate}"
            )
        if self.hysteresis < 0:
            raise ValueError(f"hysteresis must not be negative, got {self.hysteresis}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller:
    """What the next update uses, and all that the one after depends on: part of a checkpoint."""

    config: ControllerConfig
    gate_on: bool
    amplify: float  # W
    attenuate: float  # M
    integral: float = 0.0  # K_i sum(e) of `pi` and `model`
    critical_weight: float | None = None  # last known W* of `model`

    @staticmethod
    def start(config: ControllerConfig) -> Controller:
        """Before the first batch: the gate is on, as in the reference."""
        return Controller(config=config, gate_on=True, amplify=config.amplify, attenuate=config.attenuate)

    def update(self, entropy: float | None, dynamics: EntropyDynamics | None = None) -> Controller:
        """The state after a batch of this mean entropy (nats).

        Args:
            entropy: None for a batch without tokens.
            dynamics: Lambda and Gamma of the batch; only ``model`` looks at them.
        """
        if entropy is None or not math.isfinite(entropy):
            return self
        if self.config.kind in ("pi", "model"):
            return self._steered(entropy, dynamics)
        return self._gated(entropy)

    def _gated(self, entropy: float) -> Controller:
        config = self.config
        half_width = config.hysteresis if self.gate_on else -config.hysteresis
        state = replace(self, gate_on=entropy < config.target_entropy + half_width)
        if config.kind == "fixed":
            return state
        error = config.target_entropy - entropy
        step = config.alpha * ((error > 0) - (error < 0))
        return replace(
            state,
            amplify=min(max(state.amplify + step, 1.0), config.amplify_max),
            attenuate=min(max(state.attenuate - step, config.attenuate_min), 1.0),
        )

    def _steered(self, entropy: float, dynamics: EntropyDynamics | None) -> Controller:
        config = self.config
        critical = self.critical_weight
        if config.kind == "model" and dynamics is not None and dynamics.critical_weight is not None:
            critical = dynamics.critical_weight
        known = critical if config.kind == "model" and critical is not None else config.amplify
        error = 1.0 - entropy / config.target_entropy
        highest = max(config.amplify_max - 1.0, 1.0 - config.attenuate_min)
        strength = known - 1.0 + config.gain * error + self.integral
        pushes_on = (strength >= highest and error > 0) or (strength <= 0 and error < 0)
        integral = self.integral if pushes_on else self.integral + config.integral_gain * error
        integral = min(max(integral, -highest), highest)
        strength = max(0.0, known - 1.0 + config.gain * error + integral)
        return replace(
            self,
            gate_on=strength > 0,
            amplify=min(1.0 + strength, config.amplify_max),
            attenuate=max(1.0 - strength, config.attenuate_min),
            integral=integral,
            critical_weight=critical,
        )

    def to_json(self) -> str:
        """Everything, in strict JSON; ``from_json`` gives an equal object."""
        return json.dumps(asdict(self), allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Controller:
        """Raises ``ValueError`` or ``TypeError`` for anything that ``to_json`` has not written."""
        return Controller.from_dict(json.loads(text))

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Controller:
        """The object that ``dataclasses.asdict`` took apart; raises as ``from_json``."""
        try:
            config = ControllerConfig(**data["config"])
        except KeyError:
            raise ValueError("a controller state without its config") from None
        return Controller(**{**data, "config": config})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracking:
    """How well entropy was held at its target."""

    rms: float  # root of the mean squared H - H_tgt, nats
    within: float  # share of batches with |H - H_tgt| <= band * H_tgt
    num_batches: int


def tracking(entropies: Iterable[float | None], target: float, *, band: float = 0.1) -> Tracking | None:
    """Tracking error over the batches whose entropy is known; None where there is none."""
    errors = [entropy - target for entropy in entropies if entropy is not None and math.isfinite(entropy)]
    if not errors:
        return None
    return Tracking(
        rms=math.sqrt(sum(error * error for error in errors) / len(errors)),
        within=sum(abs(error) <= band * target for error in errors) / len(errors),
        num_batches=len(errors),
    )
