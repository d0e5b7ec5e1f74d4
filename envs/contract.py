"""What every environment must hold, for anyone's tests: ``check_tool_env(make)`` raises where one does not."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import cloudpickle
from gymnasium.utils.env_checker import check_env

from envs.catalog import SPECS
from envs.env import ToolEnv
from envs.mixed import MIXED
from envs.parsers import DIALECTS
from envs.registration import get, ids
from envs.types import ModelTurn, Task, TurnResult

Make = Callable[[], ToolEnv]
Solve = Callable[[Task], Sequence[str]]
"""The turns of a policy that knows the answer, the last of which ends the episode."""


def check_tool_env(make: Make, solve: Solve | None = None) -> None:
    """Every check below, one after the other. Takes seconds; starts whatever sandboxes the environment asks for.

    Args:
        make: a new environment, which makes its own resources.
        solve: for the check that the right answer scores highest; left out without it.

    Raises:
        AssertionError: says which law is broken, and by what.
    """
    check_gymnasium(make)
    check_malformed_calls(make)
    check_determinism(make)
    check_hash_seeds(make)
    check_roles(make)
    check_lifecycle(make)
    if solve is not None:
        check_gold(make, solve)
        check_forged_answers(make)


def check_gymnasium(make: Make) -> None:
    """Gymnasium's own checker is content, and silent."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = make()
        try:
            check_env(env, skip_render_check=True)
        finally:
            env.close()


def check_malformed_calls(make: Make, *, rounds: int = 20) -> None:
    """Whatever the model writes, every attempt to call gets exactly one result, in order, and nothing raises."""
    rng = random.Random(0)
    pieces = [dialect.written("nope", {"code": "1"}) for dialect in DIALECTS.values()]
    pieces += ["<tool_call>", "</tool_call>", "<think>", "</think>", "{", "}", '"', "[", "]", "null", "\n", "```"]

    async def episode(env: ToolEnv, seed: int) -> None:
        await env.areset(seed, env.tasks.task(seed % len(env.tasks)))
        while True:
            text = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 12)))
            result = await env.astep(ModelTurn(text=text, finish="stop"))
            assert result.stop != "failure", f"{text!r} made our side fail: {result.failure}"
            if result.stop is not None:
                return
            assert len(result.messages) == len(result.calls), f"{text!r}: {result.calls} got {result.messages}"

    env = make()
    try:
        for seed in range(rounds):
            env.run(episode(env, seed))
    finally:
        env.close()


def check_determinism(make: Make) -> None:
    """The same seed and actions give the same, whatever happens in another environment meanwhile."""
    actions = ["<tool_call>{</tool_call>", "\\boxed{0}"]

    def walk(env: ToolEnv, other: ToolEnv | None) -> list[object]:
        seen: list[object] = [env.reset(seed=5)]
        for action in actions:
            if other is not None:
                other.reset(seed=6)
                other.step(action)
            seen.append(env.step(action))
            if seen[-1][2] or seen[-1][3]:  # type: ignore[index]
                break
        return seen

    first, second, other = make(), make(), make()
    state = random.getstate()
    try:
        alone = walk(first, None)
        assert walk(second, other) == alone, "another environment in between changed what was seen"
        assert walk(first, None) == alone, "an earlier episode changed what was seen"
        assert random.getstate() == state, "the global random state was touched"
    finally:
        for env in (first, second, other):
            env.close()


def check_hash_seeds(make: Make) -> None:
    """Fresh interpreters with other hash seeds see the same question and answer the same (sets have another order)."""
    program = (
        "import cloudpickle, sys\n"
        "from envs import register\n"
        "make, specs = cloudpickle.load(sys.stdin.buffer)\n"
        "for spec in specs: register(spec)\n"
        "env = make()\n"
        "seen = [env.reset(seed=5), env.step('hm')]\n"
        "env.close()\n"
        "print(repr(seen))\n"
    )
    shipped = {spec.id for spec in (*SPECS, MIXED)}
    pickled = cloudpickle.dumps((make, [get(env_id) for env_id in ids() if env_id not in shipped]))
    seen = []
    for seed in ("1", "2"):
        # What the caller can import, the other interpreter can.
        settings = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run([sys.executable, "-c", program], input=pickled, capture_output=True, env=settings)
        assert done.returncode == 0, f"a fresh interpreter could not run it: {done.stderr.decode()[-2000:]}"
        seen.append(done.stdout)
    assert seen[0] == seen[1], f"PYTHONHASHSEED changes what is seen: {seen[0][:500]!r} and {seen[1][:500]!r}"


def check_roles(make: Make) -> None:
    """What the environment says is never in the policy's name: trainers mask by who wrote a message."""

    async def episode(env: ToolEnv) -> None:
        opening = await env.areset(0, env.tasks.task(0))
        assert opening.messages[-1]["role"] != "assistant", "the opening ends with a turn of the policy"
        for name in (*env.tools, "nope"):
            await env.areset(0, env.tasks.task(0))
            result = await env.astep(ModelTurn(text=env.dialect.written(name, {}), finish="stop"))
            roles = {message["role"] for message in result.messages}
            assert roles <= {"tool", "user", "system"}, f"a result of {name} is written as {roles}"

    env = make()
    try:
        env.run(episode(env))
    finally:
        env.close()


def check_lifecycle(make: Make) -> None:
    """Closing twice, without a reset and in mid-episode leaves no process behind."""
    before = _children()
    unused = make()
    unused.close()
    env = make()
    env.reset(seed=0)
    env.step("hm")
    env.reset(seed=1)
    env.close()
    env.close()
    left = _children() - before
    assert not left, f"processes left behind: {sorted(left)}"


def check_gold(make: Make, solve: Solve, *, tasks: int = 3) -> None:
    """A policy that knows the answer gets the term ``correct``, and more reward than one that says nothing."""
    env = make()
    try:
        for index in range(min(tasks, len(env.tasks))):
            task = env.tasks.task(index)
            solved = env.run(_play(env, task, solve(task)))
            silent = env.run(_play(env, task, [""]))
            assert solved.terms.get("correct") == 1.0, f"{task.id}: the solution ended by {solved.stop}: {solved.terms}"
            assert solved.reward is not None
            assert silent.reward is not None
            assert solved.reward > silent.reward, f"{task.id}: saying nothing is worth as much as solving it"
    finally:
        env.close()


def check_forged_answers(make: Make) -> None:
    """The gold answer inside reasoning, a forged result or code is no answer."""
    env = make()
    try:
        task = env.tasks.task(0)
        if task.answer is None:
            return
        for frame in ("<think>\\boxed{{{}}}</think>", "```output\n\\boxed{{{}}}\n```", "<interpreter>{}</interpreter>"):
            result = env.run(_play(env, task, [frame.format(task.answer)]))
            assert not result.terms.get("correct"), f"{frame!r} counted as the answer"
    finally:
        env.close()


async def _play(env: ToolEnv, task: Task, turns: Sequence[str]) -> TurnResult:
    await env.areset(0, task)
    for text in turns:
        result = await env.astep(ModelTurn(text=text, finish="stop"))
        assert result.failure is None, f"{task.id}: our side failed: {result.failure}"
        if result.stop is not None:
            return result
    raise AssertionError(f"{task.id}: the episode goes on after {len(turns)} turns")


def _children() -> set[int]:
    """Processes below this one (Linux; empty elsewhere)."""
    found: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended since
            found |= {int(pid) for pid in file.read_text().split()}
    return found


__all__ = [
    "check_determinism",
    "check_forged_answers",
    "check_gold",
    "check_gymnasium",
    "check_hash_seeds",
    "check_lifecycle",
    "check_malformed_calls",
    "check_roles",
    "check_tool_env",
]
