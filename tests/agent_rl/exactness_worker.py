"""Runs one fixed update batch through every layout, micro-batch size and ZeRO stage; writes what came out.

Started by ``test_exactness.py`` with one and with two gloo ranks (``python -m torch.distributed.run``).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from agent_rl.algorithm import Algorithm
from agent_rl.config import LearnerConfig, StareConfig
from agent_rl.learner import Learner
from agent_rl.plan import PlanOptions, UpdateBatch, make_plan, update_batch
from agent_rl.progress import Clock
from agent_rl.regularisers import RegulariserState
from agent_rl.types import Trajectory
from agent_rl.update import start_controllers, update
from envs.types import Failure, Task
from stare import Controller, ControllerConfig
from stare.neighbours.regularisers import CoefficientState

VOCABULARY = 97
CONTROLLER = ControllerConfig(target_entropy=100.0, amplify=1.5, attenuate=0.5)  # gate on
FRACTION = 0.2
UPDATE_LR = 0.3  # so that the second of two steps meets other weights
MODES = ("frozen", "refreshed", "reuse", "terms")
WITH_TERMS = Algorithm(
    regularisers=("kl_k3", "kl_cov", "entropy_bonus", "epo_smoothing", "adaptive_entropy"),
    correction="tis",
    options={
        "tis": {"most": 1.1},
        "kl_k3": {"coefficient": 2.0},
        "kl_cov": {"coefficient": 0.5, "fraction": 0.2},
        "entropy_bonus": {"coefficient": 0.2},
        "epo_smoothing": {"coefficient": 0.5, "low": 0.99, "high": 1.01, "penalty": 1.0},
    },
)
TERMS_STATE = RegulariserState(adaptive=CoefficientState(coefficient=0.3, target=100.0), entropies=(4.0, 4.2))


def make_model() -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # so that logits differ and surprisals spread
    return model


def make_reference() -> Any:
    """Another policy near the first, for terms that compare with it."""
    model = make_model()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    return model


def make_trajectories() -> list[Trajectory]:
    """Three groups of uneven multi-turn episodes: one with a void member, one without a difference inside."""
    generator = torch.Generator().manual_seed(1)
    rewards: list[list[float | None]] = [[1.0, 0.0, 0.0, 1.0], [0.0, None, 0.5, 1.0], [1.0, 1.0, 1.0, 1.0]]
    trajectories = []
    for group, members in enumerate(rewards):
        prompt = torch.randint(
            0, VOCABULARY, (int(torch.randint(8, 15, (1,), generator=generator)),), generator=generator
        ).tolist()
        for member, reward in enumerate(members):
            mask: list[bool] = [False] * len(prompt)
            for _ in range(int(torch.randint(1, 4, (1,), generator=generator))):
                mask += [True] * int(torch.randint(1, 14, (1,), generator=generator))
                mask += [False] * int(torch.randint(1, 10, (1,), generator=generator))
            ids = torch.randint(0, VOCABULARY, (len(mask),), generator=generator).tolist()
            ids[: len(prompt)] = prompt
            if member == 3:  # a branch of the member before: the same turns up to somewhere in its middle
                trunk = len(trajectories[-1].token_ids) * 2 // 3
                ids[:trunk], mask[:trunk] = trajectories[-1].token_ids[:trunk], trajectories[-1].loss_mask[:trunk]
            failure = Failure(kind="sandbox", where="turn 1", detail="gone") if reward is None else None
            trajectories.append(
                Trajectory(
                    task=Task(id=f"t{group}", prompt="", answer=""),
                    group=group,
                    member=member,
                    token_ids=tuple(ids),
                    loss_mask=tuple(mask),
                    logprobs=tuple(-1.0 if flag else 0.0 for flag in mask),
                    turns=(),
                    messages=(),
                    reward=reward,
                    failure=failure,
                    stop="failure" if failure else "answer",
                )
            )
    return trajectories


def plain_sgd(layout: str, size: int | None, stage: int, *, lr: float) -> LearnerConfig:
    """Without clipping, momentum or decay, in micro-batches and chunks as small as the case wants."""
    return LearnerConfig(
        zero_stage=stage,  # type: ignore[arg-type]
        optimizer="sgd",
        lr=lr,
        grad_clip=1e9,
        layout=layout,  # type: ignore[arg-type]
        max_micro_sequences=size,
        chunk_tokens=7,
    )


def one_case(batch: UpdateBatch, layout: str, size: int | None, stage: int, selection: str) -> dict[str, Any]:
    config = plain_sgd(layout, size, stage, lr=1.0)  # so that the change of a parameter is its gradient
    learner = Learner(make_model(), config, temperature=1.0)
    micro_batches = learner.pack(batch.sequences)
    statistics = learner.score(micro_batches, int(batch.num_tokens_B.sum()))
    plan = make_plan(
        batch,
        statistics,
        {"default": Controller.start(CONTROLLER)},
        PlanOptions(variant="C2", fraction=FRACTION, selection=selection),  # type: ignore[arg-type]
        micro_batches=[m for of_rank in micro_batches for m in of_rank],
    )
    # An older policy, so that ratios differ from 1 and some are clipped.
    noise = torch.randn(plan.num_tokens, generator=torch.Generator().manual_seed(2))
    plan = replace(plan, logp_old_T=plan.logp_old_T + 0.2 * noise)
    before = {name: tensor.clone() for name, tensor in learner.named_tensors()}
    report = learner.step(micro_batches, plan.coefficient_T, plan.logp_old_T)
    gradient = {name: before[name] - tensor for name, tensor in learner.named_tensors()}
    learner.close()
    return {
        "case": (layout, size, stage, selection),
        "l_plus": plan.sets.l_plus_T.nonzero().flatten().tolist(),
        "l_minus": plan.sets.l_minus_T.nonzero().flatten().tolist(),
        "num_tokens": plan.num_tokens,
        "entropy": plan.entropy,
        "loss": report.loss,
        "clip_fraction": report.clip_fraction,
        "grad_norm": report.grad_norm,
        "gradient": gradient,
        "num_slots": sum(m.num_slots for of_rank in micro_batches for m in of_rank if not m.is_pad),
        "num_micro_batches": sum(not m.is_pad for of_rank in micro_batches for m in of_rank),
    }


def one_update(batch: UpdateBatch, mode: str, layout: str, size: int | None, stage: int) -> dict[str, Any]:
    """A whole update by ``agent_rl.update``: two mini-batches frozen, refreshed or with terms beside the surrogate and
    corrected for another sampler, or one step on reused logprobs."""
    learner_config = plain_sgd(layout, size, stage, lr=UPDATE_LR)
    learner = Learner(make_model(), learner_config, temperature=1.0, reference=make_reference())
    if mode in ("reuse", "terms"):  # a sampler that agrees with the learner to the last bit, or one that is off
        statistics = learner.score(learner.pack(batch.sequences), batch.num_tokens)
        off = sampler_noise(batch.num_tokens) if mode == "terms" else 0
        batch = with_sampler_logprobs(batch, statistics.logp + off)
    algorithm = WITH_TERMS if mode == "terms" else Algorithm()
    config = StareConfig(
        variant="C2",
        fraction=FRACTION,
        target_entropy=CONTROLLER.target_entropy,
        amplify=CONTROLLER.amplify,
        attenuate=CONTROLLER.attenuate,
        score="reuse" if mode == "reuse" else "exact",
        mini_batches=1 if mode == "reuse" else 2,
        refresh="refreshed" if mode == "refreshed" else "frozen",
        remeasure=True,
    )
    before = {name: tensor.clone() for name, tensor in learner.named_tensors()}
    plan, row = update(
        learner, batch, (), start_controllers(config), config, Clock(), algorithm=algorithm, regularisers=TERMS_STATE
    )
    assert plan is not None
    gradient = {name: (before[name] - tensor) / UPDATE_LR for name, tensor in learner.named_tensors()}
    learner.close()
    return {"case": (mode, layout, size, stage), "gradient": gradient, "row": row}


def sampler_noise(num_tokens: int) -> torch.Tensor:
    return 0.2 * torch.randn(num_tokens, generator=torch.Generator().manual_seed(4))


def with_sampler_logprobs(batch: UpdateBatch, logp_T: torch.Tensor) -> UpdateBatch:
    trajectories = []
    parts = torch.split(logp_T, batch.num_tokens_B.tolist())
    for trajectory, part in zip(batch.trajectories, parts, strict=True):
        values = iter(part.tolist())
        logprobs = tuple(next(values) if flag else 0.0 for flag in trajectory.loss_mask)
        trajectories.append(replace(trajectory, logprobs=logprobs))
    return replace(batch, trajectories=tuple(trajectories))


def main(out: str, few: bool) -> None:
    """``few``: a choice of cases, for as many ranks as make each of them slow."""
    batch = update_batch(make_trajectories())
    cases = [(*case, "batch") for case in product(("padded", "packed", "shared"), (1, 3, None), (0, 2))]
    cases += [("packed", None, 3, "batch"), ("padded", 1, 0, "per_micro_batch"), ("packed", 3, 2, "per_micro_batch")]
    if few:
        cases = [("padded", 1, 2, "batch"), ("packed", 3, 0, "batch"), ("shared", None, 3, "batch"), cases[-2]]
    cuts = [("padded", 1, 2)] if few else [("padded", 1, 2), ("packed", None, 0), ("shared", 3, 2)]
    results = {
        "step": [one_case(batch, *case) for case in cases],
        "update": [one_update(batch, mode, *cut) for mode in MODES for cut in cuts],
    }
    if torch.distributed.get_rank() == 0:
        torch.save(results, out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] == ["few"])
