"""``agent-rl sandbox``: every verb does what its help says, and bad input is one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

VERBS = ("build", "list", "run", "clean", "bench", "serve")


def sandbox(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agent_rl", "sandbox", *arguments],
        capture_output=True,
        text=True,
        input=stdin,
        env={**os.environ, "AGENT_RL_SANDBOX_TOKEN": "", **environment},
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_an_example(verb: str) -> None:
    done = sandbox(verb, "--help")
    assert done.returncode == 0
    assert f"agent-rl sandbox {verb}" in done.stdout.partition("example:")[2]


def test_run_passes_on_what_the_program_did(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.exit(3)")
    done = sandbox("run", str(file), "--kind", "local")
    assert (done.returncode, done.stdout) == (3, "out\n")
    assert done.stderr.endswith("err\n")
    late = sandbox("run", "-", "--kind", "local", "--timeout", "0.5", stdin="while True: pass")
    assert late.returncode == 1
    assert "ended by timeout after 0.5" in late.stderr
    shell = sandbox("run", "-", "--kind", "local", "--language", "sh", stdin="echo from a shell")
    assert shell.stdout == "from a shell\n"


def test_bench_prints_a_table() -> None:
    done = sandbox("bench", "--kind", "local", "--calls", "5", "--size", "2")
    assert done.returncode == 0, done.stderr
    assert "| fresh process | print(1) |" in done.stdout
    assert "| session | print(1) |" in done.stdout
    assert "fresh processes a second, 2 in flight" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "no-such-file.py"), "No such file"),
        (("run", "-", "--kind", "remote"), "needs --sandbox.hosts"),
        (("serve", "--kind", "local"), "clients need a token: set AGENT_RL_SANDBOX_TOKEN"),
        (("serve", "--kind", "local", "--bind", "8088"), "--bind '8088': HOST:PORT"),
        (("serve", "--kind", "local", "--bind", "127.0.0.1:88088"), "--bind '127.0.0.1:88088': HOST:PORT"),
        (("serve", "--kind", "local", "--tokens", "/dev/null"), "each line is a client's name and its token"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    environment = {"AGENT_RL_SANDBOX_TOKEN": "t"} if "remote" in arguments else {}
    done = sandbox(*arguments, **environment)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "-", "--timeout", "0"),
        ("run", "-", "--timeout", "inf"),
        ("bench", "--calls", "0"),
        ("serve", "--idle", "-1"),
    ],
)
def test_a_number_that_is_none_is_named(arguments: tuple[str, ...]) -> None:
    done = sandbox(*arguments)
    assert done.returncode == 2
    assert done.stderr.endswith(f"error: argument {arguments[-2]}: {arguments[-1]} is not a positive number\n")


def test_clean_tells_of_folders_also_where_no_engine_answers(tmp_path: Path) -> None:
    dead = tmp_path / "agent-rl-sandbox-999999-1-x"
    dead.mkdir()
    done = sandbox("clean", TMPDIR=str(tmp_path), DOCKER_HOST="unix:///no/docker.sock")
    assert (done.returncode, done.stdout) == (2, f"{dead}\n")
    assert "no Docker engine answers" in done.stderr
    assert not dead.exists()


def test_the_sandbox_commands_need_none_of_the_other_extras() -> None:
    absent = "jsonschema gymnasium math_verify numpy torch transformers vllm deepspeed ray"
    code = (
        f"import sys\nfor name in {absent.split()!r}: sys.modules[name] = None\n"
        "from agent_rl.cli import main\nsys.exit(main(['sandbox', 'run', '-', '--kind', 'local']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input="print(6 * 7)", capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr


@pytest.mark.docker
@pytest.mark.slow
def test_list_and_clean_speak_of_containers() -> None:
    assert sandbox("list").returncode == 0
    done = sandbox("clean")
    assert done.returncode == 0
    assert "removed " in done.stdout
