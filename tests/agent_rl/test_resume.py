"""A killed run goes on as if nothing had been: the later metrics are those of a run that was never interrupted."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SETTINGS = (
    "--steps 7 --threads 1 --sandbox.kind local --rollout.prompts 3 --rollout.group 4 --rollout.max_tokens 30 "
    "--cold_start.steps 45 --cold_start.batch 24 --cold_start.guesses 0 "
    "--checkpoint.every 2 --records.trajectories 2 --learner.lr 1e-3 "
    "--stare.variant C2 --stare.controller model"  # a state that every step moves
).split()


def command(output: Path) -> list[str]:
    return [sys.executable, "-m", "agent_rl", "train", "quickstart", "--output", str(output), *SETTINGS]


def rows(output: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Rows without the wall clock's readings."""
    lines = [json.loads(line) for line in (output / "quickstart" / name).read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("whole")
    done = subprocess.run(command(output), capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert sum(row["grad_norm"] is not None for row in rows(output)) >= 5  # there was something to learn
    return output


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_killed_at_a_random_moment_ends_like_one_that_was_not(
    uninterrupted: Path, tmp_path: Path, seed: int
) -> None:
    # The cold start is taken over, so that the kill falls into RL; a kill before that starts it again.
    for name in ("cold_start", "tiny"):
        shutil.copytree(uninterrupted / "quickstart" / name, tmp_path / "quickstart" / name)
    rng = random.Random(seed)
    metrics = tmp_path / "quickstart" / "metrics.jsonl"
    kills = 0
    for wanted in (2, 5):  # rows on disk before the kill
        process = subprocess.Popen(command(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 200
        while process.poll() is None and (not metrics.is_file() or metrics.read_text().count("\n") < wanted):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.6))
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
    done = subprocess.run(command(tmp_path), capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert kills >= 1
    assert "going on after step" in done.stdout
    assert rows(tmp_path) == rows(uninterrupted)
    assert rows(tmp_path, "trajectories.jsonl") == rows(uninterrupted, "trajectories.jsonl")
    ours, theirs = (folder / "quickstart" / "model" / "model.safetensors" for folder in (tmp_path, uninterrupted))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.slow
def test_a_run_goes_on_with_settings_that_need_less_memory(uninterrupted: Path, tmp_path: Path) -> None:
    """They are what an out-of-memory error names."""
    shutil.copytree(uninterrupted / "quickstart", tmp_path / "quickstart")
    less = [
        "--learner.micro_tokens",
        "400",
        "--learner.chunk_tokens",
        "64",
        "--learner.activation_checkpointing",
        "true",
    ]
    again = [*command(tmp_path), "--steps", "8", *less]
    done = subprocess.run(again, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert "going on after step 7" in done.stdout
    assert rows(tmp_path)[:7] == rows(uninterrupted)
    assert [row["step"] for row in rows(tmp_path)[7:]] == [8]


@pytest.mark.slow
def test_a_finished_run_has_all_its_records_and_does_nothing_twice(uninterrupted: Path) -> None:
    folder = uninterrupted / "quickstart"
    before = (folder / "metrics.jsonl").read_bytes()
    again = subprocess.run(command(uninterrupted), capture_output=True, text=True, timeout=200, check=False)
    assert again.returncode == 0, again.stderr
    assert (folder / "metrics.jsonl").read_bytes() == before
    for name in ("config.json", "trajectories.jsonl", "curves.png", "model/model.safetensors", "tokenizer"):
        assert (folder / name).exists(), name
    assert list((folder / "tensorboard").glob("events*"))
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step-000007"]
    wanted = {
        "step", "reward", "accuracy", "entropy", "gate", "W", "M", "l_plus", "l_minus", "clip_fraction", "grad_norm",
        "tokens", "malformed", "reward/correct", "reward/tool", "logprob_gap_max", "logprob_gap_mean",
        "seconds/rollout", "seconds/score", "seconds/update", "seconds/sync",
    }  # fmt: skip
    assert wanted <= json.loads(before.splitlines()[0]).keys()


@pytest.mark.slow
def test_a_torn_checkpoint_is_never_taken(uninterrupted: Path, tmp_path: Path) -> None:
    """A half-written checkpoint has another name; a damaged one is named, with what to do."""
    shutil.copytree(uninterrupted / "quickstart", tmp_path / "quickstart")
    checkpoints = tmp_path / "quickstart" / "checkpoints"
    (checkpoints / "step-000009.partial").mkdir()
    (checkpoints / "step-000007" / "state.json").write_text('{"step": ')
    done = subprocess.run(command(tmp_path), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert "step-000007 is damaged" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
