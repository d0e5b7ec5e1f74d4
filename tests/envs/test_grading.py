"""Answers are found in policy text only and compared as a reader would; no answer can hang or kill the grader."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.answers import final_answer, normalised, stated_answer
from envs.equality import equal, same_exactly
from envs.grader import Grader, GraderFailure, _computes, _Worker, is_reasonable

DATA = Path(__file__).parents[1] / "data"
ROWS = [
    json.loads(line)
    for name in ("grading_pairs.jsonl", "grading_pairs_own.jsonl")
    for line in (DATA / name).read_text(encoding="utf-8").split("\n")
    if line
]
JUDGED_OTHERWISE: set[str] = set()
"""Ids of pairs in which we deliberately differ from the file."""


def two_seconds() -> float:
    """Two on a machine with nothing else to do; more when others compete for its processors."""
    return 2.0 * max(1.0, (os.getloadavg()[0] + 1) / (os.cpu_count() or 1))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def grader() -> AsyncIterator[Grader]:
    grader = Grader()
    await grader.start()
    yield grader
    await grader.close()


async def judged(grader: Grader, row: dict[str, Any]) -> str:
    answer = stated_answer(row["pred"])
    return "unparsable" if answer is None else await grader.verdict(row["gold"], answer)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_pairs_are_judged_as_common_sense_does(grader: Grader) -> None:
    verdicts = await asyncio.gather(*(judged(grader, row) for row in ROWS))
    wrong = {row["id"] for row, v in zip(ROWS, verdicts, strict=True) if (v == "correct") != row["expected"]}
    assert wrong == JUDGED_OTHERWISE


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("row", [row for row in ROWS if row["category"] == "dos"], ids=lambda row: row["id"])
async def test_hostile_answers_are_settled_within_two_seconds(grader: Grader, row: dict[str, Any]) -> None:
    started = time.monotonic()
    await judged(grader, row)
    assert time.monotonic() - started < two_seconds()


HOSTILE = [
    "10^{10^{10}}", "9**9**9", "(1+\\sqrt{2})^{999}-(1-\\sqrt{2})^{998}+x^{999}", "\\sum_{n=1}^{10000000} n^{n}",
    "\\prod_{k=1}^{99999} k", "\\int_0^{999} x^{x^{x}} dx", "((((((((((1+x)^9)^9)^9)^9)^9)^9)^9)^9)^9)", "[" * 3000,
    "{" * 300 + "}" * 300, "\\frac{" * 200, "__import__('os').system('touch /tmp/agent-rl-owned')", "x" * 2000,
    "\\sqrt" * 300, "1," * 1000, "\\text{" * 100 + "a" + "}" * 100, "\u0000\ud800",
]  # fmt: skip


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("answer", HOSTILE)
async def test_hostile_expressions_neither_hang_nor_pass(grader: Grader, answer: str) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.05)
            ticks += 1

    ticker = asyncio.create_task(tick())
    started = time.monotonic()
    assert await grader.verdict("\\sqrt{2}+1", answer) != "correct"
    assert time.monotonic() - started < two_seconds()
    if time.monotonic() - started > 0.5:
        assert ticks > 3, "the event loop stood still"
    ticker.cancel()
    assert await grader.verdict("x+1", "1+x") == "correct", "the grader works on"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_busy_machine_is_not_a_slow_answer() -> None:
    strict = Grader(timeout_s=0.3)
    busy = [await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass") for _ in range(6)]
    try:
        assert await strict.verdict("\\frac{C}{2}+1", "1 + C/2") == "correct"
        assert await strict.verdict("3", "\\int_0^{10} \\sin(e^{x})\\,dx") == "timeout"
    finally:
        for process in busy:
            process.kill()
            await process.wait()
        await strict.close()


def served(before: str, question: list[Any], **settings: Any) -> subprocess.Popen[str]:
    """A grading server that has run some lines before, with a question."""
    program = f"{before}\nimport envs.grader\nenvs.grader.serve()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    server = subprocess.Popen([sys.executable, "-c", program], env=environment, text=True, **pipes, **settings)
    assert server.stdin is not None
    server.stdin.write(json.dumps(question) + "\n")
    server.stdin.flush()
    return server


def test_address_space_that_libraries_reserved_is_not_counted_against_an_answer() -> None:
    """OpenBLAS reserves 40 MB for every processor: with 32 of them every answer that needed algebra was wrong."""
    server = served("import mmap; held = mmap.mmap(-1, 3 << 30)", [7, "x^2+2x+1", "(x+1)^2", 20])
    assert server.communicate()[0].splitlines() == ["ready", '[7, "correct"]']


def test_a_server_whose_processes_cannot_judge_is_never_ready() -> None:
    server = served("import envs.grader; envs.grader.MEMORY_MB = 0", [7, "x^2+2x+1", "(x+1)^2", 20])
    said, complaint = server.communicate()
    assert said == ""
    assert "RuntimeError: a grading process says" in complaint


def test_the_server_has_one_thread() -> None:
    """It forks, and a library's other threads would be missing in what it forks."""

    async def threads() -> int:
        own = Grader()
        try:
            await own.start()
            assert own._process is not None
            return len(list(Path(f"/proc/{own._process.pid}/task").iterdir()))
        finally:
            await own.close()

    assert asyncio.run(threads()) == 1


def test_a_folder_of_our_name_where_one_works_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "__init__.py").write_text("raise ImportError('not ours')")
    monkeypatch.chdir(tmp_path)

    async def verdict() -> str:
        own = Grader()
        try:
            return await own.verdict("x+1", "1+x")
        finally:
            await own.close()

    assert asyncio.run(verdict()) == "correct"


def test_a_process_that_computes_is_looked_at_again() -> None:
    """Its deadline is one of processor time; on the clock it may take ever so long, as in a container with a quota."""
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        worker = _Worker(number=0, pid=child.pid, reading=0, patience_s=9.0, looked_at=0.0)
        while not _computes(worker, 1.0):
            time.sleep(0.01)
        assert worker.looked_at == 10.0
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        _computes(worker, 2.0)
        assert not _computes(worker, 3.0)
    finally:
        child.kill()
        child.wait()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_process_that_gets_no_processor_time_is_our_failure() -> None:
    own = Grader(timeout_s=0.3)
    await own.start()
    assert own._process is not None
    children = Path(f"/proc/{own._process.pid}/task/{own._process.pid}/children")

    async def stop_them() -> None:
        while True:
            for pid in map(int, children.read_text().split()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0)

    stopping = asyncio.create_task(stop_them())
    try:
        with pytest.raises(GraderFailure, match="no processor time"):
            await own.verdict("3", "\\int_0^{10} \\sin(e^{x})\\,dx")
    finally:
        stopping.cancel()
        await own.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_closed_grader_leaves_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        own = Grader()
        await own.start()
        await own.close()
    await asyncio.sleep(0.1)
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_grading_process_is_replaced(grader: Grader) -> None:
    assert grader._process is not None
    grader._process.kill()
    assert await grader.verdict("x+1", "1+x") == "correct"


@pytest.mark.asyncio(loop_scope="module")
async def test_questions_are_answered_at_the_same_time_and_each_gets_its_own(grader: Grader) -> None:
    asked = [("x+1", f"{number}+x-{number - 1 if number % 3 else number}") for number in range(2, 40)]
    verdicts = await asyncio.gather(*(grader.verdict(*question) for question in asked))
    assert verdicts == ["correct" if number % 3 else "wrong" for number in range(2, 40)]


def test_verdicts_in_threads_are_those_of_the_main_thread() -> None:
    """math-verify's own alarm only works in the main thread; elsewhere its verdicts are lost without a word."""
    rows = [row for row in ROWS if row["category"] in ("sqrt", "complex", "equation")][::8]

    def all_of_them() -> list[str]:
        async def judge() -> list[str]:
            own = Grader()
            try:
                return [await judged(own, row) for row in rows]
            finally:
                await own.close()

        return asyncio.run(judge())

    expected = ["correct" if row["expected"] else "wrong" for row in rows]
    with ThreadPoolExecutor(3) as pool:
        for verdicts in pool.map(lambda _: all_of_them(), range(3)):
            assert verdicts == expected


@pytest.mark.asyncio(loop_scope="module")
async def test_verdicts_are_remembered_but_timeouts_are_not() -> None:
    own = Grader(timeout_s=0.3)
    try:
        assert await own.verdict("x+1", "1+x") == "correct"
        assert await own.verdict("3", "\\int_0^{10} \\sin(e^{x})\\,dx") == "timeout"
        assert list(own._known) == [("x+1", "1+x")]
        await own.close()
        assert await own.verdict("x+1", "1+x") == "correct"
        assert own._process is None
    finally:
        await own.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_grader_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    own = Grader()
    with pytest.raises(GraderFailure, match="failed twice on '1\\+x'"):
        await own.verdict("x+1", "1+x")
    await own.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_cancelled_question_does_not_shift_the_answers(grader: Grader) -> None:
    slow = asyncio.create_task(grader.verdict("5", "\\int_0^{1} e^{x^2}\\sin(x^3)\\,dx"))
    await asyncio.sleep(0.2)
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)
    assert await grader.verdict("x+1", "1+x") == "correct"
    assert await grader.verdict("x+1", "2+x") == "wrong"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{1}. No: \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("<think>\\boxed{1}</think> nothing", None),
        ("\\boxed{1}</think> nothing", None),
        ("<think>\\boxed{1}", None),
        ("```python\nprint('\\boxed{1}')\n```", None),
        ('<tool_call>{"name": "python", "arguments": {"code": "\\\\boxed{1}"}}</tool_call>', None),
        ("<interpreter>\\boxed{1}</interpreter>", None),
        ("<code>\\boxed{1}", None),
        ("\\boxed{1} then \\boxed{2", None),
        ("\\boxed{a\\}b}", "a\\}b"),
        ("<answer>\\boxed{4}</answer> or \\boxed{5}", "4"),
        ("<answer>4</answer>", "4"),
        ("roots $\\boxed{1}$, $\\boxed{2}$ and $\\boxed{3}$", "1, 2, 3"),
        ("\\boxed{3} \\boxed{4}", "4"),
        ("\\boxed{\\boxed{7}}", "7"),
        ("\\boxed{" + "1" * 3000 + "}", None),
        ("the answer is 5.", None),
    ],
)
def test_the_final_answer_is_the_last_closed_box_of_the_policy(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


def test_docstring_examples_of_spelling() -> None:
    assert normalised("\\dfrac12 ") == "\\frac{1}{2}"
    assert normalised("10\\,000") == "10000"
    assert normalised("√2") == "\\sqrt{2}"
    assert final_answer("\\boxed{1} and \\boxed{2}") == "1, 2"


INTEGERS = st.integers(-(10**30), 10**30)


@given(a=INTEGERS, b=INTEGERS)
def test_integers_are_compared_exactly_and_without_a_process(a: int, b: int) -> None:
    assert same_exactly(str(a), f"{b:,}") is (a == b)
    assert same_exactly(str(a), f"{a}.0") is True


@given(a=st.integers(-999, 999), b=st.integers(1, 999), k=st.integers(1, 9))
def test_fractions_are_compared_as_rational_numbers(a: int, b: int, k: int) -> None:
    assert same_exactly(f"\\frac{{{a}}}{{{b}}}", f"{a * k}/{b * k}") is True
    assert same_exactly(f"\\frac{{{a}}}{{{b}}}", f"{a + 1}/{b}") is False


@settings(max_examples=200)
@given(text=st.text(alphabet="\\{}()[]<>$ ,.^_+-=/0123456789abixe%!√½×", max_size=40))
def test_reading_answers_never_raises_and_everything_equals_itself(text: str) -> None:
    spelled = normalised(text)
    assert same_exactly(text, text) is True
    assert isinstance(equal("1", spelled, lambda a, b: False), bool)
    is_reasonable(text)
    stated_answer(text)


ATOMS = (
    "a", "1", " ", "{", "(", "\\text{", "\\text{a}", "\\frac{1}", "^{", "1,", "1 ", ".", "\\", "a ", "=", "|",
    "\\boxed{", "<answer>", "```", "-", "\\pm ", "1 a", "aA/", "0.1", "~", "\\mathrm{m}", "_", "\\,", "1/", "...",
    "answer is ", "\\left", "\\{", "[", "<think>", "\\sqrt", "√", "cis", "\\ne ", "\\approx", "or ", ";", "!", "%",
)  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("before", ["", "1", "x=", "\\{"])
@pytest.mark.parametrize("after", ["!", "}", "\\}", "^"])
def test_no_repetition_holds_up_what_is_read_in_our_own_process(before: str, after: str) -> None:
    """Only algebra runs where it can be killed: a pattern that backtracks without end would freeze the event loop."""
    for atom in ATOMS:
        text = before + atom * (600 // len(atom)) + after
        stated_answer(text)
        is_reasonable(text)
        same_exactly("5", text)
        equal("\\sqrt{2}", text, lambda a, b: False)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("gold", "answer"), [("1 2 3", "3 2 1"), ("[1 2]", "[2 1]"), ("3 4 2 1\n1 2 4 3", "1 2 3 4 1 2 3 4")]
)
async def test_a_sequence_is_no_product(grader: Grader, gold: str, answer: str) -> None:
    assert await grader.verdict(gold, answer) == "wrong"
    assert await grader.verdict(gold, gold) == "correct"
