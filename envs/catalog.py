"""The environments that ship with the package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from envs.arithmetic import ArithmeticOptions, ArithmeticTasks
from envs.data import TaskList, TaskSource, load_jsonl
from envs.env import Limits
from envs.registration import EnvSpec
from envs.tools import python
from envs.types import Task

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
    ),
    EnvSpec(
        id="agentic/ShortCoT-v1",
        summary="problems from a JSONL file, one turn of reasoning, answered in a box",
        tasks=problems_from_file("agentic/ShortCoT-v1", STEP_BY_STEP),
        limits=Limits(max_turns=1),
    ),
)
