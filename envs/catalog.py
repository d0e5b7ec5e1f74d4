"""The environments that ship with the package."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from envs.arithmetic import ArithmeticOptions, ArithmeticTasks, same_number
from envs.data import Mixture, TaskList, TaskSource, check_row_tools, load_tasks
from envs.env import Limits
from envs.files import FilesOptions, FilesTasks, wanted_files
from envs.grader import Grader
from envs.maze import MazeOptions, MazeTasks, is_out, move
from envs.reasoning import ReasoningGymTasks, gold_answer
from envs.registration import EnvSpec
from envs.rewards import Episode
from envs.search import SearchOptions, SearchTasks, same_words, search
from envs.toolbox import bash
from envs.tools import python
from envs.types import Demonstration

STEP_BY_STEP = "{problem}\nPlease reason step by step, and put your final answer within \\boxed{{}}."


class FileOptions(BaseModel):
    """Where problems come from, and which of them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str | None = Field(None, description="a .jsonl, .csv or .parquet file, or hf:NAME")
    mix: Mapping[str, float] = Field(default_factory=dict, description="instead of path: several, with weights")
    columns: Mapping[str, str] = Field(default_factory=dict, description="what the file calls our fields")
    split: str = Field("train", description="of a Hugging Face data set")
    prompt: str | None = Field(None, description="a text with {problem} in it; the environment's own when None")
    max_chars: int | None = Field(None, ge=1, description="longer problems are left out")
    where: Mapping[str, str] = Field(default_factory=dict, description="only rows with these values in meta or source")
    shuffle: int | None = Field(None, description="seed of another order; the file's own when None")
    limit: int | None = Field(None, ge=1, description="only so many, after the shuffle")


def problems_from_file(
    prompt: str = "{problem}", tools: Sequence[str] = ()
) -> Callable[[Mapping[str, Any]], TaskSource]:
    """A function from ``FileOptions`` to tasks, each problem put into the ``prompt``.

    ``tools`` are the names of the environment's; a row may ask for some of them alone.
    """

    def tasks(given: Mapping[str, Any]) -> TaskSource:
        options = FileOptions.model_validate(given)
        form = options.prompt or prompt
        try:
            if form.format(problem="\0").count("\0") != 1:
                raise ValueError("no {problem}")
        except (LookupError, ValueError) as error:
            raise ValueError(f"prompt = {form!r}: a text with {{problem}} in it once, other braces doubled") from error
        if (options.path is None) == (not options.mix):
            raise ValueError("the environment needs a file: give `path`, or `mix` with several and their weights")
        weights = options.mix or {str(options.path): 1.0}
        sources = [_from(path, options, form, tools) for path in weights]
        return sources[0] if len(sources) == 1 else Mixture(sources, list(weights.values()))

    return tasks


def _from(path: str, options: FileOptions, form: str, tools: Sequence[str]) -> TaskList:
    longest = options.max_chars or sys.maxsize
    read = load_tasks(path, options.columns, options.split)
    for task in read:
        check_row_tools(task, tools, path)
    for name in options.where:
        if not any(name in task.meta for task in read):
            raise ValueError(f"{path}: no row has a field {name!r} to choose by; `where` looks at source and meta")
    chosen = [t for t in read if all(str(t.meta.get(name)) == value for name, value in options.where.items())]
    if not chosen:
        raise ValueError(f"{path}: no row has {dict(options.where)}")
    kept = [task for task in chosen if len(task.prompt) <= longest]
    if not kept:
        raise ValueError(f"{path}: no problem has at most max_chars = {longest} characters")
    if options.shuffle is not None:
        random.Random(options.shuffle).shuffle(kept)
    kept = kept[: options.limit]
    return TaskList([replace(task, prompt=form.format(problem=task.prompt)) for task in kept])


async def thought(episode: Episode, grader: Grader) -> float:
    """1 when the last turn ended its reasoning before it answered."""
    return float("</think>" in episode.turns[-1])


SPECS = (
    EnvSpec(
        id="agentic/Arithmetic-v1",
        summary="fresh random arithmetic, made for a model too small to do it without the python tool",
        tasks=lambda options: ArithmeticTasks(ArithmeticOptions.model_validate(options)),
        tools=(python,),
        terms={"correct": same_number},
        expert=lambda task: f"print({task.meta['expression']})",
    ),
    EnvSpec(
        id="agentic/MathPython-v1",
        summary="word problems from a JSONL file, solved with the python tool, answered in a box",
        tasks=problems_from_file(tools=("python",)),
        tools=(python,),
        weights={"correct": 1.0, "void_turn": 0.0},
        instruction="Solve the problem with Python. When you know the result, put the final answer within \\boxed{}.",
        demonstrations=(
            Demonstration(
                prompt="A box holds 12 eggs. How many eggs are in 7 boxes, if 3 eggs are broken and thrown away?",
                tool="python",
                arguments={"code": "print(12 * 7 - 3)"},
                output="81",
                answer="\\boxed{81}",
            ),
        ),
    ),
    EnvSpec(
        id="agentic/ShortCoT-v1",
        summary="problems from a JSONL file, one turn of reasoning, answered in a box",
        tasks=problems_from_file(STEP_BY_STEP),
        limits=Limits(max_turns=1),
    ),
    EnvSpec(
        id="agentic/LongCoT-v1",
        summary="problems from a JSONL file, one turn of reasoning between think tags, then a boxed answer",
        tasks=problems_from_file(STEP_BY_STEP),
        instruction="Think between <think> and </think>, as long as you need; then give the answer.",
        weights={"correct": 1.0, "thought": 0.0},
        terms={"thought": thought},
        limits=Limits(max_turns=1, wall_s=3600),
    ),
    EnvSpec(
        id="agentic/Bash-v1",
        summary="files to be brought into a wanted state by shell commands; the reward looks at the files",
        tasks=lambda options: FilesTasks(FilesOptions.model_validate(options)),
        tools=(bash,),
        instruction="You work in a folder with files. Use the shell, and say that you are done when you are.",
        terms={"correct": wanted_files},
        limits=Limits(max_turns=8, max_tool_calls=16),
    ),
    EnvSpec(
        id="agentic/SearchQA-v1",
        summary="questions that take several searches in a small library to answer",
        tasks=lambda options: SearchTasks(SearchOptions.model_validate(options)),
        tools=(search,),
        instruction="Search the library to answer. Put the final answer within \\boxed{}.",
        terms={"correct": same_words},
        limits=Limits(max_turns=8, max_tool_calls=16),
    ),
    EnvSpec(
        id="agentic/Maze-v1",
        summary="a maze that is walked one call at a time, made for episodes of many turns",
        tasks=lambda options: MazeTasks(MazeOptions.model_validate(options)),
        tools=(move,),
        terms={"correct": is_out},
        limits=Limits(max_turns=64, max_tool_calls=64, max_calls_per_turn=1),
    ),
    EnvSpec(
        id="agentic/ReasoningGym-v1",
        summary="any task of the package reasoning-gym by name, with the python tool, scored exactly",
        tasks=ReasoningGymTasks,
        tools=(python,),
        terms={"correct": gold_answer},
        example={"name": "base_conversion"},
    ),
)
