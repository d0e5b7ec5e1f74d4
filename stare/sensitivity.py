"""How much one policy-gradient step on one token changes the entropy of its position (arXiv 2606.19236, Sec. 3).

A step of size eta on ``A ln p(o)`` moves the logits by ``eta A (onehot(o) - p)``; with ``dH/dz_k = -p_k (ln p_k + H)``
the first-order change is ``dH = eta A Phi(o; p)``, where, with surprisal ``s_k = -ln p_k``,

    Phi(o; p) = p_o (s_o - H) - sum_k p_k^2 (s_k - H)

``Phi > 0`` above a critical surprisal and ``< 0`` below it, and ``E_{o~p}[Phi] = 0`` exactly.

Dimensions: ``...`` positions, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_LEAST_LOGP = -1e4


class TokenStatistics(NamedTuple):
    """What one pass over the logits knows of each sampled token; natural logarithms."""

    logp: Tensor  # [...] ln p(o)
    entropy: Tensor  # [...] H(p), nats
    phi: Tensor  # [...] Phi(o; p)


def token_statistics(logits_V: Tensor, token: Tensor) -> TokenStatistics:
    """Log-probability, entropy and Phi of the sampled tokens from one log-softmax.

    Args:
        logits_V: float [..., V], already divided by the temperature; computed in its own dtype, so pass float32 or 64.
        token: int64 [...], the sampled ids.
    """
    return statistics_of_logp(torch.log_softmax(logits_V, dim=-1), token, consume=True)


def statistics_of_logp(logp_V: Tensor, token: Tensor, *, consume: bool = False) -> TokenStatistics:
    """The same from log-probabilities.

    Args:
        logp_V: float [..., V], a log-softmax.
        token: int64 [...], the sampled ids.
        consume: ``logp_V`` may be overwritten (it is left alone where a gradient goes through it).
    """
    logp = logp_V.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    p_V = logp_V.exp()
    # Without gradient two buffers of size V do; memory, not arithmetic, is what this costs.
    in_place = not (torch.is_grad_enabled() and logp_V.requires_grad)
    # 0 * -inf would be NaN where a logit was masked out; p is 0 far above this bound, so nothing else changes.
    bounded_V = logp_V.clamp_(min=_LEAST_LOGP) if in_place and consume else logp_V.clamp(min=_LEAST_LOGP)
    p_logp_V = bounded_V.mul_(p_V) if in_place else bounded_V * p_V
    entropy = -p_logp_V.sum(-1)
    # sum_k p_k^2 (s_k - H), as two reductions over what is there already.
    p2_logp_V = p_logp_V.mul_(p_V) if in_place else p_logp_V * p_V
    p2_V = p_V.square_() if in_place else p_V.square()
    mean_pull = -p2_logp_V.sum(-1) - entropy * p2_V.sum(-1)
    phi = logp.exp() * (-logp - entropy) - mean_pull
    return TokenStatistics(logp, entropy, phi)


def entropy_of_logp(logp_V: Tensor) -> Tensor:
    """H of each position, float [...], nats, with gradient: for a term of the loss that moves entropy itself.

    Args:
        logp_V: float [..., V], a log-softmax.
    """
    return -(logp_V.exp() * logp_V.clamp(min=_LEAST_LOGP)).sum(-1)


def sensitivity(logits_V: Tensor, token: Tensor) -> Tensor:
    """Phi(o; p) of the sampled tokens; shapes as in ``token_statistics``."""
    return token_statistics(logits_V, token).phi


def predicted_entropy_change(advantage: Tensor, phi: Tensor, *, step_size: float) -> Tensor:
    """First-order change of entropy (nats) of each position after its own step ``step_size * A * grad ln p(o)``."""
    return step_size * advantage * phi
