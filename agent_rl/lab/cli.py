"""``agent-rl lab``: watch what methods do to entropy, on a CPU, in seconds."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

EXAMPLES = """\
examples:
  agent-rl lab entropy
  agent-rl lab entropy --methods grpo,stare,rloo+cispo,steer --seeds 10 --steps 2000 --out lab
  agent-rl lab ablation --out lab
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The ``lab`` command."""
    parser = commands.add_parser(
        "lab",
        help="entropy and reward of any methods in a tabular world, in seconds",
        description="A tabular softmax policy with verifiable reward: what methods do to entropy, exactly.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (("entropy", "curves of any set of methods"), ("ablation", "STARE's ablation in miniature")):
        action = actions.add_parser(name, help=text, epilog=EXAMPLES, formatter_class=parser.formatter_class)
        action.add_argument("--seeds", type=int, default=10, help="worlds, side by side (default 10)")
        action.add_argument("--steps", type=int, default=2000, help="updates (default 2000)")
        action.add_argument("--seed", type=int, default=0, help="of the worlds and of sampling")
        action.add_argument("--out", type=Path, default=Path("lab"), help="folder of tables and picture (default lab)")
        action.set_defaults(func=_run)
        if name == "entropy":
            action.add_argument(
                "--methods",
                default="grpo,stare",
                help="names of `agent-rl methods list`, joined by + where they go together; stare, stare-o1, "
                "stare-fixed, stare-pi, stare-model (default grpo,stare)",
            )


def _run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from agent_rl.errors import ConfigError
    from agent_rl.lab.recipes import ablation, recipe_of
    from agent_rl.lab.run import draw, outcome_of, run, table, write
    from agent_rl.lab.world import World

    console = Console()
    try:
        for name in ("seeds", "steps"):
            if getattr(arguments, name) < 1:
                raise ConfigError(f"--{name} {getattr(arguments, name)}: at least 1")
        if arguments.action == "entropy":
            questions = {"entropy": [recipe_of(name.strip()) for name in arguments.methods.split(",")]}
        else:
            questions = ablation()
    except ConfigError as error:
        print(f"agent-rl: {error}", file=sys.stderr)
        return 2
    world = World(seeds=arguments.seeds)
    outcomes = {}
    for title, recipes in questions.items():
        curves = run(world, recipes, arguments.steps, seed=arguments.seed, console=console)
        outcomes[title] = [outcome_of(one) for one in curves]
        console.print(table(f"{title}: {arguments.seeds} seeds, {arguments.steps} steps", outcomes[title]))
        if arguments.action == "entropy":
            console.print(f"curves  {draw(curves, arguments.out / 'entropy.png')}", soft_wrap=True)
    path = write(arguments.out, arguments.action, world, arguments.steps, arguments.seed, outcomes)
    console.print(f"figures {path}", soft_wrap=True)
    return 0
