"""``agent-rl sandbox build | list | run | clean | bench | serve``."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

from sandboxes.base import PROFILES, ExecutionResult, Kind, SandboxFailure, SandboxSpec, SandboxUnavailable
from sandboxes.wire import TOKEN_VARIABLE


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("sandbox", help="build the sandbox image, run a file in a sandbox, clean up")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, text: str, example: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        added = verbs.add_parser(
            name,
            help=text,
            description=text,
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(func=lambda arguments: _guarded(run, arguments))
        return added

    build = verb("build", "build the Docker image from Debian packages", "sudo agent-rl sandbox build", _build)
    build.add_argument("--tag", default=SandboxSpec().image)
    build.add_argument(
        "--from",
        dest="base",
        metavar="IMAGE",
        help="a Debian image of a registry to build on, such as debian:bookworm-slim",
    )
    build.add_argument("--if-missing", action="store_true", help="do nothing where the image exists")
    verb("list", "sandbox containers of this Docker engine", "agent-rl sandbox list", _list)
    clean = verb("clean", "remove containers that dead runs left", "agent-rl sandbox clean", _clean)
    clean.add_argument("--all", action="store_true", help="those of living runs too")
    run = verb("run", "run a Python file in a sandbox", "agent-rl sandbox run script.py --kind docker", _run)
    run.add_argument("file", help="Python source, or - for standard input")
    run.add_argument("--language", default="python", help="python, or any interpreter in the sandbox, such as bash")
    run.add_argument(
        "--timeout", type=positive(float), metavar="SECONDS", help="wall-clock limit, the profile's when not given"
    )
    bench = verb("bench", "time calls on this machine", "agent-rl sandbox bench --kind docker --size 4", _bench)
    bench.add_argument("--calls", type=positive(int), default=200, help="calls of each kind")
    serve = verb(
        "serve",
        "offer sandboxes to other machines over HTTP",
        "AGENT_RL_SANDBOX_TOKEN=secret agent-rl sandbox serve --bind 0.0.0.0:8088 --size 16",
        _serve,
    )
    serve.add_argument(
        "--bind", default="127.0.0.1:8088", metavar="HOST:PORT", help="where to listen; port 0: any free one"
    )
    serve.add_argument(
        "--tokens", metavar="FILE", help=f"lines of client name and token; else the variable {TOKEN_VARIABLE}"
    )
    serve.add_argument(
        "--per-client", type=positive(int), default=16, help="sandboxes that one client holds or waits for at once"
    )
    serve.add_argument("--queue", type=int, default=256, help="requests that may wait for a sandbox; more get 429")
    serve.add_argument("--idle", type=positive(float), default=300.0, metavar="SECONDS", help="unused leases end")
    serve.add_argument("--drain", type=float, default=30.0, metavar="SECONDS", help="what runs at SIGTERM may go on")
    for one in (run, bench, serve):
        one.add_argument("--kind", choices=get_args(Kind), default="auto")
        one.add_argument("--profile", choices=tuple(PROFILES), default="default")
        one.add_argument("--image", default=SandboxSpec().image, help="of the docker backend")
        one.add_argument("--runtime", help="OCI runtime of the docker backend, such as runsc")
    for one in (run, bench):
        one.add_argument(
            "--host", action="append", default=[], metavar="URL", help="of the remote backend; may be repeated"
        )
    for one in (bench, serve):
        one.add_argument("--size", type=positive(int), default=4, help="sandboxes at once")


Number = TypeVar("Number", int, float)


def positive(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    """An argument's type."""

    def number(text: str) -> Number:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a positive number")
        return value

    number.__name__ = "number"  # what argparse calls it where it is none
    return number


def _guarded(run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    try:
        return run(arguments)
    except (SandboxFailure, OSError, ValueError) as error:
        print(f"agent-rl: {error}", file=sys.stderr)
        return 2


def _build(arguments: argparse.Namespace) -> int:
    from sandboxes.image import build_image, build_on, has_image

    if arguments.if_missing and has_image(arguments.tag):
        print(f"{arguments.tag} is there")
        return 0
    image = build_on(arguments.base, arguments.tag) if arguments.base else build_image(arguments.tag)
    print(f"built {arguments.tag}: {image}")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from sandboxes.reaper import list_sandboxes

    for row in list_sandboxes():
        print("  ".join((row["id"], row["state"], row["run"], row["owner"], row["image"])))
    return 0


def _clean(arguments: argparse.Namespace) -> int:
    from sandboxes.reaper import remove_folders, remove_orphans

    folders = remove_folders()
    print("".join(f"{folder}\n" for folder in folders), end="", flush=True)  # also where no engine answers below
    removed = remove_orphans(everything=arguments.all)
    print("\n".join((*removed, f"removed {len(folders) + len(removed)}")))
    return 0


def _spec(arguments: argparse.Namespace, **more: Any) -> SandboxSpec:
    given = {
        "kind": arguments.kind,
        "profile": arguments.profile,
        "image": arguments.image,
        "runtime": arguments.runtime,
    }
    return SandboxSpec(**given, hosts=tuple(getattr(arguments, "host", ())), **more)


def _run(arguments: argparse.Namespace) -> int:
    code = sys.stdin.read() if arguments.file == "-" else Path(arguments.file).read_text()
    more = {} if arguments.timeout is None else {"timeout_s": arguments.timeout}
    result = asyncio.run(_execute(code, arguments.language, _spec(arguments, size=1, **more)))
    sys.stdout.write(result.stdout)
    sys.stderr.write(result.stderr)
    if result.status not in ("ok", "error"):
        print(f"agent-rl: the program ended by {result.status} after {result.wall_s:.2f} s", file=sys.stderr)
    return 1 if result.exit_code is None else result.exit_code


async def _execute(code: str, language: str, spec: SandboxSpec) -> ExecutionResult:
    from sandboxes import SandboxPool, resolve

    async with SandboxPool(await resolve(spec)) as pool, pool.lease() as box:
        return await box.exec(code, language=language)


def _bench(arguments: argparse.Namespace) -> int:
    from sandboxes.bench import bench
    from sandboxes.choose import resolve

    async def run() -> None:
        await bench(await resolve(_spec(arguments, size=arguments.size)), arguments.calls, print)

    asyncio.run(run())
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    try:
        from sandboxes.service import Service, ServiceLimits, serve
    except ImportError as error:
        raise SandboxUnavailable(f"{error}: pip install 'agent-rl[sandboxes]'") from None
    from sandboxes import SandboxPool, resolve

    host, _, port = arguments.bind.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"--bind {arguments.bind!r}: HOST:PORT, such as 127.0.0.1:8088")
    tokens = _tokens(arguments.tokens)
    limits = ServiceLimits(per_client=arguments.per_client, idle_s=arguments.idle, drain_s=arguments.drain)

    async def run() -> None:
        spec = await resolve(_spec(arguments, size=arguments.size, warm=arguments.size))
        service = Service(SandboxPool(spec, max_waiting=arguments.queue), tokens, limits)
        await serve(service, host.strip("[]"), int(port), lambda line: print(line, flush=True))

    asyncio.run(run())
    return 0


def _tokens(path: str | None) -> dict[str, str]:
    """Client names by token."""
    if path is None:
        token = os.environ.get(TOKEN_VARIABLE)
        if not token:
            raise ValueError(
                f"clients need a token: set {TOKEN_VARIABLE}, or give --tokens FILE with lines of NAME TOKEN"
            )
        return {token: "client"}
    lines = [line.split() for line in Path(path).read_text().splitlines() if line.strip()]
    if not lines or any(len(words) != 2 for words in lines):
        raise ValueError(f"--tokens {path}: each line is a client's name and its token")
    return {token: name for name, token in lines}
