"""Supervised fine-tuning: what is learned of a trace, that it is learned, and that a kill loses nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agent_rl.codec import ChatCodec
from agent_rl.config import ConfigError
from agent_rl.sft import load_traces, tokenised
from envs.parsers import get_dialect
from envs.types import Opening

TRACES = Path(__file__).parents[1] / "data" / "tool_traces.jsonl"


def written(tmp_path: Path, *rows: object) -> Path:
    file = tmp_path / "traces.jsonl"
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return file


def test_only_the_assistants_words_are_learned_and_tool_output_is_cut_out(codec: ChatCodec, tmp_path: Path) -> None:
    inline = "First:\n<code>\nprint(6*7)\n</code>\n<interpreter>\n42\n</interpreter>\nIt is 42."
    call = {"function": {"name": "python", "arguments": '{"code": "print(1)"}'}}
    rows = [
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": inline}]},
        {
            "messages": [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "name": "python", "content": "1"},
                {"role": "assistant", "content": "One."},
            ]
        },
    ]
    hermes = get_dialect("hermes")
    learned = []
    for trace in load_traces(written(tmp_path, *rows), hermes):
        sequence = tokenised(trace, codec)
        learned.append(codec.tokenizer.decode([sequence.token_ids[p] for p in sequence.positions]))
        # Id for id what a rollout of the same turns would have been.
        ids = codec.open(Opening(messages=trace.messages[:1], tools=()))
        ids += [*codec.encode_text(str(trace.messages[1]["content"])), codec.end_of_turn]
        ids += codec.extend("stop", trace.messages[2:3])
        ids += [*codec.encode_text(str(trace.messages[3]["content"])), codec.end_of_turn]
        assert list(sequence.token_ids) == ids
    end = codec.tokenizer.decode([codec.end_of_turn])
    assert learned[0] == f"First:\n<code>\nprint(6*7)\n</code>{end}It is 42.{end}"
    assert learned[1] == f"{hermes.written('python', {'code': 'print(1)'})}{end}One.{end}"


def test_the_traces_of_tora_are_read_whole(codec: ChatCodec) -> None:
    fence = get_dialect("codefence")
    traces = load_traces(TRACES, fence)
    assert len(traces) == 30
    calls = 0
    for trace in traces:
        sequence = tokenised(trace, codec)
        learned = codec.tokenizer.decode([sequence.token_ids[p] for p in sequence.positions])
        calls += "```python" in learned
        assert "```output" not in learned
        assert ("```output" in codec.tokenizer.decode(sequence.token_ids)) == ("```python" in learned)
    assert calls > 15


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("{", r"traces\.jsonl:2: a trace is an object"),
        ({"text": "x"}, r"traces\.jsonl:2: a trace is an object"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role 'robot'"),
        ({"messages": [{"role": "user", "content": "x"}]}, "ends with an assistant's"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "begins with a system or user message"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: object, complaint: str) -> None:
    good = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}
    with pytest.raises(ConfigError, match=complaint):
        load_traces(written(tmp_path, good, row), get_dialect("hermes"))


@pytest.mark.slow
def test_the_loss_falls_and_a_killed_run_goes_on_to_the_same_weights(tiny_folder: Path, tmp_path: Path) -> None:
    def start(out: Path, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "agent_rl", "sft", str(tiny_folder), "--data", str(TRACES), "--out", str(out)]
        command += ["--steps", "16", "--batch", "4", "--save-every", "3", "--max-tokens", "1500"]
        command += ["--learner.lr", "3e-3", "--learner.layout", "packed", *more]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)

    whole, error = (process := start(tmp_path / "whole")).communicate(timeout=300)
    assert process.returncode == 0, error
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+) nats", whole)]
    assert losses[-1] < 0.9 * losses[0]

    killed = start(tmp_path / "killed")
    deadline = time.monotonic() + 200
    while not (tmp_path / "killed.work" / "done").is_file():
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not (tmp_path / "killed").exists()
    _, error = (process := start(tmp_path / "killed", "--learner.lr", "1e-3", "--seed", "1")).communicate(timeout=300)
    assert process.returncode == 2
    assert "is of a killed run with other settings (learner.lr, seed)" in error
    told, _ = (process := start(tmp_path / "killed")).communicate(timeout=300)
    assert process.returncode == 0
    assert "going on after step" in told
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not (tmp_path / "killed.work").exists()

    again, error = (process := start(tmp_path / "whole")).communicate(timeout=300)
    assert (process.returncode, again) == (2, "")
    assert "exists already" in error
