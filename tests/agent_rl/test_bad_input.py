"""What a user gets wrong: exit code 2, one clear line, no traceback, nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agent_rl.cli import main

KEEP = ["quickstart", "--engine.kind", "vllm", "--rollout.leftovers", "keep", "--rollout.oversample", "1"]
GOOD = '{"id": "1", "problem": "1+1?", "answer": "2"}\n'


def refused(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error."""
    before = sorted(tmp_path.rglob("*"))
    code = main(["train", *arguments, "--output", str(tmp_path / "runs")])
    captured = capsys.readouterr()
    assert code == 2
    assert sorted(tmp_path.rglob("*")) == before, "something was written"
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert "Traceback" not in captured.err
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["quikstart"], "no recipe 'quikstart': did you mean 'quickstart'?"),
        (["quickstart", "--rollout.goup", "4"], "unknown key 'rollout.goup': did you mean 'rollout.group'?"),
        (["quickstart", "--steps", "many"], "steps = 'many': Input should be a valid integer"),
        (["quickstart", "--rollout.group", "1"], "rollout.group = 1: Input should be greater than or equal to 2"),
        (["quickstart", "--engine.kind", "vlm"], "engine.kind = 'vlm': Input should be 'transformers', 'vllm'"),
        (["quickstart", "--steps"], "--steps needs a value"),
        (["quickstart", "stray"], "unexpected argument 'stray'"),
        (["quickstart", "--task.env", "agentic/Arithmetik-v1"], "did you mean 'agentic/Arithmetic-v1'?"),
        (["quickstart", "--task.dialect", "hermse"], "did you mean 'hermes'?"),
        (["quickstart", "--reward.corect", "1"], "no reward term 'corect': did you mean 'correct'?"),
        (["quickstart", "--task.options.max_digits", "99"], "task.options.max_digits = 99"),
        (["quickstart", "--model.path", "/no/such/folder"], "model.path = '/no/such/folder': no such folder"),
        (["quickstart", "--rollout.max_episode_tokens", "5000"], "is above engine.max_model_len"),
        (["quickstart", "--name", "../x"], "name = '../x'"),
        (["quickstart", "--rollout.top_p", "0.9"], "top_p = 0.9: training samples the whole distribution"),
        (["quickstart", "--rollout.top_k", "50"], "top_k = 50: training samples the whole distribution"),
        (["quickstart", "--stare.variant", "O5"], "stare.variant = 'O5'"),
        (["quickstart", "--stare.score", "reuse", "--stare.selector", "phi"], "stare: score 'reuse' knows surprisals"),
        (["quickstart", "--stare.controller", "pi", "--stare.target_entropy", "0"], "target_entropy must be above 0"),
        (["quickstart", "--stare.gate", "token", "--stare.hysteresis", "0.1"], "a token has no memory"),
        (["smollm2-gsm8k", "--task.options.path", "/no/rows.jsonl"], "'/no/rows.jsonl' does not exist"),
        (["quickstart", "--engine.kind", "vllm_server"], "engine.urls is empty: name the vLLM servers"),
        (
            [*KEEP, "--engine.kind", "transformers"],
            "rollout.leftovers 'keep' needs engine.kind 'vllm', not 'transformers'",
        ),
        (
            [*KEEP, "--engine.kind", "vllm_server"],
            "rollout.leftovers 'keep' needs engine.kind 'vllm', not 'vllm_server'",
        ),
        ([*KEEP, "--rollout.oversample", "0"], "'keep' needs rollout.oversample above 0: without it nothing is left"),
        (
            [*KEEP, "--engine.sleep", "true"],
            "rollout.leftovers 'keep' samples during the update: it needs engine.sleep",
        ),
        ([*KEEP, "--stare.score", "reuse"], "'keep' needs stare.score 'exact'"),
        ([*KEEP, "--rollout.max_staleness", "0"], "rollout.max_staleness = 0: Input should be greater than or equal"),
    ],
)
def test_a_wrong_setting_is_one_line(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in refused(arguments, tmp_path, capsys)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (GOOD + '{"id": "2", "problem"\n', "rows.jsonl:2: not valid JSON"),
        (GOOD + '{"id": "2", "problem": "x"}\n', "rows.jsonl:2: field 'answer' is missing"),
        (GOOD + '{"id": "1", "problem": "x", "answer": "3"}\n', "rows.jsonl:2: id '1' stands in line 1 already"),
        (
            GOOD + '{"id": "2", "problem": "x", "answer": 3}\n',
            "rows.jsonl:2: field 'answer' must be a non-empty string",
        ),
        ("\n", "has no rows"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(
    rows: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(rows)
    arguments = ["smollm2-gsm8k", "--task.options.path", str(path), "--sandbox.kind", "local"]
    assert expected in refused(arguments, tmp_path, capsys)


def test_a_tokenizer_without_chat_template_is_refused(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "chat_template.jinja").unlink()
    line = refused(["quickstart", "--model.path", str(folder)], tmp_path, capsys)
    assert "its tokenizer has no chat template" in line


def test_docker_demanded_without_an_engine_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/docker.sock")
    line = refused(["quickstart", "--sandbox.kind", "docker"], tmp_path, capsys)
    assert "no Docker engine answers" in line
    assert "--sandbox.kind local" in line


def test_vllm_chosen_and_not_installed_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_rl.engines.vllm.importlib.util.find_spec", lambda name: None)
    line = refused(["quickstart", "--engine.kind", "vllm", "--sandbox.kind", "local"], tmp_path, capsys)
    assert "the vllm engine needs vLLM" in line


def test_settings_that_contradict_a_started_run_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from agent_rl.config import load_config

    folder = tmp_path / "runs" / "quickstart"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(load_config("quickstart").model_dump_json())
    may_change = ["--learner.micro_tokens", "99", "--engine.urls", '["http://localhost:1"]', "--sandbox.size", "1"]
    line = refused(["quickstart", "--learner.lr", "0.5", *may_change], tmp_path, capsys)
    assert "holds a run with other settings (learner.lr)" in line


def test_every_command_explains_itself_with_an_example() -> None:
    for arguments in (["train"], ["report"], ["sandbox", "build"], ["sandbox", "run"], ["sandbox", "clean"]):
        done = subprocess.run(
            [sys.executable, "-m", "agent_rl", *arguments, "--help"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert f"agent-rl {' '.join(arguments)}" in done.stdout.partition("example")[2], arguments


@pytest.mark.parametrize("name", ["7", "2026-11-21", "first-try"])
def test_a_name_may_look_like_a_number_or_a_date(name: str) -> None:
    from agent_rl.config import load_config

    assert load_config("quickstart", ["--name", name]).name == name


def test_show_prints_the_resolved_settings() -> None:
    command = [sys.executable, "-m", "agent_rl", "train", "smollm2-gsm8k", "--show", "--rollout.group", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ})
    shown = json.loads(done.stdout)
    assert shown["rollout"]["group"] == 4
    assert shown["sandbox"]["kind"] == "docker"
