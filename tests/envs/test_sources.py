"""Sources of tasks: files of every kind, columns, mixtures; generators are pure functions of seed and index."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import envs
from envs import Mixture, Task, TaskList, load_tasks
from envs.arithmetic import ArithmeticOptions, ArithmeticTasks, evaluate
from envs.search import Page, load_pages

GSM8K = str(Path(__file__).parents[1] / "data" / "gsm8k_sample.jsonl")


def tasks_named(name: str, count: int) -> TaskList:
    return TaskList([Task(id=f"{name}{i}", prompt="p", answer="1") for i in range(count)])


def test_a_mixture_interleaves_in_proportion() -> None:
    mixture = Mixture([tasks_named("a", 10), tasks_named("b", 10)], [3, 1])
    assert [mixture.task(i).id for i in range(8)] == ["a0", "a1", "b0", "a2", "a3", "a4", "b1", "a5"]


@example(weights=[12.0, 0.05, 0.05, 0.05, 0.05], sizes=[1] * 5)  # several that are too small for a place
@given(weights=st.lists(st.floats(0.05, 20), min_size=1, max_size=5), sizes=st.lists(st.integers(1, 40), min_size=5))
def test_a_mixture_holds_its_shares_and_shows_every_task(weights: list[float], sizes: list[int]) -> None:
    sources = [tasks_named(f"{number}-", size) for number, size in zip(range(len(weights)), sizes, strict=False)]
    mixture = Mixture(sources, weights)
    seen = [mixture.task(i).id for i in range(len(mixture))]
    assert set(seen) == {source.task(i).id for source in sources for i in range(len(source))}
    for number, weight in enumerate(weights):
        share = sum(task_id.startswith(f"{number}-") for task_id in seen[:100])
        assert share >= 1
        assert abs(share - 100 * weight / sum(weights)) <= len(weights)


def test_every_one_of_many_sources_has_its_turn() -> None:
    mixture = Mixture([tasks_named(f"{number}-", 1) for number in range(150)], [1000.0, *[1.0] * 149])
    assert len({mixture.task(i).id for i in range(len(mixture))}) == 150


@pytest.mark.parametrize("weights", [[], [1], [1, 0], [1, -1]])
def test_bad_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="one positive weight for each"):
        Mixture([tasks_named("a", 1), tasks_named("b", 1)], weights)


def test_csv_with_columns_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('key,question,answer,source\nx,"a, ""b""\nc",1,here\n')
    (task,) = load_tasks(file, {"problem": "question", "id": "key"})
    assert task == Task(id="x", prompt='a, "b"\nc', answer="1", meta={"source": "here"})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("question,answer\na,1\n", "rows.csv:2: field 'problem' is missing"),
        ("problem,answer\na,1,2\n", "rows.csv:2: more cells"),
        ('problem,answer\n"a,1\n', "not valid CSV"),
        ("problem,answer\na,\n", "rows.csv:2: field 'answer' must be a non-empty string"),
        ("problem,answer\n", "has no rows"),
    ],
)
def test_bad_csv_rows_are_named(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match="rows") as caught:
        load_tasks(file)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [("rows.csv", "id,problem,answer\nx,p,1\n"), ("rows.jsonl", '{"id": "x", "problem": "p", "answer": "1"}\n')],
)
def test_the_mark_that_spreadsheets_begin_with_is_no_part_of_a_name(tmp_path: Path, name: str, text: str) -> None:
    """A first column ``id`` became a field of ``meta`` under another name, without a word."""
    file = tmp_path / name
    file.write_text(text, encoding="utf-8-sig")
    assert load_tasks(file) == [Task(id="x", prompt="p", answer="1")]


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_a_file_in_another_encoding_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes("problem,answer\ncafé,1\n".encode("latin-1"))
    with pytest.raises(ValueError, match=rf"data file '.*{name}' is not UTF-8"):
        load_tasks(tmp_path / name)


def test_text_that_no_tokenizer_takes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"problem": "cut: \\ud83d", "answer": "1"}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: field 'problem' holds half of a surrogate pair"):
        load_tasks(file)


def test_pages_may_hold_what_python_takes_for_ends_of_lines(tmp_path: Path) -> None:
    file = tmp_path / "pages.jsonl"
    pages = [Page(title="a\u2028b", text="c\x85d"), Page(title="e", text="f\x0cg")]
    lines = [json.dumps({"title": page.title, "text": page.text}, ensure_ascii=False) for page in pages]
    file.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    assert load_pages(str(file)) == pages


def test_parquet(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"not parquet")
    if importlib.util.find_spec("pyarrow") is None:
        with pytest.raises(ValueError, match="pip install pyarrow"):
            load_tasks(file)
        return
    with pytest.raises(ValueError, match="is not a Parquet file"):
        load_tasks(file)
    import pyarrow
    import pyarrow.parquet

    rows: list[dict[str, Any]] = [
        {"problem": "p", "answer": "1", "id": "x"},
        {"problem": "q", "answer": None, "id": "y"},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[:1]), file)
    assert load_tasks(file) == [Task(id="x", prompt="p", answer="1")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    with pytest.raises(ValueError, match=r"rows\.parquet:2: field 'answer'"):
        load_tasks(file)


def test_a_hub_data_set_without_its_package_says_what_to_install() -> None:
    if importlib.util.find_spec("datasets") is not None:
        with pytest.raises(ValueError, match="hf:/nowhere"):
            load_tasks("hf:/nowhere")
        return
    with pytest.raises(ValueError, match="pip install datasets"):
        load_tasks("hf:/nowhere")


def test_other_names_and_columns_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match="must end in"):
        load_tasks(tmp_path / "a.txt")
    with pytest.raises(ValueError, match="no field 'question'"):
        load_tasks(GSM8K, {"question": "problem"})


def test_file_environments_take_columns_mixtures_prompts_and_lengths(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text("problem,answer\nshort,1\nmuch longer than that,2\n")
    spec = envs.get("agentic/ShortCoT-v1")
    tasks = spec.tasks({"path": str(file), "prompt": "Q: {problem} \\boxed{{}}", "max_chars": 10})
    assert len(tasks) == 1
    assert tasks.task(0).prompt == "Q: short \\boxed{}"
    assert len(spec.tasks({"mix": {str(file): 1, GSM8K: 1}})) == 200
    levels = tmp_path / "levels.csv"
    levels.write_text("problem,answer,source\n" + "".join(f"p{i},1,{'ab'[i % 2]}\n" for i in range(10)))
    of_b = {"path": str(levels), "where": {"source": "b"}, "prompt": "{problem}"}
    assert [spec.tasks(of_b).task(i).prompt for i in range(5)] == ["p1", "p3", "p5", "p7", "p9"]
    mixed = [spec.tasks({**of_b, "shuffle": 1}).task(i).prompt for i in range(5)]
    assert mixed != sorted(mixed)
    assert sorted(mixed) == ["p1", "p3", "p5", "p7", "p9"]
    first = spec.tasks({**of_b, "shuffle": 1, "limit": 2})
    assert [first.task(i).prompt for i in range(len(first))] == mixed[:2]
    for options, complaint in (
        ({}, "give `path`"),
        ({"path": str(file), "mix": {GSM8K: 1}}, "give `path`"),
        ({"path": str(file), "prompt": "no place"}, "a text with {problem}"),
        ({"path": str(file), "prompt": "{problem} {other}"}, "a text with {problem}"),
        ({"path": str(file), "max_chars": 1}, "no problem has at most"),
        ({"path": str(file), "pth": 1}, "Extra inputs"),
        ({"path": str(file), "where": {"level": "5"}}, "no row has a field 'level'"),
    ):
        with pytest.raises(ValueError, match=complaint.replace("{", r"\{").replace("}", r"\}")):
            spec.tasks(options)


@given(seed=st.integers(0, 99), index=st.integers(0, 10**6 - 1))
def test_arithmetic_is_a_pure_function_and_its_answers_are_right(seed: int, index: int) -> None:
    task = ArithmeticTasks(ArithmeticOptions(seed=seed, terms=4)).task(index)
    assert task == ArithmeticTasks(ArithmeticOptions(seed=seed, terms=4)).task(index)
    assert task.answer == str(eval(task.meta["expression"]))  # digits and operators that we made ourselves
    assert task.prompt == f"{task.meta['expression']}=?"


def test_worked_example_of_evaluate() -> None:
    assert evaluate("2+3*4-10") == 4
