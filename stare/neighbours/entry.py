"""What the registry holds of a method."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Hook = Literal["advantage", "turn advantage", "token weight", "ratio", "regulariser", "sampling"]

Status = Literal["confirmed", "formula unconfirmed"]
"""Confirmed: the formula was read in the paper or in public code. Unconfirmed: part of it is our reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One entry."""

    name: str
    hook: Hook
    function: Callable[..., Any]
    formula: str  # plain text
    source: str  # title, arXiv id
    status: Status = "confirmed"
    needs: str = ""  # what the training loop does not have and a caller must supply; empty: it can be trained with
    note: str = ""  # where ours differs from the paper or its code

    @property
    def is_trainable(self) -> bool:
        """The training loop can use it by name."""
        return not self.needs

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Its parameters with their defaults, from the function itself."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
