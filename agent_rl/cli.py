"""The ``agent-rl`` command: from arguments to functions; what a user can mend is one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

TRAIN_EXAMPLES = """\
examples:
  agent-rl train quickstart
  agent-rl train smollm2-gsm8k --task.options.path gsm8k.jsonl
  agent-rl train smollm2-gsm8k --engine.kind transformers --sandbox.kind local --rollout.group 4 --steps 3
  agent-rl train my_recipe.toml --name second-try --learner.lr 2e-6

The same command again goes on from the last checkpoint. Every setting of a recipe can be overridden;
`agent-rl train RECIPE --show` prints them all.
"""


SFT_EXAMPLES = """\
examples:
  agent-rl sft ./Qwen2.5-0.5B-Instruct --data traces.jsonl --out sft-model --steps 200
  agent-rl sft smollm2 --data traces.jsonl --out sft-model --dialect codefence --learner.lr 1e-5 --learner.layout packed
  agent-rl train smollm2-gsm8k --model.path sft-model

A line of the data is {"messages": [{"role": ..., "content": ...}, ...], "tools": [...]}; only the assistant's words are
learned, tool output inside them (<interpreter>, ```output) is cut out. The same command again goes on after a kill.
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="agent-rl", description="Train tool-using language-model agents with reinforcement learning."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(commands)
    _add_sft(commands)
    _add_report(commands)
    for module in ("agent_rl.evaluation.cli", "agent_rl.methods", "agent_rl.lab.cli", "sandboxes.cli", "envs.cli"):
        _add_from(module, commands)
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.command not in ("train", "sft"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.overrides = rest
    run: Callable[[argparse.Namespace], int] = arguments.func
    try:
        return run(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "train",
        help="train an agent by a recipe",
        description="Train an agent by a recipe; settings follow as --section.key value.",
        epilog=TRAIN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", help="name of a shipped recipe, or a .toml file")
    parser.add_argument("--show", action="store_true", help="print the resolved settings and stop")
    parser.set_defaults(func=_train)


def _add_sft(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "sft",
        help="fine-tune a model on tool traces, as a start for training",
        description="Fine-tune a model on multi-turn tool traces; settings follow as --learner.key value.",
        epilog=SFT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="model folder, or smollm2")
    parser.add_argument("--data", type=Path, required=True, help="JSONL: messages (and perhaps tools) a line")
    parser.add_argument("--out", type=Path, required=True, help="model folder to make")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="traces of one step (default 16)")
    parser.add_argument("--max-tokens", type=int, default=4096, help="longer traces are left out, and counted")
    parser.add_argument("--dialect", default="auto", help="how calls are written (default: by the chat template)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS", help="to go on from after a kill")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.set_defaults(func=_sft)


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "report",
        help="table, curves and one coloured episode of a run",
        epilog="example:\n  agent-rl report runs/quickstart",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="run folder")
    parser.set_defaults(func=_report)


def _sft(arguments: argparse.Namespace) -> int:
    from agent_rl.config import ConfigError, learner_config

    def run() -> None:
        config = learner_config(arguments.overrides)
        for name in ("steps", "batch", "max_tokens", "save_every"):
            if getattr(arguments, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: at least 1")
        _quieten_libraries()
        from agent_rl.sft import sft
        from agent_rl.smollm2 import prepare_smollm2

        out = sft(
            prepare_smollm2() if arguments.model == "smollm2" else Path(arguments.model).expanduser(),
            arguments.data,
            arguments.out,
            config=config,
            steps=arguments.steps,
            batch=arguments.batch,
            seed=arguments.seed,
            max_tokens=arguments.max_tokens,
            dtype=arguments.dtype,
            dialect=arguments.dialect,
            save_every=arguments.save_every,
        )
        print(f"model folder {out}")

    return _guarded(run)


def _train(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from agent_rl.config import load_config

    def run() -> None:
        config = load_config(arguments.recipe, arguments.overrides)
        if arguments.show:
            print(config.model_dump_json(indent=2))
            return
        _quieten_libraries()
        from agent_rl.loop import train

        console = Console()
        folder = train(config, console)
        _print_report(folder, console)

    return _guarded(run)


def _report(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    return _guarded(lambda: _print_report(arguments.run, Console()))


def _print_report(folder: Path, console: object) -> None:
    from rich.console import Console

    from agent_rl.report import report
    from agent_rl.setup import read_run_config

    assert isinstance(console, Console)
    report(folder, console, target_entropy=read_run_config(folder).stare.target_entropy)


def _guarded(run: Callable[[], None]) -> int:
    """0, or 2 after one line on stderr for what a user can mend, or 1 after one line for a run that had to stop."""
    from agent_rl.engines.base import EngineFailure, PublishError
    from agent_rl.errors import ConfigError, LearnerFailure
    from agent_rl.rollout import TooManyFailures
    from sandboxes.base import SandboxFailure, SandboxUnavailable

    try:
        run()
    except (ConfigError, SandboxUnavailable) as error:
        print(f"agent-rl: {error}", file=sys.stderr)
        return 2
    except (PublishError, TooManyFailures, EngineFailure, LearnerFailure, SandboxFailure) as error:
        print(f"agent-rl: the run stopped: {error}", file=sys.stderr)
        return 1
    return 0


def _add_from(module: str, commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Subcommands that a package below brings along, where what it needs is installed (`agent-rl[sandboxes]` alone)."""
    import importlib

    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("agent_rl", "envs", "sandboxes", "stare"):
            raise
        return
    found.add_parser(commands)


def _quieten_libraries() -> None:
    """Start-up chatter of the libraries hides the run's own lines; set AGENT_RL_VERBOSE=1 to see it."""
    if os.environ.get("AGENT_RL_VERBOSE"):
        return
    import logging
    import warnings

    for name, value in (
        ("TRANSFORMERS_VERBOSITY", "error"),
        ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("DS_LOG_LEVEL", "error"),
    ):
        os.environ.setdefault(name, value)
    for name in ("DeepSpeed", "deepspeed", "vllm", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(torch|deepspeed|transformers|vllm)(\..*)?")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


if __name__ == "__main__":
    sys.exit(main())
