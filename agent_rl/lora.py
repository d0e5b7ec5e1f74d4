"""Low-rank adapters (LoRA, Hu et al., arXiv 2106.09685) by ``peft``: only they are trained; they are published merged.

The adapter sits inside the model's own layers, so the policy, the masks and the optimizer do not know of it; engines
and exported folders get ``base + scale * B A`` under the base model's names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from agent_rl.config import ConfigError, LoraSettings


class Gather(Protocol):
    """Whole tensors of parameters that may be spread over ranks, while the context is open."""

    def __call__(self, parameters: list[Tensor]) -> AbstractContextManager[Any]: ...


def add_adapter(model: Any, settings: LoraSettings) -> None:
    """Freeze ``model`` and put adapters into its linear layers, starting as the identity.

    Raises:
        ConfigError: ``peft`` is missing, no layer has one of the names in ``targets``, or one that has cannot be
            merged.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer
    except ImportError:
        raise ConfigError("learner.lora.rank > 0 needs a package: pip install peft") from None
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # any number will do
        target_modules=list(settings.targets) or "all-linear",
        lora_dropout=0.0,  # dropout would make the scored and the updated policy two different ones
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)  # A starts at random: the same on every rank and in every run
            inject_adapter_in_model(config, model)
    except ValueError as error:
        raise ConfigError(f"learner.lora.targets = {list(settings.targets)}: {error}") from None
    embedding = model.get_input_embeddings().weight
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer) and not layer.lora_A:
            raise ConfigError(f"learner.lora.targets = {list(settings.targets)}: {name} is no linear layer")
        if isinstance(layer, LoraLayer) and layer.get_base_layer().weight is embedding:
            raise ConfigError(
                f"learner.lora.targets = {list(settings.targets)}: {name} has its weights in common with the embedding "
                "of this model, so that its adapter cannot be merged into them: leave it out"
            )


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """The model computes with its base weights alone while the context is open.

    By a scale of zero: the same modules run in the same order, which ZeRO 3 counts on, and no parameter's
    ``requires_grad`` changes, which the optimizer's hooks hang on.
    """
    from peft.tuners.lora import LoraLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, LoraLayer)]
    scales = [layer.scaling["default"] for layer in layers]
    try:
        for layer in layers:
            layer.scaling["default"] = 0.0
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scaling["default"] = scale


def merged_tensors(model: Any, gather: Gather) -> Iterator[tuple[str, Tensor]]:
    """The weights that ``model`` computes with, by the names of the model without adapters."""
    from peft.tuners.lora import LoraLayer

    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for name, parameter in model.named_parameters():
        path, base, leaf = name.partition(".base_layer.")
        if ".lora_" in name:
            continue
        if not base or leaf != "weight":
            with gather([parameter]):
                yield name.replace(".base_layer.", "."), parameter.detach()
            continue
        layer: Any = layers[path]
        with gather([parameter, layer.lora_A["default"].weight, layer.lora_B["default"].weight]), torch.no_grad():
            yield f"{path}.{leaf}", parameter + layer.get_delta_weight("default")
