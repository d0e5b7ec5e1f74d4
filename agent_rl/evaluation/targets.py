"""What MODEL names: an endpoint, a model folder, one of our runs or checkpoints, SmolLM2, or a name on the hub."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_rl.errors import ConfigError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
PLAIN_FILES = ("*.json", "*.jinja", "*.safetensors", "*.model", "*.txt")
"""What of a hub repository is needed; other formats of the same weights are not fetched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A transformers folder on this machine."""

    folder: Path
    fingerprint: str  # of config and weights: another one is another model
    dialect: str | None = None  # that it was trained in, where that is known

    @property
    def max_positions(self) -> int | None:
        """Tokens that the model has positions for."""
        value = json.loads((self.folder / "config.json").read_text()).get("max_position_embeddings")
        return int(value) if value else None


def find_model(name: str, tell: Callable[[str], None]) -> LocalModel:
    """The folder that ``name`` stands for; a checkpoint without a plain model gets one inside it.

    Raises:
        ConfigError: there is no such model, or it cannot be fetched.
    """
    if name == "smollm2":
        from agent_rl.smollm2 import prepare_smollm2

        folder = prepare_smollm2()
        return LocalModel(folder=folder, fingerprint=fingerprint(folder))
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "state.json").is_file():
            run = path.parent.parent
            return _ours(exported(path, run / "tokenizer", tell), run)
        if is_run(path):
            return _ours(_newest(path, tell), path)
        return _ours(_checked(name), path.parent)
    if HUB_NAME.fullmatch(name):
        return LocalModel(folder=(folder := _from_hub(name, tell)), fingerprint=fingerprint(folder))
    raise ConfigError(
        f"no model {name!r}: give a model folder, a run or checkpoint of ours, `smollm2`, a name on the hub "
        "(org/name) or the address of an endpoint (http://...)"
    )


def is_run(folder: Path) -> bool:
    """Whether it is the folder of one of our training runs."""
    try:
        tree = json.loads((folder / "config.json").read_text())
    except (OSError, json.JSONDecodeError):
        return False
    return isinstance(tree, dict) and {"rollout", "learner", "task"} <= tree.keys()


def _ours(folder: Path, run: Path) -> LocalModel:
    dialect = None
    if is_run(run):
        told = json.loads((run / "config.json").read_text())["task"].get("dialect")
        dialect = None if told == "auto" else told
    return LocalModel(folder=folder, fingerprint=fingerprint(folder), dialect=dialect)


def _newest(run: Path, tell: Callable[[str], None]) -> Path:
    """The model of the run's end; its last checkpoint where there is none, or where the run went on since."""
    from agent_rl.checkpoint import folders  # here: it imports torch

    model, found = run / "model", folders(run / "checkpoints")
    if model.is_dir():
        ended = (model / "config.json").stat().st_mtime_ns
        if not found or (found[-1] / "state.json").stat().st_mtime_ns < ended:
            return model
        tell(f"{run} went on after its model was written: taking {found[-1].name}")
    if not found:
        raise ConfigError(f"run {run} has neither a model nor a checkpoint yet")
    return exported(found[-1], run / "tokenizer", tell)


def exported(checkpoint: Path, tokenizer: Path, tell: Callable[[str], None]) -> Path:
    """The checkpoint as a plain model folder, ``model`` inside it; made once out of DeepSpeed's files."""
    target = checkpoint / "model"
    if target.is_dir():
        return target
    if not (tokenizer / "config.json").is_file():
        raise ConfigError(f"checkpoint {checkpoint}: {tokenizer} with the model's config and tokenizer is missing")
    tell(f"writing {target} out of the checkpoint")
    # Here: heavy, and only needed for checkpoints.
    import torch
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from transformers import AutoConfig, AutoModelForCausalLM

    from agent_rl.lora import add_adapter, merged_tensors
    from agent_rl.setup import read_run_config

    whole = checkpoint / "learner" / "mp_rank_00_model_states.pt"  # ZeRO 3 spreads the weights over files of its own
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it tells about every shard
            state: dict[str, Any] = (
                torch.load(whole, map_location="cpu", weights_only=False)["module"]
                if whole.is_file()
                else get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), tag="learner")
            )
    except Exception as error:  # whatever their readers raise; the user needs the folder's name
        raise ConfigError(f"checkpoint {checkpoint} cannot be read ({' '.join(str(error).split())[:200]})") from None

    def fresh() -> Any:
        make: Any = AutoModelForCausalLM
        return make.from_config(AutoConfig.from_pretrained(tokenizer), dtype=torch.float32)

    def filled(model: Any, tensors: Mapping[str, Any]) -> Any:
        own = dict(model.named_parameters())
        if own.keys() - tensors.keys():  # the learner's module holds the model under this name
            tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        if missing := own.keys() - tensors.keys():
            raise ConfigError(f"checkpoint {checkpoint} lacks {len(missing)} parameters, first {min(missing)}")
        with torch.no_grad():
            for key, parameter in own.items():
                parameter.copy_(tensors[key])
        return model

    lora = read_run_config(tokenizer.parent).learner.lora
    if lora.rank:
        adapted = fresh()
        add_adapter(adapted, lora)
        state = dict(merged_tensors(filled(adapted, state), lambda parameters: contextlib.nullcontext()))
    aside = checkpoint / "model.partial"
    shutil.rmtree(aside, ignore_errors=True)
    filled(fresh(), state).save_pretrained(aside)
    for file in tokenizer.iterdir():
        if file.name != "config.json":
            shutil.copy(file, aside / file.name)
    aside.rename(target)
    return target


def _checked(name: str) -> Path:
    from agent_rl.models import check_model_folder  # here: it imports torch

    return check_model_folder(name)


def _from_hub(name: str, tell: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download  # here: with transformers

    tell(f"fetching {name} from the hub (cached afterwards)")
    try:
        return Path(snapshot_download(name, allow_patterns=list(PLAIN_FILES)))
    except Exception as error:  # whatever the network and the hub raise
        told = " ".join(str(error).split())[:200]
        raise ConfigError(f"{name} is no folder here, and the hub did not give it: {told}") from None


def fingerprint(folder: Path) -> str:
    """Of config, template and weights: names, sizes, and the first and last megabyte of every file."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".json", ".jinja", ".safetensors", ".bin", ".model") or not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, size - (1 << 20)))
            digest.update(file.read(1 << 20))
    return digest.hexdigest()[:16]
