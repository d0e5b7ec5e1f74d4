"""Supervised fine-tuning before the first RL step, on traces that an expert policy leaves in the real environment.

The traces go through the same codec, masks and learner as training (``agent_rl.sft``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from agent_rl.codec import ChatCodec
from agent_rl.config import LEARNER_MEMORY, ConfigError, LearnerConfig, RunConfig
from agent_rl.models import load_tokenizer
from agent_rl.pack import SampledSequence
from agent_rl.progress import bars
from agent_rl.ranks import make_learner
from agent_rl.rollout import Place, TooManyFailures, run_episode
from agent_rl.seeds import derive_seed
from agent_rl.setup import Setup
from agent_rl.sft import fit
from agent_rl.smollm2 import prepare_smollm2
from agent_rl.tiny import prepare_tiny
from agent_rl.types import Generation, Sampling
from envs import Resources, Task

TRACES = 1024
"""Distinct traces; more steps than they fill go over them again."""

SAME_MACHINE = ("ranks", "zero_stage", "offload", "offload_path", *LEARNER_MEMORY)
"""Settings of the learner that hold here too: where it runs, and what it may take of the memory."""


async def starting_model(config: RunConfig, setup: Setup, resources: Resources, console: Console) -> Path:
    """The folder of the model that RL starts from; what has to be made for it is made once per run."""
    done = config.folder / "cold_start"
    if done.is_dir():
        return done
    if config.model.path == "tiny":
        base = prepare_tiny(config.folder / "tiny", expert_texts(setup), seed=config.seed)
    elif config.model.path == "smollm2":
        base = prepare_smollm2()
    else:
        base = Path(config.model.path).expanduser()
    if not config.cold_start.steps:
        return base
    await cold_start(config, setup, resources, base, done, console)
    return done


async def cold_start(
    config: RunConfig, setup: Setup, resources: Resources, base: Path, out: Path, console: Console
) -> None:
    """Fine-tune ``base`` on expert traces and export it to ``out``."""
    if config.threads:
        torch.set_num_threads(config.threads)
    settings = config.cold_start
    tokenizer = load_tokenizer(base)
    codec = ChatCodec(tokenizer, system_text=setup.system_text)
    learner = make_learner(
        base,
        config.model.dtype,
        LearnerConfig(
            lr=settings.lr,
            betas=(0.9, 0.95),  # a short run: the second moment must settle within it
            warmup_steps=20,
            **{name: getattr(config.learner, name) for name in SAME_MACHINE},
        ),
        temperature=1.0,
        threads=config.threads,
    )
    with bars(console) as progress:
        bar = progress.add_task("traces  ", total=TRACES)
        traces = []
        for number in range(TRACES):
            traces.append(await trace(config, setup, resources, codec, number))
            progress.advance(bar)
        bar = progress.add_task("SFT     ", total=settings.steps)

        def on_step(step: int, loss: Callable[[], float]) -> None:
            if step % 20 == 0 or step == settings.steps:
                progress.console.print(
                    f"cold start {step}/{settings.steps}  loss {loss():.3f} nats a token", highlight=False
                )
            progress.advance(bar)

        seed = derive_seed(config.seed, "cold start")
        fit(learner, traces, steps=settings.steps, batch=settings.batch, seed=seed, on_step=on_step)
    learner.export(out, tokenizer)
    learner.close()


async def trace(
    config: RunConfig, setup: Setup, resources: Resources, codec: ChatCodec, number: int
) -> SampledSequence:
    """The token sequence of the expert's episode on one task, tool results as the real environment gave them.

    Raises:
        ConfigError: the expert's own episode was not right.
        TooManyFailures: our side lost it ``1 + config.rollout.max_refills`` times.
    """
    task = setup.tasks.task(derive_seed(config.seed, "trace", number) % len(setup.tasks))
    rng = random.Random(derive_seed(config.seed, "guess", number))
    guesses = rng.random() < config.cold_start.guesses
    texts = [guess(task, rng)] if guesses else expert_turns(setup, task)
    for attempt in range(1 + config.rollout.max_refills):
        trajectory = await run_episode(
            setup.make_env(resources),
            task,
            Place(step=0, group=number, member=0, attempt=attempt),
            engine=_Scripted(codec, texts),
            codec=codec,
            config=config.rollout,
            seed=config.seed,
        )
        if not trajectory.is_void:
            break
    if (failure := trajectory.failure) is not None:
        raise TooManyFailures(
            f"the trace of {task.id} was lost on our side {attempt + 1} times, last at {failure.where} "
            f"({failure.kind}): {failure.detail}"
        )
    if not guesses and trajectory.terms.get("correct") != 1.0:
        raise ConfigError(
            f"the expert's trace of {task.id} ended by {trajectory.stop} ({trajectory.terms}): "
            "are the token limits of [rollout] too small for it?"
        )
    return SampledSequence.of(trajectory.token_ids, trajectory.loss_mask)


def expert_turns(setup: Setup, task: Task) -> list[str]:
    """What the expert writes: one call, then the answer in a box."""
    assert setup.spec.expert is not None
    return [setup.dialect.written("python", {"code": setup.spec.expert(task)}), f"\\boxed{{{task.answer}}}"]


def guess(task: Task, rng: random.Random) -> str:
    """What a model that trusts its head writes: a number of the right length in a box."""
    digits = len((task.answer or "").lstrip("-"))
    return f"\\boxed{{{rng.randint(10 ** (digits - 1), 10**digits - 1)}}}"


def expert_texts(setup: Setup) -> list[str]:
    """Rendered conversations for a tokenizer to learn from, broken where the codec joins pieces."""
    from transformers.utils.chat_template_utils import render_jinja_template

    from agent_rl.tiny import CHAT_TEMPLATE

    conversations = []
    for number in range(TRACES):
        task = setup.tasks.task(derive_seed(setup.config.seed, "trace", number) % len(setup.tasks))
        call, answer = expert_turns(setup, task)
        conversations.append(
            [
                {"role": "user", "content": task.prompt},
                {"role": "assistant", "content": call},
                setup.dialect.result_message("python", str(task.answer)),
                {"role": "assistant", "content": answer},
            ]
        )
    schemas: Any = [tool.schema for tool in setup.spec.tools]
    rendered: Any = render_jinja_template(conversations, tools=schemas, chat_template=CHAT_TEMPLATE)
    texts: list[str] = rendered[0]
    # A completion is encoded alone, so no merge may reach across the generation prompt's end.
    return [text.replace("assistant\n", "assistant\n<|im_end|>") for text in texts]


class _Scripted:
    """An engine that returns given texts as if they had been sampled."""

    max_model_len = 1 << 30
    weight_version = 0

    def __init__(self, codec: ChatCodec, texts: Sequence[str]) -> None:
        self._codec = codec
        self._texts = iter(texts)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        ids = (*self._codec.encode_text(next(self._texts)), self._codec.end_of_turn)
        return Generation(token_ids=ids, logprobs=(0.0,) * len(ids), finish_reason="stop", weight_version=0)
