"""Where the weights come from: a folder, the tiny model made here, or SmolLM2 out of its package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from agent_rl.config import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_model_folder(path: str) -> Path:
    """The folder, if it holds a model and a tokenizer with a chat template; ``ConfigError`` says what is missing."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"model.path = {path!r}: no such folder (a model folder, `tiny` or `smollm2`)")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path = {path!r}: the folder has no config.json, so it is not a transformers model")
    settings = folder / "tokenizer_config.json"
    if not settings.is_file():
        raise ConfigError(
            f"model.path = {path!r}: the folder has no tokenizer_config.json: save the tokenizer there too"
        )
    has_template = (folder / "chat_template.jinja").is_file() or "chat_template" in json.loads(settings.read_text())
    if not has_template:
        raise ConfigError(
            f"model.path = {path!r}: its tokenizer has no chat template: "
            "use an instruct model or add chat_template.jinja"
        )
    return folder


def chat_template(folder: Path) -> str:
    """The source of a folder's chat template (of its ``tool_use`` or first one where it has several)."""
    own = folder.expanduser() / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    found = json.loads((folder.expanduser() / "tokenizer_config.json").read_text()).get("chat_template", "")
    if isinstance(found, list):
        named = {entry["name"]: entry["template"] for entry in found}
        found = named.get("tool_use") or next(iter(named.values()), "")
    return str(found)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder; one that is saved as plain ``tokenizer.json`` is taken as it stands.

    AutoTokenizer (5.19) forces some model types, Qwen2 among them, into a class that puts its own pre-tokenizer in
    place of the saved one, and the ids change without a word.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    saved_class = json.loads((folder / "tokenizer_config.json").read_text()).get("tokenizer_class")
    if saved_class in ("TokenizersBackend", "PreTrainedTokenizerFast"):
        return PreTrainedTokenizerFast.from_pretrained(str(folder))
    return AutoTokenizer.from_pretrained(str(folder))


def load_model(folder: Path, dtype: str) -> Any:
    """A causal language model with its weights in ``dtype`` on the default device."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=DTYPES[dtype])
    return model.to("cuda") if torch.cuda.is_available() else model
