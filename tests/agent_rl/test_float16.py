"""float16 with dynamic loss scaling: an overflow costs one step and nothing else.

DeepSpeed refuses float16 on CPUs without instructions for it; torch computes in it all the same, slowly, so these tests
switch that check off.
"""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_rl.cli import main
from agent_rl.config import ConfigError, LearnerConfig, LoraSettings
from agent_rl.errors import LearnerFailure
from agent_rl.learner import Learner, StepReport
from agent_rl.machine import check_learner
from agent_rl.models import load_model
from agent_rl.pack import SampledSequence
from agent_rl.sft import fit

SEQUENCES = [
    SampledSequence(token_ids=tuple(range(3, 3 + length)), positions=tuple(range(5, length))) for length in (30, 41, 17)
]
NUM_TOKENS = sum(len(s.positions) for s in SEQUENCES)


@pytest.fixture
def on_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: True)


def make_learner(folder: Path, dtype: str = "float16", **settings: Any) -> Learner:
    config = LearnerConfig(**{"lr": 1e-2, "optimizer": "sgd", "max_micro_sequences": 1, **settings})
    return Learner(load_model(folder, dtype), config, temperature=1.0)


def take_step(learner: Learner, scale: float = 1.0) -> StepReport:
    return learner.step(learner.pack(SEQUENCES), torch.full((NUM_TOKENS,), scale / NUM_TOKENS), None)


OVERFLOW = 1e5
"""Times the loss: far beyond float16 after scaling."""


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.named_tensors()}


@pytest.mark.usefixtures("on_this_cpu")
@pytest.mark.parametrize(
    "settings",
    [{"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}, {"offload": "cpu"}, {"activation_checkpointing": True}],
    ids=str,
)
def test_steps_are_those_of_float32_to_its_rounding(tiny_folder: Path, settings: dict[str, Any]) -> None:
    scores, norms = [], []
    for dtype in ("float32", "float16"):
        learner = make_learner(tiny_folder, dtype, **settings)
        norms.append([take_step(learner).grad_norm for _ in range(3)])
        scores.append(learner.score(learner.pack(SEQUENCES), NUM_TOKENS).logp)
        assert learner.steps_taken == 3
        learner.close()
    assert norms[1] == pytest.approx(norms[0], rel=0.01)
    torch.testing.assert_close(scores[1], scores[0], atol=0.02, rtol=0)


TWO_RANKS = """
import sys
from pathlib import Path
import torch
from deepspeed.accelerator import get_accelerator
type(get_accelerator()).is_fp16_supported = lambda self: True
from agent_rl.config import LearnerConfig
from agent_rl.learner import Learner
from agent_rl.models import load_model
from agent_rl.pack import SampledSequence

sequences = [SampledSequence(token_ids=tuple(range(3, 3 + n)), positions=tuple(range(5, n))) for n in (30, 41)]
coefficient_T = torch.full((25 + 36,), 1 / 61)
config = LearnerConfig(lr=1e-2, optimizer="sgd", max_micro_sequences=1, zero_stage=2)
learner = Learner(load_model(Path(sys.argv[1]), "float16"), config, temperature=1.0)
packed = learner.pack(sequences)
assert learner.world_size == 2 and [len(of_rank) for of_rank in packed] == [1, 1]
coefficient_T[packed[1][0].origin] *= 1e5  # overflows on the second rank alone
before = {name: tensor.clone() for name, tensor in learner.named_tensors()}
report = learner.step(packed, coefficient_T, None)
assert (report.skipped_steps, learner.steps_taken) == (1, 0), report
assert all(torch.equal(tensor, before[name]) for name, tensor in learner.named_tensors())
assert learner.step(packed, torch.full((61,), 1 / 61), None).skipped_steps == 0
"""


@pytest.mark.slow
def test_an_overflow_on_one_rank_skips_the_step_on_all(tiny_folder: Path, tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(TWO_RANKS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(worker)]
    done = subprocess.run([*launch, str(tiny_folder)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.usefixtures("on_this_cpu")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_overflow_skips_one_step_and_changes_nothing_else(tiny_folder: Path, stage: int) -> None:
    settings = {"zero_stage": stage, "optimizer": "adamw", "lr": 1e-3, "warmup_steps": 4}
    plain, skipping = [], []
    learner = make_learner(tiny_folder, **settings)
    plain = [take_step(learner) for _ in range(3)]
    expected = weights(learner)
    learner.close()

    learner = make_learner(tiny_folder, **settings)
    skipping = [take_step(learner)]
    before, scale = weights(learner), learner.engine.optimizer.loss_scale
    report = take_step(learner, OVERFLOW)
    assert (report.skipped_steps, report.num_steps, learner.steps_taken) == (1, 0, 1)
    assert math.isinf(report.grad_norm)
    assert learner.engine.optimizer.loss_scale == scale / 2
    for name, tensor in weights(learner).items():
        torch.testing.assert_close(tensor, before[name], atol=0, rtol=0)
    skipping += [take_step(learner) for _ in range(2)]
    found = weights(learner)
    learner.close()

    assert [r.lr for r in skipping] == [r.lr for r in plain] == pytest.approx([2.5e-4, 5e-4, 7.5e-4])
    for name, tensor in expected.items():  # another scale is a power of two: it rounds the same but near underflow
        torch.testing.assert_close(found[name], tensor, atol=2e-3, rtol=0)
    joined = StepReport.joined([plain[0], report], [10, 10])
    assert (joined.num_steps, joined.skipped_steps) == (1, 1)


@pytest.mark.usefixtures("on_this_cpu")
def test_a_checkpoint_keeps_scale_and_masters(tiny_folder: Path, tmp_path: Path) -> None:
    settings = {"optimizer": "adamw", "lr": 1e-3, "lora": LoraSettings(rank=2)}
    learner = make_learner(tiny_folder, **settings)
    take_step(learner, OVERFLOW)
    take_step(learner)
    learner.save(tmp_path)
    take_step(learner)
    expected, scale = weights(learner), learner.engine.optimizer.loss_scale
    learner.close()
    learner = make_learner(tiny_folder, **settings)
    learner.load(tmp_path)
    assert (learner.steps_taken, learner.engine.optimizer.loss_scale) == (1, scale)
    take_step(learner)
    for name, tensor in weights(learner).items():
        torch.testing.assert_close(tensor, expected[name], atol=0, rtol=0)
    learner.close()


@pytest.mark.usefixtures("on_this_cpu")
def test_a_gradient_that_never_becomes_finite_ends_the_run(tiny_folder: Path) -> None:
    learner = make_learner(tiny_folder)
    for _ in range(16):  # from 2^16 down to 1
        assert take_step(learner, math.inf).skipped_steps == 1
    with pytest.raises(LearnerFailure, match="not finite even with the loss scaled by 1"):
        take_step(learner, math.inf)
    learner.close()


@pytest.mark.usefixtures("on_this_cpu")
def test_fine_tuning_takes_a_skipped_batch_again(tiny_folder: Path) -> None:
    learner = make_learner(tiny_folder)
    learner.engine.optimizer.loss_scaler.cur_scale = 2.0**40
    seen: list[int] = []
    fit(learner, SEQUENCES, steps=3, batch=2, seed=0, on_step=lambda step, loss: seen.append(step))
    assert learner.engine.skipped_steps > 0
    assert (seen, learner.steps_taken) == ([1, 2, 3], 3)
    learner.close()


def test_where_it_cannot_be_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from deepspeed.accelerator import get_accelerator

    with pytest.raises(ConfigError, match=r"needs learner\.zero_stage 1, 2 or 3"):
        check_learner(LearnerConfig(zero_stage=0), "float16")
    if get_accelerator().is_fp16_supported():
        pytest.skip("this machine can train in float16")
    with pytest.raises(ConfigError, match="needs a GPU"):
        check_learner(LearnerConfig(), "float16")
    assert main(["train", "quickstart", "--model.dtype", "float16", "--output", str(tmp_path / "runs")]) == 2
    assert "here use float32 or bfloat16" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
