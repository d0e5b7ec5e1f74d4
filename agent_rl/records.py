"""What a run leaves behind: a metrics row a step (each name and its denominator stand here), trajectories, TensorBoard.

Files under ``runs/<name>/``: ``metrics.jsonl``, ``trajectories.jsonl``, ``tensorboard/``. On resume, rows after the
checkpoint are cut off: those steps are done again.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_rl.collect import Collected
from agent_rl.learner import StepReport
from agent_rl.plan import DEFAULT_SCENARIO, Plan, UpdateBatch
from agent_rl.regularisers import Penalty
from agent_rl.types import Trajectory
from stare import most_chosen, quadrants, selection_report

WIDE_GAP = 0.05
"""|sampler - learner| of a token's logprob, nats, from which it counts as wide: a ratio off by 5 %."""

Row = dict[str, Any]
"""Metric name -> number, flag, None where unknown, or (``chosen_tokens`` alone) a list."""


def rollout_metrics(
    trajectories: Sequence[Trajectory], batch: UpdateBatch, cancelled_tokens: Sequence[int] = ()
) -> Row:
    """What the episodes of a step were; means are over scored episodes unless a name says otherwise."""
    scored = [t for t in trajectories if t.reward is not None]
    statuses = [status for t in scored for turn in t.turns for status in turn.call_statuses]
    groups = {t.group for t in scored}
    kept_groups = {t.group for t in batch.trajectories}
    own = {(t.group, t.member) for t in scored}
    learned = {(t.group, t.member) for t in batch.trajectories}
    row: Row = {
        "reward": _mean([t.reward for t in scored if t.reward is not None]),
        "accuracy": _mean([t.terms.get("correct", 0.0) for t in scored]),
        "episodes": len(trajectories),
        "void": len(trajectories) - len(scored),
        "groups": len(groups),
        "groups_kept": len(kept_groups),  # those with a difference inside
        "recalled": len(learned - own),  # rollouts of earlier steps that joined a group (cross_context_replay)
        "dropped": sum(group in kept_groups for group, _ in own - learned),  # rollouts of kept groups (d3s_samples)
        "turns": _mean([len(t.turns) for t in scored]),
        "tool_calls": _mean([sum(s == "ok" for turn in t.turns for s in turn.call_statuses) for t in scored]),
        "malformed": _mean([float(s != "ok") for s in statuses]),  # share of call attempts
        "tokens": sum(len(t.token_ids) for t in scored),
        "tokens_episode": _mean([len(t.token_ids) for t in scored]),
        "branches": sum(bool(t.trunk) for t in trajectories),  # begun after another's tool result (arpo_branching)
        "branches_given_up": sum(t.trunk == 0 for t in trajectories),  # the environment had answered otherwise
        "branched_tokens": sum(t.trunk or 0 for t in scored),  # of `tokens`: taken over from another rollout
        "cancelled": len(cancelled_tokens),  # rollouts begun and no longer wanted (oversampling)
        "cancelled_tokens": _mean(cancelled_tokens),  # of each when it was cancelled; beside tokens_episode: the bias
        "tokens_sampled": sum(t.num_sampled for t in scored),
        "truncated": _mean([float(t.stop not in ("answer", "no_call")) for t in scored]),
    }
    for name in sorted({name for t in scored for name in t.terms}):
        row[f"reward/{name}"] = _mean([t.terms.get(name, 0.0) for t in scored])
    for stop, count in sorted(Counter(t.stop for t in trajectories).items()):
        row[f"stop/{stop}"] = count
    return row


def leftover_metrics(batch: UpdateBatch, collected: Collected, *, version: int) -> Row:
    """Of ``rollout.leftovers = "keep"``; ``version`` is that of the weights which the update starts from.

    The staleness of a sampled token is how many versions of the weights that made it are behind.
    """
    staleness_T = [version - made for t in batch.trajectories for made in t.weight_versions]
    return {
        "staleness_mean": _mean(staleness_T),  # over the sampled tokens of the update batch
        "staleness_max": max(staleness_T, default=None),
        "stale_tokens": _mean([float(staleness > 0) for staleness in staleness_T]),  # share of the same
        "groups_carried": collected.groups_carried,  # of this step, begun by an earlier one
        "groups_waiting": collected.groups_waiting,  # left over for a later step, complete or under way
        "groups_dropped": collected.groups_dropped,  # too stale to be trained, begun anew
        "dropped_tokens": _mean(collected.dropped_tokens),  # of each of their rollouts; beside tokens_episode: the bias
    }


def update_metrics(
    plan: Plan,
    batch: UpdateBatch,
    report: StepReport | None,
    *,
    penalties: Sequence[Penalty] = (),
    entropy_change: float | None = None,
    decode: Callable[[int], str] = str,
) -> Row:
    """What the update was; ``report`` is None where no group had a difference inside and nothing was learned.

    With more scenarios than one, ``gate``, ``W``, ``M``, ``entropy``, ``tracking_error`` and ``W_critical`` of each
    follow as ``gate/NAME`` and so on; without a name they are those of the default scenario, the entropy that of all.
    """
    learner_logp_T = plan.logp_old_T if report is None or report.statistics is None else report.statistics.logp
    difference = batch.sampler_logp_T - learner_logp_T
    gap = difference.abs()
    return {
        "entropy": plan.entropy,  # nats, mean over the sampled tokens of the update batch
        **_controller_metrics(plan),
        "l_plus": int(plan.sets.l_plus_T.sum()),
        "l_minus": int(plan.sets.l_minus_T.sum()),
        "weighted": float((plan.omega_T != 1).double().mean()),  # share of tokens with omega other than 1
        "tokens_trained": plan.num_tokens if report else 0,  # N
        "optimizer_steps": report.num_steps if report else 0,
        "skipped_steps": report.skipped_steps if report else 0,  # float16 alone: the gradient overflowed
        **_entropy_metrics(plan),
        **_correction_metrics(plan),
        **_penalty_metrics(penalties, report),
        "entropy_change": entropy_change,  # measured on the same batch after the update (stare.remeasure), nats
        "chosen_tokens": [  # of L+, text and count, the ten most frequent
            (decode(token), count) for token, count in most_chosen(batch.token_T, plan.sets.l_plus_T)
        ],
        "loss": report.loss if report else None,
        "clip_fraction": report.clip_fraction if report else None,
        "grad_norm": report.grad_norm if report else None,
        "lr": report.lr if report else None,
        "logprob_gap_mean": float(gap.mean()),  # |sampler - learner|, nats
        "logprob_gap_max": float(gap.max()),
        "logprob_gap_share": float((gap > WIDE_GAP).double().mean()),  # of tokens wider apart than WIDE_GAP
        "sampler_kl": float(difference.double().mean()),  # KL(sampler || learner), nats a token, k1 estimate
    }


def _controller_metrics(plan: Plan) -> Row:
    row: Row = {}
    for name, controller in plan.acting.items():
        suffix = "" if name == DEFAULT_SCENARIO else f"/{name}"
        view = plan.scenarios[name]
        target = controller.config.target_entropy
        row |= {
            f"gate{suffix}": controller.gate_on,
            f"W{suffix}": controller.amplify,
            f"M{suffix}": controller.attenuate,
            # W*: at which the predicted drift of this batch is zero; None where the weights have no leverage
            f"W_critical{suffix}": view.dynamics.critical_weight,
            f"tracking_error{suffix}": None if view.entropy is None else view.entropy - target,  # nats
        }
        if suffix:
            row[f"entropy{suffix}"] = view.entropy
    return row


def _correction_metrics(plan: Plan) -> Row:
    """Over the sampled tokens of the update batch; nothing where no correction was chosen."""
    if plan.correction is None:
        return {}
    return {
        "correction/weight": float(plan.correction.weight_T.mean()),
        "correction/bounded": float(plan.correction.bounded_T.double().mean()),  # share truncated or masked
    }


def _penalty_metrics(penalties: Sequence[Penalty], report: StepReport | None) -> Row:
    """Of each regulariser: its part of the loss before the coefficient, and the coefficient.

    In token-mean the part is the penalty's mean over the trained tokens. Over several optimizer steps it is the mean of
    those that the term acted in; None where it acted in none.
    """
    row: Row = {}
    for penalty in penalties:
        row[f"penalty/{penalty.name}"] = None if report is None else report.penalties.get(penalty.name)
        row[f"coefficient/{penalty.name}"] = penalty.coefficient
    return row


def _entropy_metrics(plan: Plan) -> Row:
    """First-order predictions; ``entropy_drift`` is the sum of the four quadrants' and per unit of logit step."""
    assert plan.entropy_T is not None
    assert plan.phi_T is not None
    weight_T = plan.relative_advantage_T * plan.omega_T
    parts = quadrants(weight_T, plan.phi_T)
    chosen = selection_report(plan.sets, plan.entropy_T, plan.phi_T)
    row: Row = {"entropy_drift": sum(part.drift for part in parts.values())}
    for name, part in parts.items():
        row[f"quadrant/{name}/share"] = part.share  # of all sampled tokens
        row[f"quadrant/{name}/drift"] = part.drift
    return row | {
        "l_plus_rising": chosen.l_plus_rising,  # share of L+ with Phi > 0
        "l_minus_falling": chosen.l_minus_falling,  # share of L- with Phi > 0
        "overlap_80_20": chosen.high_entropy,  # share of L+ and L- among the 20 % of highest entropy
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def trajectory_record(
    trajectory: Trajectory, step: int, *, advantage: float | None = None, coefficients: Sequence[float] | None = None
) -> dict[str, Any]:
    """One line of ``trajectories.jsonl``; ``coefficients`` are those of the sampled tokens, in order."""
    return {
        "step": step,
        "task": trajectory.task.id,
        "group": trajectory.group,
        "member": trajectory.member,
        "reward": trajectory.reward,
        "terms": trajectory.terms,
        "answer": trajectory.task.answer,
        "stop": trajectory.stop,
        "failure": None if trajectory.failure is None else repr(trajectory.failure),
        "advantage": advantage,
        "messages": trajectory.messages,
        "token_ids": trajectory.token_ids,
        "loss_mask": [int(flag) for flag in trajectory.loss_mask],
        "logprobs": [round(value, 6) for value in trajectory.logprobs],
        "turns": [[turn.start, turn.end, turn.weight_version, turn.call_statuses] for turn in trajectory.turns],
        "weight_changes": [change for turn in trajectory.turns for change in turn.weight_changes],  # position, version
        "coefficients": None if coefficients is None else [float(f"{value:.6g}") for value in coefficients],
        "trunk": trajectory.trunk,
        "seconds": trajectory.seconds,
    }


class RunRecords:
    """The writers of one run; a row is on disk when the call returns."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._metrics = folder / "metrics.jsonl"
        self._trajectories = folder / "trajectories.jsonl"
        for path in (self._metrics, self._trajectories):
            _keep_steps_before(path, first_step)
        self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)  # type: ignore[no-untyped-call]

    def write(self, step: int, row: Row, trajectories: Sequence[Mapping[str, Any]]) -> None:
        """``step`` counts from 1. NaN and infinity become null: rows are strict JSON."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        _append(self._trajectories, trajectories)
        _append(self._metrics, [{"step": step, **clean}])
        for name, value in clean.items():
            if isinstance(value, int | float):
                self._tensorboard.add_scalar(name, float(value), step)  # type: ignore[no-untyped-call]
        self._tensorboard.flush()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._tensorboard.close()  # type: ignore[no-untyped-call]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file; a last line torn by a kill is left out."""
    return list(iterate_rows(path))


def iterate_rows(path: Path) -> Iterator[dict[str, Any]]:
    """``read_rows``, one at a time: the trajectories of a long run are more than memory holds."""
    return (row for row, _ in _rows_and_ends(path))


def _rows_and_ends(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Rows with the bytes of the file up to their end."""
    if not path.is_file():
        return
    end = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            end += len(line)
            try:
                yield json.loads(line), end
            except ValueError:
                raise ValueError(f"{path}:{number}: not valid JSON") from None


def _append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _keep_steps_before(path: Path, first_step: int) -> None:
    """Rows of later steps, which are the last ones, are cut off, and so is a torn line."""
    size = 0
    for row, end in _rows_and_ends(path):
        if row["step"] >= first_step:
            break
        size = end
    with path.open("ab") as file:
        file.truncate(size)
