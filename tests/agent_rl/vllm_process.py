"""A vLLM server that can take weights, as a process of the test's own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def vllm_process(model: Path, log: Path, *, max_model_len: int, max_num_seqs: int = 8) -> Iterator[tuple[str, int]]:
    """URL and process id of a running server, started as ``engines/vllm_server.py`` says."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", str(max_model_len), "--max-num-seqs", str(max_num_seqs)]
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--no-enable-chunked-prefill"]
    command += ["--max-num-batched-tokens", "2048", "--block-size", "32", "--kv-cache-memory-bytes", str(2**27)]
    command += ["--weight-transfer-config", '{"backend": "agent-rl-file"}']
    command += ["--worker-extension-cls", "agent_rl.engines.vllm_worker.WorkerExtension"]
    settings = {"VLLM_SERVER_DEV_MODE": "1", "OMP_WAIT_POLICY": "PASSIVE", "VLLM_NO_USAGE_STATS": "1"}
    settings["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = "3"  # seconds; the least that is more than ours
    # In a session of its own it would also be a scheduler group of its own, beside which its client may stand still.
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **settings}, process_group=0
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 400
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2)
                break
            except OSError:
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(0.3)
        yield url, process.pid
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
