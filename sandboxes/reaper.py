"""Containers that a dead run left behind: found by their owner label, removed."""

from __future__ import annotations

import socket
from typing import Any

from sandboxes.container import connect, start_ticks


def is_orphan(owner: str) -> bool:
    """Whether the process that an owner label names is gone; containers of other hosts are never ours to judge."""
    host, _, rest = owner.partition(":")
    pid, _, ticks = rest.partition(":")
    return host == socket.gethostname() and pid.isdigit() and start_ticks(int(pid)) != ticks


def remove_orphans(*, everything: bool = False) -> list[str]:
    """Remove containers whose owner is dead (with ``everything``, all sandboxes); returns their short ids.

    Raises:
        SandboxUnavailable: no Docker engine answers.
    """
    from docker.errors import APIError

    client = connect()
    removed = []
    try:
        for container in _sandboxes(client):
            if everything or is_orphan(container["Labels"].get("agent-rl.owner", "")):
                try:
                    client.api.remove_container(container["Id"], force=True)
                except APIError as error:
                    if error.status_code not in (404, 409):  # gone, or already going
                        raise
                removed.append(container["Id"][:12])
    finally:
        client.close()
    return removed


def list_sandboxes() -> list[dict[str, str]]:
    """Id, image, owner and state of every sandbox container of this engine."""
    client = connect()
    try:
        return [
            {
                "id": container["Id"][:12],
                "image": container["Image"],
                "owner": container["Labels"].get("agent-rl.owner", ""),
                "state": "orphan" if is_orphan(container["Labels"].get("agent-rl.owner", "")) else container["State"],
            }
            for container in _sandboxes(client)
        ]
    finally:
        client.close()


def _sandboxes(client: Any) -> list[Any]:
    found: list[Any] = client.api.containers(all=True, filters={"label": "agent-rl.sandbox"})
    return found
