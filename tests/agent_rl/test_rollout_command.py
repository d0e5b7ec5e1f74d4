"""``agent-rl rollout``: episodes of any model, the model's own words apart from all others."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_rl.cli import main
from agent_rl.evaluation.show import _pieces


def test_episodes_of_a_model_folder_are_printed(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"rollout agentic/Arithmetic-v1 --model {tiny_folder} --episodes 2 --sandbox local --max-tokens 8"
    assert main(command.split()) == 0
    out = capsys.readouterr().out
    assert out.count("task arithmetic-0-") == 2
    assert "=?" in out
    assert "ended by length" in out


def test_what_cannot_be_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout", "agentic/Arithmetik-v1", "--model", "/nowhere"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_pieces_cover_every_id_once_and_in_order() -> None:
    ids = list(range(10))
    pieces = _pieces(ids, [[2, 4], [4, 5], [8, 10]])
    assert [i for piece, _ in pieces for i in piece] == ids
    assert [i for piece, own in pieces if own for i in piece] == [2, 3, 4, 8, 9]
