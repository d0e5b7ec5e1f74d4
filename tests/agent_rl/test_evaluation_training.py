"""A run looks at itself on a schedule, keeps its best weights, and stops when it gets no better."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from agent_rl.config import RunConfig, load_config
from agent_rl.errors import ConfigError
from agent_rl.evaluation.targets import find_model
from agent_rl.evaluation.training import evaluation_parts
from agent_rl.loop import train
from agent_rl.models import load_tokenizer

SMALL = (
    "--steps 2 --threads 1 --sandbox.kind local --cold_start.steps 2 --cold_start.batch 4 --rollout.prompts 2 "
    "--rollout.group 2 --rollout.max_tokens 12 --rollout.max_turns 2 --checkpoint.every 1 --evaluation.every 1 "
    "--evaluation.limit 3 --evaluation.k 2 --evaluation.max_tokens 8"
).split()


def config_of(tmp_path: Path, *more: str) -> RunConfig:
    return load_config("quickstart", [*SMALL, "--output", str(tmp_path), "--name", "run", *more])


def evaluations(config: RunConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.folder / "evaluations.jsonl").read_text().splitlines()]


def test_a_run_evaluates_before_between_and_after_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    told = io.StringIO()
    train(config, Console(file=told, width=200))
    rows = evaluations(config)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["complete"] and row["episodes"] == 6 for row in rows)
    assert told.getvalue().count("evaluation after step") == 3
    metrics = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["eval/score"] for row in metrics] == [row["score"] for row in rows[1:]]
    assert all("seconds/evaluation" in row for row in metrics)
    best = json.loads((config.folder / "best" / "best.json").read_text())
    assert best["score"] == max(row["score"] for row in rows)
    assert (config.folder / "best" / "model.safetensors").is_file()
    kept = (config.folder / "evaluations" / "step-000002.jsonl").read_text().splitlines()
    episodes = [json.loads(line) for line in kept]
    assert len(episodes) == 6
    assert len({(episode["problem"], episode["sample"]) for episode in episodes}) == 6

    # One more step: only its own evaluation is new.
    train(config_of(tmp_path, "--steps", "3"), Console(quiet=True))
    assert [{k: v for k, v in row.items() if k != "seconds"} for row in evaluations(config)[:3]] == [
        {k: v for k, v in row.items() if k != "seconds"} for row in rows
    ]
    assert [row["step"] for row in evaluations(config)] == [0, 1, 2, 3]


def test_a_run_that_gets_no_better_stops_with_its_weights_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([0.1, 0.4, 0.3, 0.4, 0.9])
    monkeypatch.setattr(
        "agent_rl.evaluation.training.summarise",
        lambda rows, parts: {
            "parts": {"p": {"avg": {"value": next(scores), "stderr": 0.0, "problems": 3}}},
            "total": {"scored": len(rows), "void": 0, "episodes": len(rows)},
        },
    )
    config = config_of(tmp_path, "--steps", "9", "--evaluation.patience", "2", "--checkpoint.every", "100")
    train(config, Console(quiet=True))
    assert [row["score"] for row in evaluations(config)] == [0.1, 0.4, 0.3, 0.4]  # 0.4 again is no better
    assert json.loads((config.folder / "best" / "best.json").read_text())["step"] == 1
    assert (config.folder / "model").is_dir()
    assert [path.name for path in (config.folder / "checkpoints").iterdir()] == ["step-000003"]
    train(config, Console(quiet=True))  # and it stays stopped
    assert len(evaluations(config)) == 4


@pytest.mark.parametrize(("rank", "zero_stage"), [(0, 0), (0, 3), (2, 2)])
def test_a_checkpoint_is_the_model_that_the_run_had(tmp_path: Path, rank: int, zero_stage: int) -> None:
    """Out of DeepSpeed's files, adapters merged: the very weights that were exported at that step."""
    more = ["--steps", "1", "--evaluation.every", "0", "--learner.lora.rank", str(rank)]
    config = config_of(tmp_path, *more, "--learner.zero_stage", str(zero_stage), "--learner.lr", "0.01")
    train(config, Console(quiet=True))
    wanted = load_file(config.folder / "model" / "model.safetensors")
    told: list[str] = []
    found = find_model(str(config.folder / "checkpoints" / "step-000001"), told.append)
    assert found.folder == config.folder / "checkpoints" / "step-000001" / "model"
    assert len(told) == 1
    made = load_file(found.folder / "model.safetensors")
    assert made.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(made[name], tensor), name
    assert find_model(str(config.folder), told.append).folder == config.folder / "model"
    assert load_tokenizer(found.folder).chat_template == load_tokenizer(config.folder / "model").chat_template
    shutil.rmtree(config.folder / "model")
    assert find_model(str(config.folder), told.append).folder == found.folder  # the newest checkpoint
    assert len(told) == 1  # made once


def test_a_run_that_went_on_is_its_newest_weights(tmp_path: Path) -> None:
    """The model that an earlier end wrote is not what the run has learned since."""
    run = tmp_path / "run"
    for name in (
        "checkpoints/step-000001",
        "model",
        "checkpoints/step-000002/model",
        "checkpoints/step-000003.partial",
    ):
        (run / name).mkdir(parents=True)
    (run / "config.json").write_text('{"rollout": {}, "learner": {}, "task": {}}')
    for age, name in enumerate(("checkpoints/step-000001/state.json", "model/config.json")):
        (run / name).write_text("{}")
        os.utime(run / name, (age, age))
    told: list[str] = []
    assert find_model(str(run), told.append).folder == run / "model"
    for name in ("checkpoints/step-000002/state.json", "checkpoints/step-000003.partial/state.json"):
        (run / name).write_text("{}")
    assert find_model(str(run), told.append).folder == run / "checkpoints" / "step-000002" / "model"
    assert told == [f"{run} went on after its model was written: taking step-000002"]


def test_no_schedule_no_evaluation(tmp_path: Path) -> None:
    config = config_of(tmp_path, "--evaluation.every", "0")
    assert evaluation_parts(config) == []


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--evaluation.suite", "gsm9k"], "evaluation: no suite 'gsm9k': did you mean 'gsm8k'"),
        (
            ["--evaluation.suite", "gsm8k", "--evaluation.data", "/nowhere"],
            "evaluation: --data /nowhere: does not exist",
        ),
        (["--evaluation.limit", "0"], "evaluation.limit"),
    ],
)
def test_a_wrong_evaluation_is_found_before_the_run_folder_is_touched(
    tmp_path: Path, more: list[str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        train(config_of(tmp_path, *more), Console(quiet=True))
    assert list(tmp_path.iterdir()) == []


def test_training_on_the_test_is_said_aloud(tmp_path: Path) -> None:
    from envs import get

    told = io.StringIO()
    config = config_of(tmp_path, "--task.options.size", "50", "--evaluation.limit", "10")
    parts = evaluation_parts(config, Console(file=told, width=200), get(config.task.env).tasks(config.task.options))
    assert len(parts[0].problems) == 10
    assert "10 of 10 problems are in the training data (10 word for word)" in told.getvalue()


def test_an_evaluation_that_the_clock_cuts_counts_for_nothing(tmp_path: Path) -> None:
    config = config_of(tmp_path, "--evaluation.max_seconds", "0.001")
    train(config, Console(quiet=True))
    assert [row["complete"] for row in evaluations(config)] == [False, False, False]
    assert not (config.folder / "best").exists()
