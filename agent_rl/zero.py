"""DeepSpeed as this project sets it up: process group and settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from agent_rl.config import LearnerConfig

LOSS_SCALE = {
    "loss_scale": 0,  # dynamic
    "initial_scale_power": 16,
    "loss_scale_window": 1000,  # steps without an overflow after which it doubles
    "hysteresis": 1,  # it halves at the first overflow: every skipped step costs a batch of rollouts
    "min_loss_scale": 1,
}
"""Of float16 (Micikevicius et al., arXiv 1710.03740), under DeepSpeed's names."""


def init_distributed() -> None:
    """A process group for DeepSpeed: the launcher's if one set MASTER_ADDR, else of this process alone."""
    import deepspeed

    if torch.distributed.is_initialized():
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "MASTER_ADDR" not in os.environ:  # RANK may be our own, inherited from a parent that ran this
        # A store inside this process: no port to collide with another run.
        store = torch._C._distributed_c10d.HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    # On the CPU DeepSpeed would compile its shared-memory all-reduce here: a minute, and a compiler to have. Gloo does.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)


def deepspeed_config(config: LearnerConfig, dtype: torch.dtype, swap: Path | None) -> dict[str, Any]:
    """What ``deepspeed.initialize`` is told; ``swap`` is the learner's own folder of ``offload_path``."""
    # The rate is set before every step; until then none: DeepSpeed may try the optimizer out, with weight decay.
    parameters: dict[str, Any] = {"lr": 0.0, "weight_decay": config.weight_decay}
    if config.optimizer == "adamw":
        # torch's AdamW: DeepSpeed's CPU Adam wants a compiler on the machine.
        parameters |= {"betas": list(config.betas), "torch_adam": True}
    zero: dict[str, Any] = {"stage": config.zero_stage}
    if config.offload == "cpu":
        zero["offload_optimizer"] = {"device": "cpu"}
    elif swap is not None:
        pin = torch.cuda.is_available()
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(swap), "pin_memory": pin}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # backward() only accumulates and step() is the only boundary, so micro-batches can be of any number and size.
        "managed_gradient_accumulation": False,
        "optimizer": {"type": "AdamW" if config.optimizer == "adamw" else "SGD", "params": parameters},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # it would have to be compiled
        "gradient_clipping": config.grad_clip,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "fp16": {"enabled": dtype == torch.float16} | LOSS_SCALE,
        "steps_per_print": 1 << 60,
    }
