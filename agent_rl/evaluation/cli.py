"""``agent-rl eval``, ``compare``, ``score`` and ``contamination``."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from envs.commands import SANDBOXES

EVAL_EXAMPLES = """\
MODEL is a model folder, one of our runs or checkpoints, `smollm2`, a name on the hub, or the address of an
OpenAI-compatible endpoint, whose key is read from the environment (OPENAI_API_KEY, or --key-env NAME).

examples:
  agent-rl eval ./Qwen2.5-7B-Instruct --suite stare-math --data ./sets
  agent-rl eval runs/quickstart --suite agentic/Arithmetic-v1 --set max_digits=3 --limit 100 --k 4
  agent-rl eval smollm2 --suite gsm8k --scenario tool_use --dialect codefence --shots 1 --limit 20 --k 2
  agent-rl eval http://localhost:8000/v1 --suite aime24 --scenario long_cot --concurrency 64
  agent-rl eval https://api.example.com/v1 --served-name big --suite gsm8k --limit 200 --price 0.5 1.5 --max-cost 5

The same command again goes on where it stopped; a larger --k or --limit adds to what is there.
"""


ROLLOUT_EXAMPLES = """\
examples:
  agent-rl rollout agentic/Arithmetic-v1 --model runs/quickstart
  agent-rl rollout agentic/MathPython-v1 --model smollm2 --set path=gsm8k.jsonl --dialect codefence --shots 1
  agent-rl rollout agentic/Maze-v1 --model http://localhost:8000/v1 --episodes 3
"""


def add_parser(commands: Any) -> None:
    _add_eval(commands)
    _add_rollout(commands)
    _add_compare(commands)
    _add_score(commands)
    _add_contamination(commands)


def _command(commands: Any, name: str, text: str, epilog: str, run: Callable[[argparse.Namespace], None]) -> Any:
    parser = commands.add_parser(
        name, help=text, description=text, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(func=lambda arguments: _guarded(run, arguments))
    return parser


def _add_eval(commands: Any) -> None:
    parser = _command(commands, "eval", "evaluate a model: avg@k, pass@k, maj@k with intervals", EVAL_EXAMPLES, _eval)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--suite", required=True, help="stare-math, gsm8k, one of its sets, or an environment id")
    parser.add_argument(
        "--scenario", choices=("short_cot", "long_cot", "tool_use"), help="of a named suite (default: short_cot)"
    )
    parser.add_argument("--data", metavar="PATH", help="a file, or a folder with NAME.jsonl files")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="option of an environment; may be repeated"
    )
    parser.add_argument("--k", type=int, help="samples of a problem (default: the suite's)")
    parser.add_argument("--limit", type=int, help="at most so many problems of each set, the same ones for each seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-data", metavar="FILE", action="append", default=[], help="flag problems that it has")
    parser.add_argument("--dry-run", action="store_true", help="say what would be played, and stop")

    sampling = parser.add_argument_group("sampling (the paper's: temperature 1, top-p 0.7)")
    sampling.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    sampling.add_argument("--top-p", type=float, default=0.7)
    sampling.add_argument("--max-tokens", type=int, help="of one turn (default: the scenario's)")
    sampling.add_argument("--max-episode-tokens", type=int, help="of one episode, prompt included")
    sampling.add_argument("--max-turns", type=int)
    sampling.add_argument("--max-tool-calls", type=int)
    sampling.add_argument("--wall-s", type=float, help="seconds of one episode")
    sampling.add_argument("--dialect", help="how calls are written; `native` is an endpoint's own")
    sampling.add_argument("--shots", type=int, default=0, help="solved problems before the question")

    local = parser.add_argument_group("a model on this machine")
    local.add_argument("--engine", choices=("vllm", "transformers"), help="default: vllm where it is installed")
    local.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU")
    local.add_argument("--kv-cache-gb", type=float, help="key-value cache of vLLM (default: 1; most of a free GPU)")
    local.add_argument("--sandbox", choices=SANDBOXES, default="auto")
    local.add_argument("--concurrency", type=int, help="episodes at a time (64; 16 at an endpoint)")

    endpoint = parser.add_argument_group("an endpoint")
    endpoint.add_argument("--served-name", metavar="NAME", help="of the model there (default: the only one)")
    endpoint.add_argument("--key-env", metavar="NAME", default="OPENAI_API_KEY", help="variable that holds the key")
    endpoint.add_argument("--requests-per-minute", type=float)
    endpoint.add_argument("--tokens-per-minute", type=float)
    endpoint.add_argument("--timeout-s", type=float, default=600.0, help="of one request")
    endpoint.add_argument("--extra", metavar="JSON", default="{}", help="fields of every request; null takes one out")
    endpoint.add_argument(
        "--price", nargs=2, type=float, metavar=("IN", "OUT"), help="dollars a million prompt and completion tokens"
    )
    endpoint.add_argument("--max-cost", type=float, metavar="DOLLARS", help="no episode starts after")

    parser.add_argument("--output", default="evals", help="folder of evaluations (default: evals)")
    parser.add_argument("--name", help="of this one's folder (default: made of suite, scenario and model)")


def _add_rollout(commands: Any) -> None:
    text = "play episodes of an environment with any model and print them in colour"
    parser = _command(commands, "rollout", text, ROLLOUT_EXAMPLES, _rollout)
    parser.add_argument("id", help="of the environment")
    parser.add_argument("--model", required=True, help="as of `agent-rl eval`: a folder, a run, smollm2, an endpoint")
    parser.add_argument("--episodes", type=int, default=1, help="how many tasks (default 1)")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="option of the environment")
    parser.add_argument("--seed", type=int, default=0, help="of tasks and sampling")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, help="of one turn")
    parser.add_argument("--max-turns", type=int)
    parser.add_argument("--dialect", help="how calls are written (default: by the model)")
    parser.add_argument("--shots", type=int, default=0, help="solved problems before the question")
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="transformers")
    parser.add_argument("--sandbox", choices=SANDBOXES, default="auto")
    parser.add_argument("--served-name", metavar="NAME", help="of the model at an endpoint")
    parser.add_argument("--key-env", metavar="NAME", default="OPENAI_API_KEY", help="variable with an endpoint's key")


def _add_compare(commands: Any) -> None:
    example = "example:\n  agent-rl compare evals/gsm8k-before evals/gsm8k-after"
    parser = _command(commands, "compare", "paired difference of two evaluations, A - B", example, _compare)
    parser.add_argument("first", type=Path, metavar="A")
    parser.add_argument("second", type=Path, metavar="B")
    parser.add_argument("--format", choices=("table", "json", "markdown"), default="table")


def _add_score(commands: Any) -> None:
    example = "example:\n  agent-rl score evals/gsm8k-smollm2 --grader stated"
    parser = _command(commands, "score", "grade stored episodes anew, without generating", example, _score)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of an evaluation")
    parser.add_argument(
        "--grader", default="boxed", help="boxed, stated, exact, or MODULE:FUNCTION of (gold, last turn) -> bool"
    )


def _add_contamination(commands: Any) -> None:
    example = "example:\n  agent-rl contamination train.jsonl --suite stare-math --data ./sets"
    parser = _command(commands, "contamination", "which problems of a suite training data has", example, _contamination)
    parser.add_argument("train", nargs="+", metavar="TRAIN", help="data files, or hf:NAME")
    parser.add_argument("--suite", required=True)
    parser.add_argument("--data", metavar="PATH", help="a file, or a folder with NAME.jsonl files")
    parser.add_argument("--json", action="store_true", help="every overlap, as JSON")


def _guarded(run: Callable[[argparse.Namespace], None], arguments: argparse.Namespace) -> int:
    """0; 2 after one line for what a user can mend; 1 after one line for what had to stop."""
    from agent_rl.engines.base import EngineFailure
    from agent_rl.errors import ConfigError
    from agent_rl.rollout import TooManyFailures
    from sandboxes.base import SandboxFailure, SandboxUnavailable

    try:
        run(arguments)
    except BrokenPipeError:  # `| head`
        sys.stderr.close()
        return 0
    except (ConfigError, SandboxUnavailable) as error:
        print(f"agent-rl: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except (TooManyFailures, EngineFailure, SandboxFailure) as error:
        print(f"agent-rl: the evaluation stopped: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def _eval(arguments: argparse.Namespace) -> None:
    from agent_rl.cli import _quieten_libraries
    from agent_rl.evaluation.run import evaluate
    from agent_rl.evaluation.settings import checked
    from sandboxes.base import SandboxSpec

    settings = checked(
        model=arguments.model,
        suite=arguments.suite,
        scenario=arguments.scenario,
        data=arguments.data,
        options=_options(arguments.set),
        k=arguments.k,
        limit=arguments.limit,
        seed=arguments.seed,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        max_tokens=arguments.max_tokens,
        max_episode_tokens=arguments.max_episode_tokens,
        max_turns=arguments.max_turns,
        max_tool_calls=arguments.max_tool_calls,
        wall_s=arguments.wall_s,
        dialect=arguments.dialect,
        shots=arguments.shots,
        engine=arguments.engine,
        dtype=arguments.dtype,
        kv_cache_gb=arguments.kv_cache_gb,
        concurrency=arguments.concurrency,
        sandbox=SandboxSpec(kind=arguments.sandbox, size=_sandboxes(arguments.concurrency)),
        train_data=tuple(arguments.train_data),
        served_name=arguments.served_name,
        key_variable=arguments.key_env,
        requests_per_minute=arguments.requests_per_minute,
        tokens_per_minute=arguments.tokens_per_minute,
        timeout_s=arguments.timeout_s,
        extra=_object("--extra", arguments.extra),
        price_in=arguments.price[0] if arguments.price else None,
        price_out=arguments.price[1] if arguments.price else None,
        max_cost=arguments.max_cost,
        output=arguments.output,
        name=arguments.name,
    )
    if not settings.is_endpoint:
        _quieten_libraries()
    evaluate(settings, _console(), dry=arguments.dry_run)


def _sandboxes(concurrency: int | None) -> int:
    return max(1, min(concurrency or 16, 2 * (os.cpu_count() or 1)))  # ``checked`` refuses what is below 1


def _rollout(arguments: argparse.Namespace) -> None:
    from agent_rl.cli import _quieten_libraries
    from agent_rl.evaluation.settings import checked
    from agent_rl.evaluation.show import rollout
    from sandboxes.base import SandboxSpec

    settings = checked(
        model=arguments.model,
        suite=arguments.id,
        options=_options(arguments.set),
        k=1,
        limit=arguments.episodes,
        seed=arguments.seed,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        max_tokens=arguments.max_tokens,
        max_turns=arguments.max_turns,
        dialect=arguments.dialect,
        shots=arguments.shots,
        engine=arguments.engine,
        sandbox=SandboxSpec(kind=arguments.sandbox, size=2),
        served_name=arguments.served_name,
        key_variable=arguments.key_env,
    )
    if not settings.is_endpoint:
        _quieten_libraries()
    rollout(settings, _console())


def _compare(arguments: argparse.Namespace) -> None:
    from agent_rl.evaluation.compare import compare, comparison_markdown, comparison_table

    tree = compare(arguments.first, arguments.second)
    if arguments.format == "json":
        print(json.dumps(tree, indent=2))
    elif arguments.format == "markdown":
        print(comparison_markdown(tree), end="")
    else:
        console = _console()
        console.print(comparison_table(tree))
        for note in tree["notes"]:
            console.print(f"[yellow]note[/yellow]: {note}", soft_wrap=True, highlight=False)


def _score(arguments: argparse.Namespace) -> None:
    from rich.progress import Progress

    from agent_rl.evaluation.report import rich_table
    from agent_rl.evaluation.score import score

    console = _console()
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("episodes", total=None)
        tree = asyncio.run(
            score(
                arguments.run,
                arguments.grader,
                tell=lambda done, total: progress.update(bar, completed=done, total=total),
            )
        )
    console.print(rich_table(tree))
    for before, counts in tree["changed"].items():
        told = ", ".join(f"{verdict} {count}" for verdict, count in counts.items())
        console.print(f"{before} before: {told} now", highlight=False)


def _contamination(arguments: argparse.Namespace) -> None:
    from agent_rl.evaluation.contamination import check, summary
    from agent_rl.evaluation.suites import load_suite

    parts = load_suite(arguments.suite, data=arguments.data)
    tree = check(parts, arguments.train)
    if arguments.json:
        print(json.dumps(tree, indent=2))
        return
    for line in summary(tree, parts):
        print(line)
    for overlap in tree["overlaps"]:
        kind = "word for word" if overlap["exact"] else f"{overlap['share']:.0%}"
        print(f"  {overlap['part']}  {overlap['problem']}  {kind}  {overlap['row']}")


def _console() -> Any:
    """As wide as the terminal; a file gets what the tables need."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 140)


def _options(settings: list[str]) -> dict[str, Any]:
    from agent_rl.errors import ConfigError

    options: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting}: write KEY=VALUE")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return options


def _object(name: str, text: str) -> dict[str, Any]:
    from agent_rl.errors import ConfigError

    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} {text!r}: not valid JSON ({error})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{name} {text!r}: a JSON object, please")
    return tree
