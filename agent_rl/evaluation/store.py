"""The folder of one evaluation: its settings, and one line an episode, on disk before the next is counted.

``kill -9`` loses nothing that was finished: a line is written whole and synced, and one that a kill tore is cut off
when the folder is opened again. Any number of runs may follow each other; only one works at a time.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from agent_rl.errors import ConfigError

EPISODES = "episodes.jsonl"
SETTINGS = "evaluation.json"
SERVED = "served_model"
"""In the settings: what the endpoint called its model when the first episode was played."""
HEAVY = ("messages", "token_ids", "spans")
"""Fields that hold the transcript; everything else of a row is small."""

Verdict = str
"""``correct``, ``wrong``, ``unparsable`` (no answer that mathematics can be read from), ``timeout``, or ``void``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One episode, as it stands in ``episodes.jsonl`` (without its transcript, see ``HEAVY``)."""

    part: str
    problem: str  # id of the task
    place: int  # of the problem in its source
    sample: int  # number of the sample of this problem, from 0
    attempt: int  # 0, or the number of the fresh try after void ones
    gold: str | None
    answer: str | None  # found in the last turn
    verdict: Verdict
    correct: bool | None  # None: void
    reward: float | None
    terms: Mapping[str, float] = field(default_factory=dict)
    stop: str
    failure: str | None = None
    turns: int
    calls: Mapping[str, int] = field(default_factory=dict)  # attempts to call by status
    prompt_tokens: int  # of every turn's prompt together
    sampled_tokens: int
    context_tokens: int  # of the whole conversation at its end; 0 where only the server knows
    seconds: float  # wall, from start to score
    generate_s: float
    requests: int = 0  # to an endpoint
    retries: int = 0
    cost: float | None = None  # dollars; None without prices

    @property
    def key(self) -> tuple[str, str, int]:
        return self.part, self.problem, self.sample

    @property
    def is_void(self) -> bool:
        return self.correct is None

    @property
    def is_truncated(self) -> bool:
        return self.stop not in ("answer", "no_call", "failure")


_NAMES = frozenset(Row.__dataclass_fields__)


def row_of(line: Mapping[str, Any]) -> Row:
    return Row(**{name: value for name, value in line.items() if name in _NAMES})


class Store:
    """The open folder of an evaluation that works on it. Use as a context manager.

    Raises:
        ConfigError: another process works there, or the folder holds an evaluation with other settings.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: IO[str] | None = None
        self._file: IO[str] | None = None

    def open(self, identity: Mapping[str, Any], more: Mapping[str, Any]) -> list[Row]:
        """The rows that are there already.

        Args:
            identity: settings in which all episodes of the folder agree.
            more: settings that may differ from run to run; the last ones are kept.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go of it however we die
        except OSError:
            raise ConfigError(f"{self.folder}: another process is working on this evaluation") from None
        before = read_settings(self.folder) if (self.folder / SETTINGS).is_file() else None
        wanted = json.loads(json.dumps(dict(identity)))
        if before is not None and before["identity"] != wanted:
            old = before["identity"]
            other = sorted(name for name in {*old, *wanted} if old.get(name) != wanted.get(name))
            raise ConfigError(
                f"{self.folder} holds an evaluation with other settings ({', '.join(other)}): "
                "choose another --name, or remove the folder"
            )
        kept = {SERVED: before[SERVED]} if before is not None and SERVED in before else {}
        write_json(self.folder / SETTINGS, {"identity": wanted, **more, **kept})
        path = self.folder / EPISODES
        cut_torn_line(path)
        rows = [row for row, _ in read_rows(self.folder)]
        self._file = path.open("a", encoding="utf-8")
        return rows

    def serves(self, model: str) -> None:
        """The endpoint plays by this name now; an address alone does not say whose episodes are in the folder.

        Raises:
            ConfigError: earlier episodes are another model's.
        """
        settings = read_settings(self.folder)
        before = settings.setdefault(SERVED, model)
        if before != model:
            raise ConfigError(
                f"{self.folder} holds episodes of {before!r}, and the endpoint serves {model!r} now: "
                "choose another --name, or remove the folder"
            )
        write_json(self.folder / SETTINGS, settings)

    def add(self, row: Row, transcript: Mapping[str, Any]) -> None:
        """The episode is on disk when this returns."""
        assert self._file is not None
        self._file.write(json.dumps(asdict(row) | dict(transcript), allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        for file in (self._file, self._lock):
            if file is not None:
                file.close()


def cut_torn_line(path: Path) -> None:
    """A file that does not end with a line's end is cut back to the last one."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        end = size
        while end > 0:
            start = max(0, end - (1 << 20))
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end != size:
            file.truncate(end)


def read_settings(folder: Path) -> dict[str, Any]:
    """Raises ``ConfigError`` when the folder holds no evaluation."""
    try:
        settings: dict[str, Any] = json.loads((folder / SETTINGS).read_text())
        settings["identity"]["suite"]
    except (OSError, json.JSONDecodeError, LookupError, TypeError):
        raise ConfigError(f"{folder} holds no evaluation: there is no readable {SETTINGS} in it") from None
    return settings


def read_rows(folder: Path) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Rows in the order in which they ended, each with its transcript; a last line torn by a kill is left out.

    Raises:
        ConfigError: a line before the last is damaged.
    """
    path = folder / EPISODES
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                tree = json.loads(line)
                yield row_of(tree), {name: tree.get(name) for name in HEAVY}
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{path}:{number}: damaged ({error}): remove that line to go on") from None


def final_rows(rows: Iterator[Row] | list[Row]) -> list[Row]:
    """One row a sample: the one that was scored, else the last void try; sorted by part, place and sample."""
    chosen: dict[tuple[str, str, int], Row] = {}
    for row in rows:
        held = chosen.get(row.key)
        if held is None or (held.is_void and (not row.is_void or row.attempt > held.attempt)):
            chosen[row.key] = row
    return sorted(chosen.values(), key=lambda row: (row.part, row.place, row.sample))


def write_json(path: Path, tree: Any) -> None:
    """Whole or not at all."""
    aside = path.with_name(path.name + ".partial")
    aside.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    aside.rename(path)
