"""The optimizer's state on a disk: the same weights as without, and a checkpoint from which nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agent_rl.config import ConfigError, LearnerConfig, load_config
from agent_rl.learner import Learner
from agent_rl.machine import check_learner
from agent_rl.models import load_model
from agent_rl.offload import swap_folder
from agent_rl.pack import SampledSequence
from agent_rl.ranks import make_learner

SEQUENCES = [SampledSequence(token_ids=tuple(range(3, 3 + n)), positions=tuple(range(5, n))) for n in (30, 41, 17)]
NUM_TOKENS = sum(len(s.positions) for s in SEQUENCES)
Weights = dict[str, torch.Tensor]


def steps(learner: Any, count: int) -> Weights:
    for _ in range(count):
        learner.step(learner.pack(SEQUENCES), torch.full((NUM_TOKENS,), 1 / NUM_TOKENS), None)
    return {name: tensor.clone() for name, tensor in learner.named_tensors()}


def same(a: Weights, b: Weights) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    disk = tmp_path / "disk"
    disk.mkdir()
    return {"zero_stage": 3, "offload": "nvme", "offload_path": str(disk), "lr": 1e-2, "weight_decay": 0.1}


@pytest.mark.slow
@pytest.mark.aio
@pytest.mark.timeout(900)  # the first one compiles
@pytest.mark.parametrize(("dtype", "optimizer"), [("float32", "adamw"), ("bfloat16", "sgd")])
def test_a_disk_changes_no_number_and_a_checkpoint_goes_on_bit_for_bit(
    tiny_folder: Path, tmp_path: Path, settings: dict[str, Any], dtype: str, optimizer: str
) -> None:
    check_learner(LearnerConfig(**settings), dtype)

    def learner(**options: Any) -> Learner:
        config = LearnerConfig(**{**settings, "optimizer": optimizer, **options})
        return Learner(load_model(tiny_folder, dtype), config, temperature=1.0)

    plain = learner(offload="none", offload_path=None)
    expected = steps(plain, 4)
    plain.close()
    first = learner()
    steps(first, 2)
    first.save(tmp_path)
    found = steps(first, 2)
    first.close()
    assert not list((tmp_path / "disk").iterdir())
    tolerance = 1e-6 if dtype == "float32" else 1e-2
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=tolerance)

    again = learner()
    again.load(tmp_path)
    assert again.steps_taken == 2
    assert same(steps(again, 2), found)
    again.close()


@pytest.mark.slow
@pytest.mark.aio
@pytest.mark.timeout(900)
def test_every_rank_has_its_own_part(tiny_folder: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    def ranks() -> Any:
        return make_learner(tiny_folder, "float32", LearnerConfig(ranks=2, **settings), temperature=1.0)

    first = ranks()
    steps(first, 2)
    first.save(tmp_path)
    found = steps(first, 1)
    first.close()
    again = ranks()
    again.load(tmp_path)
    assert same(steps(again, 1), found)
    again.close()
    alone = Learner(load_model(tiny_folder, "float32"), LearnerConfig(**settings), temperature=1.0)
    with pytest.raises(ValueError, match="cannot be read"):
        alone.load(tmp_path)
    alone.close()


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "agent-rl-swap-999999999-x").mkdir()
    (tmp_path / "mine").mkdir()
    own = swap_folder(str(tmp_path))
    other = swap_folder(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([own.name, other.name, "mine"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--learner.offload", "nvme"], "offload 'nvme' needs zero_stage 3, not 2"),
        (["--learner.offload", "nvme", "--learner.zero_stage", "3"], "go together: set both or none"),
        (["--learner.offload_path", "/tmp"], "go together: set both or none"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("quickstart", overrides)


def test_what_the_machine_cannot_do_is_one_line(tmp_path: Path) -> None:
    config = LearnerConfig(zero_stage=3, offload="nvme", offload_path=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="is no folder that can be written"):
        check_learner(config, "float32")
    with pytest.raises(ConfigError, match="float16 and learner\\.offload"):
        check_learner(config, "float16")
