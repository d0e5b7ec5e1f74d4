"""A tiny model, its tokenizer and codec, and local sandboxes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from rich.console import Console
from vllm_process import vllm_process

from agent_rl.codec import ChatCodec
from agent_rl.cold_start import expert_texts
from agent_rl.config import RunConfig, load_config
from agent_rl.models import load_model, load_tokenizer
from agent_rl.setup import Setup, preflight
from agent_rl.tiny import prepare_tiny
from envs import Resources
from sandboxes import SandboxSpec


@pytest.fixture(scope="session")
def quick_config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    output = tmp_path_factory.mktemp("runs")
    return load_config("quickstart", ["--sandbox.kind", "local", "--output", str(output), "--threads", "1"])


@pytest.fixture(scope="session")
def setup(quick_config: RunConfig) -> Setup:
    import asyncio

    return asyncio.run(preflight(quick_config, Console(quiet=True)))


@pytest.fixture(scope="session")
def tiny_folder(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The untrained quickstart model."""
    return prepare_tiny(tmp_path_factory.mktemp("models") / "tiny", expert_texts(setup), seed=0)


@pytest.fixture
def tiny_model(tiny_folder: Path) -> Any:
    return load_model(tiny_folder, "float32")


@pytest.fixture(scope="session")
def codec(tiny_folder: Path, setup: Setup) -> ChatCodec:
    return ChatCodec(load_tokenizer(tiny_folder), system_text=setup.system_text)


@pytest.fixture(scope="session")
def vllm_server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """URL and process id; ``test_engine_server``, the last to use it, kills it."""
    log = tmp_path_factory.mktemp("server") / "log"
    with vllm_process(tiny_folder, log, max_model_len=320, max_num_seqs=8) as server:
        yield server


@pytest_asyncio.fixture
async def resources() -> AsyncIterator[Resources]:
    async with Resources(SandboxSpec(kind="local", size=4)) as opened:
        yield opened
