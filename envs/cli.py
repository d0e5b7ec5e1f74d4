"""``agent-rl envs``: environments without a model; and, of ``cli_tools``, tools, data and grading."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from envs.cli_tools import add_tools
from envs.commands import SANDBOXES, group, verb
from envs.env import Resources
from envs.parsers import DIALECTS, get_dialect
from envs.registration import EnvSpec, get, ids
from envs.types import ModelTurn, Task
from sandboxes import SandboxSpec, resolve


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    envs_verbs = group(commands, "envs", "list, show and play environments")
    verb(envs_verbs, "list", "every environment", "agent-rl envs list", _envs_list)
    show = verb(
        envs_verbs, "show", "one environment: tools, rewards, a task", "agent-rl envs show agentic/Bash-v1", _show
    )
    play = verb(
        envs_verbs, "play", "play an episode yourself", "agent-rl envs play agentic/Maze-v1 --set width=3", _play
    )
    for parser in (show, play):
        parser.add_argument("id", help="of the environment")
        parser.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", help="an option of its tasks, as JSON or text"
        )
        parser.add_argument("--task", type=int, default=0, metavar="INDEX", help="which task (default 0)")
        parser.add_argument("--dialect", default="hermes", help=f"one of {', '.join(DIALECTS)}")
    play.add_argument("--sandbox", choices=SANDBOXES, default="auto")

    serve = verb(envs_verbs, "serve", "environments over HTTP", "agent-rl envs serve --port 8700", _serve)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    serve.add_argument("--port", type=int, default=8700)
    serve.add_argument("--token-file", metavar="FILE", help="the token of clients (default: a new one, printed)")
    serve.add_argument("--sandbox", choices=SANDBOXES, default="auto")
    serve.add_argument("--size", type=int, default=SandboxSpec().size, help="sandboxes at once")
    add_tools(commands)


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
        async with Resources(await resolve(spec_of_box) if spec.may_call else spec_of_box) as resources:
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
