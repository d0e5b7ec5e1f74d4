"""The arrows between the packages, read from the source, and what importing each of them may cost."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "vllm", "transformers", "deepspeed", "ray"}
FORBIDDEN = {
    "sandboxes": {"envs", "agent_rl", "stare"} | HEAVY,
    "envs": {"agent_rl", "stare"} | HEAVY,
    "stare": {"envs", "agent_rl", "sandboxes", "numpy"} | HEAVY - {"torch"},
    "agent_rl": set(),
}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_point_one_way(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    wrong = {str(path.relative_to(ROOT)): found for path in files if (found := imported(path) & FORBIDDEN[package])}
    assert not wrong


@pytest.mark.parametrize(
    ("package", "absent"),
    [
        ("sandboxes", HEAVY | {"docker", "aiohttp", "gymnasium"}),
        ("envs", HEAVY | {"docker", "math_verify", "sympy"}),
        ("stare", HEAVY - {"torch"} | {"envs", "sandboxes"}),
        ("agent_rl.cli", HEAVY),
    ],
)
def test_importing_a_package_leaves_heavy_ones_alone(package: str, absent: set[str]) -> None:
    code = f"import sys, {package}; print(*(m for m in {sorted(absent)!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == []
