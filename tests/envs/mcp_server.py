"""A small MCP server for the tests; run as a program it talks over its stdin and stdout, or HTTP on a given port."""

import os
import sys

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("shop")


@server.tool()
def price(item: str, count: int = 1) -> str:
    """What some items cost."""
    if item == "gold":
        raise ToolError("we do not sell gold")
    if item == "crash":
        os._exit(3)
    return f"{count} {item}: {3 * count}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
