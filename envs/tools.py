"""``@tool``: one typed, documented function is a tool; its JSON schema is made, or it is refused, where it is defined.

The function's own source runs inside the episode's sandbox, unless it is declared to run here: by ``host=True``, or by
a first parameter ``ctx: ToolContext``, which is injected and stays out of the schema.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import inspect
import json
import math
import random
import re
import symtable
import textwrap
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, get_type_hints, overload

import jsonschema
from pydantic import TypeAdapter, ValidationError

from envs.types import Task
from sandboxes import ExecutionResult, Sandbox, SandboxFailure, SandboxPool

MAX_FAULT = 500
"""Characters of a complaint about arguments: it quotes them, and they are the model's."""


class ToolBug(Exception):
    """A tool of ours raised: neither the model's fault nor the sandbox's."""


class ToolError(Exception):
    """For tools to raise when the model asked for something that cannot be: the text becomes the observation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutput:
    """What the model sees, and whether the call did what it was for (a program that raised did not)."""

    text: str
    succeeded: bool = True
    answer: str | None = None  # not None: the episode ends after this turn, with this as its answer


class HeldSandbox:
    """The sandbox that one episode keeps: leased when first asked for, so that files stay from call to call.

    Whoever makes one releases it; that may be done twice, and after a failure.
    """

    def __init__(self, pool: SandboxPool | None, files: Mapping[str, str] | None = None) -> None:
        self._pool = pool
        self._files = {name: text.encode() for name, text in (files or {}).items()}
        self._lease: AbstractAsyncContextManager[Sandbox] | None = None
        self._box: Sandbox | None = None
        self._turn = asyncio.Lock()  # one user at a time, by the sandbox's contract
        self.starved = False  # whether a call of the episode was given up while it waited for a sandbox of the pool

    @property
    def leased(self) -> bool:
        """Whether the episode has used it, and it has not broken."""
        return self._box is not None

    async def run(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        session: str | None = None,
        language: str = "python",
        fetch: Sequence[str] = (),
    ) -> ExecutionResult:
        """The program's result. Raises ``SandboxFailure`` for our failures; the sandbox is then gone."""
        async with self._turn:
            if self._box is None:
                if self._pool is None:
                    raise ToolBug("the tool wants a sandbox, but the environment was made without a pool")
                lease = self._pool.lease()
                self._box = await self.waited_for(lease)
                self._lease = lease
                if self._files:
                    await self._guarded(self._box.exec("", files=self._files))
            execution = self._box.exec(code, timeout_s=timeout_s, session=session, language=language, fetch=fetch)
            return await self._guarded(execution)

    async def waited_for(self, lease: AbstractAsyncContextManager[Sandbox]) -> Sandbox:
        """The lease's sandbox; ``starved`` is true when the wait for it is cancelled."""
        try:
            return await lease.__aenter__()
        except asyncio.CancelledError:
            self.starved = True
            raise

    async def fetch(self, names: Sequence[str]) -> dict[str, bytes]:
        """Files of the working folder, as the sandbox's worker reads them; one that is no regular file is left out.

        No program of the model runs for it, those that ran are gone (sessions aside), and no link is followed.
        """
        return (await self.run("", fetch=names)).files

    async def _guarded(self, execution: Awaitable[ExecutionResult]) -> ExecutionResult:
        try:
            return await execution
        except BaseException as error:  # also a cancelled call: what it left running must not meet the next lease
            await self.release(error)
            raise

    async def release(self, error: BaseException | None = None) -> None:
        """The sandbox is back in the pool, or thrown away when ``error`` says that it broke."""
        lease, self._lease, self._box = self._lease, None, None
        if lease is None:
            return
        try:
            await lease.__aexit__(type(error) if error else None, error, None)
        except BaseException as raised:
            if raised is not error:
                raise


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """What a tool may use of the episode that it is called in."""

    task: Task
    pool: SandboxPool | None
    state: dict[str, Any] = field(default_factory=dict)  # the tools' own memory, alive for the episode
    rng: random.Random = field(default_factory=lambda: random.Random(0))  # the episode's, seeded by its reset
    deadline: float = math.inf  # ``time.monotonic()`` at which the time of the episode's calls is over
    held: HeldSandbox | None = None  # the episode's own sandbox

    async def run(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        keep: bool = False,
        session: str | None = None,
        language: str = "python",
    ) -> ExecutionResult:
        """The program's result from a clean sandbox; with ``keep`` from the episode's own, where files stay.

        With ``keep``, ``session`` names a process of that sandbox in which variables stay, too. ``language`` is the
        name of any interpreter in the sandbox.

        Raises ``SandboxFailure`` for our failures.
        """
        if keep:
            if self.held is None:
                raise ToolBug("the tool wants the episode's sandbox, but is called outside an episode")
            return await self.held.run(code, timeout_s=timeout_s, session=session, language=language)
        if self.pool is None:
            raise ToolBug("the tool wants a sandbox, but the environment was made without a pool")
        async with AsyncExitStack() as stack:
            lease = self.pool.lease()
            box = await (self.held.waited_for(lease) if self.held else lease.__aenter__())
            stack.push_async_exit(lease)
            return await box.exec(code, timeout_s=timeout_s, language=language)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function with its schema in OpenAI's function form."""

    name: str
    schema: dict[str, Any]
    function: Callable[..., str | ToolOutput | Awaitable[str | ToolOutput]]
    wants_context: bool
    adapters: Mapping[str, TypeAdapter[Any]] = field(default_factory=dict)  # from JSON to the parameters' types
    parameters: tuple[inspect.Parameter, ...] = ()  # of the Python function, for libraries that read signatures
    timeout_s: float | None = None  # of one call; None leaves it to the episode's wall time
    max_chars: int | None = None  # of one result; None leaves it to the episode's limit
    parallel: bool = False  # whether calls of one turn may overlap
    ends: bool = False  # whether its output may carry an answer, which ends the episode
    retries: int = 0  # how often a call is repeated after a broken sandbox or connection

    def fault(self, arguments: Mapping[str, Any]) -> str:
        """What is wrong with these arguments, in words for the model; empty when they are right."""
        parameters = self.schema["function"]["parameters"]
        try:
            errors = sorted(jsonschema.Draft202012Validator(parameters).iter_errors(arguments), key=_place)
            fault = "; ".join(f"{_place(error)}: {error.message}".removeprefix(": ") for error in errors)
            if not fault:
                self._converted(arguments)
        except ValidationError as error:
            fault = "; ".join(f"{error.title}: {entry['msg']}" for entry in error.errors(include_url=False))
        except RecursionError:
            fault = "the arguments are nested too deeply"
        return fault if len(fault) <= MAX_FAULT else f"{fault[:MAX_FAULT]} ..."

    async def call(self, ctx: ToolContext, arguments: Mapping[str, Any]) -> ToolOutput:
        """The function's result. A ``ToolError`` and the tool's own time-out are results; all else it raises, too."""
        values = self._converted(arguments)
        for attempt in range(self.retries + 1):
            try:
                async with asyncio.timeout(self.timeout_s) as limit:
                    return await self._once(ctx, values)
            except ToolError as error:
                return ToolOutput(text=f"Error: {error}", succeeded=False)
            except TimeoutError:
                if not limit.expired():
                    raise
                return ToolOutput(text=f"[stopped: {self.name} took more than {self.timeout_s:g} s]", succeeded=False)
            except (SandboxFailure, ConnectionError):
                if attempt == self.retries:
                    raise
        raise AssertionError("unreachable")

    async def _once(self, ctx: ToolContext, values: Mapping[str, Any]) -> ToolOutput:
        positional = (ctx,) if self.wants_context else ()
        if self.timeout_s is not None and not inspect.iscoroutinefunction(self.function):
            # A blocking function cannot be stopped, but the episode need not wait for its thread.
            result = await asyncio.to_thread(self.function, *positional, **values)
        else:
            result = self.function(*positional, **values)
        if inspect.isawaitable(result):
            result = await result
        return result if isinstance(result, ToolOutput) else ToolOutput(text=result)

    def _converted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: self.adapters[name].validate_python(value) if name in self.adapters else value
            for name, value in arguments.items()
        }


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    timeout_s: float | None = None,
    max_chars: int | None = None,
    parallel: bool = False,
    ends: bool = False,
    retries: int = 0,
    host: bool = False,
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(function: Callable[..., Any] | None = None, /, *, host: bool = False, **settings: Any) -> Any:
    """A tool from a function with typed parameters, a docstring and an ``Args:`` line for each parameter.

    Args:
        function: the function; or leave it out and name settings: ``@tool(timeout_s=5)``.
        host: the function runs here, in our process and with our rights, as one with a ``ToolContext`` and one with
            ``ends`` always does. Any other runs in a clean sandbox and must stand alone: imports inside, JSON in,
            printable out; it may raise ``ToolError`` there too.
        settings: ``timeout_s``, ``max_chars``, ``parallel``, ``ends``, ``retries``, as in ``Tool``.

    Raises:
        TypeError: a parameter has no type or no description, the function has no docstring, or it is to run in the
            sandbox and cannot stand alone.
    """
    if function is None:
        return lambda later: _make_tool(later, host, settings)
    return _make_tool(function, host, settings)


def _make_tool(function: Callable[..., Any], host: bool, settings: Mapping[str, Any]) -> Tool:
    name = function.__name__
    summary, described = _read_docstring(inspect.getdoc(function) or "")
    if not summary:
        raise TypeError(f"tool {name}: write a docstring; the model reads it")
    hints = get_type_hints(function)
    parameters = list(inspect.signature(function).parameters.values())
    wants_context = bool(parameters) and hints.get(parameters[0].name) is ToolContext
    sandboxed = not (host or wants_context or settings.get("ends"))
    properties: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    required: list[str] = []
    adapters: dict[str, TypeAdapter[Any]] = {}
    for parameter in parameters[wants_context:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"tool {name}: parameter {parameter} cannot be given by name; a call names every argument")
        if parameter.name not in hints:
            raise TypeError(f"tool {name}: parameter {parameter.name!r} has no type")
        if parameter.name not in described:
            raise TypeError(f"tool {name}: describe {parameter.name!r} under `Args:` in the docstring")
        adapters[parameter.name] = TypeAdapter(hints[parameter.name])
        schema = adapters[parameter.name].json_schema()
        definitions |= schema.pop("$defs", {})  # references in a schema count from its root
        if sandboxed and definitions:
            raise TypeError(
                f"tool {name}: the sandbox is given JSON, no {hints[parameter.name]}: write @tool(host=True), or take "
                f"{parameter.name!r} as a dict"
            )
        properties[parameter.name] = {**schema, "description": described[parameter.name]}
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    form: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    if definitions:
        form["$defs"] = definitions
    return Tool(
        name=name,
        schema={"type": "function", "function": {"name": name, "description": summary, "parameters": form}},
        function=_in_sandbox(function) if sandboxed else function,
        wants_context=wants_context or sandboxed,
        adapters=adapters,
        parameters=tuple(p.replace(annotation=hints[p.name]) for p in parameters[wants_context:]),
        **settings,
    )


def _in_sandbox(function: Callable[..., Any]) -> Callable[..., Awaitable[ToolOutput]]:
    """The function as a call that runs its source in a clean sandbox and prints what it returns."""
    name = function.__name__
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError, ValueError) as error:
        raise TypeError(f"tool {name}: its source cannot be read ({error}); write @tool(host=True)") from None
    assert isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef))
    definition.decorator_list = []
    definition.returns = None
    for parameter in (*definition.args.args, *definition.args.kwonlyargs):
        parameter.annotation = None  # its types need not be known in there
    source = ast.unparse(definition)
    if foreign := sorted(_foreign_names(source, {name, "ToolError"})):
        raise TypeError(
            f"tool {name}: it runs inside the sandbox and cannot see {', '.join(foreign)} there: import inside the "
            "function, or write @tool(host=True)"
        )
    start = "__import__('asyncio').run({})" if isinstance(definition, ast.AsyncFunctionDef) else "{}"

    async def run(ctx: ToolContext, **arguments: Any) -> ToolOutput:
        call = start.format(f"{name}(**__import__('json').loads({json.dumps(arguments)!r}))")
        result = await ctx.run(f"class ToolError(Exception): pass\n{source}\nprint({call})\n")
        if result.status == "error" and result.stderr.strip():
            reason = result.stderr.strip().splitlines()[-1].removeprefix("ToolError: ")
            return ToolOutput(text=f"Error: {reason}", succeeded=False)
        return ToolOutput(text=describe_execution(result), succeeded=result.status == "ok")

    return run


def _foreign_names(source: str, known: set[str]) -> set[str]:
    """Names that the source uses, and that are neither its own nor Python's."""

    def used(table: symtable.SymbolTable) -> set[str]:
        names = {s.get_name() for s in table.get_symbols() if s.is_referenced() and s.is_global()}
        return names.union(*(used(child) for child in table.get_children()))

    module = symtable.symtable(source, "tool", "exec")
    defaults = {s.get_name() for s in module.get_symbols() if s.is_referenced()}
    return (used(module) | defaults) - known - set(dir(builtins))


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


def _place(error: jsonschema.ValidationError) -> str:
    return ".".join(map(str, error.absolute_path))


@tool(parallel=True)
async def python(ctx: ToolContext, code: str) -> ToolOutput:
    """Run a Python program and see what it prints.

    Args:
        code: the program
    """
    result = await ctx.run(code)
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
