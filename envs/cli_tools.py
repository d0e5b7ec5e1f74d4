"""``agent-rl tools | data | grade``: tools, data files and the grader by themselves."""

from __future__ import annotations

import argparse
import asyncio
import difflib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from envs.answers import stated_answer
from envs.commands import SANDBOXES, group, read, verb
from envs.env import Resources
from envs.grader import Grader
from envs.parsers import DIALECTS, get_dialect, parsed_turn
from envs.toolbox import TOOLBOX
from envs.tools import Tool, ToolContext
from envs.types import Task
from sandboxes import SandboxSpec, resolve


def add_tools(commands: Any) -> None:
    tools_verbs = group(commands, "tools", "list, call and parse tool calls")
    verb(tools_verbs, "list", "the tools that ship with the package", "agent-rl tools list", _tools_list)
    call = verb(
        tools_verbs, "call", "call a tool", """agent-rl tools call python '{"code": "print(6*7)"}'""", _tools_call
    )
    call.add_argument("name", help="of the tool")
    call.add_argument("arguments", help="a JSON object, or - for standard input")
    call.add_argument("--sandbox", choices=SANDBOXES, default="auto")
    parse = verb(
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

    data_verbs = group(commands, "data", "look at data files")
    check = verb(data_verbs, "check", "read a file as training would", "agent-rl data check train.jsonl", _data_check)
    check.add_argument("file")

    grade = verb(
        commands, "grade", "grade answers: verdicts and a confusion table", "agent-rl grade pairs.jsonl", _grade
    )
    grade.add_argument("file", help="JSONL rows with gold, pred (what a model wrote) and perhaps id, expected")
    grade.add_argument("--wrong", action="store_true", help="print only rows that are judged otherwise than expected")


# tools


def _tools_list(arguments: argparse.Namespace) -> int:
    for tool in TOOLBOX.values():
        form = tool.schema["function"]
        print(f"{tool.name}({', '.join(form['parameters']['properties'])})\n    {form['description']}")
    return 0


def _tools_call(arguments: argparse.Namespace) -> int:
    tool = _named(arguments.name)
    values = json.loads(read("-") if arguments.arguments == "-" else arguments.arguments)
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
    turn = parsed_turn(dialect, read(arguments.file), arguments.finish, tools)
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
    schemas = json.loads(read(file))
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
    for number, line in enumerate(read(arguments.file).split("\n"), start=1):
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
