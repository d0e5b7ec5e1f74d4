"""Tools of an MCP server (a command or a URL), through the official ``mcp`` package (version 2)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from envs.tools import Tool, ToolOutput
from sandboxes import SandboxFailure


@asynccontextmanager
async def mcp_tools(server: Any, *arguments: str, timeout_s: float = 30.0) -> AsyncIterator[list[Tool]]:
    """The server's tools, as long as the body runs; enter and leave it in the same task.

    What the server answers, errors included, is the model's to read. A server that cannot be reached, or breaks off, is
    our failure and voids the episode.

    Args:
        server: a command, with its ``arguments``, or a URL (streamable HTTP); or a server object, in process.
        timeout_s: of one call; a longer one is told to the model.

    Raises:
        ValueError: the package is missing.
        SandboxFailure: the server cannot be started or reached.
    """
    try:
        from mcp import Client, StdioServerParameters  # here: optional, and half a second to import
    except ImportError:
        raise ValueError("tools of an MCP server need a package: pip install 'mcp>=2'") from None
    if isinstance(server, str) and not server.startswith(("http://", "https://")):
        server = StdioServerParameters(command=server, args=list(arguments))
    client = Client(server)
    try:
        await client.__aenter__()
    except Exception as error:  # the package raises what its transports raise
        raise SandboxFailure(f"cannot reach the MCP server {server}: {error}") from error
    try:
        listed, cursor = [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            listed += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        yield [_tool(client, described, timeout_s) for described in listed]
    finally:
        await client.__aexit__(None, None, None)


def _tool(client: Any, described: Any, timeout_s: float) -> Tool:
    from mcp import MCPError

    async def call(**arguments: Any) -> ToolOutput:
        try:
            result = await client.call_tool(described.name, arguments)
        except MCPError as error:
            if error.code in CONNECTION_LOST:
                raise SandboxFailure(f"the MCP server broke off in a call of {described.name}: {error}") from error
            return ToolOutput(text=f"Error: {error}", succeeded=False)
        except (OSError, EOFError, RuntimeError) as error:
            raise SandboxFailure(f"the MCP server broke off in a call of {described.name}: {error!r}") from error
        texts = [block.text if block.type == "text" else f"[{block.type}, not shown]" for block in result.content]
        text = "\n".join(texts) or "[no output]"
        return ToolOutput(text=f"Error: {text}" if result.is_error else text, succeeded=not result.is_error)

    parameters = {"type": "object", "properties": {}, **described.input_schema}
    function = {"name": described.name, "description": described.description or "", "parameters": parameters}
    return Tool(
        name=described.name,
        schema={"type": "function", "function": function},
        function=call,
        wants_context=False,
        timeout_s=timeout_s,
    )


CONNECTION_LOST = (-32000, -32001)
"""JSON-RPC codes that the package gives to a closed connection and to a request that was never answered."""
