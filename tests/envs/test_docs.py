"""The pages of docs/ say what is true: their programs run, and are as short as they claim."""

from __future__ import annotations

import asyncio
import linecache
import re
import tokenize
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from envs_scripted import call, play

import envs
from envs.registration import make_env
from sandboxes import SandboxSpec

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("add-a-tool.md", "add-an-environment.md", "reward-from-the-sandbox.md")


def programs(page: str) -> list[str]:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    return [block for block in blocks if "# not run here" not in block]


def run(page: str) -> dict[str, Any]:
    """All programs of a page, one after the other, in one namespace (tools read their source)."""
    names: dict[str, Any] = {"__name__": "page"}
    for number, program in enumerate(programs(page)):
        file = f"<{page}, program {number}>"
        linecache.cache[file] = (len(program), None, program.splitlines(keepends=True), file)
        exec(compile(program, file, "exec"), names)
    return names


def code_lines(program: str) -> int:
    """Lines with code on them; a docstring is one."""
    lines = set()
    for token in tokenize.generate_tokens(StringIO(program).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            lines.add(token.start[0])
    return len(lines) - 1  # the end of the file


@pytest.mark.parametrize("page", PAGES)
def test_the_programs_of_the_page_run(page: str) -> None:
    assert run(page)


def test_a_tool_takes_eight_lines_and_an_environment_fifteen() -> None:
    assert code_lines(programs("add-a-tool.md")[0]) <= 8
    assert code_lines(programs("add-an-environment.md")[0]) <= 15


async def test_the_reward_from_the_sandbox_pays_for_the_file_alone() -> None:
    names = run("reward-from-the-sandbox.md")

    def rewarded(*turns: str) -> float | None:
        env = make_env(env_id="mine/SayYes-v0", sandbox=SandboxSpec(kind="local", size=1))
        try:
            return env.run(play(env, *turns, task=names["task"]))[-1].reward
        finally:
            env.close()

    for turns, reward in (
        ([call("bash", command="echo yes > done.txt"), "Done."], 1.0),
        ([call("bash", command="echo no > done.txt"), "yes"], 0.0),
        ([call("bash", command="cat note.txt; echo 'print(\"yes\")' > os.py"), "yes"], 0.0),
        (["yes"], 0.0),
    ):
        assert await asyncio.to_thread(rewarded, *turns) == reward


def test_every_name_that_the_pages_import_is_public() -> None:
    for page in PAGES:
        for line in re.findall(
            r"^from envs import (.*)$", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE
        ):
            assert set(line.split(", ")) <= set(envs.__all__)
