"""Takes new weights out of one file of raw bytes; runs inside vLLM's worker processes and is imported only there.

``VllmEngine`` names ``WorkerExtension`` as vLLM's ``worker_extension_cls``: that makes every worker import this module,
which registers the weight-transfer backend before the worker looks it up.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "agent-rl-file"


class WorkerExtension:
    """Adds nothing to the worker; naming it brings this module in."""


@dataclass
class NoInit(WeightTransferInitInfo):
    """There is nothing to agree on beforehand."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """Where the bytes are and how to read them."""

    path: str
    tensors: list[tuple[str, str, list[int], int]]  # name, torch dtype, shape, offset in bytes


class FileWeightTransfer(WeightTransferEngine[NoInit, FileUpdate]):
    """Loads tensors under their checkpoint names, layer by layer, as vLLM's own reload does."""

    init_info_cls = NoInit
    update_info_cls = FileUpdate

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        # Now, because a tied head appears as a parameter of its own while a reload is under way.
        self._names = {name for name, _ in model.named_parameters()}

    def init_transfer_engine(self, init_info: NoInit) -> None:
        return None

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Raises ``ValueError`` if a parameter of the model got nothing; vLLM itself would only warn."""
        size = max(offset + _num_bytes(dtype, shape) for _, dtype, shape, offset in update_info.tensors)
        # Not shared: opened for reading only, and nothing is copied before it is loaded.
        data = torch.from_file(update_info.path, shared=False, size=size, dtype=torch.uint8)
        model: Any = self.model
        loaded: set[str] = model.load_weights(
            (name, data[offset : offset + _num_bytes(dtype, shape)].view(getattr(torch, dtype)).view(shape))
            for name, dtype, shape, offset in update_info.tensors
        )
        missing = self._names - loaded
        if missing:
            raise ValueError(f"{len(missing)} of vLLM's parameters were not loaded, first {min(missing)!r}")

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)  # type: ignore[no-untyped-call]
        # On the CPU a head multiplies with a packed copy of its weight. A tied head has no weight in the checkpoint, so
        # the reload above renews the weight (the embedding's) and leaves the old copy. Elsewhere this changes nothing.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        return None


def _num_bytes(dtype: str, shape: list[int]) -> int:
    itemsize: int = getattr(torch, dtype).itemsize
    return prod(shape) * itemsize


def _end_with_parent() -> None:
    """This process does not outlive the one that started it: vLLM's would, for ever, with all of its memory."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="agent-rl-end-with-parent", daemon=True).start()


WeightTransferEngineFactory.register_engine(BACKEND, FileWeightTransfer)
if multiprocessing.parent_process() is not None:  # a process of vLLM's own
    _end_with_parent()
