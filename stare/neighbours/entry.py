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
    coefficient: float | None = None  # of a regulariser in the loss, unless its function has one of its own
    choice: Callable[..., Any] | None = None  # what picks the tokens that a regulariser acts on, over the whole batch

    @property
    def is_trainable(self) -> bool:
        """The training loop can use it by name."""
        return not self.needs

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Its parameters with their defaults, from the functions themselves."""
        own = {} if self.coefficient is None else {"coefficient": self.coefficient}
        return own | _defaults(self.function) | ({} if self.choice is None else _defaults(self.choice))


def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
