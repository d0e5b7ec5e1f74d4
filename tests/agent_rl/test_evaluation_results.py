"""What is told: summaries, reports, two runs compared, episodes judged again, contaminated problems."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evaluated import GSM8K, QUIET, by_seed, lines_of, settings_for
from served import serving

from agent_rl.cli import main
from agent_rl.errors import ConfigError
from agent_rl.evaluation import contamination
from agent_rl.evaluation.compare import compare
from agent_rl.evaluation.report import summarise
from agent_rl.evaluation.run import evaluate
from agent_rl.evaluation.score import find_grader, score
from agent_rl.evaluation.store import Row
from envs import Task


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


async def test_only_what_the_two_have_in_common_is_held_against_them(tmp_path: Path) -> None:
    async with serving(by_seed) as served:
        short = await asyncio.to_thread(evaluate, settings_for(served.url, tmp_path, name="a", max_turns=1), QUIET)
        long = await asyncio.to_thread(evaluate, settings_for(served.url, tmp_path, name="b", max_turns=2), QUIET)
    assert compare(short, long)["notes"] == ["the two differ in limits: not only the model was changed"]
    path = long / "evaluation.json"
    tree = json.loads(path.read_text())
    limits, environments = tree["identity"]["limits"], tree["identity"]["environments"]
    limits |= {"gsm8k": limits["gsm8k"] | {"max_turns": 1}, "aime24": limits["gsm8k"]}  # a suite of more parts
    environments["aime24"] = "agentic/LongCoT-v1"
    path.write_text(json.dumps(tree))
    assert compare(short, long)["notes"] == []


async def test_a_smaller_question_is_compared_and_judged_as_it_was_asked(tmp_path: Path) -> None:
    async with serving(by_seed) as served:
        large = await asyncio.to_thread(evaluate, settings_for(served.url, tmp_path, k=3, limit=8), QUIET)
        await asyncio.to_thread(evaluate, settings_for(served.url, tmp_path, k=1, limit=6), QUIET)
    told = json.loads((large / "results.json").read_text())["parts"]["gsm8k"]
    assert (await score(large, "boxed"))["parts"]["gsm8k"] == told
    assert compare(large, large)["parts"]["gsm8k"]["samples"] == [6, 6]


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


def test_a_grader_is_found_where_the_command_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "grader_of_this_folder.py").write_text("def same(gold, text):\n    return gold == text\n")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    assert find_grader("grader_of_this_folder:same")


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
