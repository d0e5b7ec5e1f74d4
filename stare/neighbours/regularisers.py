"""Terms beside the surrogate: divergences from another policy, and entropy itself.

Each returns a penalty per token, float [T], which the caller multiplies by a coefficient and by the loss's own token
scale and adds to the loss (an entropy bonus is a negative penalty). They are sums over tokens, so they do not depend on
how a batch is cut. ``CoefficientState`` moves a coefficient.

Dimensions: T sampled tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


def k1(logp_T: Tensor, reference_logp_T: Tensor) -> Tensor:
    """``ln pi - ln pi_ref``: unbiased for the divergence, of either sign; as a loss its mean gradient is zero.

    Approximating KL Divergence (Schulman, 2020, a blog post).
    """
    return logp_T - reference_logp_T


def k2(logp_T: Tensor, reference_logp_T: Tensor) -> Tensor:
    """``(ln pi - ln pi_ref)^2 / 2``: biased, never negative, and on-policy its gradient is that of the divergence.

    Approximating KL Divergence (Schulman, 2020, a blog post).
    """
    return (logp_T - reference_logp_T).square() / 2


def k3(logp_T: Tensor, reference_logp_T: Tensor) -> Tensor:
    """``d - ln d - 1`` with ``d = pi_ref / pi``: unbiased, never negative. GRPO's term, arXiv 2402.03300, Eq. 4.

    Approximating KL Divergence (Schulman, 2020, a blog post). ``ln d`` is bounded by 20.
    """
    shift_T = (reference_logp_T - logp_T).clamp(-20, 20)
    return shift_T.exp() - shift_T - 1


def kl_cov(logp_T: Tensor, logp_old_T: Tensor, held_T: Tensor) -> Tensor:
    """``|ln pi - ln pi_old|`` on the tokens that ``kl_cov_tokens`` chose over the batch, 0 elsewhere; coefficient 1.

    KL-Cov, arXiv 2505.22617. Its gradient is 0 at the old policy: it acts from a batch's second step on.
    """
    return (logp_T - logp_old_T).abs() * held_T


def entropy_bonus(entropy_T: Tensor) -> Tensor:
    """``-H``: with coefficient beta, beta H is added to the objective. A3C, arXiv 1602.01783."""
    return -entropy_T


@dataclass(frozen=True, slots=True, kw_only=True)
class CoefficientState:
    """The coefficient of an entropy bonus that seeks a target: ``c`` acts only below it. Skywork-OR1, arXiv 2505.22312
    (target 0.2, step 0.005)."""

    coefficient: float = 0.0  # c, moved by every batch, never negative
    target: float = 0.2  # nats
    step: float = 0.005

    def update(self, entropy: float) -> tuple[CoefficientState, float]:
        """The next state, and the coefficient to use with this batch: c where entropy is not above the target, else 0.

        A non-finite entropy changes nothing and uses 0.
        """
        if not math.isfinite(entropy):
            return self, 0.0
        used = self.coefficient if entropy <= self.target else 0.0
        moved = self.coefficient + (self.step if entropy < self.target else -self.step)
        return replace(self, coefficient=max(0.0, moved)), used


def epo_smoothing(
    entropy_T: Tensor, history: Sequence[float], *, low: float = 0.8, high: float = 1.2, penalty: float = 0.1
) -> Tensor:
    """``penalty`` times how far a token's entropy is outside ``[low, high]`` times the mean entropy of earlier steps.

    EPO, arXiv 2509.22576, beside an entropy bonus of coefficient 0.001. The paper's penalty is a constant
    outside the band, so that its released code has no gradient from it; here it is the distance, so that it has one.
    Empty history: 0.
    """
    if not history:
        return torch.zeros_like(entropy_T)
    mean = sum(history) / len(history)
    return penalty * ((low * mean - entropy_T).clamp(min=0) + (entropy_T - high * mean).clamp(min=0))


def lp_reg(
    logits_V: Tensor, old_logits_V: Tensor, token_T: Tensor, protected_T: Tensor, *, min_p: float = 0.02
) -> Tensor:
    """``KL(proxy || pi)`` at protected tokens, the proxy being the old policy without its noise: what is below
    ``min_p`` times its largest probability is cut, the rest renormalised. Lp-Reg, arXiv 2510.03222.

    Args:
        logits_V: float [T, V], with gradient.
        old_logits_V: float [T, V].
        token_T: int64 [T], sampled.
        protected_T: bool [T], of ``lp_reg_tokens``.
        min_p: share of the largest probability.

    Returns:
        float [T]; 0 where the token is not protected, or the proxy gives it no more than the policy does.
    """
    old_V = torch.softmax(old_logits_V.detach(), -1)
    kept_V = torch.where(old_V >= min_p * old_V.max(-1, keepdim=True).values, old_V, torch.zeros_like(old_V))
    proxy_V = kept_V / kept_V.sum(-1, keepdim=True)
    logp_V = torch.log_softmax(logits_V, -1)
    divergence_T = (torch.xlogy(proxy_V, proxy_V) - proxy_V * logp_V).sum(-1)
    at = token_T.unsqueeze(-1)
    below_T = logp_V.detach().gather(-1, at).squeeze(-1).exp() < proxy_V.gather(-1, at).squeeze(-1)
    return torch.where(protected_T & below_T, divergence_T, torch.zeros_like(divergence_T))
