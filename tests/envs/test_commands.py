"""The commands around environments: what they print, and one line with exit code 2 for what a user can mend."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

import pytest

import envs
from envs.cli import add_parser

GSM8K = str(Path(__file__).parents[1] / "data" / "gsm8k_sample.jsonl")
CALL = '<tool_call>{"name": "python", "arguments": {"code": "print(1)"}}</tool_call>'


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="agent-rl")
    add_parser(parser.add_subparsers(required=True))
    parsed = parser.parse_args(arguments)
    code: int = parsed.func(parsed)
    return code


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_every_environment_is_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("envs", "list") == 0
    listed = capsys.readouterr().out
    for env_id in envs.ids():
        assert env_id in listed
        assert run("envs", "show", env_id) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"{env_id}: ")
        assert all(tool.name in shown for tool in envs.get(env_id).tools)


def test_a_person_plays_an_episode(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = envs.get("agentic/Arithmetic-v1")
    task = spec.tasks({"seed": 4}).task(2)
    typed(monkeypatch, f'/python {{"code": "print({task.meta["expression"]})"}}\n\\boxed{{{task.answer}}}\n\n')
    assert run("envs", "play", spec.id, "--set", "seed=4", "--task", "2", "--sandbox", "local") == 0
    out = capsys.readouterr().out
    assert f"[user]\n{task.prompt}" in out
    assert f"[tool]\n{task.answer}" in out
    assert "ended by answer: reward 1.0" in out


def test_attempts_are_printed_as_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    typed(monkeypatch, f"<think>{CALL}</think>Let me see. {CALL}{CALL.replace('python', 'pyton')}")
    assert run("tools", "parse", "--dialect", "hermes", "-") == 0
    attempts = json.loads(capsys.readouterr().out)
    assert [(a["status"], a["name"], a["arguments"]) for a in attempts] == [
        ("ok", "python", {"code": "print(1)"}),
        ("unknown_tool", "pyton", None),
    ]
    schema = {"type": "object", "properties": {"code": {"type": "integer"}}, "required": ["code"]}
    (tmp_path / "tools.json").write_text(json.dumps([{"name": "python", "parameters": schema}]))
    (tmp_path / "text.txt").write_text(f"Let me see. {CALL}")
    options = ["--dialect", "hermes", "--tools", str(tmp_path / "tools.json"), "--whole"]
    assert run("tools", "parse", *options, str(tmp_path / "text.txt")) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["content"] == "Let me see."
    assert [a["status"] for a in whole["calls"]] == ["invalid_args"]


def test_a_tool_is_called(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("tools", "list") == 0
    assert "python(code)" in capsys.readouterr().out
    assert run("tools", "call", "python", '{"code": "print(6*7)"}', "--sandbox", "local") == 0
    assert capsys.readouterr().out == "42\n"
    typed(monkeypatch, '{"code": "1/0"}')
    assert run("tools", "call", "python", "-", "--sandbox", "local") == 1
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_pairs_are_graded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [
        {"id": "a", "gold": "1/2", "pred": "\\boxed{0.5}", "expected": True},
        {"id": "b", "gold": "1/2", "pred": "\\boxed{0.6}", "expected": True},
        {"gold": "1/2", "pred": "no\u2028idea"},
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    assert run("grade", str(file)) == 0
    out = capsys.readouterr().out
    lines = [line.split("\t") for line in out.splitlines()[:3]]
    assert [(line[0], line[1]) for line in lines] == [("a", "correct"), ("b", "wrong"), ("3", "unparsable")]
    assert "JUDGED OTHERWISE" in lines[1][2]
    assert "agreement 1 of 2 (50.0 %)" in out


def test_a_data_file_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("data", "check", GSM8K) == 0
    assert "100 tasks" in capsys.readouterr().out


BAD: list[tuple[list[str], str]] = [
    (["envs", "show", "agentic/Mase-v1"], "did you mean 'agentic/Maze-v1'?"),
    (["envs", "play", "agentic/Maze-v1", "--set", "width"], "write KEY=VALUE"),
    (["envs", "play", "agentic/Maze-v1", "--set", "width=1"], "width: Input should be greater than or equal to 2"),
    (["envs", "play", "agentic/Maze-v1", "--set", "wide=1"], "wide: Extra inputs are not permitted"),
    (["envs", "play", "agentic/Maze-v1", "--task", "-1"], "there are tasks 0 to 99999"),
    (["envs", "play", "agentic/Maze-v1", "--dialect", "hermess"], "did you mean 'hermes'?"),
    (["envs", "play", "agentic/MathPython-v1"], "give `path`"),
    (["envs", "play", "agentic/MathPython-v1", "--set", "path=gone.jsonl"], "'gone.jsonl' does not exist"),
    (["tools", "call", "pyton", "{}"], "did you mean 'python'?"),
    (["tools", "call", "python", "[]"], "a JSON object"),
    (["tools", "call", "python", "{"], "Expecting property name"),
    (["tools", "call", "python", "{}"], "'code' is a required property"),
    (["tools", "parse", "--dialect", "nope", "-"], "there are hermes"),
    (["tools", "parse", "--dialect", "hermes", "gone.txt"], "gone.txt"),
    (["tools", "parse", "--dialect", "hermes", "--tools", GSM8K, "-"], "Extra data"),
    (["grade", "gone.jsonl"], "gone.jsonl"),
    (["grade", GSM8K], "gsm8k_sample.jsonl:1: a row is an object with the texts gold and pred"),
    (["data", "check", "data.txt"], "does not exist"),
]


@pytest.mark.parametrize(("arguments", "complaint"), BAD, ids=lambda value: " ".join(value)[-40:])
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "")
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert complaint in captured.err
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("agent-rl: ")
    assert captured.out == ""


def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    verbs: Any = [["envs", "list"], ["envs", "show"], ["envs", "play"], ["tools", "list"], ["tools", "call"]]
    for verb in [*verbs, ["tools", "parse"], ["data", "check"], ["grade"]]:
        with pytest.raises(SystemExit) as stop:
            run(*verb, "--help")
        assert stop.value.code == 0
        assert f"agent-rl {' '.join(verb)}" in capsys.readouterr().out.split("example:")[1]
