"""What a dead run left behind on the engine or on disk: found by its owner's name, removed."""

from __future__ import annotations

import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

from sandboxes.container import engine
from sandboxes.owner import SCRATCH_PREFIX, is_orphan

LABEL = {"label": "agent-rl.sandbox"}


def remove_orphans(*, everything: bool = False) -> list[str]:
    """Remove containers, networks and volumes whose owner is dead (with ``everything``, all that are ours).

    Returns what was removed, each by kind and short id or name.

    Raises:
        SandboxUnavailable: no Docker engine answers.
    """
    removed = []
    with engine() as client:
        api = client.api
        for container in _wanted(api.containers(all=True, filters=LABEL), everything):
            if _is_removed(lambda one=container: api.remove_container(one["Id"], force=True, v=True)):
                removed.append(f"container {container['Id'][:12]}")
        for network in _wanted(api.networks(filters=LABEL), everything):
            if _is_removed(lambda one=network: api.remove_network(one["Id"])):
                removed.append(f"network {network['Name']}")
        for volume in _wanted(api.volumes(filters=LABEL)["Volumes"] or [], everything):
            if _is_removed(lambda one=volume: api.remove_volume(one["Name"], force=True)):
                removed.append(f"volume {volume['Name']}")
    return removed


def _wanted(found: list[Any], everything: bool) -> list[Any]:
    return [one for one in found if everything or is_orphan((one["Labels"] or {}).get("agent-rl.owner", ""))]


def _is_removed(remove: Any) -> bool:
    from docker.errors import APIError

    try:
        remove()
    except APIError as error:
        return error.status_code in (404, 409)  # gone, or already going; else it stays, in use or stuck
    return True


def remove_folders() -> list[str]:
    """Remove scratch folders of the ``local`` backend whose owner is dead; returns their paths."""
    removed = []
    for folder in Path(tempfile.gettempdir()).glob(f"{SCRATCH_PREFIX}*"):
        pid, _, rest = folder.name.removeprefix(SCRATCH_PREFIX).partition("-")
        if is_orphan(f"{socket.gethostname()}:{pid}:{rest.partition('-')[0]}"):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(str(folder))
    return removed


def list_sandboxes() -> list[dict[str, str]]:
    """Id, image, owner, run and state of every sandbox container of this engine."""
    with engine() as client:
        return [
            {
                "id": container["Id"][:12],
                "image": container["Image"],
                "owner": container["Labels"].get("agent-rl.owner", ""),
                "run": container["Labels"].get("agent-rl.run", ""),
                "state": "orphan" if is_orphan(container["Labels"].get("agent-rl.owner", "")) else container["State"],
            }
            for container in client.api.containers(all=True, filters=LABEL)
        ]
