"""Where tasks come from: a numbered source, made by a generator or read from a JSONL file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from envs.types import Task


class TaskSource(Protocol):
    """Task ``i`` is always the same task."""

    def __len__(self) -> int: ...

    def task(self, index: int) -> Task: ...


class TaskList:
    """Tasks that are all in memory."""

    def __init__(self, tasks: list[Task]) -> None:
        self._tasks = tasks

    def __len__(self) -> int:
        return len(self._tasks)

    def task(self, index: int) -> Task:
        return self._tasks[index]


def load_jsonl(path: str | Path) -> list[Task]:
    """Tasks of a file with one ``{"id", "problem", "answer", ...}`` object a line.

    Raises:
        ValueError: no such file, no rows, or a bad row, named by file and line, and what a row must be.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"data file {str(path)!r} does not exist")
    tasks: list[Task] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not valid JSON ({error})") from None
        task = _task(row, where, number)
        if task.id in lines:
            raise ValueError(f"{where}: id {task.id!r} stands in line {lines[task.id]} already")
        lines[task.id] = number
        tasks.append(task)
    if not tasks:
        raise ValueError(f"data file {str(path)!r} has no rows")
    return tasks


def _task(row: Any, where: str, number: int) -> Task:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a row is an object with problem and answer, not {type(row).__name__}")
    for name in ("problem", "answer"):
        if name not in row:
            raise ValueError(f"{where}: field {name!r} is missing; the row has {', '.join(sorted(row)) or 'no fields'}")
        if not isinstance(row[name], str) or not row[name].strip():
            raise ValueError(f"{where}: field {name!r} must be a non-empty string, not {row[name]!r}")
    meta = row.get("meta", {})
    return Task(
        id=str(row.get("id", number)),
        prompt=row["problem"],
        answer=row["answer"],
        meta=meta if isinstance(meta, dict) else {"meta": meta},
    )
