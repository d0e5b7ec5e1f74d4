"""Which backend: by its name, or the most isolating one that works on this machine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from sandboxes.base import Kind, Sandbox, SandboxSpec, SandboxUnavailable


def make_sandbox(spec: SandboxSpec) -> Sandbox:
    """A sandbox of ``spec.kind``, not yet started; ``auto`` must have been resolved before (``resolve``)."""
    if spec.kind == "docker":
        from sandboxes.container import DockerSandbox

        return DockerSandbox(spec)
    if spec.kind == "bwrap":
        from sandboxes.bwrap import BwrapSandbox

        return BwrapSandbox(spec)
    if spec.kind == "local":
        from sandboxes.local import LocalSandbox

        return LocalSandbox(spec)
    if spec.kind == "remote":
        from sandboxes.remote import RemoteSandbox

        return RemoteSandbox(spec)
    raise ValueError(f"sandbox kind {spec.kind!r} is not resolved: call resolve(spec) first")


async def resolve(spec: SandboxSpec, warn: Callable[[str], None] | None = None) -> SandboxSpec:
    """The specification with a kind that works here.

    ``auto`` becomes ``docker`` when an engine answers and has the image, else ``bwrap`` when it can make namespaces,
    else ``local``. What ``bwrap``, ``local`` or the services of ``remote`` lack is said in one line through ``warn``
    (standard error by default).

    Raises:
        SandboxUnavailable: a kind was demanded and cannot be had.
    """
    say = warn or (lambda line: print(line, file=sys.stderr))
    if spec.kind == "remote":
        from sandboxes.remote import check_hosts

        given = await check_hosts(spec)
        if given < spec.size:
            say(
                f"WARNING: sandbox.size is {spec.size}, and the services that answer give one client {given}: who asks "
                "for more at once waits, and fails after a minute"
            )
        return spec
    kind: Kind = spec.kind
    reason = "as demanded"
    if kind in ("auto", "docker"):
        kind, reason = await _try("docker", spec, lambda: _check_docker(spec))
    if kind == "bwrap" or (kind == "auto" and not spec.network):
        from sandboxes.bwrap import check_bwrap

        kind, more = await _try("bwrap", spec, lambda: check_bwrap(spec))
        reason = f"{reason}; {more}" if more else reason
    if kind == "auto":
        kind = "local"
    if kind == "bwrap":
        say(f"WARNING: sandbox `bwrap` has NO CGROUP LIMITS: memory is limited by process, CPU not at all ({reason})")
    if kind == "local":
        say(f"WARNING: sandbox `local` gives NO ISOLATION: model-written code runs as you on this machine ({reason})")
    return spec.model_copy(update={"kind": kind})


async def _try(kind: Kind, spec: SandboxSpec, check: Callable[[], None]) -> tuple[Kind, str]:
    """``kind``, or ``auto`` and why not when another will do."""
    try:
        await asyncio.to_thread(check)
    except SandboxUnavailable as error:
        if spec.kind == kind:
            raise
        return "auto", str(error)
    return kind, ""


def _check_docker(spec: SandboxSpec) -> None:
    from sandboxes.container import check_image, check_runtime, engine

    with engine() as client:
        check_image(client, spec.image)
        check_runtime(client, spec.runtime)
