"""Tools of MCP servers: over stdin, over HTTP; their errors are observations, their death is our failure."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from envs_scripted import FakeResources, call, make_env, play

from envs.mcp import mcp_tools
from sandboxes import SandboxFailure

SERVER = str(Path(__file__).parent / "mcp_server.py")


async def test_a_server_over_stdin_becomes_tools_and_its_errors_observations() -> None:
    async with mcp_tools(sys.executable, SERVER) as tools:
        assert [tool.name for tool in tools] == ["price"]
        assert tools[0].schema["function"]["description"] == "What some items cost."
        turn = "".join(
            [call("price", item="pen", count=2), call("price", count=2), call("price", item="gold"), call("price")]
        )
        results = await play(make_env(FakeResources(), tools), turn, call("price", item="crash"))
    assert [c.status for c in results[0].calls] == ["ok", "invalid_args", "ok", "invalid_args"]
    texts = [message["content"] for message in results[0].messages]
    assert texts[0] == "2 pen: 6"
    assert "'item' is a required property" in texts[1]
    assert texts[2].startswith("Error: ")
    assert "we do not sell gold" in texts[2]
    assert results[-1].stop == "failure"
    assert results[-1].failure is not None
    assert results[-1].failure.kind == "sandbox"
    assert results[-1].messages == ()


@pytest.mark.slow
async def test_a_server_over_http() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = await asyncio.create_subprocess_exec(sys.executable, SERVER, str(port), stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            try:
                async with mcp_tools(f"http://127.0.0.1:{port}/mcp") as tools:
                    results = await play(make_env(FakeResources(), tools), call("price", item="pen"))
                    assert results[0].messages[0]["content"] == "1 pen: 3"
                return
            except SandboxFailure:
                await asyncio.sleep(0.1)
        raise AssertionError("the server did not come up")
    finally:
        process.kill()
        await process.wait()


async def test_a_server_that_cannot_be_started_is_our_failure() -> None:
    with pytest.raises(SandboxFailure, match="cannot reach the MCP server"):
        async with mcp_tools("/nowhere/server"):
            pass
