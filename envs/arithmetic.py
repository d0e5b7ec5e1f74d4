"""Arithmetic on fresh random numbers, too large for a tiny model's head: it must learn to let Python do it."""

from __future__ import annotations

import random

from pydantic import BaseModel, ConfigDict, Field

from envs.equality import same_exactly
from envs.grader import Grader
from envs.rewards import Episode
from envs.types import Task


class ArithmeticOptions(BaseModel):
    """What the problems look like."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int = Field(0, description="of the numbers")
    size: int = Field(1_000_000, ge=1, description="problems before they repeat")
    min_digits: int = Field(2, ge=1, le=9)
    max_digits: int = Field(4, ge=1, le=9)
    operators: str = Field("*+-", pattern=r"^[-+*]+$")
    terms: int = Field(2, ge=2, le=6, description="numbers in an expression")


class ArithmeticTasks:
    """Problem ``i`` is a pure function of the seed and ``i``."""

    def __init__(self, options: ArithmeticOptions) -> None:
        if options.min_digits > options.max_digits:
            raise ValueError(f"min_digits ({options.min_digits}) is above max_digits ({options.max_digits})")
        self.options = options

    def __len__(self) -> int:
        return self.options.size

    def task(self, index: int) -> Task:
        options = self.options
        rng = random.Random(f"{options.seed}/{index % options.size}")
        expression = ""
        for term in range(options.terms):
            digits = rng.randint(options.min_digits, options.max_digits)
            number = str(rng.randint(10 ** (digits - 1), 10**digits - 1))
            expression += (rng.choice(options.operators) if term else "") + number
        return Task(
            id=f"arithmetic-{options.seed}-{index}",
            prompt=f"{expression}=?",
            answer=str(evaluate(expression)),
            meta={"expression": expression},
        )


async def same_number(episode: Episode, grader: Grader) -> float:
    """1 for the number itself: to algebra the question ``12*34`` is as right as its answer."""
    if episode.answer is None or episode.task.answer is None:
        return 0.0
    return float(same_exactly(episode.task.answer, episode.answer) is True)


def evaluate(expression: str) -> int:
    """The value of integers joined by ``+ - *``, without ``eval``."""
    total, product, sign = 0, None, 1
    number = ""
    for character in expression + "+":
        if character.isdigit():
            number += character
            continue
        factor = int(number)
        product = factor if product is None else product * factor
        number = ""
        if character != "*":
            total += sign * product
            product, sign = None, (-1 if character == "-" else 1)
    return total
