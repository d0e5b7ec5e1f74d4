"""From a command to its first training step: python tests/benchmarks/bench_start.py [--rounds N]

Seconds from the start of ``agent-rl train`` to the first row of metrics, of which the step itself is named apart. The
model folders are prepared beforehand, as they are for whoever starts a second run.
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

from bench_trl import problems, untrained_tiny

from agent_rl.config import load_config
from agent_rl.smollm2 import prepare_smollm2

OPTIONS = """--task.env agentic/ShortCoT-v1 --reward.correct 1.0 --reward.tool 0.0 --cold_start.steps 0 --steps 1
    --rollout.prompts 2 --rollout.group 4 --rollout.max_tokens 32 --rollout.max_episode_tokens 256 --rollout.max_turns 1
    --engine.max_model_len 256 --engine.kv_cache_gb 0.5"""


def first_step(model: Path, data: Path, engine: str, output: Path) -> tuple[float, float]:
    """Seconds to the first row of metrics, and those of its step."""
    name = f"start-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "agent_rl", "train", "quickstart", "--name", name, "--output", str(output)]
    command += [*OPTIONS.split(), "--model.path", str(model), "--engine.kind", engine]
    command += ["--task.options", f'{{path = "{data}", prompt = "{{problem}}"}}']
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = output / name / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    taken = time.perf_counter() - started
    assert process.wait() == 0, f"agent-rl train ended with {process.returncode}"
    row = json.loads(metrics.read_text().splitlines()[0])
    return taken, sum(value for key, value in row.items() if key.startswith("seconds/"))


def main(rounds: int) -> None:
    with TemporaryDirectory() as temporary:
        home = Path(temporary)
        data = home / "problems.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in problems(64)))
        models = {"0.9M": untrained_tiny(home, load_config("quickstart")), "135M": prepare_smollm2()}
        print("| model | engine | s to the end of the first step (median) | lowest | highest | the step itself |")
        print("|---|---|---|---|---|---|")
        for name, folder in models.items():
            for engine in ("transformers", "vllm"):
                pairs = [first_step(folder, data, engine, home / "runs") for _ in range(rounds)]
                taken, step = zip(*pairs, strict=True)
                cells = (statistics.median(taken), min(taken), max(taken), statistics.median(step))
                print(f"| {name} | {engine} | {' | '.join(f'{cell:.1f}' for cell in cells)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    main(parser.parse_args().rounds)
