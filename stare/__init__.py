"""STARE (arXiv 2606.19236) and the GRPO it rests on, as functions over tensors; needs torch and nothing else."""

from stare.advantage import group_advantage
from stare.controller import ControllerConfig, GateState, update_gate
from stare.loss import LossMode, SurrogateSum, surrogate_sum, token_scale
from stare.sensitivity import TokenStatistics, predicted_entropy_change, sensitivity, token_statistics
from stare.weights import TokenWeights, Variant, num_selected, token_weights, top_surprisal

__all__ = [
    "ControllerConfig",
    "GateState",
    "LossMode",
    "SurrogateSum",
    "TokenStatistics",
    "TokenWeights",
    "Variant",
    "group_advantage",
    "num_selected",
    "predicted_entropy_change",
    "sensitivity",
    "surrogate_sum",
    "token_scale",
    "token_statistics",
    "token_weights",
    "top_surprisal",
    "update_gate",
]
