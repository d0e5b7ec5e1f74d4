"""The sandbox image: Debian with Python, numpy and sympy, from Debian's packages alone or on a base of a registry."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from sandboxes.base import SandboxUnavailable
from sandboxes.container import check_image, connect, engine

PACKAGES = ("python3", "python3-numpy", "python3-sympy")


def build_image(tag: str, *, release: str = "bookworm", say: Callable[[str], None] = print) -> str:
    """Build ``tag`` by debootstrap from Debian's packages and import it; returns the image id. Needs root.

    Raises:
        SandboxUnavailable: no Docker engine, no debootstrap, not root, or the build failed (last lines in the message).
    """
    connect().close()
    if shutil.which("debootstrap") is None:
        raise SandboxUnavailable("debootstrap is missing: apt-get install debootstrap")
    if os.geteuid() != 0:
        raise SandboxUnavailable("building the image needs root: run the same command with sudo")
    folder = Path(tempfile.mkdtemp(prefix="agent-rl-image-"))
    try:
        root = folder / "root"
        say(f"installing Debian {release} with {', '.join(PACKAGES)} (about a minute)")
        _run(["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", release, str(root)])
        shutil.rmtree(root / "var/cache/apt", ignore_errors=True)
        shutil.rmtree(root / "var/lib/apt/lists", ignore_errors=True)
        say("importing the image")
        return _import(root, tag)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def build_on(base: str, tag: str) -> str:
    """Build ``tag`` by the engine from ``Dockerfile`` on a Debian ``base``; returns the image id.

    Raises:
        SandboxUnavailable: no Docker engine, or the build failed (last lines in the message).
    """
    connect().close()
    command = ["docker", "build", "--quiet", "--tag", tag, "--build-arg", f"BASE={base}", "-"]
    dockerfile = Path(__file__).with_name("Dockerfile").read_text()
    done = subprocess.run(command, input=dockerfile, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = " | ".join((done.stdout + done.stderr).strip().splitlines()[-3:])
        raise SandboxUnavailable(f"docker build on {base} failed: {said}")
    return done.stdout.strip()


def has_image(tag: str) -> bool:
    """Raises ``SandboxUnavailable`` when no Docker engine answers."""
    with engine() as client:
        try:
            check_image(client, tag)
        except SandboxUnavailable:
            return False
    return True


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise SandboxUnavailable(f"{command[0]} failed: {' | '.join(done.stdout.splitlines()[-3:])}")


def _import(root: Path, tag: str) -> str:
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as tar:
        done = subprocess.run(
            ["docker", "import", "-", tag], stdin=tar.stdout, capture_output=True, text=True, check=False
        )
    if done.returncode != 0 or tar.returncode != 0:
        raise SandboxUnavailable(f"docker import failed: {done.stderr.strip()}")
    return done.stdout.strip()
