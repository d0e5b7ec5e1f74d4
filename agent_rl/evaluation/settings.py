"""Everything that one evaluation is told, and which of it makes its episodes what they are."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agent_rl.errors import ConfigError
from agent_rl.evaluation.suites import Scenario
from sandboxes.base import SandboxSpec


class Settings(BaseModel):
    """What ``agent-rl eval`` was asked for; every default stands here."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    suite: str
    scenario: Scenario | None = None
    data: str | None = None
    options: dict[str, Any] = Field(default_factory=dict, description="of the environment, where the suite is one")
    k: int | None = Field(None, ge=1)
    limit: int | None = Field(None, ge=1)
    seed: int = Field(0, ge=0)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(0.7, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    max_episode_tokens: int | None = Field(None, ge=2)
    max_turns: int | None = Field(None, ge=1)
    max_tool_calls: int | None = Field(None, ge=0)
    wall_s: float | None = Field(None, gt=0)
    dialect: str | None = None
    shots: int = Field(0, ge=0)

    # How it is done; may change from run to run of one evaluation.
    engine: Literal["vllm", "transformers"] | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    kv_cache_gb: float | None = Field(None, gt=0)
    concurrency: int | None = Field(None, ge=1)
    max_refills: int = Field(2, ge=0)
    max_failures: int = Field(16, ge=1)
    sandbox: SandboxSpec = SandboxSpec()
    train_data: tuple[str, ...] = ()

    # Of an endpoint.
    served_name: str | None = None
    key_variable: str = Field("OPENAI_API_KEY", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    requests_per_minute: float | None = Field(None, gt=0)
    tokens_per_minute: float | None = Field(None, gt=0)
    timeout_s: float = Field(600.0, gt=0)
    extra: dict[str, Any] = Field(default_factory=dict)
    price_in: float | None = Field(None, ge=0, description="dollars a million prompt tokens")
    price_out: float | None = Field(None, ge=0, description="dollars a million completion tokens")
    max_cost: float | None = Field(None, gt=0, description="dollars; no episode starts after")

    output: str = "evals"
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")

    @model_validator(mode="after")
    def _prices_come_together(self) -> Settings:
        if (self.price_in is None) != (self.price_out is None):
            raise ValueError("a price is two numbers: of prompt and of completion tokens")
        if self.max_cost is not None and self.price_in is None:
            raise ValueError("max_cost needs prices: --price IN OUT, dollars a million tokens")
        return self

    @property
    def is_endpoint(self) -> bool:
        return self.model.startswith(("http://", "https://"))

    @property
    def folder_name(self) -> str:
        """``name``, or one made of suite, scenario and model."""
        if self.name is not None:
            return self.name
        model = self.model.rstrip("/")
        if self.is_endpoint:
            tail = self.served_name or model.split("//", 1)[1]
        else:
            pieces = model.split("/")
            tail = "-".join(pieces[-2:]) if pieces[-1] in ("model", "best") else pieces[-1]
        parts = [self.suite.rsplit("/", 1)[-1], *([self.scenario] if self.scenario else []), tail]
        return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts)).strip("-._")

    def cost(self, prompt_tokens: float, completion_tokens: float) -> float | None:
        """Dollars; None without prices."""
        if self.price_in is None or self.price_out is None:
            return None
        return (prompt_tokens * self.price_in + completion_tokens * self.price_out) / 1e6


def checked(**values: Any) -> Settings:
    """Raises ``ConfigError`` with one line that names every fault."""
    try:
        return Settings(**values)
    except ValidationError as error:
        faults = []
        for fault in error.errors(include_url=False):
            name = ".".join(map(str, fault["loc"]))
            message = fault["msg"].removeprefix("Value error, ")
            faults.append(f"{name} = {fault['input']!r}: {message}" if name else message)
        raise ConfigError("; ".join(faults)) from None
