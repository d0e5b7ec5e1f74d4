"""The ``bwrap`` backend: the worker as PID 1 in namespaces of its own, by Debian's bubblewrap; no engine, no image.

It isolates files, processes, network and System V objects as ``docker`` does: the host's ``/usr`` and this interpreter
read-only, sized tmpfs to write to, no capability for programs. It has NO CGROUPS: memory is limited for each process,
not for all together, and CPU share not at all. Run by root, programs have a uid of their own under the worker's; run by
a user, they share it, and the worker is protected by being PID 1 and undumpable.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

from sandboxes.base import SandboxSpec, SandboxUnavailable
from sandboxes.link import ProcessBytes, WorkerLink, WorkerSandbox, settings_of
from sandboxes.worker import BOOTSTRAP

SCRATCH = "/scratch"
VENV = "/venv"  # where this interpreter's virtual environment stands, which may be below /tmp outside
INSTALL = "install it (apt-get install bubblewrap), or take --sandbox.kind docker or local"


def command(spec: SandboxSpec) -> list[str]:
    """``bwrap`` with everything but what it runs."""
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxUnavailable(f"bwrap is missing: {INSTALL}")
    if spec.network:
        raise SandboxUnavailable("the bwrap backend gives no network: take --sandbox.kind docker")
    parts = [program, "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"]
    if os.geteuid() == 0:
        parts += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        parts += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_KILL"]
    else:
        parts += ["--unshare-all", "--cap-drop", "ALL"]
    parts += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib64", "lib32"):
        if os.path.islink(f"/{name}"):
            parts += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            parts += ["--ro-bind", f"/{name}", f"/{name}"]
    parts += ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives", "--ro-bind-try", "/etc/ld.so.cache"]
    parts += ["/etc/ld.so.cache", "--proc", "/proc", "--dev", "/dev"]
    if not sys.base_prefix.startswith("/usr"):
        for parent in reversed(Path(sys.base_prefix).parents[:-1]):  # else closed to programs where it is outside
            parts += ["--perms", "0755", "--dir", str(parent)]
        parts += ["--ro-bind", sys.base_prefix, sys.base_prefix]
    if sys.prefix != sys.base_prefix:
        parts += ["--ro-bind", sys.prefix, VENV]
    for folder, size_mb in ((SCRATCH, spec.scratch_mb), ("/tmp", 16), ("/dev/shm", 16)):
        parts += ["--perms", "1777", "--size", str(size_mb << 20), "--tmpfs", folder]
    # What bwrap itself has put up is a tmpfs of no fixed size.
    return [*parts, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]


def check_bwrap(spec: SandboxSpec) -> None:
    """Raises ``SandboxUnavailable`` when namespaces cannot be had here, with what bwrap says."""
    try:
        done = subprocess.run([*command(spec), "true"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxUnavailable(f"bwrap does not run: {error}") from error
    if done.returncode != 0:
        raise SandboxUnavailable(
            f"bwrap cannot make namespaces here ({done.stderr.strip()}): run as root, allow unprivileged user "
            "namespaces (sysctl kernel.unprivileged_userns_clone=1), or take another --sandbox.kind"
        )


class BwrapSandbox(WorkerSandbox):
    """One set of namespaces, one worker; all of it goes when this process goes, even by ``kill -9``."""

    kind = "bwrap"
    isolated = True

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        settings = settings_of(
            self.spec,
            scratch=SCRATCH,
            wipe=[SCRATCH, "/tmp", "/dev/shm"],
            # A uid that no other sandbox has: the kernel counts a uid's processes over the whole machine.
            uid=100_000 + secrets.randbelow(2**30) if os.geteuid() == 0 else None,
            count_processes=True,
            system_v=True,
        )
        try:
            self.process = await asyncio.create_subprocess_exec(
                *command(self.spec),
                sys.executable if sys.prefix == sys.base_prefix else f"{VENV}/bin/python",
                "-I",
                "-c",
                BOOTSTRAP,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C goes to us; bwrap's own --new-session is for what it runs
            )
        except OSError as error:
            raise SandboxUnavailable(f"bwrap does not run: {error}") from error
        self.link = WorkerLink(ProcessBytes(self.process), isolated=True)
        try:
            await self.link.handshake(settings)
        except BaseException as error:
            said = await self._said()
            await self.close()
            if isinstance(error, Exception):
                raise SandboxUnavailable(f"no worker under bwrap: {said or error}") from error
            raise

    async def _said(self) -> str:
        """What came on standard error, without waiting for more."""
        assert self.process is not None
        assert self.process.stderr is not None
        try:
            async with asyncio.timeout(1):
                return (await self.process.stderr.read(4096)).decode(errors="replace").strip()
        except TimeoutError:
            return ""

    async def alive(self) -> bool:
        is_running = self.process is not None and self.process.returncode is None
        return is_running and self.link is not None and not self.link.broken

    async def close(self) -> None:
        process, self.process = self.process, None
        if process is not None and process.returncode is None:
            process.kill()  # the kernel ends all of the namespace with it
            await process.wait()
