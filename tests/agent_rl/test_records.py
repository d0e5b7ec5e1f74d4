"""Records of runs of any length: a run goes on after its last whole step, and a report needs no more than one row."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agent_rl.cli import main
from agent_rl.config import RunConfig
from agent_rl.models import load_tokenizer
from agent_rl.records import RunRecords, read_rows, trajectory_record
from agent_rl.report import report
from agent_rl.setup import keep_tokenizer
from agent_rl.types import Trajectory, Turn
from envs import Task


def record(step: int, member: int, length: int) -> dict[str, Any]:
    trajectory = Trajectory(
        task=Task(id="t", prompt="p"),
        group=0,
        member=member,
        token_ids=(5,) * length,
        loss_mask=(True,) * length,
        logprobs=(-0.5,) * length,
        turns=(Turn(start=0, end=length, weight_version=0, finish_reason="stop"),),
        messages=({"role": "user", "content": "line\u2028separator"},),
        reward=float(member),
    )
    return trajectory_record(trajectory, step)


def test_rows_after_the_checkpoint_and_a_torn_one_are_cut_off(tmp_path: Path) -> None:
    records = RunRecords(tmp_path, first_step=1)
    for step in (1, 2, 3):
        records.write(step, {"reward": 1.0}, [record(step, member, 3) for member in range(2)])
    records.close()
    for name in ("metrics.jsonl", "trajectories.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 4, "rew')
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    again = RunRecords(tmp_path, first_step=3)
    again.write(3, {"reward": 0.5}, [record(3, 0, 4)])
    again.close()
    assert [(row["step"], row["reward"]) for row in read_rows(tmp_path / "metrics.jsonl")] == [(1, 1), (2, 1), (3, 0.5)]
    steps = [(row["step"], len(row["token_ids"])) for row in read_rows(tmp_path / "trajectories.jsonl")]
    assert steps == [(1, 3), (1, 3), (2, 3), (2, 3), (3, 4)]


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_going_on_and_reporting_take_the_memory_of_one_trajectory(tmp_path: Path, tiny_folder: Path) -> None:
    keep_tokenizer(tiny_folder, tmp_path)
    console = Console(quiet=True)
    few, many = tmp_path / "few", tmp_path / "many"
    for folder, steps in ((few, 2), (many, 40)):
        folder.mkdir()
        keep_tokenizer(tiny_folder, folder)
        row = {"step": 0, "reward": 1.0, "accuracy": 1.0, "entropy": None, "gate": False}
        with (folder / "metrics.jsonl").open("w") as metrics, (folder / "trajectories.jsonl").open("w") as file:
            for step in range(1, steps + 1):
                metrics.write(json.dumps(row | {"step": step}) + "\n")
                file.write(json.dumps(record(step, 0, 8000)) + "\n")
        report(folder, console, target_entropy=0.3)  # whatever is loaded only once
        RunRecords(folder, first_step=steps).close()
    for work in (
        lambda folder: report(folder, console, target_entropy=0.3),
        lambda folder: RunRecords(folder, first_step=39).close(),
    ):
        assert peak_bytes(lambda work=work: work(many)) < peak_bytes(lambda work=work: work(few)) + 3_000_000


def test_a_report_of_a_run_that_has_not_begun_is_one_line(
    quick_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(quick_config.model_dump_json())
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("has no metrics.jsonl with a finished step: nothing to report\n")


def test_a_tokenizer_without_tokenizer_json_is_kept_too(tiny_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(tiny_folder, source)
    whole = json.loads((source / "tokenizer.json").read_text())
    (source / "tokenizer.json").unlink()
    (source / "vocab.json").write_text(json.dumps(whole["model"]["vocab"]))
    (source / "merges.txt").write_text("".join(" ".join(pair) + "\n" for pair in whole["model"]["merges"]))
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "Qwen2Tokenizer"}))
    keep_tokenizer(source, tmp_path)
    text = "call python with 12 + 3"
    assert load_tokenizer(tmp_path / "tokenizer")(text).input_ids == load_tokenizer(source)(text).input_ids
