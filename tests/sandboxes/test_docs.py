"""The example of docs/sandboxes.md does what its comments say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "sandboxes.md"


def test_the_example_runs_as_written() -> None:
    code = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    environment = {
        **os.environ,
        "DOCKER_HOST": "unix:///no/docker.sock",
        "PATH": "/nowhere",
    }  # so that auto means local here
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "ok 42\n\n"), done.stderr
    assert done.stderr.count("\n") == 1
    assert "NO ISOLATION" in done.stderr
