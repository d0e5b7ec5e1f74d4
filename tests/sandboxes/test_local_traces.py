"""The local backend leaves neither process nor folder, however its owner ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

OWNER = """
import asyncio, os, sys
from sandboxes import SandboxSpec, make_sandbox
DAEMON = '''
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
open("pid", "w").write(str(os.getpid()))
time.sleep(60)
'''
async def main():
    box = make_sandbox(SandboxSpec(kind="local"))
    await box.start()
    if sys.argv[1] == "inherited":  # a process that holds the worker's stdin open for longer than we live
        if os.fork() == 0:
            os.closerange(0, 3)
            import time; time.sleep(5); os._exit(0)
    print(box.process.pid, box._scratch, flush=True)
    await box.exec(DAEMON, timeout_s=60)
asyncio.run(main())
"""


def processes_in(folder: str) -> list[int]:
    """Processes whose working folder is ``folder``, also a removed one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.readlink(entry / "cwd").startswith(folder):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("pipes", ["own", "inherited"])
def test_daemons_and_folder_go_with_the_owner(number: signal.Signals, pipes: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, pipes], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    _, scratch = owner.stdout.readline().split()
    deadline = time.monotonic() + 20
    while len(processes_in(scratch)) < 2:
        assert time.monotonic() < deadline, "the program and its daemon did not start"
        time.sleep(0.05)
    owner.send_signal(number)
    owner.wait()
    while processes_in(scratch) or Path(scratch).exists():
        assert time.monotonic() < deadline, "a daemon or the scratch folder outlived the owner"
        time.sleep(0.05)
