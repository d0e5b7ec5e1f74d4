"""From a suite to results: what is read, kept through a kill, judged, reported, compared and judged again."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from served import completion, failing, serving

from agent_rl.cli import main
from agent_rl.errors import ConfigError
from agent_rl.evaluation import contamination
from agent_rl.evaluation.compare import compare
from agent_rl.evaluation.report import summarise
from agent_rl.evaluation.run import evaluate
from agent_rl.evaluation.score import score
from agent_rl.evaluation.settings import checked
from agent_rl.evaluation.store import Row, Store, cut_torn_line, final_rows, read_rows
from agent_rl.evaluation.suites import DATA_SETS, SUITES, chosen_places, fetch, load_suite, plain_answer
from agent_rl.evaluation.targets import find_model, fingerprint
from envs import Task

DATA = Path(__file__).parents[1] / "data"
GSM8K = DATA / "gsm8k_sample.jsonl"
ANSWERS = [json.loads(line) for line in (DATA / "suite_answers.jsonl").read_text(encoding="utf-8").splitlines()]
QUIET = Console(quiet=True)


@pytest.fixture
def no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any data set."""
    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("AGENT_RL_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)
    return tmp_path


@pytest.fixture(scope="module")
def six_sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The answers and ids of the paper's sets; their texts are not ours to ship."""
    folder = tmp_path_factory.mktemp("sets")
    for name in SUITES["stare-math"]:
        rows = [row for row in ANSWERS if row["set"] == name]
        lines = [json.dumps({"id": r["id"], "problem": f"Problem {r['id']}.", "answer": r["answer"]}) for r in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def named(body: dict[str, Any]) -> str:
    """The id of the problem that a request asks about."""
    found = re.search(r"Problem (\S+)\.\n", body["messages"][-1]["content"])
    assert found
    return found[1]


# Suites and their data.


def test_the_suite_of_the_paper_has_its_sets_and_samples(six_sets: Path) -> None:
    parts = load_suite("stare-math", data=str(six_sets))
    assert [(part.name, len(part.problems), part.k) for part in parts] == [
        ("aime24", 30, 32),
        ("aime25", 30, 32),
        ("amc23", 40, 32),
        ("math500", 500, 4),
        ("minerva", 272, 4),
        ("olympiadbench", 675, 4),
    ]
    assert {part.env.id for part in parts} == {"agentic/ShortCoT-v1"}
    assert [part.notes for part in parts] == [()] * 6
    assert parts[0].problems[0].task.prompt.endswith("put your final answer within \\boxed{}.")


def test_another_amc_is_not_taken_for_this_one(tmp_path: Path) -> None:
    lines = [json.dumps({"id": str(i), "problem": f"{i}?", "answer": "1"}) for i in range(83)]
    (tmp_path / "amc23.jsonl").write_text("\n".join(lines))
    (part,) = load_suite("amc23", data=str(tmp_path))
    assert part.notes == ("amc23: 83 problems instead of the usual 40: another set",)


def test_missing_data_says_where_to_get_it(no_data: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"aime24 is not here .*--data FOLDER with aime24\.jsonl.*AGENT_RL_DATA.*hf:H"
    ):
        load_suite("stare-math")
    with pytest.raises(ConfigError, match=r"has no aime24\.jsonl"):
        load_suite("stare-math", data=str(no_data))
    with pytest.raises(ConfigError, match="does not exist"):
        load_suite("aime24", data="/nowhere")
    with pytest.raises(ConfigError, match="a suite of several sets needs a folder"):
        load_suite("stare-math", data=str(GSM8K))


def test_data_is_found_in_the_variable_and_in_the_cache(no_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_RL_DATA", str(no_data / "mine"))
    (no_data / "mine").mkdir()
    (no_data / "mine" / "gsm8k_test.jsonl").write_text(GSM8K.read_text())
    assert load_suite("gsm8k")[0].path == no_data / "mine" / "gsm8k_test.jsonl"
    monkeypatch.delenv("AGENT_RL_DATA")
    (no_data / "cache" / "data").mkdir(parents=True)
    (no_data / "cache" / "data" / "gsm8k.jsonl").write_text(GSM8K.read_text())
    assert load_suite("gsm8k")[0].path == no_data / "cache" / "data" / "gsm8k.jsonl"


def test_rows_of_the_hub_become_ours_once(no_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Datasets:
        @staticmethod
        def load_dataset(*arguments: str, split: str) -> list[dict[str, Any]]:
            asked.append((*arguments, split))
            if "olympiad" in arguments[0]:
                return [{"id": 7, "question": "q", "final_answer": ["$2$", "3"]}]
            return [{"question": "q0", "answer": "so #### 1,234"}, {"question": "q1", "answer": "#### 5"}]

    monkeypatch.setitem(sys.modules, "datasets", Datasets())
    target = no_data / "gsm8k.jsonl"
    assert fetch(DATA_SETS["gsm8k"], target) == target
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(row["id"], row["problem"], row["answer"]) for row in rows] == [
        ("gsm8k-0", "q0", "1234"),
        ("gsm8k-1", "q1", "5"),
    ]
    fetch(DATA_SETS["olympiadbench"], no_data / "olympiadbench.jsonl")
    row = json.loads((no_data / "olympiadbench.jsonl").read_text())
    assert (row["id"], row["answer"]) == ("olympiadbench-7", "2$, 3")
    assert asked == [("openai/gsm8k", "main", "test"), ("math-ai/olympiadbench", "test")]


def test_plain_answers() -> None:
    assert plain_answer("amc23", 27.0) == "27"
    assert plain_answer("aime24", "025") == "025"
    assert plain_answer("math500", "$\\frac12$") == "\\frac12"


def test_unknown_suites_offer_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'stare-math'"):
        load_suite("stare-maths")
    with pytest.raises(ConfigError, match="did you mean 'agentic/Maze-v1'"):
        load_suite("agentic/Mace-v1")
    with pytest.raises(ConfigError, match="1000000 tasks: say how many with --limit"):
        load_suite("agentic/Arithmetic-v1")
    with pytest.raises(ConfigError, match="--scenario chooses"):
        load_suite("agentic/Arithmetic-v1", scenario="tool_use", limit=3)


@pytest.mark.parametrize("size", [100, 1_000_000])
def test_a_larger_limit_keeps_the_problems_of_a_smaller(size: int) -> None:
    small, large = set(chosen_places(size, 10, 0)), set(chosen_places(size, 50, 0))
    assert len(small) == 10
    assert small < large
    assert small != set(chosen_places(size, 10, 1))
    assert chosen_places(5, None, 0) == chosen_places(5, 9, 0) == [0, 1, 2, 3, 4]


# A policy that is always right, and one that never is.


@pytest.mark.parametrize(("right", "limit", "problems"), [(True, None, 1547), (False, 60, 280)], ids=["right", "wrong"])
async def test_who_solves_all_six_sets_scores_one_and_who_does_not_zero(
    six_sets: Path, tmp_path: Path, right: bool, limit: int | None, problems: int
) -> None:
    """Every gold answer of the paper's sets grades as right, and a wrong one as wrong."""
    gold = {row["id"]: row["answer"] for row in ANSWERS}

    def answer(body: dict[str, Any]) -> str:
        return f"It follows that \\boxed{{{gold[named(body)] if right else '-987654321/7'}}}."

    async with serving(answer) as served:
        settings = checked(
            model=served.url, suite="stare-math", data=str(six_sets), k=1, limit=limit, output=str(tmp_path)
        )
        folder = await asyncio.to_thread(evaluate, settings, QUIET)
    tree = json.loads((folder / "results.json").read_text())
    assert {part["avg"]["value"] for part in tree["parts"].values()} == {float(right)}
    assert tree["average"]["value"] == float(right)
    assert (tree["total"]["scored"], tree["total"]["void"]) == (problems, 0)
    assert {row.verdict for row, _ in read_rows(folder)} == {"correct" if right else "wrong"}


# What is finished stays finished.


def settings_for(url: str, output: Path, **changes: Any) -> Any:
    base: dict[str, Any] = {"suite": "gsm8k", "data": str(GSM8K), "limit": 6, "k": 3, "served_name": "scripted"}
    return checked(**(base | {"model": url, "output": str(output), "name": "run"} | changes))


def by_seed(body: dict[str, Any]) -> str:
    """Right for about half of the seeds, with several wrong answers."""
    return f"\\boxed{{{'7' if body['seed'] % 2 else body['seed'] % 5}}}"


def lines_of(folder: Path) -> list[str]:
    path = folder / "episodes.jsonl"
    return path.read_text().splitlines() if path.is_file() else []


async def test_kill_9_loses_nothing_that_was_finished(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    async def slow(body: dict[str, Any]) -> str:
        await asyncio.sleep(0.02)
        return by_seed(body)

    async with serving(slow) as served:
        command = [sys.executable, "-m", "agent_rl", "eval", served.url, "--suite", "gsm8k", "--data", str(GSM8K)]
        command += ["--limit", "40", "--k", "5", "--concurrency", "2", "--served-name", "scripted", "--name", "run"]
        command += ["--output", str(tmp_path)]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
        while len(lines_of(folder)) < 20:  # a file, not an event
            await asyncio.sleep(0.02)
            assert process.returncode is None
        process.kill()
        await process.wait()
        before = lines_of(folder)
        assert 20 <= len(before) < 200
        # And the worst moment of all: a line half written.
        with (folder / "episodes.jsonl").open("a") as file:
            file.write(before[0][: len(before[0]) // 2])
        asked = len(served.bodies)
        await asyncio.to_thread(evaluate, settings_for(served.url, tmp_path, limit=40, k=5), QUIET)
        after = lines_of(folder)
        assert after[: len(before)] == before
        assert len(served.bodies) - asked == 200 - len(before)
    rows = [row for row, _ in read_rows(folder)]
    assert Counter(Counter(row.key for row in rows).values()) == {1: 200}

    async with serving(by_seed) as served:
        await asyncio.to_thread(evaluate, settings_for(served.url, tmp_path / "whole", limit=40, k=5), QUIET)
    whole = final_rows(row for row, _ in read_rows(tmp_path / "whole" / "run"))
    told = [(row.key, row.answer, row.verdict) for row in final_rows(rows)]
    assert told == [(row.key, row.answer, row.verdict) for row in whole]


async def test_more_samples_and_problems_add_to_what_is_there(tmp_path: Path) -> None:
    async with serving(by_seed) as served:
        folder = await asyncio.to_thread(evaluate, settings_for(served.url, tmp_path), QUIET)
        assert len(served.bodies) == 18
        await asyncio.to_thread(evaluate, settings_for(served.url, tmp_path), QUIET)
        assert len(served.bodies) == 18
        await asyncio.to_thread(evaluate, settings_for(served.url, tmp_path, k=4, limit=8), QUIET)
        assert len(served.bodies) == 32
        tree = json.loads((folder / "results.json").read_text())
        assert (tree["parts"]["gsm8k"]["k"], tree["parts"]["gsm8k"]["complete_problems"]) == (4, 8)
        # A smaller question is answered out of what is there.
        await asyncio.to_thread(evaluate, settings_for(served.url, tmp_path, k=1, limit=6), QUIET)
        assert len(served.bodies) == 32
        tree = json.loads((folder / "results.json").read_text())
        assert (tree["parts"]["gsm8k"]["episodes"], list(tree["parts"]["gsm8k"]["pass"])) == (6, ["1"])


async def test_other_settings_need_another_folder(tmp_path: Path) -> None:
    async with serving(by_seed) as served:
        folder = await asyncio.to_thread(evaluate, settings_for(served.url, tmp_path), QUIET)
        kept = lines_of(folder)
        with pytest.raises(ConfigError, match=r"holds an evaluation with other settings \(seed, top_p\)"):
            await asyncio.to_thread(evaluate, settings_for(served.url, tmp_path, top_p=1.0, seed=1), QUIET)
        assert lines_of(folder) == kept
        with Store(folder) as store:
            store.open(json.loads((folder / "evaluation.json").read_text())["identity"], {})
            with pytest.raises(ConfigError, match="another process is working"):
                Store(folder).open({}, {})


def test_a_torn_line_is_cut_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    for text, kept in (("", ""), ("a\nb\n", "a\nb\n"), ("a\nb", "a\n"), ("a", ""), ("x" * 3_000_000, "")):
        path.write_text(text)
        cut_torn_line(path)
        assert path.read_text() == kept


async def test_our_failures_are_void_and_are_tried_again(tmp_path: Path) -> None:
    broken = True

    def answer(body: dict[str, Any]) -> Any:
        return {"choices": []} if broken else "\\boxed{1}"

    async with serving(answer) as served:
        from agent_rl.engines import openai
        from agent_rl.rollout import TooManyFailures

        settings = settings_for(served.url, tmp_path, limit=2, k=1, max_refills=1, max_failures=100)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(openai.tenacity, "wait_random_exponential", lambda **_: lambda state: 0.0)
            folder = await asyncio.to_thread(evaluate, settings, QUIET)
            tree = json.loads((folder / "results.json").read_text())
            assert tree["parts"]["gsm8k"]["avg"]["value"] is None  # not 0: nothing is known
            assert (tree["total"]["void"], tree["total"]["void_causes"]) == (2, {"engine": 2})
            assert len(lines_of(folder)) == 4  # two problems, each with a fresh try
            with pytest.raises(TooManyFailures, match="3 episodes in a row failed on our side"):
                await asyncio.to_thread(evaluate, settings.model_copy(update={"max_failures": 3}), QUIET)
            broken = False
            await asyncio.to_thread(evaluate, settings, QUIET)
    rows = final_rows(row for row, _ in read_rows(folder))
    assert [row.correct is None for row in rows] == [False, False]
    assert all(row.attempt >= 2 for row in rows)


async def test_no_episode_starts_after_the_money_is_spent(tmp_path: Path) -> None:
    async with serving(lambda body: completion("\\boxed{1}", prompt=1000, sampled=500)) as served:
        costly = {"price_in": 1.0, "price_out": 2.0, "max_cost": 0.009, "concurrency": 1}
        settings = settings_for(served.url, tmp_path, **costly)  # 0.002 dollars an episode
        folder = await asyncio.to_thread(evaluate, settings, QUIET)
    tree = json.loads((folder / "results.json").read_text())
    assert tree["total"]["cost"] == pytest.approx(0.010)
    assert tree["total"]["episodes"] == 5
    assert "6 problems have all 3 samples" in (folder / "results.md").read_text()


async def test_a_refused_key_stops_before_anything_is_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    async with serving(lambda body: failing(401, "bad key")) as served:
        command = ["eval", served.url, "--suite", "gsm8k", "--data", str(GSM8K), "--limit", "2", "--k", "1"]
        code = await asyncio.to_thread(main, [*command, "--output", str(tmp_path), "--served-name", "m"])
    told = capsys.readouterr()
    assert code == 2
    assert "the key in $OPENAI_API_KEY is refused" in told.err
    assert "sk-very-secret" not in told.err + told.out
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or "sk-very-secret" not in file.read_text()


# Results.


def row(problem: str, sample: int, verdict: str, answer: str | None = None, **changes: Any) -> Row:
    correct = None if verdict == "void" else verdict == "correct"
    fields: dict[str, Any] = {
        "part": "p",
        "problem": problem,
        "place": int(problem),
        "sample": sample,
        "attempt": 0,
        "gold": "1",
        "answer": answer,
        "verdict": verdict,
        "correct": correct,
        "reward": None if correct is None else float(correct),
        "stop": "answer",
        "turns": 1,
        "prompt_tokens": 10,
        "sampled_tokens": 5,
        "context_tokens": 15,
        "seconds": 1.0,
        "generate_s": 0.5,
    }
    return Row(**(fields | changes))


def test_a_summary_by_hand() -> None:
    rows = [
        row("0", 0, "correct", "1"),
        row("0", 1, "correct", "1.0"),  # votes with "1"
        row("0", 2, "wrong", "2", calls={"ok": 2, "invalid_json": 1}, sampled_tokens=20),
        row("1", 0, "wrong", "3"),
        row("1", 1, "unparsable", None, stop="length"),
        row("1", 2, "correct", "1"),
        row("2", 0, "void", stop="failure", failure="sandbox at turn 1: gone"),
        row("2", 1, "correct", "1"),
    ]
    tree = summarise(rows, [{"name": "p", "k": 3, "problems": 4}])
    part = tree["parts"]["p"]
    assert part["avg"]["value"] == pytest.approx((2 / 3 + 1 / 3 + 1) / 3)
    assert part["maj"]["value"] == pytest.approx((1 + 0.5 + 1) / 3)
    assert [part["pass"][k]["problems"] for k in ("1", "2", "3")] == [3, 2, 2]
    assert part["pass"]["3"]["value"] == 1.0
    assert part["verdicts"] == {"correct": 4, "wrong": 2, "unparsable": 1, "void": 1}
    assert (part["episodes"], part["scored"], part["void"], part["complete_problems"]) == (8, 7, 1, 2)
    assert part["void_causes"] == {"sandbox": 1}
    assert part["stops"] == {"answer": 6, "failure": 1, "length": 1}
    assert part["truncated"] == pytest.approx(1 / 7)
    assert part["calls"] == pytest.approx(3 / 7)
    assert part["malformed"] == pytest.approx(1 / 3)
    assert part["length_wrong"] == pytest.approx((20 + 5 + 5) / 3)
    assert tree["average"] is None  # one part has no average beside itself


async def test_all_outputs_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(by_seed) as served:
        command = ["eval", served.url, "--suite", "gsm8k", "--data", str(GSM8K), "--limit", "6", "--k", "3"]
        command += ["--output", str(tmp_path), "--served-name", "scripted", "--name", "run"]
        assert await asyncio.to_thread(main, command) == 0
    folder = tmp_path / "run"
    avg = json.loads((folder / "results.json").read_text())["parts"]["gsm8k"]["avg"]
    shown = f"{100 * avg['value']:.1f}"
    assert f"| {shown} |" in (folder / "results.md").read_text()
    told = capsys.readouterr().out
    assert shown in told
    assert "plan  gsm8k: 6 problems x 3 = 18 episodes" in told
    assert "plan  at most" in told
    assert "forecast  left: about" in told
    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["metric"], r["k"]) for r in rows] == [
        ("avg", "3"),
        ("maj", "3"),
        ("pass", "1"),
        ("pass", "2"),
        ("pass", "3"),
    ]
    assert float(rows[0]["value"]) == avg["value"]
    page = (folder / "transcripts.html").read_text()
    assert page.count("<details") == 18
    assert '<span class="own">\\boxed{' in page
    assert not re.search(r"(?:src|href)\s*=|@import|url\(", page)  # it needs nothing else


async def test_a_page_shows_hostile_text_as_text(tmp_path: Path) -> None:
    evil = "</pre><script>alert(1)</script><img onerror=x>\ud83d\ude00 \\boxed{1}"
    async with serving(lambda body: evil) as served:
        folder = await asyncio.to_thread(evaluate, settings_for(served.url, tmp_path, limit=1, k=1), QUIET)
    page = (folder / "transcripts.html").read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_plan_is_told_without_playing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["eval", "http://127.0.0.1:9/v1", "--suite", "gsm8k", "--data", str(GSM8K), "--k", "2", "--dry-run"]
    assert main([*command, "--output", str(tmp_path / "evals"), "--price", "1", "10", "--scenario", "tool_use"]) == 0
    told = capsys.readouterr().out
    assert "100 problems x 2 = 200 episodes" in told
    # 200 episodes x 9,216 sampled tokens x $10, and 16 prompts of at most as many tokens x $1, a million
    assert "at most 1,843,200 sampled tokens, $47.92" in told
    assert not (tmp_path / "evals").exists()


# Two runs, another grader, other data.


async def two_runs(tmp_path: Path) -> tuple[Path, Path]:
    gold = {json.loads(line)["problem"]: json.loads(line)["answer"] for line in GSM8K.read_text().splitlines()}

    def knowing(share: int) -> Callable[[dict[str, Any]], str]:
        def answer(body: dict[str, Any]) -> str:
            problem = body["messages"][-1]["content"].split("\nPlease reason")[0]
            known = int(hashlib.sha256(problem.encode()).hexdigest(), 16) % 10 < share
            return f"The answer is {gold[problem]}. \\boxed{{{gold[problem] if known else -1}}}"

        return answer

    folders = []
    for name, share in (("good", 8), ("bad", 4)):
        async with serving(knowing(share)) as served:
            settings = settings_for(served.url, tmp_path, limit=30, k=1, name=name)
            folders.append(await asyncio.to_thread(evaluate, settings, QUIET))
    return folders[0], folders[1]


async def test_two_runs_are_compared_problem_by_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = await two_runs(tmp_path)
    part = compare(good, bad)["parts"]["gsm8k"]
    assert part["problems"] == 30
    assert part["worse"] == 0
    assert part["difference"]["value"] == pytest.approx(part["better"] / 30)
    assert part["difference"]["low"] > 0
    assert part["sign_p"] == pytest.approx(2 / 2 ** part["better"])
    assert compare(bad, good)["parts"]["gsm8k"]["difference"]["value"] == -part["difference"]["value"]
    for form in ("table", "markdown", "json"):
        assert main(["compare", str(good), str(bad), "--format", form]) == 0
        assert "gsm8k" in capsys.readouterr().out
    assert main(["compare", str(good), str(tmp_path)]) == 2
    assert "holds no evaluation" in capsys.readouterr().err


async def test_an_unfair_comparison_says_so(tmp_path: Path) -> None:
    async with serving(by_seed) as served:
        first = await asyncio.to_thread(evaluate, settings_for(served.url, tmp_path, name="a"), QUIET)
        second = await asyncio.to_thread(
            evaluate, settings_for(served.url, tmp_path, name="b", temperature=0.0, limit=8), QUIET
        )
    notes = compare(first, second)["notes"]
    assert notes == [
        "the two differ in temperature: not only the model was changed",
        "gsm8k: 2 problems that only one of the two has are left out",
    ]


async def test_stored_episodes_are_judged_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, bad = await two_runs(tmp_path)
    before = lines_of(bad)
    boxed = await score(bad, "boxed")
    assert boxed["parts"]["gsm8k"]["avg"] == json.loads((bad / "results.json").read_text())["parts"]["gsm8k"]["avg"]
    (tmp_path / "lenient.py").write_text(
        "async def anywhere(gold, text):\n    return f'answer is {gold}.' in text\n"
        "def never(gold, text):\n    return False\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        assert (await score(bad, "lenient:anywhere"))["parts"]["gsm8k"]["avg"]["value"] == 1.0
        assert (await score(bad, "lenient:never"))["parts"]["gsm8k"]["avg"]["value"] == 0.0
        with pytest.raises(ConfigError, match="has no attribute 'gone'"):
            await score(bad, "lenient:gone")
    assert lines_of(bad) == before
    with pytest.raises(ConfigError, match="there are boxed, stated, exact, or write MODULE:FUNCTION"):
        await score(bad, "nice")
    assert await asyncio.to_thread(main, ["score", str(bad), "--grader", "stated"]) == 0
    assert "correct before: correct" in capsys.readouterr().out


def test_words_are_what_typesetting_leaves() -> None:
    assert contamination.words("Find $x^2$!") == ["find", "x", "2"]
    assert contamination.words("\\frac{1}{2} Ｆ") == ["frac", "1", "2", "f"]


def test_overlap_is_found_by_text_and_by_ngrams() -> None:
    text = "A farmer has seventeen sheep and all but nine of them run away how many are left on the farm"
    moved = "In a far village " + text.replace("farmer", "peasant") + " that day?"
    problems = [
        ("p", "same", text),
        ("p", "moved", moved),
        ("p", "other", " ".join(map(str, range(30)))),
        ("p", "1", "2+2"),
    ]
    train = [
        Task(id="t0", prompt="Nothing to do with it, really nothing at all, whatever one may say about it"),
        Task(id="t1", prompt=text.upper() + "?"),
        Task(id="t2", prompt="2 + 2 ="),
    ]
    found = {o.problem: (o.exact, o.row, round(o.share, 2)) for o in contamination.overlaps(problems, train)}
    assert found == {"same": (True, "t1", 1.0), "moved": (False, "t1", 0.58), "1": (True, "t2", 1.0)}


async def test_contaminated_problems_are_reported_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = [json.loads(line) for line in GSM8K.read_text().splitlines()][:30]
    train = tmp_path / "train.jsonl"
    train.write_text("".join(json.dumps({**row, "id": f"t{i}"}) + "\n" for i, row in enumerate(seen)))
    async with serving(by_seed) as served:
        settings = settings_for(served.url, tmp_path, limit=100, k=1, train_data=(str(train),))
        folder = await asyncio.to_thread(evaluate, settings, QUIET)
    part = json.loads((folder / "results.json").read_text())["parts"]["gsm8k"]
    assert len(part["without_overlap"]["flagged"]) == 30
    assert part["without_overlap"]["avg"]["problems"] == 70
    assert "30 problems overlap with training data; without them" in (folder / "results.md").read_text()
    assert main(["contamination", str(train), "--suite", "gsm8k", "--data", str(GSM8K)]) == 0
    assert (
        "30 of 100 problems share at least 50% of their 8-grams with one training row, 30 word"
        in capsys.readouterr().out
    )


# The command line, and a model of this machine.


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["eval", "nothing-here", "--suite", "gsm8k", "--data", str(GSM8K)], "no model 'nothing-here'"),
        (["eval", "http://x", "--suite", "gsm9k"], "did you mean 'gsm8k'"),
        (["eval", "http://x", "--suite", "gsm8k", "--k", "0"], "k = 0"),
        (["eval", "http://x", "--suite", "gsm8k", "--top-p", "0"], "top_p = 0.0"),
        (["eval", "http://x", "--suite", "gsm8k", "--max-cost", "5"], "max_cost needs prices"),
        (["eval", "http://x", "--suite", "gsm8k", "--extra", "[1]"], "a JSON object"),
        (["eval", "http://x", "--suite", "agentic/Maze-v1", "--set", "size"], "write KEY=VALUE"),
        (
            ["eval", "http://x", "--suite", "gsm8k", "--data", str(GSM8K), "--dialect", "klingon"],
            "no tool-call dialect",
        ),
        (["eval", "http://x", "--suite", "gsm8k", "--data", str(GSM8K), "--train-data", "gone.jsonl"], "gone.jsonl"),
        (["compare", "a", "b"], "a holds no evaluation"),
        (["score", "a"], "a holds no evaluation"),
        (["contamination", "gone.jsonl", "--suite", "gsm8k", "--data", str(GSM8K)], "gone.jsonl"),
    ],
    ids=lambda value: " ".join(value)[-30:] if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert complaint in told.err
    assert (told.err.count("\n"), told.err[:10]) == (1, "agent-rl: ")
    assert list(tmp_path.iterdir()) == []


def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("eval", "compare", "score", "contamination"):
        with pytest.raises(SystemExit) as stop:
            main([name, "--help"])
        assert stop.value.code == 0
        told = capsys.readouterr().out
        assert f"agent-rl {name} " in told.split("example")[1]


def test_an_endpoint_is_evaluated_without_torch() -> None:
    program = (
        "import sys; import agent_rl.evaluation.run, agent_rl.evaluation.cli, agent_rl.evaluation.score; "
        "sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@contextlib.contextmanager
def stopped_after(count: int) -> Iterator[None]:
    """A process that dies after so many episodes are on disk, as far as this process can die."""
    from agent_rl.evaluation import run

    class Stopping(Store):
        left = count

        def add(self, row: Row, transcript: Any) -> None:
            super().add(row, transcript)
            Stopping.left -= 1
            if Stopping.left == 0:
                raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "Store", Stopping)
        yield


def test_a_model_folder_is_evaluated_in_token_space_and_repeats(tiny_folder: Path, tmp_path: Path) -> None:
    """Same seed, same episodes, id for id, whether or not the evaluation was interrupted."""

    def settings(name: str, **changes: Any) -> Any:
        base: dict[str, Any] = {
            "model": str(tiny_folder),
            "suite": "agentic/Arithmetic-v1",
            "options": {"max_digits": 2},
            "limit": 3,
            "k": 4,
            "engine": "transformers",
            "max_tokens": 12,
            "max_episode_tokens": 120,
            "concurrency": 4,
            "sandbox": {"kind": "local", "size": 1},
            "output": str(tmp_path),
            "name": name,
        }
        return checked(**(base | changes))

    def played(folder: Path) -> dict[Any, Any]:
        return {
            row.key: (transcript["token_ids"], transcript["spans"], row.verdict)
            for row, transcript in read_rows(folder)
        }

    whole = played(evaluate(settings("whole"), QUIET))
    assert len(whole) == 12
    with stopped_after(5), pytest.raises(KeyboardInterrupt):
        evaluate(settings("broken"), QUIET)
    assert len(lines_of(tmp_path / "broken")) == 5
    assert (tmp_path / "broken" / "results.json").is_file()
    assert played(evaluate(settings("broken"), QUIET)) == whole
    other = played(evaluate(settings("other", seed=1), QUIET))
    assert {ids for ids in map(str, other.values())} != {ids for ids in map(str, whole.values())}
    page = (tmp_path / "whole" / "transcripts.html").read_text()
    assert page.count("<details") == 12
    assert "&lt;|im_start|&gt;assistant" in page  # decoded from ids, with what the template put there
    tree = json.loads((tmp_path / "whole" / "results.json").read_text())
    assert tree["total"]["tokens_sampled"] == sum(sum(e - s for s, e in spans) for _, spans, _ in whole.values())


def test_a_name_on_the_hub_is_fetched_or_says_why_not(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def snapshot(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name == "org/gone":
            raise OSError("404 not found\nat all")
        return str(tiny_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    told: list[str] = []
    assert find_model("org/small", told.append).folder == tiny_folder
    assert told == ["fetching org/small from the hub (cached afterwards)"]
    assert "*.safetensors" in asked[0][1]
    assert not any(".bin" in pattern or ".pt" in pattern for pattern in asked[0][1])
    with pytest.raises(
        ConfigError, match="org/gone is no folder here, and the hub did not give it: 404 not found at all"
    ):
        find_model("org/gone", told.append)


def test_other_weights_are_another_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(os.urandom(3_000_000))
    before = fingerprint(tmp_path)
    (tmp_path / "notes.txt").write_text("of no matter")
    assert fingerprint(tmp_path) == before
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"!!!!!")
    assert fingerprint(tmp_path) != before
