"""Tasks on files in the sandbox: the reward looks at the files that are there in the end, not at what was said."""

from __future__ import annotations

import random

from pydantic import BaseModel, ConfigDict, Field

from envs.grader import Grader
from envs.rewards import Episode
from envs.types import Task


async def wanted_files(episode: Episode, grader: Grader) -> float:
    """1 when every file in ``meta["wanted"]`` holds what it shall (blanks at the ends of lines aside).

    ``None`` as wanted content means that the file must be gone.
    """
    wanted: dict[str, str | None] = episode.task.meta["wanted"]
    if episode.sandbox is None or not episode.sandbox.leased:
        return 0.0
    found = await episode.sandbox.fetch(sorted(wanted))
    return float(all(_lines(found.get(name)) == _lines(content) for name, content in wanted.items()))


def _lines(content: bytes | str | None) -> list[str] | None:
    if content is None:
        return None
    text = content.decode(errors="replace") if isinstance(content, bytes) else content
    return [line.rstrip() for line in text.rstrip().split("\n")]


class FilesOptions(BaseModel):
    """What the tasks look like."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int = Field(0, description="of the files")
    size: int = Field(100_000, ge=1, description="tasks before they repeat")
    lines: int = Field(12, ge=3, le=200, description="of a file")


class FilesTasks:
    """Task ``i`` is a pure function of the seed and ``i``."""

    def __init__(self, options: FilesOptions) -> None:
        self.options = options

    def __len__(self) -> int:
        return self.options.size

    def task(self, index: int) -> Task:
        options = self.options
        rng = random.Random(f"files/{options.seed}/{index % options.size}")
        names = ["ada", "bo", "cy", "dee", "eve", "flo", "gus"]
        rows = [(rng.choice(names), rng.randint(1, 99)) for _ in range(options.lines)]
        data = "".join(f"{name},{number}\n" for name, number in rows)
        who = rng.choice(rows)[0]
        kinds = {
            "sum": (
                f"data.csv has lines of name,number. Write the sum of the numbers of {who} to sum.txt.",
                {"sum.txt": str(sum(number for name, number in rows if name == who))},
            ),
            "sort": (
                "Write the lines of data.csv to sorted.csv, ordered by the number, largest first; "
                "lines with the same number keep their order.",
                {"sorted.csv": "".join(f"{n},{v}\n" for n, v in sorted(rows, key=lambda row: -row[1]))},
            ),
            "distinct": (
                "Write every name in data.csv once, one a line, in alphabetical order, to names.txt.",
                {"names.txt": "\n".join(sorted({name for name, _ in rows}))},
            ),
            "split": (
                f"Move the lines of {who} out of data.csv into {who}.csv, keeping the order in both files.",
                {
                    f"{who}.csv": "".join(f"{n},{v}\n" for n, v in rows if n == who),
                    "data.csv": "".join(f"{n},{v}\n" for n, v in rows if n != who),
                },
            ),
            "rename": (
                "Rename data.csv to old.csv without changing it.",
                {"data.csv": None, "old.csv": data},
            ),
        }
        kind = rng.choice(sorted(kinds))
        prompt, wanted = kinds[kind]
        return Task(
            id=f"files-{options.seed}-{index}",
            prompt=prompt,
            meta={"kind": kind, "files": {"data.csv": data}, "wanted": wanted},
        )
