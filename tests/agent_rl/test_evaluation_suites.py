"""What is asked: suites, where their data come from, and that right answers score 1."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from evaluated import GSM8K, QUIET
from served import serving

from agent_rl.errors import ConfigError
from agent_rl.evaluation.run import evaluate
from agent_rl.evaluation.settings import checked
from agent_rl.evaluation.store import read_rows
from agent_rl.evaluation.suites import DATA_SETS, SUITES, chosen_places, fetch, load_suite, plain_answer

DATA = Path(__file__).parents[1] / "data"
ANSWERS = [json.loads(line) for line in (DATA / "suite_answers.jsonl").read_text(encoding="utf-8").splitlines()]


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
