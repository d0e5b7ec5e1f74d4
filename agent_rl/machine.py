"""What the chosen settings ask of this machine, checked before anything is written: one line says what is missing."""

from __future__ import annotations

import torch

from agent_rl.config import ConfigError, EngineConfig, LearnerConfig
from agent_rl.engines.vllm import check_installed
from agent_rl.engines.vllm_server import check_urls
from agent_rl.offload import check_disk


def check_engine(config: EngineConfig) -> None:
    """Raises ``ConfigError`` where this machine cannot sample so."""
    if config.kind == "vllm":
        check_installed()
    if config.kind == "vllm_server":
        check_urls(config.urls)
    if config.sleep and not torch.cuda.is_available():
        raise ConfigError("engine.sleep needs a GPU: on the CPU vLLM has no memory of its own to give back")


def check_learner(config: LearnerConfig, dtype: str) -> None:
    """Raises ``ConfigError`` where this machine cannot train so, with weights in ``dtype``."""
    if dtype == "float16":
        _check_float16(config)
    if config.offload_path is not None:
        check_disk(config.offload_path)


def _check_float16(config: LearnerConfig) -> None:
    if config.zero_stage == 0:
        raise ConfigError("float16 needs learner.zero_stage 1, 2 or 3: without ZeRO DeepSpeed does not scale the loss")
    if config.offload == "nvme":
        raise ConfigError("float16 and learner.offload 'nvme' do not go together: take bfloat16 or offload 'cpu'")
    from deepspeed.accelerator import get_accelerator  # heavy

    if not get_accelerator().is_fp16_supported():
        raise ConfigError(
            "float16 (model.dtype, --dtype) needs a GPU, or a CPU that computes in it: here use float32 or bfloat16"
        )
