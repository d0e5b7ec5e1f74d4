"""An engine that sleeps while the learner updates: when it is told to, what it is told, and where it is refused."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from agent_rl import loop
from agent_rl.cli import main
from agent_rl.config import ConfigError, EngineConfig, load_config
from agent_rl.engines.transformers import TransformersEngine
from agent_rl.engines.vllm import VllmEngine
from agent_rl.models import load_model

FEW = (
    "--steps 2 --threads 1 --sandbox.kind local --rollout.prompts 1 --rollout.group 2 --rollout.max_tokens 4 "
    "--cold_start.steps 1 --cold_start.batch 2 --records.trajectories 0"
).split()


class Diary(TransformersEngine):
    def __init__(self, model: Any, diary: list[str]) -> None:
        super().__init__(model, max_model_len=512)
        self.diary = diary

    async def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self.diary.append(f"weights {version}")
        await super().update_weights(tensors, version)

    async def sleep(self) -> None:
        self.diary.append("asleep")

    async def wake(self) -> None:
        self.diary.append("awake")


def test_the_engine_sleeps_through_the_update_and_wakes_for_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diary: list[str] = []

    def make_engine(config: EngineConfig, model: Path, dtype: str, **settings: Any) -> Diary:
        return Diary(load_model(model, dtype), diary)

    def update(*arguments: Any, **settings: Any) -> Any:
        diary.append("update")
        return learn(*arguments, **settings)

    learn = loop.update
    monkeypatch.setattr(loop, "make_engine", make_engine)
    monkeypatch.setattr(loop, "update", update)
    loop.train(load_config("quickstart", [*FEW, "--output", str(tmp_path)]), Console(quiet=True))
    step = ["asleep", "update", "awake"]
    assert diary == ["weights 0", *step, "weights 1", *step, "weights 2"]


@pytest.mark.vllm
@pytest.mark.parametrize("sleep", [True, False])
async def test_vllm_is_told_to_keep_its_weights_and_to_finish_first(sleep: bool) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    class Llm:
        errored = False

        async def sleep(self, **settings: Any) -> None:
            calls.append(("sleep", settings))

        async def wake_up(self) -> bool:
            calls.append(("wake_up", {}))
            return True

    engine = VllmEngine(model="-", max_model_len=8, sleep=sleep)
    engine._llm, engine._fault = Llm(), ""  # type: ignore[assignment]
    await engine.sleep()
    await engine.wake()
    assert engine._arguments["enable_sleep_mode"] is sleep
    assert calls == ([("sleep", {"level": 1, "mode": "wait"}), ("wake_up", {})] if sleep else [])


def test_where_nothing_can_sleep_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="sleep needs kind 'vllm', not 'transformers'"):
        load_config("quickstart", ["--engine.sleep", "true"])
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    arguments = ["--engine.sleep", "true", "--engine.kind", "vllm", "--output", str(tmp_path / "runs")]
    assert main(["train", "quickstart", *arguments]) == 2
    assert "engine.sleep needs a GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
