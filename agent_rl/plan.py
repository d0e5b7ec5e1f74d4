"""The plan of one update, made once for the whole batch before it is cut up: one coefficient per sampled token.

Nothing after this ranks, averages or decides. ``selection = "per_micro_batch"`` reproduces the public reference, which
ranks surprisal and normalises inside every micro-batch: it exists as the negative control of our invariance tests.

Dimensions: B trajectories of the update batch, T sampled tokens of all of them in order of trajectory, then position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agent_rl.pack import MicroBatch, SampledSequence
from agent_rl.types import Trajectory
from stare import (
    ControllerConfig,
    GateState,
    LossMode,
    TokenStatistics,
    Variant,
    group_advantage,
    token_scale,
    token_weights,
    update_gate,
)

Selection = Literal["batch", "per_micro_batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateBatch:
    """The trajectories that an update is made of, with their advantages."""

    trajectories: tuple[Trajectory, ...]  # B, scored, in order of group and member
    sequences: tuple[SampledSequence, ...]  # B
    advantage_B: Tensor  # float64 [B]

    @property
    def num_tokens_B(self) -> Tensor:
        return torch.tensor([len(s.positions) for s in self.sequences], dtype=torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the learner sums; all tensors on the CPU."""

    coefficient_T: Tensor  # float32 [T], omega * A * normaliser
    logp_old_T: Tensor  # float32 [T], under the weights before this update
    entropy_T: Tensor  # float32 [T], nats
    phi_T: Tensor  # float32 [T]
    advantage_T: Tensor  # float64 [T]
    omega_T: Tensor  # float64 [T]
    l_plus_T: Tensor  # bool [T]
    l_minus_T: Tensor  # bool [T]
    entropy: float  # mean over T, nats: what the gate was moved by
    gate: GateState  # after this batch's entropy; what omega was made with

    @property
    def num_tokens(self) -> int:
        return self.coefficient_T.numel()


def update_batch(trajectories: Sequence[Trajectory], *, divide_by_std: bool = True) -> UpdateBatch:
    """Advantages among the scored members of each group; void rows and groups without a difference leave.

    A void trajectory is as if it had not been: neither mean nor std of its group, nor anything later, sees it.
    """
    scored = sorted((t for t in trajectories if not t.is_void), key=lambda t: (t.group, t.member))
    rewards = torch.tensor([t.reward for t in scored], dtype=torch.float64)
    groups = torch.tensor([t.group for t in scored], dtype=torch.int64)
    advantage = group_advantage(rewards, groups, divide_by_std=divide_by_std)
    informative = {t.group for t, a in zip(scored, advantage.tolist(), strict=True) if a != 0.0}
    kept = [i for i, t in enumerate(scored) if t.group in informative and t.num_sampled > 0]
    return UpdateBatch(
        trajectories=tuple(scored[i] for i in kept),
        sequences=tuple(SampledSequence.of(scored[i].token_ids, scored[i].loss_mask) for i in kept),
        advantage_B=advantage[kept],
    )


def make_plan(
    batch: UpdateBatch,
    statistics_T: TokenStatistics,
    gate: GateState,
    controller: ControllerConfig,
    *,
    variant: Variant,
    fraction: float,
    loss_mode: LossMode = "token-mean",
    selection: Selection = "batch",
    micro_batches: Sequence[MicroBatch] = (),
) -> Plan:
    """Gate, omega and coefficients of one update from the score pass over its whole batch.

    Args:
        batch: trajectories and advantages.
        statistics_T: logprob, entropy and Phi of every sampled token under the weights before the update.
        gate: state before this batch; the batch's own entropy moves it first (as in the reference).
        controller: its set-point and schedule.
        variant: which sets carry a weight.
        fraction: P.
        loss_mode: the normaliser.
        selection: ``batch``, or ``per_micro_batch`` as negative control.
        micro_batches: of all ranks; only read by ``per_micro_batch``.

    Raises:
        ValueError: a logprob or entropy of the score pass is not finite.
    """
    logp_T, entropy_T = statistics_T.logp.float().cpu(), statistics_T.entropy.float().cpu()
    if not (torch.isfinite(logp_T).all() and torch.isfinite(entropy_T).all()):
        raise ValueError("the score pass returned a non-finite logprob or entropy: the weights are broken")
    mean_entropy = float(entropy_T.double().mean())
    gate = update_gate(gate, mean_entropy, controller)
    row_T = torch.repeat_interleave(torch.arange(len(batch.sequences)), batch.num_tokens_B)
    advantage_T = batch.advantage_B[row_T]
    scale_T = token_scale(batch.num_tokens_B, loss_mode)[row_T]

    omega_T = torch.ones_like(advantage_T)
    l_plus_T = torch.zeros_like(row_T, dtype=torch.bool)
    l_minus_T = torch.zeros_like(l_plus_T)
    for tokens in _selection_scopes(selection, micro_batches, len(row_T)):
        weights = token_weights(
            -logp_T.double()[tokens],
            advantage_T[tokens],
            gate_on=gate.gate_on,
            amplify=gate.amplify,
            attenuate=gate.attenuate,
            fraction=fraction,
            variant=variant,
        )
        omega_T[tokens] = weights.omega_T
        l_plus_T[tokens], l_minus_T[tokens] = weights.l_plus_T, weights.l_minus_T
        if selection == "per_micro_batch":
            # The reference averages over the tokens of a micro-batch and weighs it by its share of the sequences.
            share = len(set(row_T[tokens].tolist())) / len(batch.sequences)
            scale_T[tokens] = share / len(tokens)
    return Plan(
        coefficient_T=(omega_T * advantage_T * scale_T).float(),
        logp_old_T=logp_T,
        entropy_T=entropy_T,
        phi_T=statistics_T.phi.float().cpu(),
        advantage_T=advantage_T,
        omega_T=omega_T,
        l_plus_T=l_plus_T,
        l_minus_T=l_minus_T,
        entropy=mean_entropy,
        gate=gate,
    )


def _selection_scopes(selection: Selection, micro_batches: Sequence[MicroBatch], num_tokens: int) -> list[Tensor]:
    if selection == "batch":
        return [torch.arange(num_tokens)]
    return [micro_batch.origin for micro_batch in micro_batches if not micro_batch.is_pad]
