"""A maze that is walked one call at a time: many turns, and a reward that only the last of them decides."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from envs.grader import Grader
from envs.rewards import Episode
from envs.tools import ToolContext, ToolOutput, tool
from envs.types import Task

STEPS = {"north": (0, -1), "south": (0, 1), "west": (-1, 0), "east": (1, 0)}

Cell = tuple[int, int]


class MazeOptions(BaseModel):
    """What the mazes look like."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int = Field(0, description="of the mazes")
    size: int = Field(100_000, ge=1, description="mazes before they repeat")
    width: int = Field(4, ge=2, le=20, description="cells on a side")


class MazeTasks:
    """Maze ``i`` is a pure function of the seed and ``i``."""

    def __init__(self, options: MazeOptions) -> None:
        self.options = options

    def __len__(self) -> int:
        return self.options.size

    def task(self, index: int) -> Task:
        options = self.options
        key = f"{options.seed}/{index % options.size}"
        return Task(
            id=f"maze-{options.seed}-{index}",
            prompt=(
                f"You are in the north-west corner of a maze of {options.width} by {options.width} rooms. "
                f"Walk to the south-east corner. {_view(doors(key, options.width), (0, 0))}"
            ),
            meta={"maze": key, "width": options.width},
        )


@tool
def move(ctx: ToolContext, direction: Literal["north", "south", "east", "west"]) -> ToolOutput:
    """Walk to the next room.

    Args:
        direction: where to
    """
    width = int(ctx.task.meta["width"])
    open_doors = doors(str(ctx.task.meta["maze"]), width)
    place: Cell = ctx.state.get("place", (0, 0))
    there = (place[0] + STEPS[direction][0], place[1] + STEPS[direction][1])
    if (place, there) not in open_doors:
        return ToolOutput(text=f"There is a wall. {_view(open_doors, place)}", succeeded=False)
    ctx.state["place"] = there
    if there == (width - 1, width - 1):
        return ToolOutput(text="You are out.", answer="out")
    return ToolOutput(text=_view(open_doors, there))


async def is_out(episode: Episode, grader: Grader) -> float:
    """1 when the walk ended in the south-east corner."""
    corner = int(episode.task.meta["width"]) - 1
    return float(episode.state.get("place") == (corner, corner))


@lru_cache(maxsize=1024)
def doors(key: str, width: int) -> frozenset[tuple[Cell, Cell]]:
    """Pairs of neighbouring cells with a door between them, both ways; exactly one way leads from any to any."""
    rng = random.Random(f"maze/{key}")
    found: set[tuple[Cell, Cell]] = set()
    seen = {(0, 0)}
    path: list[Cell] = [(0, 0)]
    while path:
        x, y = path[-1]
        around = [(x + dx, y + dy) for dx, dy in STEPS.values()]
        fresh = [c for c in around if 0 <= c[0] < width and 0 <= c[1] < width and c not in seen]
        if not fresh:
            path.pop()
            continue
        chosen = rng.choice(fresh)
        found |= {((x, y), chosen), (chosen, (x, y))}
        seen.add(chosen)
        path.append(chosen)
    return frozenset(found)


def way_out(key: str, width: int) -> list[str]:
    """The directions of the shortest walk."""
    open_doors = doors(key, width)
    walks: list[tuple[Cell, list[str]]] = [((0, 0), [])]
    seen = {(0, 0)}
    for place, walk in walks:
        if place == (width - 1, width - 1):
            return walk
        for direction, (dx, dy) in STEPS.items():
            there = (place[0] + dx, place[1] + dy)
            if (place, there) in open_doors and there not in seen:
                seen.add(there)
                walks.append((there, [*walk, direction]))
    raise AssertionError("every cell is connected")


def _view(open_doors: frozenset[tuple[Cell, Cell]], place: Cell) -> str:
    ways = [name for name, (dx, dy) in STEPS.items() if (place, (place[0] + dx, place[1] + dy)) in open_doors]
    return f"Doors lead {' and '.join(ways)}."
