"""Where tasks come from: a numbered source, made by a generator, read from a file, or mixed from several."""

from __future__ import annotations

import csv
import difflib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from envs.types import Task

FIELDS = ("id", "problem", "answer", "source", "meta")
"""What a row may have; other columns of it go to ``meta``."""

UTF8 = "utf-8-sig"
"""With or without the mark that spreadsheets begin a file with: it would become part of the first column's name."""


class TaskSource(Protocol):
    """Task ``i`` is always the same task."""

    def __len__(self) -> int: ...

    def task(self, index: int) -> Task: ...


class TaskList:
    """Tasks that are all in memory."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = list(tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def task(self, index: int) -> Task:
        return self._tasks[index]


def check_row_tools(task: Task, offered: Collection[str], where: str) -> None:
    """Raises ``ValueError`` when the row's own ``tools`` are not names of tools that its environment has."""
    named = task.meta.get("tools")
    if named is None:
        return
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ValueError(f"{where}: task {task.id}: tools must be a list of names, not {named!r}")
    for name in named:
        if name not in offered:
            close = difflib.get_close_matches(name, offered, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(offered) or 'none'}"
            raise ValueError(f"{where}: task {task.id}: its environment has no tool {name!r}: {hint}")


class Mixture:
    """Sources in fixed proportions: every hundred tasks hold each one's share, in the order in which it has them.

    ``Mixture([a, b], [3, 1])`` gives ``a0 a1 b0 a2 a3 a4 b1 a5 ...``. As long as every source lasts; then it starts
    again.

    Raises:
        ValueError: weights that are not positive, or not one for each source.
    """

    def __init__(self, sources: Sequence[TaskSource], weights: Sequence[float]) -> None:
        if not sources or len(sources) != len(weights) or min(weights) <= 0:
            raise ValueError(f"a mixture needs one positive weight for each of its sources, not {list(weights)}")
        self._sources = list(sources)
        self._schedule = _schedule(weights)
        self._share = [self._schedule.count(number) for number in range(len(sources))]

    def __len__(self) -> int:
        cycles = max(-(-len(source) // share) for source, share in zip(self._sources, self._share, strict=True))
        return cycles * len(self._schedule)

    def task(self, index: int) -> Task:
        cycle, place = divmod(index, len(self._schedule))
        number = self._schedule[place]
        own = cycle * self._share[number] + self._schedule[:place].count(number)
        return self._sources[number].task(own % len(self._sources[number]))


def _schedule(weights: Sequence[float]) -> list[int]:
    """Which source each place of a cycle belongs to; the one that is furthest behind its share comes next."""
    total = sum(weights)
    given = [0] * len(weights)
    schedule: list[int] = []
    for place in range(1, max(100, len(weights)) + 1):
        behind = [weight / total * place - count for weight, count in zip(weights, given, strict=True)]
        number = behind.index(max(behind))
        given[number] += 1
        schedule.append(number)
    for number in range(len(weights)):
        if not given[number]:  # a share below one in a hundred still gets its turn, out of the largest one
            most = given.index(max(given))
            last = max(place for place, other in enumerate(schedule) if other == most)
            schedule[last] = number
            given[most], given[number] = given[most] - 1, 1
    return schedule


def load_jsonl(path: str | Path) -> list[Task]:
    """Tasks of a file with one ``{"id", "problem", "answer", ...}`` object a line; see ``load_tasks``."""
    file = _existing(path)
    return _tasks(_jsonl_rows(file), str(file), {})


def load_tasks(path: str | Path, columns: Mapping[str, str] | None = None, split: str = "train") -> list[Task]:
    """Tasks of a ``.jsonl``, ``.csv`` or ``.parquet`` file, or of ``hf:NAME``, a data set of Hugging Face.

    Args:
        path: the file, or ``hf:`` and what ``datasets.load_dataset`` takes (a local folder, or a name on the hub).
        columns: where our fields stand when the file calls them otherwise, e.g. ``{"problem": "question"}``.
        split: of a Hugging Face data set.

    Raises:
        ValueError: no such file, no rows, a missing package, or a bad row, named by file and line.
    """
    columns = columns or {}
    for field in columns:
        if field not in FIELDS:
            raise ValueError(f"columns: there is no field {field!r}; there are {', '.join(FIELDS)}")
    if str(path).startswith("hf:"):
        return _tasks(_hub_rows(str(path)[3:], split), str(path), columns)
    file = _existing(path)
    readers = {".jsonl": _jsonl_rows, ".csv": _csv_rows, ".parquet": _parquet_rows}
    if file.suffix not in readers:
        raise ValueError(f"data file {str(path)!r}: the name must end in {', '.join(readers)}, or begin with hf:")
    return _tasks(readers[file.suffix](file), str(file), columns)


Rows = Iterator[tuple[int, Any]]
"""Line (or row) numbers as people count, and rows."""


def _existing(path: str | Path) -> Path:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"data file {str(path)!r} does not exist")
    return file


def _jsonl_rows(file: Path) -> Rows:
    for number, line in enumerate(file.read_text(encoding=UTF8).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}:{number}: not valid JSON ({error})") from None


def _csv_rows(file: Path) -> Rows:
    with file.open(encoding=UTF8, newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            for row in reader:
                if None in row:
                    raise ValueError(f"{file}:{reader.line_num}: more cells than the first line has names")
                yield reader.line_num, {name: cell for name, cell in row.items() if cell is not None}
        except csv.Error as error:
            raise ValueError(f"{file}:{reader.line_num}: not valid CSV ({error})") from None


def _parquet_rows(file: Path) -> Rows:
    try:
        import pyarrow.parquet  # here: optional
    except ImportError:
        raise ValueError(f"reading {file} needs a package: pip install pyarrow") from None
    try:
        table = pyarrow.parquet.read_table(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{file} is not a Parquet file ({error})") from None
    yield from enumerate(table.to_pylist(), start=1)


def _hub_rows(name: str, split: str) -> Rows:
    try:
        import datasets  # here: optional, and seconds to import
    except ImportError:
        raise ValueError(f"reading hf:{name} needs a package: pip install datasets") from None
    try:
        rows = datasets.load_dataset(name, split=split)
    except Exception as error:  # the package raises whatever its readers and the network raise
        raise ValueError(f"hf:{name}, split {split}: {error}") from None
    yield from enumerate(rows, start=1)


def _tasks(rows: Rows, name: str, columns: Mapping[str, str]) -> list[Task]:
    try:
        return _distinct(rows, name, columns)
    except UnicodeDecodeError as error:
        raise ValueError(f"data file {name!r} is not UTF-8 text ({error})") from None


def _distinct(rows: Rows, name: str, columns: Mapping[str, str]) -> list[Task]:
    tasks: list[Task] = []
    lines: dict[str, int] = {}
    for number, row in rows:
        where = f"{name}:{number}"
        task = _task(row, where, number, columns)
        if task.id in lines:
            raise ValueError(f"{where}: id {task.id!r} stands in line {lines[task.id]} already")
        lines[task.id] = number
        tasks.append(task)
    if not tasks:
        raise ValueError(f"data file {name!r} has no rows")
    return tasks


def _task(row: Any, where: str, number: int, columns: Mapping[str, str]) -> Task:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a row is an object with problem and answer, not {type(row).__name__}")
    found = {field: row[columns.get(field, field)] for field in FIELDS if columns.get(field, field) in row}
    for field in ("problem", "answer"):
        column = columns.get(field, field)
        if field not in found:
            has = ", ".join(sorted(map(str, row))) or "no fields"
            raise ValueError(f"{where}: field {column!r} is missing; the row has {has}")
        if not isinstance(found[field], str) or not found[field].strip():
            raise ValueError(f"{where}: field {column!r} must be a non-empty string, not {found[field]!r}")
        if re.search("[\ud800-\udfff]", found[field]):
            raise ValueError(f"{where}: field {column!r} holds half of a surrogate pair, which no tokenizer takes")
    meta = found.get("meta") or {}
    meta = dict(meta) if isinstance(meta, dict) else {"meta": meta}
    used = {columns.get(field, field) for field in FIELDS}
    meta = {**{str(name): value for name, value in row.items() if name not in used}, **meta}
    if "source" in found:
        meta.setdefault("source", found["source"])
    return Task(
        id=str(found.get("id", number)),
        prompt=found["problem"],
        answer=found["answer"],
        meta=meta,
    )
