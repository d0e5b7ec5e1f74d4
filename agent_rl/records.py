"""What a run leaves behind: a metrics row a step (each name and its denominator stand here), trajectories, TensorBoard.

Files under ``runs/<name>/``: ``metrics.jsonl``, ``trajectories.jsonl``, ``tensorboard/``. On resume, rows after the
checkpoint are cut off: those steps are done again.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from agent_rl.learner import StepReport
from agent_rl.plan import Plan, UpdateBatch
from agent_rl.types import Trajectory

Row = dict[str, float | int | bool | None]


def rollout_metrics(
    trajectories: Sequence[Trajectory], batch: UpdateBatch, cancelled_tokens: Sequence[int] = ()
) -> Row:
    """What the episodes of a step were; means are over scored episodes unless a name says otherwise."""
    scored = [t for t in trajectories if t.reward is not None]
    statuses = [status for t in scored for turn in t.turns for status in turn.call_statuses]
    groups = {t.group for t in scored}
    row: Row = {
        "reward": _mean([t.reward for t in scored if t.reward is not None]),
        "accuracy": _mean([t.terms.get("correct", 0.0) for t in scored]),
        "episodes": len(trajectories),
        "void": len(trajectories) - len(scored),
        "groups": len(groups),
        "groups_kept": len({t.group for t in batch.trajectories}),  # those with a difference inside
        "turns": _mean([len(t.turns) for t in scored]),
        "tool_calls": _mean([sum(s == "ok" for turn in t.turns for s in turn.call_statuses) for t in scored]),
        "malformed": _mean([float(s != "ok") for s in statuses]),  # share of call attempts
        "tokens": sum(len(t.token_ids) for t in scored),
        "tokens_episode": _mean([len(t.token_ids) for t in scored]),
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


def update_metrics(plan: Plan, report: StepReport | None, sampler_logprob_T: torch.Tensor) -> Row:
    """What the update was; ``report`` is None where no group had a difference inside and nothing was learned."""
    gap = (sampler_logprob_T - plan.logp_old_T).abs()
    weight = (plan.omega_T * plan.advantage_T).float()
    return {
        "entropy": plan.entropy,  # nats, mean over the sampled tokens of the update batch
        "gate": plan.gate.gate_on,
        "W": plan.gate.amplify,
        "M": plan.gate.attenuate,
        "l_plus": int(plan.l_plus_T.sum()),
        "l_minus": int(plan.l_minus_T.sum()),
        "tokens_trained": plan.num_tokens if report else 0,  # N
        "entropy_drift": float((weight * plan.phi_T).mean()),  # predicted dH per unit of logit step
        "loss": report.loss if report else None,
        "clip_fraction": report.clip_fraction if report else None,
        "grad_norm": report.grad_norm if report else None,
        "lr": report.lr if report else None,
        "logprob_gap_mean": float(gap.mean()),  # |sampler - learner|, nats
        "logprob_gap_max": float(gap.max()),
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
        "coefficients": None if coefficients is None else [float(f"{value:.6g}") for value in coefficients],
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
            if value is not None:
                self._tensorboard.add_scalar(name, float(value), step)  # type: ignore[no-untyped-call]
        self._tensorboard.flush()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._tensorboard.close()  # type: ignore[no-untyped-call]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file; a last line torn by a kill is left out."""
    if not path.is_file():
        return []
    lines = path.read_text().splitlines()
    rows = []
    for number, line in enumerate(lines):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number != len(lines) - 1:
                raise ValueError(f"{path}:{number + 1}: not valid JSON") from None
    return rows


def _append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _keep_steps_before(path: Path, first_step: int) -> None:
    rows = [row for row in read_rows(path) if row["step"] < first_step]
    aside = path.with_suffix(".partial")
    aside.write_text("".join(json.dumps(row) + "\n" for row in rows))
    aside.rename(path)
