"""One update: score, plan, optimizer step or steps; the only place where the plan's coefficients meet a gradient.

With ``mini_batches`` above 1 the batch is cut into parts of whole groups, one optimizer step each, every one normalised
by its own tokens. ``frozen``: omega is the one planned for the whole batch. ``refreshed``: each part is planned on its
own tokens, scored under the weights that it meets (one more forward of all parts but the first); the ratio's old
logprobs, the controllers, a correction of stale tokens and what regularisers chose stay those of the batch. Either way
nothing depends on micro-batches, packing or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from agent_rl.algorithm import Algorithm
from agent_rl.config import StareConfig
from agent_rl.learner import StepReport
from agent_rl.pack import MicroBatch, SampledSequence
from agent_rl.plan import (
    DEFAULT_SCENARIO,
    GRPO,
    Plan,
    UpdateBatch,
    frozen_coefficients,
    make_plan,
    mini_batches,
    observe,
    plan_from_sampler,
    scale_of,
)
from agent_rl.progress import Clock
from agent_rl.ranks import AnyLearner
from agent_rl.records import Row, update_metrics
from agent_rl.regularisers import Penalty, RegulariserState, penalties
from agent_rl.types import Trajectory
from stare import Controller
from stare.neighbours.token_weights import entropy_signal

RankedBatches = Sequence[Sequence[MicroBatch]]


def start_controllers(config: StareConfig) -> dict[str, Controller]:
    """One for each scenario with a target of its own, and one for all others."""
    names = [DEFAULT_SCENARIO, *(name for name in config.targets if name != DEFAULT_SCENARIO)]
    return {name: Controller.start(config.controller_config(name)) for name in names}


def update(
    learner: AnyLearner,
    batch: UpdateBatch,
    trajectories: Sequence[Trajectory],
    controllers: Mapping[str, Controller],
    config: StareConfig,
    clock: Clock,
    *,
    algorithm: Algorithm = GRPO,
    regularisers: RegulariserState | None = None,
    decode: Callable[[int], str] = str,
) -> tuple[Plan | None, Row]:
    """Score, plan, step; the plan is None when nothing was measured, so that the controllers stay as they are.

    Where no group has a difference inside there is nothing to learn, but the entropy is measured and moves the
    controllers (``score = "reuse"`` measures nothing beside the update, so there they stay).

    Args:
        learner: whose weights change.
        batch: what is learned from; empty where no group has a difference inside.
        trajectories: all of the step.
        controllers: by scenario.
        config: of the method.
        clock: takes the laps ``score`` and ``update``.
        algorithm: its token weights, correction, ratio rule and regularisers.
        regularisers: what they remember from the batches before; None: this is the first.
        decode: text of a token id, for the record of the most chosen tokens.
    """
    learns = bool(batch.trajectories)
    if not learns:
        scored = [t for t in trajectories if not t.is_void and t.num_sampled]
        batch = UpdateBatch(
            trajectories=tuple(scored),
            sequences=tuple(SampledSequence.of(t.token_ids, t.loss_mask) for t in scored),
            advantage_B=torch.zeros(len(scored), dtype=torch.float64),
        )
    if not batch.trajectories or (config.score == "reuse" and not learns):
        return None, {}
    packed = learner.pack(batch.sequences)
    reference_T = learner.reference_logp(packed, batch.num_tokens) if algorithm.needs_reference else None
    if config.score == "reuse":
        plan = replace(plan_from_sampler(batch, controllers, config.plan), reference_logp_T=reference_T)
    else:
        # A step whose terms move entropy needs a forward of its own.
        goes_on = learns and config.mini_batches == 1 and not algorithm.needs_entropy_gradient
        statistics = learner.score(packed, batch.num_tokens, before_step=goes_on)
        flat = [micro_batch for of_rank in packed for micro_batch in of_rank]
        plan = make_plan(
            batch,
            statistics,
            controllers,
            config.plan,
            algorithm=algorithm,
            micro_batches=flat,
            reference_logp_T=reference_T,
        )
    state = regularisers or RegulariserState.start(algorithm)
    terms = _terms(batch, plan, algorithm, state)
    clock.lap("score")
    report: StepReport | None = None
    change: float | None = None
    if learns:
        report = _step(learner, batch, plan, packed, config, algorithm, terms)
        if report.statistics is not None:
            plan = observe(batch, plan, report.statistics, config.plan)
        clock.lap("update")
        if config.remeasure and plan.entropy is not None:
            change = float(learner.score(packed, batch.num_tokens).entropy.double().mean()) - plan.entropy
            clock.lap("remeasure")
    plan = replace(plan, regularisers=state.after(plan.entropy))
    return plan, update_metrics(plan, batch, report, penalties=terms, entropy_change=change, decode=decode)


def _terms(batch: UpdateBatch, plan: Plan, algorithm: Algorithm, state: RegulariserState) -> tuple[Penalty, ...]:
    """The regularisers over the whole batch."""
    if not algorithm.regularisers:
        return ()
    # Where nothing was scored no term that looks at entropies is allowed.
    entropy_T = torch.zeros(plan.num_tokens) if plan.entropy_T is None else plan.entropy_T
    tokens = batch.tokens(plan.logp_old_T, entropy_T, plan.reference_logp_T)
    return penalties(algorithm, state, tokens, plan.scale_T, plan.entropy)


def _step(
    learner: AnyLearner,
    batch: UpdateBatch,
    plan: Plan,
    packed: RankedBatches,
    config: StareConfig,
    algorithm: Algorithm,
    terms: Sequence[Penalty],
) -> StepReport:
    """The optimizer step or steps of a plan; with ``reuse`` the report has the statistics of their forwards."""
    wants_statistics = config.score == "reuse"
    parts = mini_batches(batch, config.mini_batches)
    signal_T = None if plan.entropy_T is None else entropy_signal(plan.entropy_T)
    at_once = [term for term in terms if not term.from_second_step]
    if len(parts) == 1:
        rule = algorithm.ratio_rule(batch.trajectories, signal_T)
        return learner.step(
            packed, plan.coefficient_T, plan.logp_old_T, statistics=wants_statistics, rule=rule, penalties=at_once
        )
    reports: list[StepReport] = []
    for number, (part, tokens) in enumerate(parts):
        packed_part = learner.pack(part.sequences)
        if config.refresh == "frozen":
            coefficient_T = frozen_coefficients(plan, part, tokens, config.loss_mode)
        else:
            statistics = learner.score(packed_part, part.num_tokens) if number else plan.statistics(tokens)
            coefficient_T = make_plan(
                part,
                statistics,
                plan.controllers,
                config.plan,
                algorithm=algorithm,
                steer=False,
                reference_logp_T=None if plan.reference_logp_T is None else plan.reference_logp_T[tokens],
                correction=None if plan.correction is None else plan.correction.part(tokens),
            ).coefficient_T
        scale_T = scale_of(part, config.loss_mode)
        reports.append(
            learner.step(
                packed_part,
                coefficient_T,
                plan.logp_old_T[tokens],
                statistics=wants_statistics,
                rule=algorithm.ratio_rule(part.trajectories, None if signal_T is None else signal_T[tokens]),
                penalties=[term.part(tokens, scale_T) for term in (terms if number else at_once)],
            )
        )
    return StepReport.joined(reports, [part.num_tokens for part, _ in parts])
