"""``@tool``: one typed, documented function is a tool; its JSON schema is made, or it is refused, where it is defined.

A tool's first parameter may be ``ctx: ToolContext``: it is injected and stays out of the schema.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import jsonschema
from pydantic import TypeAdapter

from envs.types import Task
from sandboxes import ExecutionResult, SandboxPool


class ToolBug(Exception):
    """A tool of ours raised: neither the model's fault nor the sandbox's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutput:
    """What the model sees, and whether the call did what it was for (a program that raised did not)."""

    text: str
    succeeded: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """What a tool may use of the episode that it is called in."""

    task: Task
    pool: SandboxPool | None
    state: dict[str, Any] = field(default_factory=dict)  # the tool's own memory, alive for the episode

    async def run_python(self, code: str, *, timeout_s: float | None = None) -> ExecutionResult:
        """The program's result from a clean sandbox. Raises ``SandboxFailure`` for our failures."""
        if self.pool is None:
            raise ToolBug("the tool wants a sandbox, but the environment was made without a pool")
        async with self.pool.lease() as box:
            return await box.exec(code, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function with its schema in OpenAI's function form."""

    name: str
    schema: dict[str, Any]
    function: Callable[..., str | ToolOutput | Awaitable[str | ToolOutput]]
    wants_context: bool

    def fault(self, arguments: Mapping[str, Any]) -> str:
        """What is wrong with these arguments, in words for the model; empty when they are right."""
        parameters = self.schema["function"]["parameters"]
        errors = sorted(jsonschema.Draft202012Validator(parameters).iter_errors(arguments), key=str)
        return "; ".join(
            f"{'.'.join(map(str, error.absolute_path))}: {error.message}" if error.absolute_path else error.message
            for error in errors
        )

    async def call(self, ctx: ToolContext, arguments: Mapping[str, Any]) -> ToolOutput:
        """Raises whatever the function raises."""
        result = self.function(ctx, **arguments) if self.wants_context else self.function(**arguments)
        if inspect.isawaitable(result):
            result = await result
        return result if isinstance(result, ToolOutput) else ToolOutput(text=result)


def tool(function: Callable[..., Any]) -> Tool:
    """A tool from a function with typed parameters, a docstring and an ``Args:`` line for each parameter.

    Raises:
        TypeError: a parameter has no type or no description, or the function has no docstring.
    """
    name = function.__name__
    summary, described = _read_docstring(inspect.getdoc(function) or "")
    if not summary:
        raise TypeError(f"tool {name}: write a docstring; the model reads it")
    hints = get_type_hints(function)
    parameters = list(inspect.signature(function).parameters.values())
    wants_context = bool(parameters) and hints.get(parameters[0].name) is ToolContext
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in parameters[wants_context:]:
        if parameter.name not in hints:
            raise TypeError(f"tool {name}: parameter {parameter.name!r} has no type")
        if parameter.name not in described:
            raise TypeError(f"tool {name}: describe {parameter.name!r} under `Args:` in the docstring")
        properties[parameter.name] = {
            **TypeAdapter(hints[parameter.name]).json_schema(),
            "description": described[parameter.name],
        }
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    described_function = {"name": name, "description": summary, "parameters": schema}
    return Tool(
        name=name,
        schema={"type": "function", "function": described_function},
        function=function,
        wants_context=wants_context,
    )


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The part before ``Args:`` and the description of each parameter."""
    before, _, after = text.partition("Args:")
    described: dict[str, str] = {}
    last = ""
    for line in after.splitlines():
        match = re.match(r"\s+(\w+)(?: \([^)]*\))?:\s*(.+)", line)
        if match:
            last = match.group(1)
            described[last] = match.group(2).strip()
        elif last and line.startswith("        "):
            described[last] += " " + line.strip()
        elif line.strip():
            break
    return " ".join(before.split()), described


@tool
async def python(ctx: ToolContext, code: str) -> ToolOutput:
    """Run a Python program and see what it prints.

    Args:
        code: the program
    """
    result = await ctx.run_python(code)
    return ToolOutput(text=describe_execution(result), succeeded=result.status == "ok")


def describe_execution(result: ExecutionResult) -> str:
    """What a model is told of a program: its output, its errors, and how it ended when that was not well."""
    parts = [text.rstrip("\n") for text in (result.stdout, result.stderr) if text.strip()]
    if result.status == "timeout":
        parts.append(f"[stopped: still running after {result.wall_s:.0f} s]")
    elif result.status == "memory":
        parts.append("[stopped: out of memory]")
    elif result.status == "killed":
        parts.append("[the program was killed by a signal]")
    elif result.exit_code and not result.stderr.strip():
        parts.append(f"[exit code {result.exit_code}]")
    return "\n".join(parts) if parts else "[no output]"
