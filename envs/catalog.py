"""The environments that ship with the package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from envs.arithmetic import ArithmeticOptions, ArithmeticTasks
from envs.data import TaskList, TaskSource, load_jsonl
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
from envs.types import Demonstration, Task

STEP_BY_STEP = "{problem}\nPlease reason step by step, and put your final answer within \\boxed{{}}."


def problems_from_file(env_id: str, prompt: str = "{problem}") -> Any:
    """Tasks from the JSONL file that the option ``path`` names, each problem put into the ``prompt``."""

    def tasks(options: Mapping[str, Any]) -> TaskSource:
        if set(options) - {"path", "prompt"} or "path" not in options:
            raise ValueError(
                f"options of {env_id}: `path` of a JSONL file, perhaps `prompt`, nothing else; not {dict(options)}"
            )
        form = str(options.get("prompt", prompt))
        try:
            form.format(problem="")
        except (LookupError, ValueError) as error:
            raise ValueError(f"prompt = {form!r}: a text with {{problem}} in it, other braces doubled") from error
        return TaskList([_asked(task, form) for task in load_jsonl(options["path"])])

    return tasks


def _asked(task: Task, form: str) -> Task:
    return replace(task, prompt=form.format(problem=task.prompt))


async def thought(episode: Episode, grader: Grader) -> float:
    """1 when the last turn ended its reasoning before it answered."""
    return float("</think>" in episode.turns[-1])


SPECS = (
    EnvSpec(
        id="agentic/Arithmetic-v1",
        summary="fresh random arithmetic, made for a model too small to do it without the python tool",
        tasks=lambda options: ArithmeticTasks(ArithmeticOptions.model_validate(options)),
        tools=(python,),
        expert=lambda task: f"print({task.meta['expression']})",
    ),
    EnvSpec(
        id="agentic/MathPython-v1",
        summary="word problems from a JSONL file, solved with the python tool, answered in a box",
        tasks=problems_from_file("agentic/MathPython-v1"),
        tools=(python,),
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
        tasks=problems_from_file("agentic/ShortCoT-v1", STEP_BY_STEP),
        limits=Limits(max_turns=1),
    ),
    EnvSpec(
        id="agentic/LongCoT-v1",
        summary="problems from a JSONL file, one turn of reasoning between think tags, then a boxed answer",
        tasks=problems_from_file("agentic/LongCoT-v1", STEP_BY_STEP),
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
