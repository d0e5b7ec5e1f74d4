"""The plan of 512 trajectories of 4,096 sampled tokens, on the CPU: python tests/benchmarks/bench_plan.py [THREADS]

Beside it a full sort of the same tokens and one elementwise pass over the same columns. All rows are timed in turns in
one run, so that a busy neighbour hits all; medians of wall and of processor time. Prints a Markdown table.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

from agent_rl.pack import SampledSequence
from agent_rl.plan import PlanOptions, UpdateBatch, make_plan, update_batch
from agent_rl.records import update_metrics
from agent_rl.types import Trajectory
from envs.types import Task
from stare import Controller, ControllerConfig, TokenStatistics, group_advantage, top_fraction

TRAJECTORIES, LENGTH, GROUP, PROMPT = 512, 4096, 8, 64
ROUNDS = 9


def make_batch() -> tuple[list[Trajectory], UpdateBatch, TokenStatistics]:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randint(0, 2, (TRAJECTORIES,), generator=generator).double()
    rewards[::GROUP], rewards[1::GROUP] = 1.0, 0.0  # no group without a difference
    positions = tuple(range(PROMPT, PROMPT + LENGTH))
    mask = (False,) * PROMPT + (True,) * LENGTH
    trajectories = [
        Trajectory(
            task=Task(id="t", prompt=""),
            group=i // GROUP,
            member=i % GROUP,
            token_ids=tuple(torch.randint(0, 150_000, (PROMPT + LENGTH,), generator=generator).tolist()),
            loss_mask=mask,
            logprobs=(-0.5,) * (PROMPT + LENGTH),
            turns=(),
            messages=(),
            reward=float(rewards[i]),
        )
        for i in range(TRAJECTORIES)
    ]
    batch = UpdateBatch(
        trajectories=tuple(trajectories),
        sequences=tuple(SampledSequence(token_ids=t.token_ids, positions=positions) for t in trajectories),
        advantage_B=group_advantage(rewards, torch.arange(TRAJECTORIES) // GROUP),
    )
    num_tokens = TRAJECTORIES * LENGTH
    surprisal, entropy = (torch.empty(num_tokens).exponential_(generator=generator) for _ in range(2))
    phi = 0.1 * torch.randn(num_tokens, generator=generator)
    return trajectories, batch, TokenStatistics(-surprisal, entropy, phi)


def main(threads: int) -> None:
    torch.set_num_threads(threads)
    trajectories, batch, scored = make_batch()

    def plan_with(kind: str, **options: object) -> Callable[[], object]:
        controllers = {"default": Controller.start(ControllerConfig(kind=kind, target_entropy=9.0))}  # type: ignore[arg-type]
        chosen = PlanOptions(**options)  # type: ignore[arg-type]
        return lambda: make_plan(batch, scored, controllers, chosen)

    plan = make_plan(
        batch, scored, {"default": Controller.start(ControllerConfig(target_entropy=9.0))}, PlanOptions(variant="C2")
    )
    surprisal = -scored.logp
    everyone = torch.ones_like(surprisal, dtype=torch.bool)
    ways: dict[str, Callable[[], object]] = {
        "whole plan, O1, gate per batch": plan_with("fixed", variant="O1"),
        "whole plan, C4, model-based": plan_with("model", variant="C4"),
        "whole plan, C2, ranked by Phi, gate per token": plan_with(
            "fixed", variant="C2", selector="phi", granularity="token"
        ),
        "the diagnostics of its metrics row": lambda: update_metrics(plan, batch, None),
        "trajectories to update batch (Python)": lambda: update_batch(trajectories),
        "top 10 % of all tokens (radix)": lambda: top_fraction(surprisal, everyone, 0.1),
        "torch.topk of all tokens": lambda: torch.topk(surprisal, len(surprisal) // 10, sorted=False),
        "torch.sort of all tokens": lambda: torch.sort(surprisal),
        "one pass over logp, H, Phi (addcmul)": lambda: torch.addcmul(scored.phi, scored.logp, scored.entropy),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            wall, processor = time.perf_counter(), time.process_time()
            way()
            taken[name].append((1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - processor)))
    print(f"{len(surprisal):,} tokens, {threads} thread(s), torch {torch.__version__}, medians of {ROUNDS}\n")
    print("| what | wall ms | processor ms |\n|---|---|---|")
    for name, values in taken.items():
        wall, processor = (statistics.median(column) for column in zip(*values, strict=True))
        print(f"| {name} | {wall:.1f} | {processor:.1f} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
