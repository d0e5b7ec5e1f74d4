"""The learner's options: adapters, schedules, offload and checkpointing change what is trained, or nothing at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agent_rl.config import ConfigError, LearnerConfig, LoraSettings, load_config
from agent_rl.errors import LearnerFailure
from agent_rl.learner import Learner
from agent_rl.models import load_model, load_tokenizer
from agent_rl.pack import SampledSequence

SEQUENCES = [
    SampledSequence(token_ids=tuple(range(3, 3 + length)), positions=tuple(range(5, length))) for length in (30, 41, 17)
]
NUM_TOKENS = sum(len(s.positions) for s in SEQUENCES)


def stepped(folder: Path, steps: int = 2, **settings: Any) -> tuple[Learner, dict[str, torch.Tensor]]:
    learner = Learner(load_model(folder, "float32"), LearnerConfig(lr=1e-2, **settings), temperature=1.0)
    for _ in range(steps):
        learner.step(learner.pack(SEQUENCES), torch.full((NUM_TOKENS,), 1 / NUM_TOKENS), None)
    return learner, {name: tensor.clone() for name, tensor in learner.named_tensors()}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_published_weights_of_an_adapter_compute_what_the_adapter_computes(
    tiny_folder: Path, tmp_path: Path, stage: int
) -> None:
    before = {name: tensor.clone() for name, tensor in load_model(tiny_folder, "float32").named_parameters()}
    learner, merged = stepped(tiny_folder, zero_stage=stage, lora=LoraSettings(rank=4))
    try:
        assert merged.keys() == before.keys()
        changed = {name for name in before if not torch.equal(before[name], merged[name])}
        assert changed == {name for name in before if "proj" in name and name.endswith("weight")}
        scored = learner.score(learner.pack(SEQUENCES), NUM_TOKENS).logp
        learner.export(tmp_path / "model", load_tokenizer(tiny_folder))
    finally:
        learner.close()
    plain = Learner(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), LearnerConfig(), temperature=1.0)
    torch.testing.assert_close(plain.score(plain.pack(SEQUENCES), NUM_TOKENS).logp, scored, rtol=0, atol=1e-5)
    plain.close()


@pytest.mark.parametrize(
    "settings", [{"activation_checkpointing": True}, {"offload": "cpu"}, {"zero_stage": 3, "offload": "cpu"}]
)
def test_what_saves_memory_changes_no_number(tiny_folder: Path, settings: dict[str, Any]) -> None:
    sgd = {"optimizer": "sgd"}  # Adam makes a whole step out of the rounding of a gradient that is all but zero
    learner, expected = stepped(tiny_folder, **sgd)
    learner.close()
    learner, found = stepped(tiny_folder, **sgd, **settings)
    learner.close()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("most", [None, 1])
def test_a_step_that_goes_on_from_the_score_pass_is_the_same_step(
    tiny_folder: Path, stage: int, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    coefficient_T = torch.linspace(-1, 1, NUM_TOKENS)

    def weights(before_step: bool) -> tuple[dict[str, torch.Tensor], int]:
        settings: dict[str, Any] = {"zero_stage": stage, "max_micro_sequences": most, "lr": 1e-2}
        learner = Learner(load_model(tiny_folder, "float32"), LearnerConfig(**settings), temperature=1.0)
        calls = []
        forward = learner.policy.forward
        monkeypatch.setattr(learner.policy, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
        for _ in range(2):
            packed = learner.pack(SEQUENCES)
            old_T = learner.score(packed, NUM_TOKENS, before_step=before_step).logp
            learner.step(packed, coefficient_T, old_T)
        learner.close()
        return {name: tensor.clone() for name, tensor in learner.named_tensors()}, len(calls)

    (expected, num_plain), (found, num_forwards) = weights(False), weights(True)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    # One micro-batch: the forward of the score pass serves the step; several: graphs of all would not fit.
    assert (num_plain, num_forwards) == ((4, 2) if most is None else (12, 12))


def test_an_adapter_goes_on_from_its_checkpoint(tiny_folder: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"lora": LoraSettings(rank=2)}
    learner, expected = stepped(tiny_folder, 3, **settings)
    learner.close()
    learner, _ = stepped(tiny_folder, 2, **settings)
    learner.save(tmp_path)
    learner.close()
    learner, _ = stepped(tiny_folder, 0, **settings)
    learner.load(tmp_path)
    learner.step(learner.pack(SEQUENCES), torch.full((NUM_TOKENS,), 1 / NUM_TOKENS), None)
    for name, tensor in learner.named_tensors():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)
    learner.close()


def test_the_learning_rate_warms_up_and_falls() -> None:
    linear = LearnerConfig(lr=1.0, warmup_steps=4, schedule="linear", decay_steps=8, lr_min=0.2)
    assert [linear.lr_at(step) for step in range(10)] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = LearnerConfig(lr=1.0, schedule="cosine", decay_steps=4)
    assert [cosine.lr_at(step) for step in (0, 2, 4, 9)] == pytest.approx([1, 0.5, 0, 0])
    assert LearnerConfig(lr=1.0).lr_at(10**6) == 1.0


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["--learner.schedule", "cosine"], "needs decay_steps"),
        (["--learner.offload", "cpu", "--learner.zero_stage", "0"], "offload needs zero_stage"),
        (["--learner.lora.rank", "-1"], "learner.lora.rank"),
    ],
)
def test_settings_that_cannot_be_are_refused(overrides: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_config("quickstart", overrides)


@pytest.mark.parametrize(
    ("name", "complaint"), [("embed_tokens", "is no linear layer"), ("lm_head", "in common with the embedding")]
)
def test_an_adapter_that_cannot_be_merged_is_refused(tiny_folder: Path, name: str, complaint: str) -> None:
    """Published without it, the weights would be another policy's."""
    config = LearnerConfig(lora=LoraSettings(rank=4, targets=("q_proj", name)))
    with pytest.raises(ConfigError, match=complaint):
        Learner(load_model(tiny_folder, "float32"), config, temperature=1.0)


def test_an_adapter_for_layers_that_are_not_there_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner\.lora\.targets = \['nope'\]"):
        stepped(tiny_folder, 0, lora=LoraSettings(rank=2, targets=("nope",)))


NO_MEMORY = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory"), MemoryError()]


@pytest.mark.parametrize("error", NO_MEMORY)
@pytest.mark.parametrize("method", ["score", "step"])
def test_running_out_of_memory_names_the_settings(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, method: str
) -> None:
    learner, _ = stepped(tiny_folder, 0)

    def full(*inputs: Any, **settings: Any) -> None:
        raise error

    monkeypatch.setattr(learner, "engine", full)
    packed = learner.pack(SEQUENCES)
    call = {
        "score": lambda: learner.score(packed, NUM_TOKENS),
        "step": lambda: learner.step(packed, torch.full((NUM_TOKENS,), 1 / NUM_TOKENS), None),
    }[method]
    with pytest.raises(LearnerFailure, match=rf"in {method} .* lower learner\.micro_tokens or learner\.chunk_tokens"):
        call()
    monkeypatch.undo()
    learner.close()


@pytest.mark.parametrize("decay", [0.0, 10.0])
def test_bfloat16_takes_the_same_steps_without_zero(tiny_folder: Path, decay: float) -> None:
    """Adam's first steps show whether its count begins at 0; decay, whether it was tried out beforehand."""
    found = []
    for stage in (0, 2):
        config = LearnerConfig(lr=1e-2, zero_stage=stage, weight_decay=decay)
        learner = Learner(load_model(tiny_folder, "bfloat16"), config, temperature=1.0)
        for _ in range(2):
            learner.step(learner.pack(SEQUENCES), torch.full((NUM_TOKENS,), 1 / NUM_TOKENS), None)
        found.append(torch.cat([tensor.float().flatten() for _, tensor in learner.named_tensors()]))
        learner.close()
    difference = (found[0] - found[1]).abs()
    assert difference.median() == 0, "but for signs of gradients that are all but zero"
    assert (difference > 1e-3).double().mean() < 0.02


def test_one_rank_alone_keeps_a_copy_to_export(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight ranks on a machine seven copies of the weights would be memory for nothing."""
    learner, _ = stepped(tiny_folder, 0)
    monkeypatch.setattr(learner, "rank", 1)
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor: pytest.fail("a copy was made"))
    learner.export(tmp_path / "model", None)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    learner.close()


def test_another_error_that_speaks_of_memory_is_not_running_out_of_it(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, _ = stepped(tiny_folder, 0)

    def broken(*inputs: Any, **settings: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(learner, "engine", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        learner.score(learner.pack(SEQUENCES), NUM_TOKENS)
    monkeypatch.undo()
    learner.close()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bfloat16_learns_with_float32_masters(tiny_folder: Path, stage: int) -> None:
    """A step far below bfloat16's resolution is not lost: the optimizer's own weights are float32."""
    learner = Learner(load_model(tiny_folder, "bfloat16"), LearnerConfig(lr=1e-4, zero_stage=stage), temperature=1.0)
    try:
        before = learner.score(learner.pack(SEQUENCES), NUM_TOKENS).logp.mean()
        for _ in range(30):
            learner.step(learner.pack(SEQUENCES), torch.full((NUM_TOKENS,), 1 / NUM_TOKENS), None)
        after = learner.score(learner.pack(SEQUENCES), NUM_TOKENS).logp.mean()
        assert after > before + 0.05
        assert {tensor.dtype for _, tensor in learner.named_tensors()} == {torch.bfloat16}
    finally:
        learner.close()
