"""``agent-rl envs | tools | data | grade``: environments and tools without a model."""

from __future__ import annotations

import argparse
import asyncio
import difflib
import json
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from envs.answers import stated_answer
from envs.env import Resources
from envs.grader import Grader
from envs.parsers import DIALECTS, get_dialect, parsed_turn
from envs.registration import EnvSpec, get, ids
from envs.toolbox import TOOLBOX
from envs.tools import Tool, ToolContext
from envs.types import ModelTurn, Task
from sandboxes import SandboxFailure, SandboxSpec, resolve


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    envs_verbs = _group(commands, "envs", "list, show and play environments")
    _verb(envs_verbs, "list", "every environment", "agent-rl envs list", _envs_list)
    show = _verb(
        envs_verbs, "show", "one environment: tools, rewards, a task", "agent-rl envs show agentic/Bash-v1", _show
    )
    play = _verb(
        envs_verbs, "play", "play an episode yourself", "agent-rl envs play agentic/Maze-v1 --set width=3", _play
    )
    for parser in (show, play):
        parser.add_argument("id", help="of the environment")
        parser.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", help="an option of its tasks, as JSON or text"
        )
        parser.add_argument("--task", type=int, default=0, metavar="INDEX", help="which task (default 0)")
        parser.add_argument("--dialect", default="hermes", help=f"one of {', '.join(DIALECTS)}")
    play.add_argument("--sandbox", choices=("auto", "docker", "local"), default="auto")

    serve = _verb(envs_verbs, "serve", "environments over HTTP", "agent-rl envs serve --port 8700", _serve)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    serve.add_argument("--port", type=int, default=8700)
    serve.add_argument("--token-file", metavar="FILE", help="the token of clients (default: a new one, printed)")
    serve.add_argument("--sandbox", choices=("auto", "docker", "local"), default="auto")
    serve.add_argument("--size", type=int, default=SandboxSpec().size, help="sandboxes at once")

    tools_verbs = _group(commands, "tools", "list, call and parse tool calls")
    _verb(tools_verbs, "list", "the tools that ship with the package", "agent-rl tools list", _tools_list)
    call = _verb(
        tools_verbs, "call", "call a tool", """agent-rl tools call python '{"code": "print(6*7)"}'""", _tools_call
    )
    call.add_argument("name", help="of the tool")
    call.add_argument("arguments", help="a JSON object, or - for standard input")
    call.add_argument("--sandbox", choices=("auto", "docker", "local"), default="auto")
    parse = _verb(
        tools_verbs,
        "parse",
        "print the attempts to call that are in a text, as a JSON list",
        "agent-rl tools parse --dialect hermes answer.txt",
        _tools_parse,
    )
    parse.add_argument("file", help="what a model wrote, or - for standard input")
    parse.add_argument("--dialect", required=True, help=f"one of {', '.join(DIALECTS)}")
    parse.add_argument("--finish", choices=("stop", "length"), default="stop", help="how the turn ended")
    parse.add_argument(
        "--tools", metavar="FILE", help="JSON list of schemas in OpenAI's form (default: the tools of `tools list`)"
    )
    parse.add_argument("--whole", action="store_true", help="also content and reasoning, in an object")

    data_verbs = _group(commands, "data", "look at data files")
    check = _verb(data_verbs, "check", "read a file as training would", "agent-rl data check train.jsonl", _data_check)
    check.add_argument("file")

    grade = _verb(
        commands, "grade", "grade answers: verdicts and a confusion table", "agent-rl grade pairs.jsonl", _grade
    )
    grade.add_argument("file", help="JSONL rows with gold, pred (what a model wrote) and perhaps id, expected")
    grade.add_argument("--wrong", action="store_true", help="print only rows that are judged otherwise than expected")


def _group(commands: Any, name: str, text: str) -> Any:
    parser = commands.add_parser(name, help=text, description=text)
    return parser.add_subparsers(dest="verb", required=True, metavar="VERB")


def _verb(
    verbs: Any, name: str, text: str, example: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=text,
        description=text,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(func=lambda arguments: _guarded(run, arguments))
    return parser


def _guarded(run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """0, or 2 after one line on stderr for what a user can mend."""
    try:
        return run(arguments)
    except BrokenPipeError:  # `| head`
        sys.stderr.close()
        return 0
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        print(f"agent-rl: {'.'.join(map(str, fault['loc']))}: {fault['msg']}", file=sys.stderr)
    except (SandboxFailure, OSError, ValueError) as error:
        print(f"agent-rl: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def _read(file: str) -> str:
    return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")


# envs


def _envs_list(arguments: argparse.Namespace) -> int:
    width = max(map(len, ids()))
    for env_id in ids():
        print(f"{env_id:<{width}}  {get(env_id).summary}")
    return 0


def _chosen(arguments: argparse.Namespace) -> tuple[EnvSpec, Task]:
    spec = get(arguments.id)
    tasks = spec.tasks(_options(arguments, spec))
    if not 0 <= arguments.task < len(tasks):
        raise ValueError(f"--task {arguments.task}: there are tasks 0 to {len(tasks) - 1}")
    return spec, tasks.task(arguments.task)


def _show(arguments: argparse.Namespace) -> int:
    spec = get(arguments.id)
    dialect = get_dialect(arguments.dialect)
    print(f"{spec.id}: {spec.summary}\n")
    print(f"rewards   {', '.join(f'{name} {weight:g}' for name, weight in spec.weights.items())}")
    print("limits    " + ", ".join(f"{name} {value:g}" for name, value in spec.limits.model_dump().items()))
    print(f"tools     {', '.join(tool.name for tool in spec.tools) or 'none'}")
    if spec.instruction:
        print(f"\nsystem\n{spec.instruction}")
    if spec.tools:
        print(f"\ntools as {dialect.name} describes them\n{dialect.system_text([tool.schema for tool in spec.tools])}")
    try:
        _, task = _chosen(arguments)
    except ValueError as error:
        print(f"\nno task to show: {error}")
        return 0
    print(f"\ntask {task.id}\n{task.prompt}\n\nanswer\n{task.answer}")
    return 0


PLAY_HELP = """\
You are the model. End a turn with an empty line. In a turn of its own:
  /NAME JSON   calls a tool, e.g. /python {"code": "print(6*7)"}
  /quit        stops
"""


def _play(arguments: argparse.Namespace) -> int:
    spec, task = _chosen(arguments)
    dialect = get_dialect(arguments.dialect)

    async def episode() -> int:
        spec_of_box = SandboxSpec(kind=arguments.sandbox, size=1)
        async with Resources(await resolve(spec_of_box) if spec.tools else spec_of_box) as resources:
            env = spec.make(spec.tasks(_options(arguments, spec)), resources=resources, dialect=dialect.name)
            opening = await env.areset(0, task)
            print(PLAY_HELP)
            for message in opening.messages:
                print(f"[{message['role']}]\n{message['content']}\n")
            try:
                while (text := await asyncio.to_thread(_turn, dialect.written)) is not None:
                    result = await env.astep(ModelTurn(text=text, finish="stop"))
                    for message in result.messages:
                        print(f"[{message['role']}]\n{message['content']}\n")
                    if result.stop is not None:
                        print(f"ended by {result.stop}: reward {result.reward}, {result.failure or result.terms}")
                        break
            finally:
                await env.aclose()
        return 0

    return asyncio.run(episode())


def _serve(arguments: argparse.Namespace) -> int:
    from aiohttp import web  # here: the other commands do without

    from envs.serve import EnvServer

    token = Path(arguments.token_file).read_text().strip() if arguments.token_file else secrets.token_urlsafe(24)
    if not token:
        raise ValueError(f"{arguments.token_file} is empty")

    async def run() -> int:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        spec = await resolve(SandboxSpec(kind=arguments.sandbox, size=arguments.size))
        async with Resources(spec) as resources:
            runner = web.AppRunner(EnvServer(resources, token=token).application())
            await runner.setup()
            try:
                await web.TCPSite(runner, arguments.host, arguments.port).start()
                port = runner.addresses[0][1]
                print(f"serving http://{arguments.host}:{port}", flush=True)
                if not arguments.token_file:
                    print(f"token {token}", flush=True)
                await stop.wait()
            finally:
                await runner.cleanup()
        return 0

    return asyncio.run(run())


def _options(arguments: argparse.Namespace, spec: EnvSpec) -> Mapping[str, Any]:
    options: dict[str, Any] = dict(spec.example)
    for setting in arguments.set:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting}: write KEY=VALUE")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return options


def _turn(written: Callable[[str, dict[str, Any]], str]) -> str | None:
    """What was typed; None at the end of the input."""
    lines: list[str] = []
    while True:
        print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == "/quit":
            return None if not lines else "\n".join(lines)
        if not line.strip():
            return "\n".join(lines)
        if line.startswith("/") and not lines:
            name, _, arguments = line[1:].strip().partition(" ")
            try:
                return written(name, json.loads(arguments or "{}"))
            except (ValueError, AttributeError, KeyError) as error:
                print(f"write /NAME and a JSON object ({error})")
                continue
        lines.append(line.rstrip("\n"))


# tools


def _tools_list(arguments: argparse.Namespace) -> int:
    for tool in TOOLBOX.values():
        form = tool.schema["function"]
        print(f"{tool.name}({', '.join(form['parameters']['properties'])})\n    {form['description']}")
    return 0


def _tools_call(arguments: argparse.Namespace) -> int:
    tool = _named(arguments.name)
    values = json.loads(_read("-") if arguments.arguments == "-" else arguments.arguments)
    if not isinstance(values, dict):
        raise ValueError("the arguments are a JSON object")
    if fault := tool.fault(values):
        raise ValueError(f"{tool.name}: {fault}")

    async def run() -> int:
        spec = await resolve(SandboxSpec(kind=arguments.sandbox, size=1))
        async with Resources(spec) as resources:
            task = Task(id="call", prompt="", meta={"corpus": "generated:0"})
            env_context = ToolContext(task=task, pool=resources.pool, held=resources.held())
            try:
                output = await tool.call(env_context, values)
            finally:
                assert env_context.held is not None
                await env_context.held.release()
        print(output.text)
        return 0 if output.succeeded else 1

    return asyncio.run(run())


def _named(name: str) -> Tool:
    if name not in TOOLBOX:
        close = difflib.get_close_matches(name, TOOLBOX, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(TOOLBOX)}"
        raise ValueError(f"no tool {name!r}: {hint}")
    return TOOLBOX[name]


def _tools_parse(arguments: argparse.Namespace) -> int:
    dialect = get_dialect(arguments.dialect)
    tools = _tools_of_file(arguments.tools) if arguments.tools else TOOLBOX
    turn = parsed_turn(dialect, _read(arguments.file), arguments.finish, tools)
    attempts = [
        {
            "status": call.status,
            "name": call.name,
            "arguments": call.arguments,
            "error": call.error,
            "span": list(call.span),
        }
        for call in turn.calls
    ]
    whole = {"content": turn.content, "reasoning": [list(span) for span in turn.reasoning], "calls": attempts}
    print(json.dumps(whole if arguments.whole else attempts, ensure_ascii=False, indent=2))
    return 0


def _tools_of_file(file: str) -> dict[str, Tool]:
    """Tools that only have a schema, for checking calls against."""
    schemas = json.loads(_read(file))
    tools: dict[str, Tool] = {}
    for schema in schemas if isinstance(schemas, list) else [None]:
        function = schema.get("function", schema) if isinstance(schema, dict) else None
        if not isinstance(function, dict) or "name" not in function or "parameters" not in function:
            raise ValueError(f"{file}: a list of objects with name, description and parameters (OpenAI's form)")
        form = {"type": "function", "function": function}
        tools[function["name"]] = Tool(
            name=function["name"], schema=form, function=lambda **arguments: "", wants_context=False
        )
    return tools


# data and grading


def _data_check(arguments: argparse.Namespace) -> int:
    from envs.data import load_tasks

    tasks = load_tasks(arguments.file)
    prompts = Counter(" ".join(task.prompt.split()).lower() for task in tasks)
    repeated = sum(count - 1 for count in prompts.values())
    lengths = sorted(len(task.prompt) for task in tasks)
    print(f"{arguments.file}: {len(tasks)} tasks")
    print(f"problems  {lengths[0]} to {lengths[-1]} characters, half of them up to {lengths[len(lengths) // 2]}")
    print(f"repeated  {repeated} problems stand there already, blanks and case aside")
    print(f"answers   {len({task.answer for task in tasks})} distinct")
    print(f"first     {tasks[0].id}: {tasks[0].prompt[:100]!r} -> {tasks[0].answer!r}")
    return 0


def _grade(arguments: argparse.Namespace) -> int:
    rows = []
    for number, line in enumerate(_read(arguments.file).splitlines(), start=1):
        if line.strip():
            rows.append(_pair(line, f"{arguments.file}:{number}", number))
    if not rows:
        raise ValueError(f"{arguments.file} has no rows")
    return asyncio.run(_grade_rows(rows, only_wrong=arguments.wrong))


def _pair(line: str, where: str, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("gold", "pred")):
        raise ValueError(f"{where}: a row is an object with the texts gold and pred")
    if not isinstance(row.get("expected", True), bool):
        raise ValueError(f"{where}: expected is true or false, not {row['expected']!r}")
    return {"id": str(number), **row}


async def _grade_rows(rows: Sequence[dict[str, Any]], *, only_wrong: bool) -> int:
    grader = Grader()
    await grader.start()
    table: Counter[tuple[bool | None, str]] = Counter()
    slowest = 0.0
    try:
        for row in rows:
            started = time.perf_counter()
            answer = stated_answer(row["pred"])
            verdict = "unparsable" if answer is None else await grader.verdict(row["gold"], answer)
            milliseconds = (time.perf_counter() - started) * 1000
            slowest = max(slowest, milliseconds)
            expected = row.get("expected")
            table[expected, verdict] += 1
            differs = expected is not None and expected != (verdict == "correct")
            if differs or not only_wrong:
                mark = "  JUDGED OTHERWISE" if differs else ""
                print(f"{row['id']}\t{verdict}\t{milliseconds:.1f} ms{mark}")
    finally:
        await grader.close()
    _print_table(table)
    print(f"slowest {slowest:.0f} ms")
    return 0


def _print_table(table: Mapping[tuple[bool | None, str], int]) -> None:
    verdicts = ("correct", "wrong", "unparsable", "timeout")
    print(f"\n{'expected':<10}" + "".join(f"{verdict:>12}" for verdict in verdicts))
    for expected, name in ((True, "correct"), (False, "wrong"), (None, "unknown")):
        counts = [table.get((expected, verdict), 0) for verdict in verdicts]
        if any(counts):
            print(f"{name:<10}" + "".join(f"{count:>12}" for count in counts))
    known = sum(count for (expected, _), count in table.items() if expected is not None)
    agreed = sum(
        count for (expected, v), count in table.items() if expected is not None and expected == (v == "correct")
    )
    if known:
        print(f"\nagreement {agreed} of {known} ({100 * agreed / known:.1f} %)")
