"""Left-over groups in a whole run: beside a real learner, over its failure, over Ctrl-C, and with vLLM."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from agent_rl import loop
from agent_rl.checkpoint import read_state
from agent_rl.config import LearnerConfig, load_config
from agent_rl.engines.transformers import TransformersEngine
from agent_rl.errors import LearnerFailure
from agent_rl.learner import Learner
from agent_rl.models import load_model
from agent_rl.pack import SampledSequence
from agent_rl.setup import Setup, preflight
from agent_rl.types import Generation, Sampling
from envs.types import ModelTurn, Opening, Task, TurnResult

SETTINGS = (
    "--engine.kind vllm --rollout.leftovers keep --rollout.oversample 1.0 --rollout.prompts 2 --rollout.group 3 "
    "--rollout.max_tokens 30 --checkpoint.every 1 --records.trajectories 100 --threads 1 --sandbox.kind local"
).split()
CONSOLE = Console(quiet=True)


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_steps_in_the_thread_are_those_made_here_bit_for_bit(tiny_folder: Path) -> None:
    sequence = SampledSequence(token_ids=tuple(range(3, 60)), positions=tuple(range(5, 57)))

    def trained(thread: ThreadPoolExecutor | None) -> list[torch.Tensor]:
        learner = Learner(load_model(tiny_folder, "float32"), LearnerConfig(lr=1e-3), temperature=1.0)
        packed = learner.pack([sequence])

        def work() -> torch.Tensor:
            old = learner.score(packed, 52).logp
            learner.step(packed, torch.linspace(-1, 1, 52) / 52, old)
            return old

        try:
            scored = [asyncio.run(loop.done_by(thread, work)) for _ in range(3)]
            return [*scored, *(tensor.clone() for _, tensor in learner.named_tensors())]
        finally:
            learner.close()

    with ThreadPoolExecutor(1) as thread:
        assert all(map(torch.equal, trained(thread), trained(None)))


class Immediate(TransformersEngine):
    """Answers who asks, as vLLM does: nobody waits for a wave."""

    def join(self, episode_id: str) -> None: ...

    def leave(self, episode_id: str) -> None: ...

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        await asyncio.sleep(0)
        return await super().generate(prompt_ids, sampling, request_id=request_id)


class Coin:
    """Two turns and a reward by chance; the groups in ``held`` wait after the first turn until an update is made."""

    held: frozenset[str] = frozenset()
    updating = threading.Event()
    gone_on = threading.Event()
    opened = 0

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.turns = rng, 0

    async def areset(self, seed: int, task: Task) -> Opening:
        Coin.opened += 1
        self.task = task
        return Opening(messages=({"role": "user", "content": task.prompt},), tools=())

    async def astep(self, turn: ModelTurn) -> TurnResult:
        self.turns += 1
        if self.turns == 1:
            if self.task.id in Coin.held:
                while not Coin.updating.is_set():  # noqa: ASYNC110  # set by another thread
                    await asyncio.sleep(0.01)
                Coin.gone_on.set()
            message = {"role": "tool", "content": "1"}
            return TurnResult(messages=(message,), reward=None, terms={}, stop=None, calls=())
        return TurnResult(messages=(), reward=self.rng.random(), terms={}, stop="answer", calls=())

    async def aclose(self) -> None:
        Coin.opened -= 1


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def assert_each_prompt_is_trained_once(folder: Path, last_step: int) -> None:
    """The tasks in the records, and those that the last checkpoint has pending, are the run's first ones."""
    state = read_state(folder / "checkpoints" / f"step-{last_step:06d}")
    records = rows(folder, "trajectories.jsonl")
    assert {r["step"] for r in records} == set(range(1, last_step + 1))
    groups = {(r["step"], r["group"]): r["task"] for r in records}
    assert len(set(groups.values())) == len(groups), "a prompt was trained twice"
    assert len(groups) + len(state.pending) == state.cursor
    for record in records:
        spans = [(start, end) for start, end, _, _ in record["turns"]]
        assert sum(record["loss_mask"]) == sum(end - start for start, end in spans)
        assert all(any(start < at < end for start, end in spans) for at, _ in record["weight_changes"])


def test_episodes_go_on_beside_the_update_and_a_learner_that_breaks_leaves_nothing(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config("quickstart", [*SETTINGS, "--output", str(tmp_path), "--steps", "3"])
    setup = asyncio.run(preflight(config, CONSOLE))
    Coin.held = frozenset(setup.task(place).id for place in (2, 3))
    rng = random.Random(0)
    threads: list[str] = []
    update = loop.update

    def watched(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread().name)
        Coin.updating.set()
        assert Coin.gone_on.wait(30), "no episode went on beside the update"
        if len(threads) == 2:
            raise LearnerFailure("injected")
        return update(*args, **kwargs)

    async def untrained(*args: Any) -> Path:
        return tiny_folder

    def make_engine(config: Any, model: Path, dtype: str, *, seed: int, change_midway: bool) -> Immediate:
        assert change_midway
        return Immediate(load_model(model, dtype), max_model_len=config.max_model_len)

    monkeypatch.setattr(loop, "update", watched)
    monkeypatch.setattr(loop, "starting_model", untrained)
    monkeypatch.setattr(loop, "make_engine", make_engine)
    monkeypatch.setattr(Setup, "make_env", lambda self, resources: Coin(rng))
    with pytest.raises(LearnerFailure, match="injected"):
        loop.train(config, CONSOLE)
    assert Coin.opened == 0
    assert {name.partition("_")[0] for name in threads} == {"learner"}
    assert not [t for t in threading.enumerate() if t.name.startswith("learner")]

    loop.train(config, CONSOLE)
    assert Coin.opened == 0
    metrics = rows(config.folder, "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert [row["groups_waiting"] for row in metrics] == [2, 2, 0]
    assert metrics[2]["groups_carried"] == 2
    assert metrics[2]["staleness_max"] == 1
    assert_each_prompt_is_trained_once(config.folder, 3)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_run_on_vllm_trains_every_prompt_once_over_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agent_rl", "train", "quickstart", "--output", str(tmp_path), *SETTINGS]
    command += "--engine.kv_cache_gb 0.2 --cold_start.steps 60 --cold_start.batch 24 --learner.lr 1e-3 --steps".split()
    process = subprocess.Popen(
        [*command, "500"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        # A shell starts what runs in its background with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 5/"):
            process.send_signal(signal.SIGINT)
            break
    process.communicate(timeout=120)
    assert process.returncode == 130
    listed = ["ps", "-o", "stat=,args=", "--sid", str(process.pid)]
    left = subprocess.run(listed, capture_output=True, text=True, check=False).stdout.splitlines()
    assert [line for line in left if not line.startswith("Z")] == [], "something was left running"
    folder = tmp_path / "quickstart"
    done = len(rows(folder, "metrics.jsonl"))
    assert done >= 5

    last = done + 2
    finished = subprocess.run([*command, str(last)], capture_output=True, text=True, timeout=600, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "going on after step" in finished.stdout
    metrics = rows(folder, "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, last + 1))
    assert all(row["canary_gap"] < 1e-3 for row in metrics)
    assert max(row["staleness_max"] or 0 for row in metrics) <= 1  # which groups are in time, the machine decides
    assert sum(row["groups_carried"] for row in metrics) > 0
    assert all(row["groups_dropped"] == 0 for row in metrics)
    # Where all tokens are of the current weights, sampler and learner agree on them.
    assert all(row["logprob_gap_max"] < 1e-3 for row in metrics if row["staleness_max"] == 0)
    assert_each_prompt_is_trained_once(folder, last)
    assert os.path.isdir(folder / "model")
