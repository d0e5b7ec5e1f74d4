"""vLLM servers over HTTP: ids and logprobs of transformers, new weights in place, one that dies is left out."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agent_rl.engines.base import EngineFailure, PublishError
from agent_rl.engines.vllm_server import VllmServerEngine
from agent_rl.errors import ConfigError
from agent_rl.types import Generation, Sampling

TOLERANCE = 1e-3


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    port = free_port()
    log = (tmp_path_factory.mktemp("server") / "log").open("w")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_folder)]
    command += [
        "--port",
        str(port),
        "--max-model-len",
        "200",
        "--max-num-seqs",
        "8",
        "--dtype",
        "float32",
        "--enforce-eager",
    ]
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--no-enable-chunked-prefill"]
    command += ["--max-num-batched-tokens", "2048", "--block-size", "32", "--kv-cache-memory-bytes", str(2**27)]
    command += ["--weight-transfer-config", '{"backend": "agent-rl-file"}']
    command += ["--worker-extension-cls", "agent_rl.engines.vllm_worker.WorkerExtension"]
    settings = {"VLLM_SERVER_DEV_MODE": "1", "OMP_WAIT_POLICY": "PASSIVE", "VLLM_NO_USAGE_STATS": "1"}
    process = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **settings}, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 400
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2)
            break
        except OSError:
            assert process.poll() is None, Path(log.name).read_text()[-3000:]
            assert time.monotonic() < deadline, Path(log.name).read_text()[-3000:]
            time.sleep(0.3)
    yield url, process.pid
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def gap(model: Any, prompt: list[int], generation: Generation) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *generation.token_ids]])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(generation.token_ids)[:, None])[:, 0]
    return float((expected - torch.tensor(generation.logprobs)).abs().max())


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.asyncio
async def test_a_server_samples_takes_weights_and_is_left_out_when_it_dies(
    server: tuple[str, int], tiny_folder: Path
) -> None:
    url, pid = server
    first: Any = AutoModelForCausalLM.from_pretrained(tiny_folder)
    second: Any = AutoModelForCausalLM.from_pretrained(tiny_folder).requires_grad_(False)
    for parameter in second.parameters():
        parameter.add_(0.3 * parameter.abs().mean() * torch.randn_like(parameter))
    engine = VllmServerEngine([f"{url}/v1"], model=tiny_folder, max_model_len=200)
    await engine.start()
    try:
        prompt = list(range(5, 70))

        async def sample(number: int, **settings: Any) -> Generation:
            sampling = Sampling(**{"max_tokens": 20, "seed": number, **settings})
            return await engine.generate(prompt, sampling, request_id=f"r{number}")

        batch = await asyncio.gather(*map(sample, range(12)))
        alone = await sample(3)
        assert alone.token_ids == batch[3].token_ids
        assert len({result.token_ids for result in batch}) == 12
        assert all(gap(first, prompt, result) < TOLERANCE for result in batch)
        greedy = await sample(0, temperature=0.0)
        stop = greedy.token_ids[4]
        stopped = await sample(0, temperature=0.0, stop_token_ids=(stop,))
        assert stopped.token_ids == greedy.token_ids[: greedy.token_ids.index(stop) + 1]
        assert stopped.finish_reason == "stop"
        with pytest.raises(ValueError, match="leaves no room"):
            await engine.generate([5] * 200, Sampling(max_tokens=1), request_id="full")

        with pytest.raises(PublishError, match="tensors are missing"):
            await engine.update_weights(list(second.named_parameters())[1:], 1)
        running = asyncio.create_task(sample(99, max_tokens=100))
        await asyncio.sleep(0.05)
        await engine.update_weights(second.named_parameters(), 1)
        assert gap(first, prompt, await running) < TOLERANCE
        after = await sample(7)
        assert after.weight_version == 1
        assert gap(second, prompt, after) < TOLERANCE
        assert gap(first, prompt, after) > 10 * TOLERANCE

        cancelled = asyncio.create_task(sample(1, max_tokens=130))
        await asyncio.sleep(0)  # begun, and no answer can have been read yet
        assert engine._servers[0].in_flight == 1
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert engine._servers[0].in_flight == 0

        # One server is gone: its request is made again at the other.
        engine._servers.insert(0, type(engine._servers[0])("http://127.0.0.1:9"))
        again = await sample(7)
        assert again.token_ids == after.token_ids
        assert "127.0.0.1:9" in engine._servers[0].fault
        # All are gone.
        os.killpg(pid, signal.SIGKILL)
        with pytest.raises(EngineFailure, match="no vLLM server is left"):
            await sample(8)
    finally:
        await engine.close()


async def test_a_server_that_is_not_there_is_named(tiny_folder: Path) -> None:
    engine = VllmServerEngine(["http://127.0.0.1:9"], model=tiny_folder, max_model_len=200)
    try:
        with pytest.raises(ConfigError, match=r"no vLLM server answers at http://127\.0\.0\.1:9"):
            await engine.start()
    finally:
        await engine.close()
    with pytest.raises(ConfigError, match=r"engine\.urls is empty"):
        VllmServerEngine([], model=tiny_folder, max_model_len=200)
