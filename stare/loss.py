"""The clipped surrogate as a plain sum of per-token terms, so that no caller can average it wrongly.

Everything that compares tokens with each other (advantage, omega, the normaliser) is folded beforehand into ONE
coefficient per sampled token: ``c = omega * A * token_scale``. Splitting the sum over micro-batches and ranks then
cannot change it. Dimensions: T sampled tokens, B trajectories.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

LossMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]

MAX_LOG_RATIO = 20.0
"""|ln rho| is bounded by this before ``exp``, so that one absurd ratio cannot make the loss infinite."""


class SurrogateSum(NamedTuple):
    """Sum of the loss terms and, for the record, where the clip decided."""

    loss: Tensor  # scalar
    ratio_T: Tensor  # float [T], rho
    clipped_T: Tensor  # bool [T], the clipped branch was the larger loss


def token_scale(num_tokens_B: Tensor, mode: LossMode) -> Tensor:
    """The factor [B] that every sampled token of a trajectory carries in the objective.

    ``token-mean``: 1 / N over all tokens of the batch. ``seq-mean-token-sum``: 1 / B.
    ``seq-mean-token-mean``: 1 / (B n_i).
    Trajectories without a sampled token count neither as sequence nor as token.
    """
    counts = num_tokens_B.to(torch.float64)
    num_sequences = (counts > 0).sum().clamp(min=1)
    if mode == "token-mean":
        return torch.full_like(counts, 1.0) / counts.sum().clamp(min=1)
    if mode == "seq-mean-token-sum":
        return torch.full_like(counts, 1.0) / num_sequences
    if mode == "seq-mean-token-mean":
        return 1.0 / (num_sequences * counts.clamp(min=1))
    raise ValueError(f"unknown loss mode {mode!r}: token-mean, seq-mean-token-sum or seq-mean-token-mean")


def surrogate_sum(
    logp_T: Tensor,
    logp_old_T: Tensor,
    coefficient_T: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float = 10.0,
) -> SurrogateSum:
    """``-sum_t min(rho c, clip(rho, 1 - low, 1 + high) c)``, bounded by ``-dual_clip * c`` where c < 0.

    PPO's clip (arXiv 1707.06347), DAPO's higher upper bound (arXiv 2503.14476), the dual clip (arXiv 1912.09729).
    The coefficient has the sign of the advantage, so the clip acts as on the advantage itself.

    Args:
        logp_T: float [T], with gradient.
        logp_old_T: float [T], log-probabilities that the ratio is taken against.
        coefficient_T: float [T], ``omega * A * scale``.
        clip_low: lower half-width of the clip.
        clip_high: upper half-width.
        dual_clip: bound of the ratio for negative coefficients; > 1.
    """
    ratio_T = (logp_T - logp_old_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = -ratio_T * coefficient_T
    clipped = -ratio_T.clamp(1 - clip_low, 1 + clip_high) * coefficient_T
    loss_T = torch.maximum(plain, clipped)
    loss_T = torch.where(coefficient_T < 0, torch.minimum(loss_T, -dual_clip * coefficient_T), loss_T)
    return SurrogateSum(loss_T.sum(), ratio_T.detach(), (clipped > plain).detach())
