"""The tools and cases of a golden file of tool calls, as the tests use them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from envs.tools import Tool

GOLDEN = Path(__file__).parents[1] / "data" / "tool_calls.json"
FILES = [GOLDEN, *([Path(os.environ["TOOL_CALL_CASES"])] if os.environ.get("TOOL_CALL_CASES") else [])]
TYPES: dict[str, dict[str, Any]] = {
    "string": {"type": "string"},
    "integer": {"type": "integer"},
    "boolean": {"type": "boolean"},
    "array<string>": {"type": "array", "items": {"type": "string"}},
}


def read_tools(file: Path) -> dict[str, Tool]:
    """Tools that only have a schema."""
    tools = {}
    for name, form in json.loads(file.read_text(encoding="utf-8"))["tools"].items():
        parameters = {
            "type": "object",
            "properties": {key: TYPES[kind] for key, kind in form["properties"].items()},
            "required": form["required"],
            "additionalProperties": False,
        }
        schema = {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}
        tools[name] = Tool(name=name, schema=schema, function=lambda **arguments: "", wants_context=False)
    return tools


def read_cases(file: Path) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["cases"]
    return cases
