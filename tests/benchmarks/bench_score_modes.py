"""What `stare.score = "reuse"` changes and saves, on SmolLM2-135M: python tests/benchmarks/bench_score_modes.py

Four GSM8K prompts, four samples each, drawn by a float32 and by a bfloat16 sampler and learned from in float32;
arbitrary rewards, so that every group differs inside. Compared with `exact` on the same samples: the chosen tokens, the
gradient (relative difference of the change of the weights by one SGD step), processor time of the passes.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from agent_rl.config import LearnerConfig, StareConfig
from agent_rl.learner import Learner
from agent_rl.models import load_model, load_tokenizer
from agent_rl.plan import UpdateBatch, make_plan, plan_from_sampler, update_batch
from agent_rl.smollm2 import prepare_smollm2
from agent_rl.types import Trajectory
from agent_rl.update import start_controllers
from envs.types import Task

PROMPTS, GROUP, TOKENS = 4, 4, 32
LR = 1e-3
ROWS = Path(__file__).parents[1] / "data" / "gsm8k_sample.jsonl"


@torch.no_grad()
def sample(folder: Path, dtype: str) -> list[Trajectory]:
    """Group after group, with the sampler's own logprobs."""
    model, tokenizer = load_model(folder, dtype), load_tokenizer(folder)
    torch.manual_seed(0)
    trajectories = []
    for group, line in enumerate(ROWS.read_text().splitlines()[:PROMPTS]):
        messages = [{"role": "user", "content": json.loads(line)["problem"]}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        ids = torch.tensor([prompt] * GROUP)
        cache, logprobs = None, []
        for _ in range(TOKENS):
            output: Any = model(input_ids=ids if cache is None else ids[:, -1:], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logp = torch.log_softmax(output.logits[:, -1].float(), -1)
            token = torch.multinomial(logp.exp(), 1)
            logprobs.append(logp.gather(-1, token))
            ids = torch.cat((ids, token), 1)
        for member in range(GROUP):
            trajectories.append(
                Trajectory(
                    task=Task(id=str(group), prompt=""),
                    group=group,
                    member=member,
                    token_ids=tuple(ids[member].tolist()),
                    loss_mask=(False,) * len(prompt) + (True,) * TOKENS,
                    logprobs=(0.0,) * len(prompt) + tuple(torch.cat(logprobs, 1)[member].tolist()),
                    turns=(),
                    messages=(),
                    reward=float(member % 2),
                )
            )
    return trajectories


def weights_of(learner: Learner) -> torch.Tensor:
    return torch.cat([tensor.flatten().clone() for _, tensor in learner.named_tensors()])


def one_step(folder: Path, batch: UpdateBatch, mode: str) -> dict[str, Any]:
    """One update in this mode, with the gate on; processor seconds of its passes."""
    config = StareConfig(variant="C2", target_entropy=99.0, amplify=1.5, attenuate=0.5)
    learner = Learner(
        load_model(folder, "float32"),
        LearnerConfig(optimizer="sgd", lr=LR, grad_clip=1e9, zero_stage=0, micro_tokens=4096),
        temperature=1.0,
    )
    before = weights_of(learner)
    packed = learner.pack(batch.sequences)
    started = time.process_time()
    if mode == "exact":
        scored = learner.score(packed, batch.num_tokens)
        plan = make_plan(batch, scored, start_controllers(config), config.plan)
    else:
        plan = plan_from_sampler(batch, start_controllers(config), config.plan)
    planned = time.process_time()
    learner.step(packed, plan.coefficient_T, plan.logp_old_T, statistics=mode == "reuse")
    done = time.process_time()
    change = weights_of(learner) - before
    learner.close()
    return {"plan": plan, "change": change, "score_s": planned - started, "update_s": done - planned}


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    folder = prepare_smollm2()
    print(
        "| sampler | gap mean (nats) | gap max | L+, L- in common | gradient | score s | exact step s | reuse step s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for dtype in ("float32", "bfloat16"):
        batch = update_batch(sample(folder, dtype))
        exact, reuse = one_step(folder, batch, "exact"), one_step(folder, batch, "reuse")
        gap = (batch.sampler_logp_T - exact["plan"].logp_old_T).abs()
        chosen = [run["plan"].sets.l_plus_T | run["plan"].sets.l_minus_T for run in (exact, reuse)]
        common = (chosen[0] & chosen[1]).sum() / chosen[0].sum()
        error = (reuse["change"] - exact["change"]).norm() / exact["change"].norm()
        print(
            f"| {dtype} | {gap.mean():.2g} | {gap.max():.2g} | {common:.1%} | {error:.2g} | {exact['score_s']:.2f} "
            f"| {exact['update_s']:.2f} | {reuse['update_s']:.2f} |",
            flush=True,
        )
    print(f"\n{batch.num_tokens} sampled tokens")


if __name__ == "__main__":
    main()
