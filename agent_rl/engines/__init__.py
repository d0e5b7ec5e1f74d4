"""Engines by name; each imports its heavy library only when it is made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agent_rl.engines.base import Engine, EngineFailure, PublishError

if TYPE_CHECKING:
    from agent_rl.config import EngineConfig

__all__ = ["Engine", "EngineFailure", "PublishError", "make_engine"]


def make_engine(config: EngineConfig, model: Path, dtype: str, *, seed: int, change_midway: bool = False) -> Engine:
    """The engine that ``config.kind`` names, not yet started; ``change_midway`` is ``VllmEngine``'s."""
    if config.kind == "vllm_server":
        from agent_rl.engines.vllm_server import VllmServerEngine

        return VllmServerEngine(config.urls, model=model, max_model_len=config.max_model_len)
    if config.kind == "vllm":
        from agent_rl.engines.vllm import VllmEngine

        engine: Engine = VllmEngine(
            model=str(model),
            dtype=dtype,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            kv_cache_gb=config.kv_cache_gb,
            seed=seed,
            sleep=config.sleep,
            change_midway=change_midway,
        )
        return engine
    from agent_rl.engines.transformers import TransformersEngine
    from agent_rl.models import load_model

    return TransformersEngine(
        load_model(model, dtype), max_model_len=config.max_model_len, max_num_seqs=config.max_num_seqs
    )
