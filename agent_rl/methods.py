"""``agent-rl methods``: every method by name, with formula, defaults, source and status; also makes docs/methods.md."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from agent_rl.errors import ConfigError

if TYPE_CHECKING:
    from stare.neighbours import Hook, Method

EXAMPLES = """\
examples:
  agent-rl methods list
  agent-rl methods list --hook ratio
  agent-rl methods show gspo
  agent-rl methods list --markdown > docs/methods.md
"""

HOOKS: tuple[tuple[Hook, str], ...] = (
    ("advantage", "one number per trajectory, from the rewards of its group"),
    ("turn advantage", "one number per turn"),
    ("token weight", "multiplies the advantage of each sampled token; chosen over the whole batch"),
    ("ratio", "what becomes of the ratio of new to old policy"),
    ("regulariser", "a term beside the surrogate"),
    ("sampling", "which prompts and rollouts a batch is made of"),
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The ``methods`` command."""
    parser = commands.add_parser(
        "methods",
        help="the methods that can be trained with, and their formulas",
        description="STARE and the methods around it: hook, formula, defaults, source, status.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="all of them", epilog=EXAMPLES, formatter_class=parser.formatter_class)
    listing.add_argument("--hook", choices=[hook for hook, _ in HOOKS], help="only methods of this hook")
    listing.add_argument("--markdown", action="store_true", help="the page docs/methods.md")
    listing.set_defaults(func=_list)
    showing = actions.add_parser(
        "show",
        help="one of them",
        epilog="example:\n  agent-rl methods show stare",
        formatter_class=parser.formatter_class,
    )
    showing.add_argument("name")
    showing.set_defaults(func=_show)


def _list(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from stare.neighbours import METHODS

    if arguments.markdown:
        print(markdown(), end="")
        return 0
    table = Table(title=f"{len(METHODS)} methods", show_lines=False)
    for heading in ("name", "hook", "formula", "source", "status", "training"):
        table.add_column(heading, overflow="fold")
    for entry in METHODS.values():
        if arguments.hook in (None, entry.hook):
            table.add_row(entry.name, entry.hook, entry.formula, entry.source, entry.status, use_of(entry))
    Console().print(table)
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from stare.neighbours import method

    try:
        entry = method(arguments.name)
    except ValueError as error:
        print(f"agent-rl: {error}", file=sys.stderr)
        return 2
    console = Console(highlight=False)
    lines = {
        "hook": entry.hook,
        "formula": entry.formula,
        "defaults": defaults_of(entry) or "none",
        "source": entry.source,
        "status": entry.status,
        "training": use_of(entry),
        "note": entry.note,
        "function": f"{entry.function.__module__}.{entry.function.__qualname__}",
    }
    console.print(entry.name, style="bold")
    for label, text in lines.items():
        if text:
            console.print(f"  {label:9} {text}", markup=False, soft_wrap=True)
    return 0


def defaults_of(entry: Method) -> str:
    """``name = value`` of each parameter, as the function has it."""
    return ", ".join(f"{name} = {value}" for name, value in entry.defaults.items())


def use_of(entry: Method) -> str:
    """How a training run chooses it, or what a caller of the function has to bring."""
    if entry.needs:
        return f"library only: the caller brings {entry.needs}"
    if entry.name == "dynamic_sampling":
        return "built in"
    if entry.hook == "sampling":
        return f"`--rollout.sampling {entry.name}`"
    if entry.name == "stare":
        return "built in: the section `stare`"
    field = {
        "advantage": "advantage",
        "turn advantage": "advantage",
        "token weight": "token_weights",
        "ratio": "ratio",
        "regulariser": "regularisers",
    }[entry.hook]
    return f"`--algorithm.{field} {entry.name}`"


def markdown() -> str:
    """The page: a section per hook, a row per method."""
    from stare.neighbours import METHODS

    lines = [
        "# Methods",
        "",
        "Made by `agent-rl methods list --markdown`; a test holds the two together. Each method is one function of",
        "`stare/neighbours/` over tensors; `agent-rl methods show NAME` prints one entry. *Unconfirmed* means that",
        "part of the formula is our reading, because neither paper nor public code was at hand. In every one of them a",
        "group of one and a group without a difference have advantage 0. *Library only* means that the training loop",
        "has not got the inputs: the function is there, tested, and says what its caller must bring.",
    ]
    for hook, meaning in HOOKS:
        entries = [entry for entry in METHODS.values() if entry.hook == hook]
        lines += ["", f"## {hook.capitalize()}: {meaning}", ""]
        lines += ["| name | formula | defaults | source | status | training |", "|---|---|---|---|---|---|"]
        for entry in entries:
            formula = entry.formula + (f" ({entry.note})" if entry.note else "")
            status = entry.status.removeprefix("formula ")
            cells = (f"`{entry.name}`", formula, defaults_of(entry), entry.source, status, use_of(entry))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def chosen(name: str, *hooks: Hook) -> Method:
    """The entry of this name under one of the hooks, that the training loop can use.

    Raises:
        ConfigError: unknown, of another hook, or library only.
    """
    from stare.neighbours import METHODS, method

    entry = METHODS.get(name)
    if entry is None or entry.hook not in hooks:
        try:
            entry = method(name, hooks[0])
        except ValueError as error:
            raise ConfigError(str(error)) from None
    if entry.needs:
        raise ConfigError(f"{name} cannot be trained with: the loop has not got {entry.needs}")
    return entry
