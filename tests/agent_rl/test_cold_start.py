"""The start before RL: our side's failures cost a trace nothing, and the run's memory settings hold for it too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agent_rl import cold_start
from agent_rl.codec import ChatCodec
from agent_rl.config import LearnerConfig, RunConfig, load_config
from agent_rl.rollout import TooManyFailures
from agent_rl.setup import Setup
from envs import Resources
from envs.tools import ToolContext
from sandboxes import SandboxFailure


async def test_a_trace_that_our_side_lost_is_made_again_and_blames_nobody_else(
    quick_config: RunConfig, setup: Setup, codec: ChatCodec, resources: Resources, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = quick_config.model_copy(update={"cold_start": quick_config.cold_start.model_copy(update={"guesses": 0.0})})
    assert config.rollout.max_refills == 2
    whole = await cold_start.trace(config, setup, resources, codec, 0)
    run, losses = ToolContext.run, 2

    async def lossy(self: ToolContext, code: str, **settings: Any) -> Any:
        nonlocal losses
        losses -= 1
        if losses >= 0:
            raise SandboxFailure("the worker died")
        return await run(self, code, **settings)

    monkeypatch.setattr(ToolContext, "run", lossy)
    assert await cold_start.trace(config, setup, resources, codec, 0) == whole
    losses = 3
    with pytest.raises(TooManyFailures, match=r"lost on our side 3 times, last at turn 1, .* \(sandbox\): the worker"):
        await cold_start.trace(config, setup, resources, codec, 0)


async def test_it_takes_no_more_memory_than_the_run_was_given(
    setup: Setup, resources: Resources, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):
        pass

    def asked(source: Path, dtype: str, config: LearnerConfig, **settings: Any) -> Any:
        assert (config.micro_tokens, config.chunk_tokens, config.activation_checkpointing) == (512, 64, True)
        assert (config.lr, config.grad_clip) == (1e-3, LearnerConfig().grad_clip)
        raise Asked

    monkeypatch.setattr(cold_start, "make_learner", asked)
    less = "--learner.micro_tokens 512 --learner.chunk_tokens 64 --learner.activation_checkpointing true"
    config = load_config("quickstart", [*less.split(), "--learner.grad_clip", "0.5"])
    with pytest.raises(Asked):
        await cold_start.cold_start(config, setup, resources, tiny_folder, tmp_path / "out", Console(quiet=True))
