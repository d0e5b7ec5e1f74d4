"""``agent-rl sandbox build | list | run | clean``."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from sandboxes.base import ExecutionResult, SandboxFailure, SandboxSpec


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
    build.add_argument("--if-missing", action="store_true", help="do nothing where the image exists")
    verb("list", "sandbox containers of this Docker engine", "agent-rl sandbox list", _list)
    clean = verb("clean", "remove containers that dead runs left", "agent-rl sandbox clean", _clean)
    clean.add_argument("--all", action="store_true", help="those of living runs too")
    run = verb("run", "run a Python file in a sandbox", "agent-rl sandbox run script.py --kind docker", _run)
    run.add_argument("file", help="Python source, or - for standard input")
    run.add_argument("--kind", choices=("auto", "docker", "local"), default="auto")
    run.add_argument("--timeout", type=float, default=SandboxSpec().timeout_s, metavar="SECONDS")


def _guarded(run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    try:
        return run(arguments)
    except (SandboxFailure, OSError, ValueError) as error:
        print(f"agent-rl: {error}", file=sys.stderr)
        return 2


def _build(arguments: argparse.Namespace) -> int:
    from sandboxes.image import build_image, has_image

    if arguments.if_missing and has_image(arguments.tag):
        print(f"{arguments.tag} is there")
        return 0
    print(f"built {arguments.tag}: {build_image(arguments.tag)}")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from sandboxes.reaper import list_sandboxes

    for row in list_sandboxes():
        print("  ".join((row["id"], row["state"], row["run"], row["owner"], row["image"])))
    return 0


def _clean(arguments: argparse.Namespace) -> int:
    from sandboxes.reaper import remove_folders, remove_orphans

    removed = [*remove_folders(), *remove_orphans(everything=arguments.all)]
    print("\n".join((*removed, f"removed {len(removed)}")))
    return 0


def _run(arguments: argparse.Namespace) -> int:
    code = sys.stdin.read() if arguments.file == "-" else Path(arguments.file).read_text()
    result = asyncio.run(_execute(code, SandboxSpec(kind=arguments.kind, timeout_s=arguments.timeout)))
    sys.stdout.write(result.stdout)
    sys.stderr.write(result.stderr)
    if result.status not in ("ok", "error"):
        print(f"agent-rl: the program ended by {result.status} after {result.wall_s:.2f} s", file=sys.stderr)
    return 1 if result.exit_code is None else result.exit_code


async def _execute(code: str, spec: SandboxSpec) -> ExecutionResult:
    from sandboxes import SandboxPool, resolve

    async with SandboxPool(await resolve(spec)) as pool, pool.lease() as box:
        return await box.exec(code)
