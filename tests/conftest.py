"""Shared by all tests: what a missing part means (a skip with its reason, or a failure where skips are forbidden)."""

from __future__ import annotations

import importlib.util
import os
import subprocess

import pytest
from hypothesis import HealthCheck, settings

NO_SKIP = bool(os.environ.get("AGENT_RL_NO_SKIP"))
"""Set in CI: a test that cannot run because something is missing fails there instead of being skipped."""

# A busy machine is no fault of the code. In CI all runs try the same examples, elsewhere each run tries others.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=NO_SKIP)
settings.load_profile("untimed")


def docker_reason() -> str:
    """Why Docker tests cannot run; empty when they can."""
    try:
        probe = ["docker", "image", "inspect", "agent-rl-sandbox:latest"]
        done = subprocess.run(probe, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no Docker engine ({error})"
    return "" if done.returncode == 0 else f"no Docker engine or no sandbox image ({done.stderr.strip()})"


def runsc_reason() -> str:
    """Why gVisor tests cannot run; empty when they can."""
    probe = ["docker", "info", "--format", "{{json .Runtimes}}"]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no Docker engine ({error})"
    return "" if '"runsc"' in done.stdout else "the Docker engine has no runtime runsc"


def bwrap_reason() -> str:
    """Why bubblewrap tests cannot run; empty when they can."""
    from sandboxes import SandboxSpec, SandboxUnavailable
    from sandboxes.bwrap import check_bwrap

    try:
        check_bwrap(SandboxSpec(kind="bwrap"))
    except SandboxUnavailable as error:
        return str(error)
    return ""


def aio_reason() -> str:
    """Why DeepSpeed cannot swap to a disk; empty when it can."""
    from agent_rl.errors import ConfigError
    from agent_rl.offload import check_disk

    try:
        check_disk("/tmp")
    except ConfigError as error:
        return str(error)
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons: dict[str, str] = {}
    if any(item.get_closest_marker("docker") for item in items):
        reasons["docker"] = docker_reason()
    if any(item.get_closest_marker("runsc") for item in items):
        reasons["runsc"] = runsc_reason()
    if any(item.get_closest_marker("bwrap") for item in items):
        reasons["bwrap"] = bwrap_reason()
    if any(item.get_closest_marker("aio") for item in items):
        reasons["aio"] = aio_reason()
    if importlib.util.find_spec("vllm") is None:
        reasons["vllm"] = "vLLM is not installed"
    for item in items:
        for name, reason in reasons.items():
            if reason and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = [] if reporter is None else reporter.stats.get("skipped", [])
    if NO_SKIP and skipped and exitstatus == 0:
        reporter.write_line(f"AGENT_RL_NO_SKIP is set and {len(skipped)} tests were skipped: failing", red=True)
        session.exitstatus = 1
