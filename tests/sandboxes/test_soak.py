"""A short soak: every answer right, every kill survived, nothing left. The long one is the same script with more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKER = pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.slow])
BWRAP = pytest.param("bwrap", marks=[pytest.mark.bwrap, pytest.mark.slow])


@pytest.mark.parametrize("kind", [BWRAP, DOCKER])
def test_no_answer_is_wrong_or_lost_and_nothing_is_left(kind: str) -> None:
    script = str(ROOT / "tests" / "benchmarks" / "soak_sandbox.py")
    command = [sys.executable, script, "--kind", kind, "--executions", "400", "--kills", "6", "--size", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["answered"], report["wrong"], report["kills"]) == (400, 0, 6)
    assert 1 <= report["failures"] <= 6
    assert set(report["left"].values()) == {0}
