"""A GRPO step beside TRL's GRPOTrainer: python tests/benchmarks/bench_trl.py [tiny|smollm2]

TRL comes from the environment of `make test-peers`. Same model folder, prompts, group size and completion length,
float32 on the CPU, no tools, one optimizer step a batch. TRL generates with transformers, as it does without a GPU;
ours runs with its embedded engine and with vLLM. Each is a process of its own, one after the other; the first step is
left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

SIZES = {"tiny": {"prompts": 8, "group": 8, "tokens": 32}, "smollm2": {"prompts": 2, "group": 8, "tokens": 64}}


def problems(count: int) -> list[dict[str, str]]:
    return [{"problem": f"{123 + i}+{456 * i % 997}=?", "answer": "0"} for i in range(count)]


def as_trl(folder: Path, data: Path, size: dict[str, int], steps: int) -> None:
    """Prints the seconds of every step as JSON; runs in the environment that has TRL."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Watch(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.seconds.append(time.perf_counter() - self.started)

    rows = [json.loads(line) for line in data.read_text().splitlines()]
    watch = Watch()
    marks = iter(range(10**9))
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder),
        reward_funcs=lambda completions, **kwargs: [float(next(marks) % 2) for _ in completions],
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": r["problem"]}]} for r in rows]),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
        callbacks=[watch],
        args=GRPOConfig(
            output_dir=str(folder.parent / "trl"),
            per_device_train_batch_size=size["prompts"] * size["group"],
            num_generations=size["group"],
            max_completion_length=size["tokens"],
            max_steps=steps,
            learning_rate=1e-6,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
    )
    trainer.train()
    print("SECONDS", json.dumps(watch.seconds))


def ours(folder: Path, data: Path, size: dict[str, int], steps: int, engine: str, output: Path) -> list[float]:
    longest = 256
    command = f"""train quickstart --name {engine} --output {output} --steps {steps} --model.path {folder}
        --task.env agentic/ShortCoT-v1 --reward.correct 1.0 --reward.tool 0.0
        --cold_start.steps 0 --engine.kind {engine} --engine.max_model_len {longest} --learner.lr 1e-6
        --engine.kv_cache_gb 0.5 --rollout.prompts {size["prompts"]} --rollout.group {size["group"]}
        --rollout.max_tokens {size["tokens"]} --rollout.max_episode_tokens {longest} --rollout.max_turns 1
        --checkpoint.every {steps} --learner.micro_tokens 16384"""
    # An untrained model never answers right; with this reward groups differ inside, so that there is a step to time.
    program = (
        "import sys, zlib, envs.rewards as r\n"
        "async def mark(episode, grader): return float(zlib.crc32(episode.turns[-1].encode()) % 2)\n"
        "r.TERMS['correct'] = mark\n"
        "from agent_rl.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    arguments = [*command.split(), "--task.options", f'{{path = "{data}", prompt = "{{problem}}"}}']
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (output / engine / "metrics.jsonl").read_text().splitlines()]
    assert all(row["tokens_trained"] > 0 for row in rows)
    return [sum(value for key, value in row.items() if key.startswith("seconds/")) for row in rows]


def bench(model: str, peer: str, steps: int) -> None:
    from agent_rl.config import load_config
    from agent_rl.smollm2 import prepare_smollm2

    size = SIZES[model]
    with TemporaryDirectory() as temporary:
        home = Path(temporary)
        data = home / "problems.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in problems(512)))
        folder = prepare_smollm2() if model == "smollm2" else untrained_tiny(home, load_config("quickstart"))
        trl = [peer, __file__, model, "--as-trl", str(folder), "--data", str(data), "--steps", str(steps)]
        done = subprocess.run(trl, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        taken = {"TRL GRPOTrainer": json.loads(done.stdout.split("SECONDS ")[1])}
        for engine in ("transformers", "vllm"):
            taken[f"ours, {engine}"] = ours(folder, data, size, steps, engine, home / "runs")
    episodes = size["prompts"] * size["group"]
    print(f"\n{model}: {size['prompts']} prompts x {size['group']}, {size['tokens']} new tokens, {steps - 1} steps\n")
    print("| trainer | s a step (median) | lowest | highest | samples/s | to TRL |\n|---|---|---|---|---|---|")
    base = statistics.median(taken["TRL GRPOTrainer"][1:])
    for name, seconds in taken.items():
        median = statistics.median(seconds[1:])
        spread = f"{min(seconds[1:]):.2f} | {max(seconds[1:]):.2f}"
        print(f"| {name} | {median:.2f} | {spread} | {episodes / median:.1f} | {base / median:.2f}x |")


def untrained_tiny(home: Path, config: Any) -> Path:
    """The quickstart's model before its cold start."""
    import asyncio

    from rich.console import Console

    from agent_rl.cold_start import expert_texts
    from agent_rl.setup import preflight
    from agent_rl.tiny import prepare_tiny

    setup = asyncio.run(preflight(config, Console(quiet=True)))
    return prepare_tiny(home / "tiny", expert_texts(setup), seed=0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=tuple(SIZES), default="tiny")
    parser.add_argument("--peer", default=".venv-peers/bin/python", help="Python of an environment with TRL")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--as-trl", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_trl:
        as_trl(given.as_trl, given.data, SIZES[given.model], given.steps)
    else:
        bench(given.model, given.peer, given.steps)
