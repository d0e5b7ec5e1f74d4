"""The target-entropy gate: a small state that one batch entropy at a time moves (arXiv 2606.19236, Sec. 4.3-4.4)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """Set-point and schedule. Entropies in nats."""

    target_entropy: float = 0.3  # H_tgt: the gate is on below it
    amplify: float = 1.1  # W at the start
    attenuate: float = 0.9  # M at the start
    adaptive: bool = False  # move W and M by alpha * sgn(H_tgt - H) after every batch
    alpha: float = 0.01
    amplify_max: float = 1.5  # W stays in [1, amplify_max]
    attenuate_min: float = 0.5  # M stays in [attenuate_min, 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateState:
    """What the next update uses; part of a checkpoint."""

    gate_on: bool
    amplify: float
    attenuate: float

    @staticmethod
    def initial(config: ControllerConfig) -> GateState:
        return GateState(gate_on=True, amplify=config.amplify, attenuate=config.attenuate)


def update_gate(state: GateState, entropy: float | None, config: ControllerConfig) -> GateState:
    """State after a batch of this mean entropy (nats); an unknown or non-finite entropy leaves it as it was."""
    if entropy is None or not math.isfinite(entropy):
        return state
    state = replace(state, gate_on=entropy < config.target_entropy)
    if not config.adaptive:
        return state
    error = config.target_entropy - entropy
    step = config.alpha * ((error > 0) - (error < 0))
    return replace(
        state,
        amplify=min(max(state.amplify + step, 1.0), config.amplify_max),
        attenuate=min(max(state.attenuate - step, config.attenuate_min), 1.0),
    )
