"""The real path in small: SmolLM2-135M, real GSM8K problems, Docker containers, vLLM, DeepSpeed ZeRO-2, three steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLE = Path(__file__).parents[1] / "data" / "gsm8k_sample.jsonl"
SETTINGS = (
    "--steps 3 --rollout.prompts 2 --rollout.group 6 --rollout.max_tokens 48 --rollout.max_turns 2 "
    "--engine.max_model_len 448 --rollout.max_episode_tokens 448 --engine.kv_cache_gb 0.5 --checkpoint.every 3"
).split()


@pytest.mark.slow
@pytest.mark.docker
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_three_steps_of_the_pretrained_model_on_real_problems(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agent_rl", "train", "smollm2-gsm8k", "--output", str(tmp_path)]
    command += ["--task.options.path", str(SAMPLE), *SETTINGS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    folder = tmp_path / "smollm2-gsm8k"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["episodes"] == 12
        assert row["void"] == 0
        assert row["logprob_gap_max"] < 1e-3  # sampler and learner agree on every token of the batch
        assert row["canary_gap"] < 1e-3
        assert 0.1 < row["entropy"] < 5
    assert all(row["grad_norm"] > 0 for row in rows)  # three updates, none of them empty
    assert sum(row["tool_calls"] for row in rows) > 0  # and containers ran the model's programs
    assert (folder / "model" / "model.safetensors").stat().st_size > 200_000_000
    config = json.loads((folder / "config.json").read_text())
    assert (config["engine"]["kind"], config["sandbox"]["kind"], config["learner"]["zero_stage"]) == (
        "vllm",
        "docker",
        2,
    )
