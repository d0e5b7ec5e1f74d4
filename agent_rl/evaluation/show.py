"""``agent-rl rollout``: play a few episodes of an environment with any model, and print them in colour."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.text import Text

from agent_rl.evaluation.run import evaluate
from agent_rl.evaluation.settings import Settings
from agent_rl.evaluation.store import Row, read_rows


def rollout(settings: Settings, console: Console) -> None:
    """Play ``settings.limit`` episodes of the environment and print each.

    Raises:
        ConfigError, EngineFailure, TooManyFailures: as ``evaluate`` does.
    """
    with TemporaryDirectory() as temporary:
        quiet = Console(quiet=True)
        folder = evaluate(settings.model_copy(update={"output": temporary, "name": "rollout"}), quiet)
        episodes = list(read_rows(folder))
        decode = _decoder(folder)
    for row, transcript in episodes:
        console.print(episode_text(row, transcript, decode))


def episode_text(row: Row, transcript: dict[str, Any], decode: Any) -> Text:
    """The model's own words in green, all else dim: by token where tokens are known, else by message."""
    text = Text()
    reward = "void" if row.reward is None else f"reward {row.reward:.2f}"
    told = f"task {row.problem}: {reward}, {row.verdict}, ended by {row.stop}"
    text.append(f"{told} (green: the model, dim: all else)\n\n", style="bold")
    if decode is not None and transcript["token_ids"]:
        for ids, own in _pieces(transcript["token_ids"], transcript["spans"]):
            text.append(decode(ids), style="green" if own else "dim")
    else:
        for message in transcript["messages"]:
            text.append(f"[{message['role']}]\n", style="bold")
            own = message["role"] == "assistant"
            text.append(f"{message['content']}\n", style="green" if own else "dim")
    text.append(f"\n{row.failure}\n" if row.failure else "\n", style="red")
    return text


def _pieces(ids: Sequence[int], spans: Sequence[Sequence[int]]) -> list[tuple[Sequence[int], bool]]:
    pieces: list[tuple[Sequence[int], bool]] = []
    end = 0
    for start, stop in spans:
        pieces += [(ids[end:start], False), (ids[start:stop], True)]
        end = stop
    return [*pieces, (ids[end:], False)]


def _decoder(folder: Path) -> Any:
    """Ids to text by the model's tokenizer; None for an endpoint."""
    name = json.loads((folder / "evaluation.json").read_text()).get("tokenizer")
    if name is None:
        return None
    from agent_rl.models import load_tokenizer  # here: it imports torch, which an endpoint does without

    tokenizer = load_tokenizer(Path(name))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
