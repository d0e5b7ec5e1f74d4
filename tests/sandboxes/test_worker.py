"""The worker's sources run in any image with Python >= 3.8, from the standard library alone."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sandboxes.worker
from sandboxes import SandboxSpec
from sandboxes.contract import CHECKS, check
from sandboxes.local import LocalSandbox
from sandboxes.worker import BOOTSTRAP, MODULES

FOLDER = Path(sandboxes.worker.__file__).parent


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_python_3_8_and_imports_the_standard_library(name: str) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text(), feature_version=(3, 8))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {alias.name.partition(".")[0] for alias in node.names} <= set(sys.stdlib_module_names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1 or (node.module or "").partition(".")[0] in sys.stdlib_module_names
            assert node.level == 0 or node.module in MODULES[: MODULES.index(name)], "imports follow the order sent"
    assert "from __future__ import annotations" in (FOLDER / f"{name}.py").read_text()


def test_the_bootstrap_and_all_modules_are_what_is_sent() -> None:
    ast.parse(BOOTSTRAP, feature_version=(3, 8))
    assert {path.stem for path in FOLDER.glob("*.py")} == {*MODULES, "__init__"}


def oldest_interpreter() -> str:
    """The oldest Python >= 3.8 of this machine, this one if there is no other."""
    found = [shutil.which(f"python3.{minor}") for minor in range(8, 15)]
    found += map(str, Path.home().glob(".pyenv/versions/*/bin/python3"))
    probe = "import sys; print(*sys.version_info[:2])"
    versions = {}
    for path in filter(None, [*found, sys.executable]):
        done = subprocess.run([path, "-c", probe], capture_output=True, text=True, check=False)
        if done.returncode == 0 and (version := tuple(map(int, done.stdout.split()))) >= (3, 8):
            versions[version] = path
    return versions[min(versions)]


@pytest.mark.slow
async def test_the_contract_holds_on_the_oldest_python_there_is() -> None:
    def make() -> LocalSandbox:
        box = LocalSandbox(SandboxSpec(kind="local"))
        box.python = oldest_interpreter()
        return box

    assert len(await check(make)) == len(CHECKS)
