"""The program inside a sandbox, and how it gets there: its sources, sent ahead over the worker's standard input.

Nothing of it is installed in the sandbox: any image with Python >= 3.8 will do. The modules are standard library only.
"""

from __future__ import annotations

import json
import struct
from functools import cache
from pathlib import Path

MODULES = ("system", "program", "main")
"""In the order of their imports."""

BOOTSTRAP = """\
import json, os, sys, types
def take(n):
    b = b""
    while len(b) < n:
        p = os.read(0, n - len(b))
        if not p:
            sys.exit()
        b += p
    return b
sources = json.loads(take(int.from_bytes(take(4), "big")).decode())
package = sys.modules["agent_rl_worker"] = types.ModuleType("agent_rl_worker")
package.__path__ = []
for name, source in sources:
    name = "agent_rl_worker." + name
    module = sys.modules[name] = types.ModuleType(name)
    module.__package__ = "agent_rl_worker"
    exec(compile(source, name, "exec"), module.__dict__)
module.main()
"""
"""What the sandbox's Python is started with: ``python3 -I -c BOOTSTRAP``."""


@cache
def packed() -> bytes:
    """The sources as the bootstrap reads them: 4 bytes big-endian length, then JSON."""
    folder = Path(__file__).parent
    body = json.dumps([(name, (folder / f"{name}.py").read_text()) for name in MODULES]).encode()
    return struct.pack(">I", len(body)) + body
