"""The shipped tools against a real sandbox: what a model sees of programs, shells and files."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from collections.abc import AsyncIterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
import pytest_asyncio
from envs_scripted import TASK, FakeResources, call, make_env, play
from pydantic import BaseModel

import envs
from envs import Limits, Resources, Task, ToolContext, tool
from envs.files import FilesOptions, FilesTasks
from envs.grader import Grader
from envs.reasoning import OWN_SCORER, REFUSED, ReasoningGymTasks, gold_answer
from envs.rewards import Episode
from envs.search import Index, Page, load_pages, plain_words
from envs.toolbox import TOOLBOX
from envs.tools import ToolError, python
from envs.types import ModelTurn
from sandboxes import SandboxFailure, SandboxSpec


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def local() -> AsyncIterator[Resources]:
    async with Resources(SandboxSpec(kind="local", size=2, timeout_s=3.0)) as resources:
        yield resources


async def shown(local: Resources, *turns: str, **settings: Any) -> list[str]:
    env = make_env(local, list(TOOLBOX.values()), **{"limits": Limits(max_turns=20, max_tool_calls=20), **settings})
    results = await play(env, *turns, task=Task(id="t", prompt="?", meta={"files": {"a.txt": "one\ntwo\n"}}))
    assert all(result.failure is None for result in results)
    return [str(message["content"]) for result in results for message in result.messages]


@pytest.mark.asyncio(loop_scope="module")
async def test_output_and_errors_are_both_kept(local: Resources) -> None:
    (text,) = await shown(local, call(code="import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"))
    assert text == "out\nerr"
    (text,) = await shown(local, call(code="print('out'); raise SystemExit(3)"))
    assert text == "out\n[exit code 3]"
    (text,) = await shown(local, call(code="print('out'); 1/0"))
    assert text.startswith("out\nTraceback")
    assert text.endswith("ZeroDivisionError: division by zero")
    assert await shown(local, call(code="pass")) == ["[no output]"]


@pytest.mark.asyncio(loop_scope="module")
async def test_an_endless_program_is_stopped_and_the_next_gets_its_own_answer(local: Resources) -> None:
    texts = await shown(local, call(code="print('begun', flush=True)\nwhile True: pass"), call(code="print(1)"))
    assert texts == ["begun\n[stopped: still running after 3 s]", "1"]


@pytest.mark.asyncio(loop_scope="module")
async def test_ten_megabytes_are_cut_to_the_budget_and_say_so(local: Resources) -> None:
    (text,) = await shown(
        local, call(code="print('a' * 10_000_000 + 'z')"), limits=Limits(max_result_chars=1000, max_tool_calls=1)
    )
    assert len(text) < 1100
    assert text.startswith("aaa")
    assert text.endswith("z")
    assert "left out" in text


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("code", ["\x00", "print('\U0001f600 é')", "print('<|im_end|>')", "", "print('\\ud800')"])
async def test_odd_programs_are_no_failure_of_ours(local: Resources, code: str) -> None:
    assert len(await shown(local, call(code=code))) == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_files_stay_for_the_episode_and_not_for_the_next(local: Resources) -> None:
    texts = await shown(
        local,
        call("bash", command="cat a.txt; echo three >> a.txt; exit 4"),
        call("read_file", path="a.txt"),
        call("edit_file", path="a.txt", old="two\n", new="2\n") + call("edit_file", path="a.txt", old="e", new="E"),
        call("write_file", path="b.txt", content="quote ' \" \\ \n"),
        call("bash", command="cat a.txt b.txt"),
        call("read_file", path="gone.txt"),
    )
    assert texts == [
        "one\ntwo\n[exit code 4]",
        "one\ntwo\nthree",
        "replaced",
        "the piece stands there 3 times; it must be once",
        "13 characters written",
        "one\n2\nthree\nquote ' \" \\ ",
        "[Errno 2] No such file or directory: 'gone.txt'",
    ]
    assert await shown(local, call("bash", command="ls; cat a.txt")) == ["a.txt\none\ntwo"]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_sandboxed_tool_runs_its_own_source_in_there(local: Resources) -> None:
    @tool
    def where(word: str, times: int = 2) -> str:
        """Say where this runs.

        Args:
            word: to repeat
            times: how often
        """
        import os

        return f"{word * times} {os.getpid()}"

    results = await play(make_env(local, [where]), call("where", word="ab'\"\n"))
    text = str(results[0].messages[0]["content"])
    assert text.startswith("ab'\"\nab'\"\n ")
    import os

    assert int(text.split()[-1]) != os.getpid()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_session_keeps_its_variables_and_says_when_it_lost_them(local: Resources) -> None:
    def run(code: str) -> str:
        return call("python_session", code=code)

    texts = await shown(local, run("x = 20"), run("print(x + 1)"), run("1 / 0"), run("print(x)"))
    assert (texts[0], texts[1], texts[3]) == ("[no output]", "21", "20")
    assert "ZeroDivisionError" in texts[2]
    texts = await shown(local, run("x = 1"), run("while True: pass"), run("print('x' in globals())"))
    assert "[stopped: still running" in texts[1]
    assert texts[2] == "[the interpreter was restarted: earlier variables are gone]\nFalse"


@pytest.mark.asyncio(loop_scope="module")
async def test_what_a_sandboxed_tool_raises_is_one_line_for_the_model(local: Resources) -> None:
    @tool
    async def half(n: int) -> str:
        """Half of an even number.

        Args:
            n: the number
        """
        if n % 2:
            raise ToolError(f"{n} is odd")
        return str(next(n // 2 for _ in range(100 // n)))

    for n, told in (
        (4, "2"),
        (3, "Error: 3 is odd"),
        (0, "Error: ZeroDivisionError: integer division or modulo by zero"),
    ):
        results = await play(make_env(local, [half]), call("half", n=n))
        assert str(results[0].messages[0]["content"]) == told


def test_a_function_that_cannot_stand_alone_is_refused_until_it_is_declared_to_run_here() -> None:
    outside = 3

    def count(n: int = 1) -> str:
        """Count.

        Args:
            n: how far
        """
        return str(re.sub("a", "b", "a") * outside * n)

    with pytest.raises(TypeError, match="cannot see outside, re there: import inside the function"):
        tool(count)
    assert tool(host=True)(count).function is count
    with pytest.raises(TypeError, match="its source cannot be read"):
        tool(_without_source())


def _without_source() -> Any:
    names: dict[str, Any] = {}
    exec('def f() -> str:\n    "Say."\n    return ""', names)
    return names["f"]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_checker_of_files_does_not_import_what_the_model_left(local: Resources) -> None:
    spec = envs.get("agentic/Bash-v1")
    task = FilesTasks(FilesOptions(seed=1)).task(0)
    forged = "print('{}'); raise SystemExit(0)"
    cheat = f'for m in json os sitecustomize io codecs; do echo "{forged}" > $m.py; done'
    env = spec.make(FilesTasks(FilesOptions()), resources=local)
    result = (await play(env, call("bash", command=cheat), "Done.", task=task))[-1]
    assert (result.reward, result.failure) == (0.0, None)
    copy = (
        "cat data.csv > sum.txt; ln -s data.csv old.csv; ln -s data.csv names.txt; rm data.csv; ln -s old.csv data.csv"
    )
    result = (await play(env, call("bash", command=copy), "Done.", task=task))[-1]
    assert (result.reward, result.failure) == (0.0, None)


def test_every_kind_of_files_task_comes_up_and_repeats() -> None:
    tasks = FilesTasks(FilesOptions(seed=3))
    assert {tasks.task(index).meta["kind"] for index in range(60)} == {"sum", "sort", "distinct", "split", "rename"}
    assert tasks.task(7) == FilesTasks(FilesOptions(seed=3)).task(7)
    assert tasks.task(7) != FilesTasks(FilesOptions(seed=4)).task(7)


# Schemas.


class Colour(Enum):
    RED = "red"


class Point(BaseModel):
    x: int


def test_a_schema_comes_from_types_and_docstring() -> None:
    @tool(host=True)
    def draw(point: Point, colour: Colour, style: Literal["thin", "thick"] = "thin", note: str | None = None) -> str:
        """Draw a point
        in colour.

        Args:
            point: where
            colour (Colour): in which
                colour
            style: of the line
            note: beside it

        Returns:
            nothing of interest
        """
        assert isinstance(point, Point)
        assert isinstance(colour, Colour)
        return f"{point.x} {colour.name} {style}"

    function = draw.schema["function"]
    assert function["description"] == "Draw a point in colour."
    parameters = function["parameters"]
    assert parameters["required"] == ["point", "colour"]
    assert parameters["properties"]["colour"]["description"] == "in which colour"
    assert parameters["properties"]["style"]["enum"] == ["thin", "thick"]
    assert draw.fault({"point": {"x": 1}, "colour": "red"}) == ""
    assert "point.x" in draw.fault({"point": {"x": "one"}, "colour": "red"})
    assert "'blue' is not one of ['red']" in draw.fault({"point": {"x": 1}, "colour": "blue"})
    assert "'extra' was unexpected" in draw.fault({"point": {"x": 1}, "colour": "red", "extra": 1})
    assert len(draw.fault({"point": {"x": "1" * 5000}, "colour": "red"})) < 600


async def test_arguments_arrive_as_their_types() -> None:
    @tool(host=True)
    def double(point: Point, n: int) -> str:
        """Double.

        Args:
            point: to be doubled
            n: a whole number, also as 2.0
        """
        return f"{point.x * 2} {n!r}"

    results = await play(make_env(FakeResources(), [double]), call("double", point={"x": 2}, n=2.0))
    assert results[0].messages[0]["content"] == "4 2"


def test_what_cannot_be_a_tool_is_refused_where_it_is_defined() -> None:
    def untyped(x):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, RUF100
        """Do.

        Args:
            x: it
        """

    def undescribed(x: int) -> str:
        """Do."""
        return ""

    def silent(x: int) -> str:
        return ""

    def loose(*things: int) -> str:
        """Do.

        Args:
            things: them
        """
        return ""

    for function, complaint in (
        (untyped, "parameter 'x' has no type"),
        (undescribed, "describe 'x' under `Args:`"),
        (silent, "write a docstring"),
        (loose, "cannot be given by name"),
    ):
        with pytest.raises(TypeError, match=complaint):
            tool(function)


async def test_a_sandbox_tool_without_a_pool_is_a_bug_and_says_so() -> None:
    from envs import ToolBug

    with pytest.raises(ToolBug, match="made without a pool"):
        await python.call(ToolContext(task=TASK, pool=None), {"code": "1"})


# Search.


def test_bm25_ranks_rare_words_over_common_ones() -> None:
    pages = [Page(title=f"t{i}", text="the common word") for i in range(9)] + [Page(title="rare", text="the zebra")]
    assert [page.title for page in Index(pages).best("the zebra", 2)] == ["rare", "t0"]
    assert Index(pages).best("nothing here", 3) == []
    assert Index([]).best("x", 1) == []


def test_bad_pages_are_named_by_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"title": "a", "text": "b"}\n{"title": "a"}\n')
    with pytest.raises(ValueError, match=r"corpus\.jsonl:2"):
        load_pages(str(file))
    assert plain_words("\\text{The Rhine.}") == "rhine"


@pytest.mark.asyncio(loop_scope="module")
async def test_an_edit_leaves_the_ends_of_lines_as_they_are(local: Resources) -> None:
    make = call("bash", command="printf 'one\\r\\ntwo\\r\\n' > dos.txt")
    edit = call("edit_file", path="dos.txt", old="two", new="2")
    assert (await shown(local, make, edit, call("bash", command="od -c dos.txt | head -1")))[-1].split() == [
        *("0000000 o n e \\r \\n 2 \\r \\n".split())
    ]


async def test_the_sandboxes_go_also_when_the_grader_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    resources = Resources(SandboxSpec(kind="local", size=1))
    monkeypatch.setattr(resources.grader, "close", cancelled)
    with pytest.raises(asyncio.CancelledError):
        async with resources:
            pass
    with pytest.raises(SandboxFailure, match="closed"):
        await resources.pool.lease().__aenter__()


# Waiting for a sandbox.


async def test_an_episode_whose_time_went_with_waiting_for_a_sandbox_is_void() -> None:
    """It was scored as if the policy had taken too long; an episode may wait for a second sandbox itself, too."""
    tools = [TOOLBOX["bash"], python]
    ran, waits = call("bash", command="echo a"), call("python", code="print(1)")
    async with Resources(SandboxSpec(kind="local", size=1)) as resources:
        first = make_env(resources, tools, limits=Limits(wall_s=60))
        await first.areset(0, TASK)
        assert (await first.astep(ModelTurn(text=ran, finish="stop"))).messages[0]["content"] == "a"
        for turn in (ran, waits):
            (result,) = await play(make_env(resources, tools, limits=Limits(wall_s=1)), turn)
            assert (result.stop, result.reward) == ("failure", None)
            assert result.failure is not None
            assert (result.failure.kind, result.failure.where) == ("sandbox", "turn 1")
            assert "more are wanted at once than the pool may have" in result.failure.detail
        await first.aclose()


# Exact answers.


@pytest.mark.parametrize(
    ("gold", "answer", "name", "reward"),
    [
        ("0x3eb2", "0x5b993", "bitwise_arithmetic", 0.0),
        ("06:09", "02:03", "time_intervals", 0.0),
        ("00:34:28", "00:28:34", "time_intervals", 0.0),
        ("2 × 2 × 3", "12", "prime_factorization", 0.0),
        ("45a", "a45", "base_conversion", 0.0),
        ("2", "7 - 5", "chain_sum", 0.0),
        ("7412 32975 79422", "79422 32975 7412", "path_star", 0.0),
        ("1 2\n2 1", "2 1\n1 2", "kakurasu", 0.0),
        ("1 2\n2 1", "1 2 2 1", "kakurasu", 0.0),
        ("A=7,G=0", "7,0", "cryptarithm", 0.0),
        ("1/2", "2/4", "fraction_simplification", 0.0),
        ("[50, 88]", "[88, 50]", "list_functions", 0.0),
        ("1/2", "2/4", "dice", 1.0),
        ("$\\dfrac{1}{2}$", "1/2", "fraction_simplification", 1.0),
        ("1 2\n2 1", " 1  2 \n2 1\n", "kakurasu", 1.0),
        ("-14282", "-14,282", "chain_sum", 1.0),
        ("48.0 + 36.0i", "48+36i", "complex_arithmetic", 1.0),
        ("0.0, 0.5909", "0.5909, 0", "polynomial_equations", 1.0),
        ("(4.051, -5.487)", "(4.051,-5.487)", "advanced_geometry", 1.0),
        ("['14', '-48.986']", "[14, -48.986]", "number_sorting", 1.0),
        ('[["ai", "ia"], ["b"]]', '[["ai","ia"],["b"]]', "group_anagrams", 1.0),
        ("Friday", "friday", "calendar_arithmetic", 1.0),
    ],
)
async def test_an_answer_of_reasoning_gym_is_the_gold_answer_and_no_other(
    gold: str, answer: str, name: str, reward: float
) -> None:
    """Algebra took permuted digits for products, clock times for quotients and every hexadecimal number for zero."""
    task = Task(id="x", prompt="", answer=gold, meta={"name": name, "entry": {}})
    episode = Episode(task=task, turns=("",), calls=(), succeeded=(), stop="answer", submitted=answer)
    assert await gold_answer(episode, Grader()) == reward


@pytest.mark.parametrize(("answer", "reward"), [("7976", 1.0), ("7,976", 1.0), ("592+7384", 0.0), ("7977", 0.0)])
async def test_the_question_of_an_arithmetic_task_is_not_its_answer(answer: str, reward: float) -> None:
    spec = envs.get("agentic/Arithmetic-v1")
    task = Task(id="x", prompt="592+7384=?", answer="7976")
    episode = Episode(task=task, turns=(f"\\boxed{{{answer}}}",), calls=(), succeeded=(), stop="answer")
    assert await spec.terms["correct"](episode, Grader()) == reward


# reasoning-gym.

HAS_REASONING_GYM = importlib.util.find_spec("reasoning_gym") is not None
"""It is optional; without it the tests below hold that the refusal says what to install."""


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_scored_safely_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ValueError, match="is refused: "):
        ReasoningGymTasks({"name": name})


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"name": "base_conversionn"}, "did you mean 'base_conversion'"),
        ({"name": "base_conversion", "min_bas": 2}, "has no setting 'min_bas'"),
        ({"name": "base_conversion", "min_base": 1}, "refuses"),
        ({}, "no reasoning-gym task ''"),
    ],
)
def test_bad_options_say_what_is_wrong(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint if HAS_REASONING_GYM else "pip install reasoning-gym"):
        ReasoningGymTasks(options)


@pytest.mark.slow
async def test_every_offered_task_pays_for_its_gold_answer_and_for_nothing_else() -> None:
    if not HAS_REASONING_GYM:
        with pytest.raises(ValueError, match="pip install reasoning-gym"):
            ReasoningGymTasks({"name": "base_conversion"})
        return
    from reasoning_gym.factory import DATASETS

    grader = Grader()
    for name in sorted(set(DATASETS) - set(REFUSED)):
        task = ReasoningGymTasks({"name": name, "size": 3}).task(0)

        async def paid(answer: str, task: Task = task) -> float:
            episode = Episode(task=task, turns=(f"<answer>{answer}</answer>",), calls=(), succeeded=(), stop="answer")
            return await gold_answer(episode, grader)

        if task.answer is not None:
            assert await paid(task.answer) == 1.0, name
            assert await paid(f"It is {task.answer}, or banana") == 0.0, name
        else:
            assert name in OWN_SCORER, name
        for garbage in ("", "banana", "__import__('os').system('touch /tmp/agent-rl-owned')"):
            assert await paid(garbage) == 0.0, name
    await grader.close()
    assert not Path("/tmp/agent-rl-owned").exists()
