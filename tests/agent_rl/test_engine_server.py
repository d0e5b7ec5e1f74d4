"""vLLM servers over HTTP, beyond the contract: weights that change in mid-request, a server that dies or never was."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web
from rich.console import Console
from transformers import AutoModelForCausalLM

from agent_rl import loop
from agent_rl.config import load_config
from agent_rl.engines.base import EngineFailure
from agent_rl.engines.vllm_server import VllmServerEngine
from agent_rl.errors import ConfigError
from agent_rl.types import Generation, Sampling

TOLERANCE = 1e-3


def gap(model: Any, prompt: list[int], generation: Generation) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *generation.token_ids]])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(generation.token_ids)[:, None])[:, 0]
    return float((expected - torch.tensor(generation.logprobs)).abs().max())


@pytest.mark.slow
@pytest.mark.vllm
async def test_a_request_that_fails_is_made_again_where_the_server_lives(
    vllm_server: tuple[str, int], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = VllmServerEngine([vllm_server[0]], model=tiny_folder, max_model_len=200)
    await engine.start()
    call, losses = engine._call, 2

    async def lossy(server: Any, method: str, path: str, **settings: Any) -> Any:
        nonlocal losses
        answer = await call(server, method, path, **settings)
        if path == "/v1/completions" and losses > 0:
            losses -= 1
            raise aiohttp.ServerDisconnectedError
        return answer

    try:
        whole = await engine.generate([5], Sampling(max_tokens=3, seed=1), request_id="whole")
        monkeypatch.setattr(engine, "_call", lossy)
        assert await engine.generate([5], Sampling(max_tokens=3, seed=1), request_id="lost-twice") == whole
        losses = 3
        with pytest.raises(EngineFailure, match=r"3 tries failed, the last at .*ServerDisconnectedError"):
            await engine.generate([5], Sampling(max_tokens=3, seed=1), request_id="lost")
        assert engine._servers[0].fault == ""
        # One that was started anew has its first weights: it does not know our version.
        await call(engine._servers[0], "POST", "/update_weight_version", json={"new_version": "default"})
        losses = 1
        with pytest.raises(EngineFailure, match=r"no vLLM server is left: .*ServerDisconnectedError"):
            await engine.generate([5], Sampling(max_tokens=3, seed=1), request_id="elsewhere")
    finally:
        await engine.close()


async def test_every_server_is_asked_for_the_model_by_its_own_name(tiny_folder: Path) -> None:
    """One was started with ``./model``, the other with the whole path."""

    @asynccontextmanager
    async def named(name: str) -> AsyncIterator[str]:
        async def card(request: web.Request) -> web.Response:
            return web.json_response({"data": [{"id": name}]})

        async def info(request: web.Request) -> web.Response:
            return web.json_response({"weight_version": "0"})

        async def complete(request: web.Request) -> web.Response:
            if (await request.json())["model"] != name:
                return web.json_response({"error": {"message": "The model does not exist."}}, status=404)
            told = {"token_ids": [7], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "length"}
            return web.json_response({"choices": [told]})

        app = web.Application()
        app.router.add_get("/v1/models", card)
        app.router.add_get("/weight_info", info)
        app.router.add_post("/update_weight_version", info)
        app.router.add_post("/v1/completions", complete)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async with named("./model") as first, named("/home/user/model") as second:
        engine = VllmServerEngine([first, second], model=tiny_folder, max_model_len=200)
        await engine.start()
        try:
            requests = (engine.generate([5], Sampling(max_tokens=1), request_id=f"r{i}") for i in range(4))
            assert [generation.token_ids for generation in await asyncio.gather(*requests)] == [(7,)] * 4
        finally:
            await engine.close()


@pytest.mark.slow
@pytest.mark.vllm
def test_a_run_trains_over_http(vllm_server: tuple[str, int], tmp_path: Path) -> None:
    settings = "--engine.kind vllm_server --sandbox.kind local --rollout.prompts 2 --rollout.group 4 --learner.lr 1e-3"
    settings += f" --cold_start.steps 60 --cold_start.batch 24 --steps 4 --output {tmp_path} --engine.urls"
    config = load_config("quickstart", [*settings.split(), f'["{vllm_server[0]}"]'])
    loop.train(config, Console(quiet=True))  # the server has other weights until the run gives it its own
    metrics = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    learned = [row for row in metrics if row["grad_norm"] is not None]
    assert len(learned) >= 2
    assert all(row["logprob_gap_max"] < TOLERANCE for row in learned)
    assert all(row["canary_gap"] < TOLERANCE for row in metrics)


@pytest.mark.slow
@pytest.mark.vllm
async def test_a_server_that_dies_is_left_out(vllm_server: tuple[str, int], tiny_folder: Path) -> None:
    url, pid = vllm_server
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

        await engine.update_weights(first.named_parameters(), 1)
        alone, top = await sample(3), await sample(3, top_logprobs=4)
        assert (top.token_ids, alone.top_logprobs) == (alone.token_ids, None)
        with torch.no_grad():
            logits = first(torch.tensor([[*prompt, *top.token_ids]])).logits[0, len(prompt) - 1 : -1]
        likeliest = torch.log_softmax(logits, -1).topk(4).values
        assert float((torch.tensor(top.top_logprobs) - likeliest).abs().max()) < TOLERANCE
        running = asyncio.create_task(sample(99, max_tokens=100))
        await asyncio.sleep(0.05)
        await engine.update_weights(second.named_parameters(), 2)
        assert gap(first, prompt, await running) < TOLERANCE
        after = await sample(7)
        assert gap(second, prompt, after) < TOLERANCE
        time.sleep(4)  # noqa: ASYNC251  # nobody hears that the server ends idle connections
        assert (await sample(7)).token_ids == after.token_ids

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
