"""STARE (arXiv 2606.19236) and the GRPO it rests on, as functions over tensors; needs torch and nothing else."""

from stare.advantage import group_advantage
from stare.controller import Controller, ControllerConfig, ControllerKind, Tracking, tracking
from stare.diagnostics import (
    EntropyDynamics,
    Quadrant,
    SelectionReport,
    entropy_dynamics,
    most_chosen,
    quadrants,
    selection_report,
)
from stare.loss import LossMode, SurrogateSum, surrogate_sum, token_scale
from stare.selection import num_selected, top_fraction
from stare.sensitivity import (
    TokenStatistics,
    entropy_of_logp,
    predicted_entropy_change,
    sensitivity,
    statistics_of_logp,
    token_statistics,
)
from stare.weights import (
    OPERATIONS,
    Granularity,
    Operation,
    Selector,
    TokenSets,
    TokenWeights,
    Variant,
    omega,
    token_gate,
    token_sets,
    token_weights,
)

__all__ = [
    "OPERATIONS",
    "Controller",
    "ControllerConfig",
    "ControllerKind",
    "EntropyDynamics",
    "Granularity",
    "LossMode",
    "Operation",
    "Quadrant",
    "SelectionReport",
    "Selector",
    "SurrogateSum",
    "TokenSets",
    "TokenStatistics",
    "TokenWeights",
    "Tracking",
    "Variant",
    "entropy_dynamics",
    "entropy_of_logp",
    "group_advantage",
    "most_chosen",
    "num_selected",
    "omega",
    "predicted_entropy_change",
    "quadrants",
    "selection_report",
    "sensitivity",
    "statistics_of_logp",
    "surrogate_sum",
    "token_gate",
    "token_scale",
    "token_sets",
    "token_statistics",
    "token_weights",
    "top_fraction",
    "tracking",
]
