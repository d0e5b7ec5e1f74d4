"""Supervised fine-tuning on multi-turn tool traces: same codec, masks, packing and learner as reinforcement learning.

Maximum likelihood is the plan in which every sampled token has the coefficient ``1 / N``. "Sampled" are the assistant's
own words; what tools said is context, also where a trace has it inside the assistant's text (``<interpreter>`` of
ReTool, arXiv 2504.11536, and ``output`` fences of ToRA, arXiv 2309.17452).
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from agent_rl.codec import ChatCodec
from agent_rl.config import ConfigError, LearnerConfig, other_settings
from agent_rl.pack import SampledSequence
from agent_rl.progress import bars
from agent_rl.seeds import shuffled_index
from envs.parsers import Dialect, get_dialect, guess_dialect
from envs.types import Message, Opening

INLINE_RESULT = re.compile(r"\n?(?:```output\n(.*?)\n?```|<interpreter>\n?(.*?)\n?</interpreter>)\n?", re.DOTALL)
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One conversation, the assistant's turns and what followed each of them."""

    where: str  # file and line
    messages: tuple[Message, ...]  # first an opening without assistant turns, last an assistant turn
    tools: tuple[dict[str, Any], ...]  # schemas in OpenAI's form


def load_traces(path: Path, dialect: Dialect) -> list[Trace]:
    """Traces of a JSONL file: ``{"messages": [...], "tools": [...]}`` a line, or both inside ``meta``.

    Structured ``tool_calls`` of an assistant message are written as ``dialect`` writes calls.

    Raises:
        ConfigError: no such file, no rows, or a row that is no conversation, named by file and line.
    """
    if not path.is_file():
        raise ConfigError(f"traces {str(path)!r} do not exist")
    traces = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
            row = row if "messages" in row else row["meta"]
            messages = [_plain(message, dialect) for message in row["messages"]]
            tools = tuple(row.get("tools") or ())
        except (json.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{where}: a trace is an object with messages of role and content ({error!r})") from None
        turns = [part for message in messages for part in _without_inline_results(message, dialect)]
        if not turns or turns[0]["role"] == "assistant" or turns[-1]["role"] != "assistant":
            raise ConfigError(f"{where}: a trace begins with a system or user message and ends with an assistant's")
        traces.append(Trace(where=where, messages=tuple(turns), tools=tools))
    if not traces:
        raise ConfigError(f"traces {str(path)!r} have no rows")
    return traces


def _plain(message: dict[str, Any], dialect: Dialect) -> Message:
    role, content = message["role"], message.get("content") or ""
    if role not in ROLES or not isinstance(content, str):
        raise ValueError(f"role {role!r} with a content of type {type(content).__name__}")
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        content += ("\n" if content else "") + dialect.written(function["name"], arguments)
    if role == "tool":
        return dialect.result_message(message.get("name") or "python", content)
    return {"role": role, "content": content}


def _without_inline_results(message: Message, dialect: Dialect) -> list[Message]:
    """An assistant message with tool output inside, as the turns and results that it stands for."""
    if message["role"] != "assistant":
        return [message]
    text = str(message["content"])
    parts: list[Message] = []
    end = 0
    for match in INLINE_RESULT.finditer(text):
        parts.append({"role": "assistant", "content": text[end : match.start()]})
        parts.append(dialect.result_message("python", match.group(1) if match.group(1) is not None else match.group(2)))
        end = match.end()
    return [*parts, {"role": "assistant", "content": text[end:]}] if text[end:].strip() else parts


def tokenised(trace: Trace, codec: ChatCodec) -> SampledSequence:
    """The trace as ids, as a rollout of it would have grown; the assistant's words and its ends of turn count."""
    first = next(i for i, message in enumerate(trace.messages) if message["role"] == "assistant")
    ids = codec.open(Opening(messages=trace.messages[:first], tools=trace.tools))
    mask = [False] * len(ids)
    between: list[Message] = []
    for place, message in enumerate(trace.messages[first:]):
        if message["role"] != "assistant":
            between.append(message)
            continue
        if place:
            new = codec.extend("stop", between)
            ids, mask, between = ids + new, mask + [False] * len(new), []
        said = [*codec.encode_text(str(message["content"])), codec.end_of_turn]
        ids, mask = ids + said, mask + [True] * len(said)
    return SampledSequence.of(ids, mask)


def fit(
    learner: Any,
    sequences: Sequence[SampledSequence],
    *,
    steps: int,
    batch: int,
    seed: int,
    on_step: Callable[[int, Callable[[], float]], None],
) -> None:
    """Maximum likelihood until the learner has taken ``steps`` steps; batches are a pure function of seed and step.

    Args:
        learner: an ``agent_rl.learner.Learner``, perhaps one that has taken some of the steps already.
        batch: sequences of one step.
        on_step: called after each step with its number and a function that computes the loss of its batch, nats a
            token, under the new weights.
    """
    while learner.steps_taken < steps:
        step = learner.steps_taken
        chosen = [sequences[shuffled_index(step * batch + i, len(sequences), seed)] for i in range(batch)]
        num_tokens = sum(len(sequence.positions) for sequence in chosen)
        micro_batches = learner.pack(chosen)
        # The ratio is 1, so the summed loss is -1; its gradient is that of the mean log-likelihood.
        learner.step(micro_batches, torch.full((num_tokens,), 1.0 / num_tokens), None)
        if learner.steps_taken == step:
            continue  # a float16 gradient overflowed: the same batch again, with the loss scaled less
        on_step(step + 1, functools.partial(_loss, learner, micro_batches, num_tokens))


def _loss(learner: Any, micro_batches: Any, num_tokens: int) -> float:
    return -float(learner.score(micro_batches, num_tokens).logp.mean())


def sft(
    model: Path,
    data: Path,
    out: Path,
    *,
    config: LearnerConfig,
    steps: int,
    batch: int,
    seed: int = 0,
    max_tokens: int = 4096,
    dtype: str = "float32",
    dialect: str = "auto",
    save_every: int = 50,
    console: Console | None = None,
) -> Path:
    """Fine-tune ``model`` on the traces of ``data`` into the model folder ``out``; a killed run goes on where it was.

    Raises:
        ConfigError: no model, no traces, a bad row, no trace within ``max_tokens``, a killed run with other settings,
            or what this machine cannot do.
    """
    from agent_rl.machine import check_learner
    from agent_rl.models import chat_template, check_model_folder, load_tokenizer
    from agent_rl.ranks import make_learner

    console = console or Console()
    check_model_folder(str(model))
    check_learner(config, dtype)
    if out.exists():
        raise ConfigError(f"{out} exists already: choose another folder, or remove it")
    spoken = get_dialect(dialect) if dialect != "auto" else guess_dialect(chat_template(model)) or get_dialect("hermes")
    traces = load_traces(data, spoken)
    work = out.with_name(out.name + ".work")
    settings = {
        "model": str(model.resolve()),
        "data": hashlib.sha256(data.read_bytes()).hexdigest(),
        "dialect": spoken.name,
        "dtype": dtype,
        "batch": batch,
        "seed": seed,
        "max_tokens": max_tokens,
        "learner": config.model_dump(mode="json"),
    }
    _check_continues(work, settings)
    tokenizer = load_tokenizer(model)
    codec = ChatCodec(tokenizer, system_text=spoken.system_text)
    sequences = [tokenised(trace, codec) for trace in traces]
    kept = [sequence for sequence in sequences if len(sequence.token_ids) <= max_tokens]
    if not kept:
        shortest = min(len(sequence.token_ids) for sequence in sequences)
        raise ConfigError(f"{data}: no trace has at most --max-tokens {max_tokens} tokens; the shortest has {shortest}")
    sampled = sum(len(sequence.positions) for sequence in kept)
    console.print(
        f"{len(kept)} traces ({len(sequences) - len(kept)} longer than {max_tokens} tokens left out), "
        f"{sum(len(s.token_ids) for s in kept)} tokens, {sampled} of them the assistant's",
        highlight=False,
        soft_wrap=True,
    )
    learner = make_learner(model, dtype, config, temperature=1.0)
    if (work / "done").is_file():
        learner.load(work / (work / "done").read_text())
        console.print(f"going on after step {learner.steps_taken}, from {work}", highlight=False)
    with bars(console) as progress:
        bar = progress.add_task("SFT     ", total=steps, completed=learner.steps_taken)

        def on_step(step: int, loss: Callable[[], float]) -> None:
            progress.advance(bar)
            if step == 1 or step % 10 == 0 or step == steps:
                progress.console.print(f"step {step}/{steps}  loss {loss():.4f} nats a token", highlight=False)
            if step % save_every == 0 and step < steps:
                _save(learner, work, step, settings)

        fit(learner, kept, steps=steps, batch=batch, seed=seed, on_step=on_step)
    learner.export(out, tokenizer)
    learner.close()
    shutil.rmtree(work, ignore_errors=True)
    return out


def _check_continues(work: Path, settings: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` when what a killed run left was made with other settings."""
    if not (work / "done").is_file():
        return
    before = json.loads((work / (work / "done").read_text() / "settings.json").read_text())
    if differing := other_settings(settings, before):
        raise ConfigError(
            f"{work} is of a killed run with other settings ({', '.join(differing)}): "
            "go on with those, choose another --out, or remove the folder"
        )


def _save(learner: Any, work: Path, step: int, settings: Mapping[str, Any]) -> None:
    """A new state; the one before leaves only after it is whole, and ``done`` names the one to use."""
    folder = work / f"step-{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    learner.save(folder)
    (folder / "settings.json").write_text(json.dumps(settings))
    aside = work / "done.partial"
    aside.write_text(folder.name)
    aside.rename(work / "done")
    for old in work.glob("step-*"):
        if old != folder:
            shutil.rmtree(old)
