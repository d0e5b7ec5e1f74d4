"""What becomes of the ratio of new to old policy: the neighbours of PPO's clip.

Every function takes logprobs [M] of whole trajectories (with gradient), the old ones, the coefficient ``omega A scale``
and returns the summed loss as ``stare.surrogate_sum`` does; rules per trajectory or turn also take ``segment_M``, which
numbers the segment of each token. All are sums over tokens or segments, so they do not depend on how a batch is cut as
long as a segment stays whole. At ratio 1 the gradient of every one of them is ``-coefficient`` (``c_t / n`` summed over
the segment for GMPO, which is the same for equal coefficients).

Dimensions: M sampled tokens, S segments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stare.loss import MAX_LOG_RATIO, SurrogateSum, surrogate_sum


def _log_ratio(logp_M: Tensor, logp_old_M: Tensor) -> Tensor:
    return (logp_M - logp_old_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _segment_mean(value_M: Tensor, segment_M: Tensor) -> Tensor:
    """Mean over each token's segment, at each token's place, [M]."""
    _, index_M = torch.unique(segment_M, return_inverse=True)
    counts_S = torch.bincount(index_M)
    return (value_M.new_zeros(len(counts_S)).index_add(0, index_M, value_M) / counts_S)[index_M]


def _clipped(ratio_M: Tensor, coefficient_M: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    plain_M = -ratio_M * coefficient_M
    clipped_M = -ratio_M.clamp(1 - low, 1 + high) * coefficient_M
    return torch.maximum(plain_M, clipped_M), (clipped_M > plain_M).detach()


def ppo(logp_M: Tensor, logp_old_M: Tensor, coefficient_M: Tensor, *, clip: float = 0.2) -> SurrogateSum:
    """``-min(rho c, clip(rho, 1 - e, 1 + e) c)``. PPO, arXiv 1707.06347, Eq. 7."""
    ratio_M = _log_ratio(logp_M, logp_old_M).exp()
    loss_M, clipped_M = _clipped(ratio_M, coefficient_M, clip, clip)
    return SurrogateSum(loss_M.sum(), ratio_M.detach(), clipped_M)


def dapo(
    logp_M: Tensor,
    logp_old_M: Tensor,
    coefficient_M: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float = 10.0,
) -> SurrogateSum:
    """Clip-higher (DAPO, arXiv 2503.14476, Sec. 3.1) with the dual clip (arXiv 1912.09729): ``stare.surrogate_sum``."""
    return surrogate_sum(logp_M, logp_old_M, coefficient_M, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def dual_clip(
    logp_M: Tensor, logp_old_M: Tensor, coefficient_M: Tensor, *, clip: float = 0.2, bound: float = 3.0
) -> SurrogateSum:
    """PPO whose loss for c < 0 is at most ``bound |c|``, however large rho is. Dual-clip PPO, arXiv 1912.09729."""
    return surrogate_sum(logp_M, logp_old_M, coefficient_M, clip_low=clip, clip_high=clip, dual_clip=bound)


def hapo_clip(
    logp_M: Tensor,
    logp_old_M: Tensor,
    coefficient_M: Tensor,
    *,
    signal_M: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    alpha: float = 1.0,
    dual_clip: float = 10.0,
) -> SurrogateSum:
    """PPO whose bounds follow entropy: where h > 0 the upper one is ``clip_high (1 + alpha h)``, where h <= 0 the lower
    one ``clip_low (1 - alpha h)``. HAPO, arXiv 2509.16591 (asymmetric adaptive clipping), with the dual clip.

    Uncertain tokens may rise further, certain ones fall further. Defaults as in the recipes of its public code.

    Args:
        logp_M: float [M], with gradient.
        logp_old_M: float [M].
        coefficient_M: float [M].
        signal_M: float [M], h of ``token_weights.entropy_signal``, from the whole batch under the weights before it.
        clip_low: half-width below 1 where h > 0.
        clip_high: half-width above 1 where h <= 0.
        alpha: strength of the signal.
        dual_clip: bound of the ratio for negative coefficients.
    """
    low_M = clip_low * (1 - alpha * signal_M.clamp(max=0))
    high_M = clip_high * (1 + alpha * signal_M.clamp(min=0))
    ratio_M = _log_ratio(logp_M, logp_old_M).exp()
    plain_M = -ratio_M * coefficient_M
    clipped_M = -torch.minimum(torch.maximum(ratio_M, 1 - low_M), 1 + high_M) * coefficient_M
    loss_M = torch.maximum(plain_M, clipped_M)
    loss_M = torch.where(coefficient_M < 0, torch.minimum(loss_M, -dual_clip * coefficient_M), loss_M)
    return SurrogateSum(loss_M.sum(), ratio_M.detach(), (clipped_M > plain_M).detach())


def gspo(
    logp_M: Tensor,
    logp_old_M: Tensor,
    coefficient_M: Tensor,
    *,
    segment_M: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> SurrogateSum:
    """One ratio per trajectory, ``s = exp(mean_t ln rho_t)``, clipped. GSPO, arXiv 2507.18071, Eq. 5-7.

    Its token form (Eq. 13-14): value s, gradient through each token's own logprob, so tokens may weigh differently.
    Meant for the loss mode ``seq-mean-token-mean``.
    """
    log_ratio_M = _log_ratio(logp_M, logp_old_M)
    sequence_M = _segment_mean(log_ratio_M.detach(), segment_M)
    ratio_M = (sequence_M + log_ratio_M - log_ratio_M.detach()).exp()
    loss_M, clipped_M = _clipped(ratio_M, coefficient_M, clip_low, clip_high)
    return SurrogateSum(loss_M.sum(), ratio_M.detach(), clipped_M)


def turn_ratio(
    logp_M: Tensor,
    logp_old_M: Tensor,
    coefficient_M: Tensor,
    *,
    segment_M: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> SurrogateSum:
    """GSPO's ratio with a turn as the segment. Turn-level importance sampling of ST-PPO, arXiv 2511.20718, Eq. 4.

    Formula of the geometric mean unconfirmed; ST-PPO's clipping-bias correction, which divides by the size of the
    clipped part, is not in.
    """
    return gspo(logp_M, logp_old_M, coefficient_M, segment_M=segment_M, clip_low=clip_low, clip_high=clip_high)


def cispo(
    logp_M: Tensor, logp_old_M: Tensor, coefficient_M: Tensor, *, clip_low: float = 10.0, clip_high: float = 0.2
) -> SurrogateSum:
    """``-sg(clip(rho, 1 - low, 1 + high)) c ln pi``: no token loses its gradient. MiniMax-M1, arXiv 2506.13585.

    low = 10 means no lower bound; verl's high is 0.2, TRL's 5.
    """
    ratio_M = _log_ratio(logp_M, logp_old_M).exp().detach()
    bounded_M = ratio_M.clamp(max(0.0, 1 - clip_low), 1 + clip_high)
    return SurrogateSum(-(bounded_M * coefficient_M * logp_M).sum(), ratio_M, bounded_M != ratio_M)


def sapo(
    logp_M: Tensor,
    logp_old_M: Tensor,
    coefficient_M: Tensor,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> SurrogateSum:
    """A soft gate instead of a clip: ``-c sigmoid(tau (rho - 1)) 4 / tau``, tau by the sign of c.

    SAPO, arXiv 2511.20347. Nothing is ever clipped; ``clipped_T`` marks nothing.
    """
    ratio_M = _log_ratio(logp_M, logp_old_M).exp()
    positive_M = (coefficient_M > 0).to(ratio_M.dtype)
    tau_M = temperature_positive * positive_M + temperature_negative * (1 - positive_M)
    gate_M = torch.sigmoid(tau_M * (ratio_M - 1)) * 4 / tau_M
    return SurrogateSum(-(gate_M * coefficient_M).sum(), ratio_M.detach(), torch.zeros_like(ratio_M, dtype=torch.bool))


def gmpo(
    logp_M: Tensor, logp_old_M: Tensor, coefficient_M: Tensor, *, segment_M: Tensor, clip_log: float = 0.4
) -> SurrogateSum:
    """``-(sum c) exp(mean_t ln rho_t)`` per trajectory, each ``ln rho`` clipped to +-0.4 against the sign of c.

    Geometric-Mean Policy Optimization, arXiv 2507.20673. c is summed over the trajectory.
    """
    log_ratio_M = _log_ratio(logp_M, logp_old_M)
    sign_M = torch.sign(coefficient_M)
    signed_M = sign_M * log_ratio_M
    # The pessimistic one of plain and clipped, as in PPO, in log space.
    bounded_M = torch.minimum(signed_M, signed_M.clamp(-clip_log, clip_log))
    mean_M = _segment_mean(sign_M * bounded_M, segment_M)
    return SurrogateSum(
        -(mean_M.exp() * coefficient_M).sum(), log_ratio_M.exp().detach(), (bounded_M < signed_M).detach()
    )


def aspo(
    logp_M: Tensor,
    logp_old_M: Tensor,
    coefficient_M: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.4,
    dual_clip: float = 3.0,
) -> SurrogateSum:
    """Where c > 0 the weight is ``1 / rho`` instead of rho, bounded by ``dual_clip``; tokens beyond the clip drop out.

    ASPO, arXiv 2510.06062; the gradient is that weight times ``c grad ln pi``. c < 0: PPO with dual clip.
    """
    ratio_M = _log_ratio(logp_M, logp_old_M).exp()
    fixed_M = ratio_M.detach()
    flipped_M = torch.minimum(1 / fixed_M, torch.full_like(fixed_M, dual_clip)) * (ratio_M / fixed_M)
    beyond_M = fixed_M > 1 + clip_high
    positive_M = -torch.where(beyond_M, flipped_M.detach(), flipped_M) * coefficient_M
    loss_M, clipped_M = _clipped(ratio_M, coefficient_M, clip_low, clip_high)
    loss_M = torch.minimum(loss_M, -dual_clip * coefficient_M)
    is_positive_M = coefficient_M > 0
    loss_M = torch.where(is_positive_M, positive_M, torch.where(coefficient_M < 0, loss_M, 0 * loss_M))
    return SurrogateSum(loss_M.sum(), fixed_M, torch.where(is_positive_M, beyond_M, clipped_M))


def ce_gppo(
    logp_M: Tensor,
    logp_old_M: Tensor,
    coefficient_M: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    low_gradient: float = 0.75,
    high_gradient: float = 1.0,
) -> SurrogateSum:
    """PPO whose clipped tokens keep a bounded gradient: ``beta (1 -+ e) / sg(rho) rho c``.

    CE-GPPO, arXiv 2509.20712. beta is ``low_gradient`` for c < 0 below the lower bound (7B: 0.75, 1.5B: 0.5)
    and ``high_gradient`` for c > 0 above the upper one.
    """
    ratio_M = _log_ratio(logp_M, logp_old_M).exp()
    fixed_M = ratio_M.detach()
    low_M = (coefficient_M < 0) & (fixed_M < 1 - clip_low)
    high_M = (coefficient_M > 0) & (fixed_M > 1 + clip_high)
    unit_M = ratio_M / fixed_M
    kept_M = torch.where(low_M, low_gradient * (1 - clip_low) * unit_M, ratio_M)
    kept_M = torch.where(high_M, high_gradient * (1 + clip_high) * unit_M, kept_M)
    return SurrogateSum(-(kept_M * coefficient_M).sum(), fixed_M, low_M | high_M)
