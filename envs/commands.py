"""What the commands of this package have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sandboxes import SandboxFailure

SANDBOXES = ("auto", "docker", "bwrap", "local")
"""Backends to choose by name alone (``remote`` wants hosts and a token, and is set in a recipe)."""


def group(commands: Any, name: str, text: str) -> Any:
    parser = commands.add_parser(name, help=text, description=text)
    return parser.add_subparsers(dest="verb", required=True, metavar="VERB")


def verb(
    verbs: Any, name: str, text: str, example: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=text,
        description=text,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(func=lambda arguments: guarded(run, arguments))
    return parser


def guarded(run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
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


def read(file: str) -> str:
    return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
