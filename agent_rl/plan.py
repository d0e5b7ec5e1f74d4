"""The plan of one update, made once for the whole batch before it is cut up: one coefficient per sampled token.

Nothing after this ranks, averages or decides (but ``selection = "per_micro_batch"``, a negative control).

Dimensions: B trajectories of the update batch, T sampled tokens of all of them in order of trajectory, then position.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress, pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from agent_rl.algorithm import Algorithm, tokens_of_turns
from agent_rl.correction import Correction, correction_of
from agent_rl.pack import MicroBatch, SampledSequence
from agent_rl.per_micro_batch import scale_per_micro_batch, sets_per_micro_batch
from agent_rl.regularisers import RegulariserState
from agent_rl.types import Trajectory
from stare import (
    Controller,
    EntropyDynamics,
    Granularity,
    LossMode,
    Selector,
    TokenSets,
    TokenStatistics,
    Variant,
    entropy_dynamics,
    omega,
    token_gate,
    token_scale,
    token_sets,
)
from stare.neighbours import Tokens

Selection = Literal["batch", "per_micro_batch"]

GRPO = Algorithm()

DEFAULT_SCENARIO = "default"
"""The scenario of every trajectory whose task names none, or one without a target of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What the plan decides by; the set-points are in the controllers."""

    variant: Variant = "O1"
    fraction: float = 0.1  # P
    selector: Selector = "surprisal"
    granularity: Granularity = "batch"
    loss_mode: LossMode = "token-mean"
    selection: Selection = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateBatch:
    """The trajectories that an update is made of, with their advantages."""

    trajectories: tuple[Trajectory, ...]  # B, scored, in order of group and member
    sequences: tuple[SampledSequence, ...]  # B
    advantage_B: Tensor  # float64 [B]; where advantages are per turn, the mean over its tokens
    turn_advantage_T: Tensor | None = None  # float64 [T], where advantages are per turn

    @property
    def advantage_T(self) -> Tensor:
        """float64 [T], of every sampled token."""
        if self.turn_advantage_T is not None:
            return self.turn_advantage_T
        return torch.repeat_interleave(self.advantage_B, self.num_tokens_B)

    @property
    def num_tokens_B(self) -> Tensor:
        return torch.tensor([len(s.positions) for s in self.sequences], dtype=torch.int64)

    @property
    def num_tokens(self) -> int:
        return sum(len(s.positions) for s in self.sequences)

    @property
    def token_T(self) -> Tensor:
        """int64 [T], the sampled ids."""
        return torch.from_numpy(self._sampled((t.token_ids for t in self.trajectories), np.int64))

    @property
    def sampler_logp_T(self) -> Tensor:
        """float32 [T], logprobs as the engine gave them."""
        return torch.from_numpy(self._sampled((t.logprobs for t in self.trajectories), np.float32))

    def tokens(self, logp_T: Tensor, entropy_T: Tensor, reference_logp_T: Tensor | None = None) -> Tokens:
        """What methods over the whole batch look at; logprobs and entropy under the weights before the update."""
        return Tokens(
            logp_T=logp_T,
            entropy_T=entropy_T,
            advantage_T=self.advantage_T,
            row_T=torch.repeat_interleave(torch.arange(len(self.sequences)), self.num_tokens_B),
            sampler_logp_T=self.sampler_logp_T,
            reference_logp_T=reference_logp_T,
        )

    def _sampled(self, columns: Iterable[Sequence[float]], dtype: type[np.generic]) -> np.ndarray[Any, Any]:
        # By an iterator over all: ten times faster than a tensor of each tuple.
        masks = (t.loss_mask for t in self.trajectories)
        values = chain.from_iterable(compress(column, mask) for column, mask in zip(columns, masks, strict=True))
        return np.fromiter(values, dtype, count=self.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioView:
    """What the controller of one scenario was moved by."""

    num_tokens: int
    entropy: float | None  # mean over the scenario's sampled tokens, nats; None without any
    dynamics: EntropyDynamics


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the learner sums; all tensors on the CPU. ``None`` where the sampler's logprobs were reused unscored."""

    coefficient_T: Tensor  # float32 [T], omega * A * normaliser
    logp_old_T: Tensor  # float32 [T], under the weights before this update
    entropy_T: Tensor | None  # float32 [T], nats
    phi_T: Tensor | None  # float32 [T]
    advantage_T: Tensor  # float64 [T], with the algorithm's token weights
    scale_T: Tensor  # float64 [T], the normaliser: each token's share of the objective
    omega_T: Tensor  # float64 [T]
    sets: TokenSets  # bool [T] each
    acting: Mapping[str, Controller]  # by scenario, what omega was made with
    controllers: Mapping[str, Controller]  # by scenario, for the next batch: the same, unless logprobs were reused
    scenarios: Mapping[str, ScenarioView]  # empty before a reused batch is observed
    reference_logp_T: Tensor | None = None  # float32 [T], of the starting policy; None where nothing compares with it
    correction: Correction | None = None  # in ``advantage_T`` already; None where there is none
    regularisers: RegulariserState = field(default_factory=RegulariserState)  # for the next batch

    @property
    def num_tokens(self) -> int:
        return self.coefficient_T.numel()

    def statistics(self, tokens: slice) -> TokenStatistics:
        """Of a part of the tokens, as they were scored; only where they were."""
        assert self.entropy_T is not None, "nothing was measured"
        assert self.phi_T is not None, "nothing was measured"
        return TokenStatistics(self.logp_old_T[tokens], self.entropy_T[tokens], self.phi_T[tokens])

    @property
    def relative_advantage_T(self) -> Tensor:
        """float64 [T], A times the token's share times T: what A counts in the objective, A itself in token-mean."""
        return self.advantage_T * (self.scale_T * self.num_tokens)

    @property
    def entropy(self) -> float | None:
        """Mean over T, nats; None where it is not known."""
        return None if self.entropy_T is None or not self.num_tokens else float(self.entropy_T.double().mean())


def update_batch(trajectories: Sequence[Trajectory], algorithm: Algorithm = GRPO) -> UpdateBatch:
    """Advantages among the scored members of each group; void rows and groups without an advantage leave.

    A void trajectory is as if it had not been: neither mean nor std of its group, nor anything later, sees it.
    """
    scored = sorted((t for t in trajectories if not t.is_void), key=lambda t: (t.group, t.member))
    advantage = algorithm.advantages(scored)
    by_turn: list[Tensor] = []
    if algorithm.is_per_turn:
        counts = [tokens_of_turns(trajectory) for trajectory in scored]
        parts = torch.split(advantage, [len(of_turns) for of_turns in counts])
        by_turn = [torch.repeat_interleave(a, torch.tensor(c)) for a, c in zip(parts, counts, strict=True)]
        # By the largest: turns of opposite sign may cancel in the mean.
        advantage = torch.tensor([float(a.abs().max()) if len(a) else 0.0 for a in by_turn], dtype=torch.float64)
    informative = {t.group for t, a in zip(scored, advantage.tolist(), strict=True) if a != 0.0}
    kept = [i for i, t in enumerate(scored) if t.group in informative and t.num_sampled > 0]
    return UpdateBatch(
        trajectories=tuple(scored[i] for i in kept),
        sequences=tuple(SampledSequence.of(scored[i].token_ids, scored[i].loss_mask) for i in kept),
        advantage_B=torch.stack([by_turn[i].mean() for i in kept]) if by_turn and kept else advantage[kept],
        turn_advantage_T=torch.cat([by_turn[i] for i in kept]) if by_turn and kept else None,
    )


def mini_batches(batch: UpdateBatch, count: int) -> list[tuple[UpdateBatch, slice]]:
    """The batch as at most ``count`` parts of whole groups in their order, each with its place among the T tokens.

    As even in groups as can be; every trajectory is in exactly one part.
    """
    groups = list(dict.fromkeys(t.group for t in batch.trajectories))
    bounds = [round(i * len(groups) / count) for i in range(count + 1)]
    parts: list[tuple[UpdateBatch, slice]] = []
    row = token = 0
    for start, end in pairwise(bounds):
        chosen = set(groups[start:end])
        if not chosen:
            continue
        last_row = row + sum(t.group in chosen for t in batch.trajectories)
        part = UpdateBatch(
            trajectories=batch.trajectories[row:last_row],
            sequences=batch.sequences[row:last_row],
            advantage_B=batch.advantage_B[row:last_row],
        )
        tokens = slice(token, token + part.num_tokens)
        if batch.turn_advantage_T is not None:
            part = replace(part, turn_advantage_T=batch.turn_advantage_T[tokens])
        parts.append((part, tokens))
        row, token = last_row, token + part.num_tokens
    return parts


def scale_of(part: UpdateBatch, loss_mode: LossMode) -> Tensor:
    """float64 [T], the normaliser of the part's own tokens."""
    counts_B = part.num_tokens_B
    return torch.repeat_interleave(token_scale(counts_B, loss_mode), counts_B)


def frozen_coefficients(plan: Plan, part: UpdateBatch, tokens: slice, loss_mode: LossMode) -> Tensor:
    """float32 coefficients of one mini-batch: omega as planned for the batch, normalised by the part's own tokens."""
    return (plan.omega_T[tokens] * plan.advantage_T[tokens] * scale_of(part, loss_mode)).float()


def make_plan(
    batch: UpdateBatch,
    statistics_T: TokenStatistics,
    controllers: Mapping[str, Controller],
    options: PlanOptions,
    *,
    algorithm: Algorithm = GRPO,
    micro_batches: Sequence[MicroBatch] = (),
    steer: bool = True,
    reference_logp_T: Tensor | None = None,
    correction: Correction | None = None,
) -> Plan:
    """Gate, omega and coefficients of one update from the score pass over its whole batch.

    Args:
        batch: trajectories and advantages.
        statistics_T: logprob, entropy and Phi of every sampled token under the weights before the update.
        controllers: by scenario, as they were before this batch; its own entropy moves them first (as in the
            reference).
        options: of the selection and the loss.
        algorithm: whose token weights multiply the advantages first; what they set to 0 takes no part in the ranking.
        micro_batches: of all ranks; only read by ``per_micro_batch``.
        steer: False leaves the controllers as they are (a mini-batch that is planned again).
        reference_logp_T: float32 [T], of the policy that the run started with, where the algorithm needs it.
        correction: of a mini-batch that is planned again, as it was found for the batch; else the algorithm's own.

    Raises:
        ValueError: a logprob or entropy of the score pass is not finite.
    """
    logp_T, entropy_T, phi_T = (column.float().cpu() for column in statistics_T)
    if not (torch.isfinite(logp_T).all() and torch.isfinite(entropy_T).all()):
        raise ValueError("the score pass returned a non-finite logprob or entropy: the weights are broken")
    score_T = {"surprisal": -logp_T, "phi": phi_T, "entropy": entropy_T}[options.selector]
    advantage_T = batch.advantage_T
    if algorithm.token_weights or algorithm.correction != "none":
        tokens = batch.tokens(logp_T, entropy_T, reference_logp_T)
        correction = correction_of(algorithm, tokens) if correction is None else correction
        advantage_T = advantage_T * algorithm.weights(tokens)
        if correction is not None:
            advantage_T = advantage_T * correction.weight_T
    plan = _unweighted(batch, advantage_T, score_T, logp_T, controllers, options, micro_batches)
    plan = replace(plan, entropy_T=entropy_T, phi_T=phi_T, reference_logp_T=reference_logp_T, correction=correction)
    if steer:
        plan = _steered(batch, plan, options)
    return _weighted(batch, plan, options)


def plan_from_sampler(batch: UpdateBatch, controllers: Mapping[str, Controller], options: PlanOptions) -> Plan:
    """The plan without a score pass: the sampler's logprobs, and controllers that the step before has moved.

    Call ``observe`` with what the update's own forward saw, to move them for the next step.
    """
    logp_T = batch.sampler_logp_T
    if not torch.isfinite(logp_T).all():
        raise ValueError("the engine returned a non-finite logprob")
    advantage_T = batch.advantage_T
    plan = _unweighted(batch, advantage_T, -logp_T, logp_T, controllers, options, ())
    return _weighted(batch, plan, options)


def observe(batch: UpdateBatch, plan: Plan, statistics_T: TokenStatistics, options: PlanOptions) -> Plan:
    """A reused plan with the entropy and Phi that the update's own forward measured; controllers moved by them.

    Raises:
        ValueError: an entropy is not finite.
    """
    entropy_T, phi_T = statistics_T.entropy.float().cpu(), statistics_T.phi.float().cpu()
    if not torch.isfinite(entropy_T).all():
        raise ValueError("the update's forward returned a non-finite entropy: the weights are broken")
    return _steered(batch, replace(plan, entropy_T=entropy_T, phi_T=phi_T), options)


def _unweighted(
    batch: UpdateBatch,
    advantage_T: Tensor,
    score_T: Tensor,
    logp_T: Tensor,
    controllers: Mapping[str, Controller],
    options: PlanOptions,
    micro_batches: Sequence[MicroBatch],
) -> Plan:
    """The chosen sets, with omega 1 everywhere."""
    scale_T = scale_of(batch, options.loss_mode)
    if options.selection == "batch":
        above = 0.0 if options.selector == "phi" else -math.inf
        sets = token_sets(score_T, advantage_T, options.fraction, above=above)
    else:
        sets = sets_per_micro_batch(score_T, advantage_T, options.fraction, micro_batches)
        scale_per_micro_batch(scale_T, batch.num_tokens_B, micro_batches)
    return Plan(
        coefficient_T=(advantage_T * scale_T).float(),
        logp_old_T=logp_T,
        entropy_T=None,
        phi_T=None,
        advantage_T=advantage_T,
        scale_T=scale_T,
        omega_T=torch.ones_like(advantage_T),
        sets=sets,
        acting=dict(controllers),
        controllers=dict(controllers),
        scenarios={},
    )


def _steered(batch: UpdateBatch, plan: Plan, options: PlanOptions) -> Plan:
    """Each scenario's controller moved by the entropy, Lambda and Gamma of its own tokens."""
    assert plan.entropy_T is not None, "nothing was measured"
    assert plan.phi_T is not None, "nothing was measured"
    controllers: dict[str, Controller] = {}
    views: dict[str, ScenarioView] = {}
    advantage_T = plan.relative_advantage_T
    for name, tokens in _scenario_tokens(batch, plan.controllers).items():
        controller = plan.controllers[name]
        entropy_T = plan.entropy_T[tokens]
        gate_T = _token_gate(batch, entropy_T, tokens, controller, options)
        sets = _part(plan.sets, tokens)
        dynamics = entropy_dynamics(advantage_T[tokens], plan.phi_T[tokens], sets, options.variant, gate=gate_T)
        entropy = float(entropy_T.double().mean()) if len(entropy_T) else None
        views[name] = ScenarioView(num_tokens=len(entropy_T), entropy=entropy, dynamics=dynamics)
        controllers[name] = controller.update(entropy, dynamics)
    return replace(plan, controllers=controllers, scenarios=views)


def _weighted(batch: UpdateBatch, plan: Plan, options: PlanOptions) -> Plan:
    """omega by each scenario's controller, folded into the coefficients."""
    omega_T = torch.ones_like(plan.advantage_T)
    for name, tokens in _scenario_tokens(batch, plan.controllers).items():
        controller = plan.controllers[name]
        gate: bool | Tensor = controller.gate_on
        if plan.entropy_T is not None:
            gate_T = _token_gate(batch, plan.entropy_T[tokens], tokens, controller, options)
            gate = controller.gate_on if gate_T is None else gate_T
        omega_T[tokens] = omega(
            _part(plan.sets, tokens),
            options.variant,
            gate=gate,
            amplify=controller.amplify,
            attenuate=controller.attenuate,
            dtype=torch.float64,
        )
    coefficient_T = (omega_T * plan.advantage_T * plan.scale_T).float()
    return replace(plan, coefficient_T=coefficient_T, omega_T=omega_T, acting=plan.controllers)


def _scenario_tokens(batch: UpdateBatch, controllers: Mapping[str, Controller]) -> dict[str, slice | Tensor]:
    """The tokens of each controller: all of them where there is one."""
    if len(controllers) == 1:
        return {name: slice(None) for name in controllers}
    names = [str(t.task.meta.get("scenario", DEFAULT_SCENARIO)) for t in batch.trajectories]
    order = list(controllers)
    number_B = torch.tensor([order.index(n if n in controllers else DEFAULT_SCENARIO) for n in names])
    number_T = torch.repeat_interleave(number_B, batch.num_tokens_B)
    return {name: (number_T == number).nonzero().flatten() for number, name in enumerate(order)}


def _token_gate(
    batch: UpdateBatch, entropy_T: Tensor, tokens: slice | Tensor, controller: Controller, options: PlanOptions
) -> Tensor | None:
    """The gate of each of ``tokens``, or None for the gate per batch, which is the controller's own."""
    if options.granularity == "batch":
        return None
    row_T = torch.repeat_interleave(torch.arange(len(batch.sequences)), batch.num_tokens_B)[tokens]
    return token_gate(entropy_T, controller.config.target_entropy, options.granularity, row_T)


def _part(sets: TokenSets, tokens: slice | Tensor) -> TokenSets:
    return TokenSets(
        plus_T=sets.plus_T[tokens],
        minus_T=sets.minus_T[tokens],
        l_plus_T=sets.l_plus_T[tokens],
        l_minus_T=sets.l_minus_T[tokens],
    )
