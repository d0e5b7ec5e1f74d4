"""What crosses the border of an environment, as JSON and back."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from envs.types import ModelTurn, Opening, Task, TurnResult

TASK = TypeAdapter(Task)
TURN = TypeAdapter(ModelTurn)
OPENING = TypeAdapter(Opening)
RESULT = TypeAdapter(TurnResult)


def to_json(value: Task | ModelTurn | Opening | TurnResult) -> dict[str, Any]:
    """Plain lists and objects; the adapters above read them back."""
    return asdict(value)
