"""What every backend promises, and what only the isolating one does."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from sandboxes import Sandbox, SandboxFailure, SandboxPool, SandboxSpec, make_sandbox

DOCKER = pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.slow])
BWRAP = pytest.param("bwrap", marks=[pytest.mark.bwrap])


@pytest_asyncio.fixture(params=["local", BWRAP, DOCKER])
async def box(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    made = make_sandbox(SandboxSpec(kind=request.param, timeout_s=10, output_bytes=2000, memory_mb=256))
    await made.start()
    yield made
    await made.close()
    await made.close()  # twice is once


async def test_output_errors_and_exit_code_are_kept_apart(box: Sandbox) -> None:
    result = await box.exec("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert (result.stdout, result.stderr, result.exit_code, result.status) == ("out\n", "err\n", 3, "error")
    assert result.isolated == (box.kind != "local")


async def test_a_traceback_shows_the_program_and_nothing_of_ours(box: Sandbox) -> None:
    result = await box.exec("def f():\n    return 1 / 0\nf()")
    assert result.status == "error"
    assert "worker" not in result.stderr
    assert result.stderr.startswith('Traceback (most recent call last):\n  File "main.py", line 3, in <module>')
    assert "    return 1 / 0" in result.stderr
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")


async def test_a_timeout_keeps_partial_output_and_the_next_call_gets_its_own_answer(box: Sandbox) -> None:
    slow = await box.exec("print('partial', flush=True)\nwhile True: pass", timeout_s=2)
    assert (slow.status, slow.stdout, slow.exit_code) == ("timeout", "partial\n", None)
    assert slow.wall_s < 10
    assert (await box.exec("print(1)")).stdout == "1\n"


async def test_ten_megabytes_are_cut_to_head_and_tail_with_the_cut_stated(box: Sandbox) -> None:
    result = await box.exec("print('a' * 5_000_000 + 'b' * 5_000_000)")
    assert result.stdout.startswith("aaa")
    assert result.stdout.rstrip().endswith("bbb")
    assert result.stdout_cut_bytes == 10_000_001 - 2000
    assert "[... 9998001 bytes left out ...]" in result.stdout
    assert len(result.stdout) < 2100


async def test_bytes_that_are_not_text_do_not_break_anything(box: Sandbox) -> None:
    code = "import sys; sys.stdout.buffer.write(b'\\x00\\xff\\xfe'); sys.stdout.buffer.write('é'.encode())"
    assert (await box.exec(code)).stdout == "\x00\ufffd\ufffdé"


async def test_stdin_and_files_arrive_and_files_stay_until_the_reset(box: Sandbox) -> None:
    read = await box.exec("print(input(), open('a.txt').read())", stdin="in\n", files={"a.txt": b"file"})
    assert read.stdout == "in file\n"
    assert (await box.exec("print(open('a.txt').read())")).stdout == "file\n"
    await box.reset()
    assert "FileNotFoundError" in (await box.exec("open('a.txt')")).stderr
    with pytest.raises(ValueError, match="inside the working folder"):
        await box.exec("", files={"../a": b""})


async def test_nothing_of_a_program_meets_the_next(box: Sandbox) -> None:
    poison = (
        "import builtins, os, sys; builtins.print = None; os.environ['X'] = '1'; os.chdir('/'); sys.modules['json'] = 3"
    )
    await box.exec(poison)
    clean = "import os, json; print(os.environ.get('X'), os.getcwd() == '/', json.dumps([1]))"
    assert (await box.exec(clean)).stdout == "None False [1]\n"


async def test_daemons_do_not_delay_the_answer_or_outlive_it(box: Sandbox) -> None:
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(60)\n"
        "    os._exit(0)\nprint('done')"
    )
    result = await box.exec(code)
    assert result.stdout == "done\n"
    assert result.wall_s < 5
    await box.reset()


async def test_a_very_deep_tree_is_wiped(box: Sandbox) -> None:
    code = "import os\nfor i in range(5000):\n    os.mkdir('d')\n    os.chdir('d')\nopen('f', 'w').close()"
    assert (await box.exec(code)).status == "ok"
    await box.reset()
    assert (await box.exec("import os; print(os.listdir('.'))")).stdout == "[]\n"


async def test_memory_has_a_limit(box: Sandbox) -> None:
    result = await box.exec("x = bytearray(10**10)")
    assert result.status == "memory"
    assert (await box.exec("print(1)")).stdout == "1\n"


async def test_every_call_draws_its_own_random_numbers(box: Sandbox) -> None:
    draws = {(await box.exec("import random; print(random.random())")).stdout for _ in range(3)}
    assert len(draws) == 3


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("import socket; socket.create_connection(('1.1.1.1', 80), 2)", "OSError"),
        ("import socket; socket.gethostbyname('example.com')", "gaierror"),
        ("open('/etc/x', 'w')", "Error"),
        ("import os; os.kill(1, 9)", "PermissionError"),
        ("import os; os.setuid(0)", "PermissionError"),
        ("print(open('/proc/1/environ').read())", "PermissionError"),
        ("open('/proc/1/fd/1', 'wb').write(b'x')", "PermissionError"),
        ("f = open('big', 'wb')\nwhile True: f.write(bytes(10**6))", "OSError"),
        ("import os\nwhile True: os.fork()", ""),
        ("import os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.kill(os.getpid(), signal.SIGSTOP)", ""),
    ],
)
async def test_a_container_stops_what_it_must(code: str, shown: str) -> None:
    async with SandboxPool(SandboxSpec(kind="docker", timeout_s=3, memory_mb=256, size=1)) as pool:
        async with pool.lease() as box:
            result = await box.exec(code)
        assert result.status != "ok"
        assert shown in result.stderr
        async with pool.lease() as box:
            assert (await box.exec("print(1)")).stdout == "1\n"


@pytest.mark.docker
@pytest.mark.slow
async def test_system_v_memory_cannot_be_left_behind() -> None:
    async with SandboxPool(SandboxSpec(kind="docker", size=1)) as pool, pool.lease() as box:
        code = "import ctypes; print(ctypes.CDLL(None).shmget(77, 4096, 0o1666))"
        assert (await box.exec(code)).stdout == "-1\n"


@pytest.mark.docker
@pytest.mark.slow
async def test_a_container_costs_one_descriptor_of_ours() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    boxes = [make_sandbox(SandboxSpec(kind="docker", preload=())) for _ in range(3)]
    for box in boxes:
        await box.start()
    assert count() == before + 3, "512 of them must not meet the usual limit of 1024"
    for box in boxes:
        assert (await box.exec("print(1)")).stdout == "1\n"
        await box.close()
    assert count() == before


async def test_a_machine_without_room_for_a_folder_is_our_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/no/such/folder")
    with pytest.raises(SandboxFailure, match="cannot start"):
        async with SandboxPool(SandboxSpec(kind="local", warm=0)) as pool, pool.lease():
            pass


OWNER = """
import asyncio, sys
from sandboxes import SandboxPool, SandboxSpec
async def main():
    async with SandboxPool(SandboxSpec(kind=sys.argv[1])) as pool, pool.lease() as box:
        print(getattr(box, "container_id", None) or box.process.pid, flush=True)
        await box.exec("import time; time.sleep(60)", timeout_s=60)
asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["local", BWRAP, DOCKER])
def test_kill_9_of_the_owner_leaves_nothing(kind: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, kind], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    name = owner.stdout.readline().strip()
    time.sleep(0.5)
    owner.kill()
    owner.wait()

    def is_left() -> bool:
        if kind != "docker":
            stat = Path(f"/proc/{name}/stat")
            return os.path.exists(stat) and stat.read_text().split()[2] != "Z"
        listed = subprocess.run(["docker", "ps", "-aq", "--no-trunc"], capture_output=True, text=True, check=True)
        return name in listed.stdout

    deadline = time.monotonic() + 20
    while is_left():
        assert time.monotonic() < deadline, f"{kind} sandbox {name} outlived its owner"
        time.sleep(0.2)


@pytest.mark.docker
@pytest.mark.slow
async def test_orphans_are_removed_and_living_owners_are_left_alone() -> None:
    from sandboxes.container import connect
    from sandboxes.owner import is_orphan, owner_label
    from sandboxes.reaper import remove_orphans

    assert not is_orphan(owner_label())
    client = connect()
    host = owner_label().partition(":")[0]
    labels = {"agent-rl.sandbox": "1", "agent-rl.owner": f"{host}:999999:1"}
    orphan = client.api.create_container(SandboxSpec().image, command=["true"], labels=labels)["Id"][:12]
    client.close()
    box = make_sandbox(SandboxSpec(kind="docker"))
    await box.start()
    removed = await asyncio.to_thread(remove_orphans)
    assert f"container {orphan}" in removed
    assert (await box.exec("print(1)")).stdout == "1\n"
    await box.close()


INTERRUPTED = """
import asyncio, os, signal, sys
from sandboxes import SandboxPool, SandboxSpec
async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: None)
    async with SandboxPool(SandboxSpec(kind=sys.argv[1], size=1)) as pool, pool.lease() as box:
        code = "import time; print('begun'); time.sleep(0.5); print('done')"
        result = await box.exec(code, on_output=lambda name, data: os.killpg(0, signal.SIGINT))
        print(result.stdout)
asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["local", BWRAP, DOCKER])
def test_ctrl_c_at_a_terminal_ends_no_sandbox_of_who_goes_on(kind: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED, kind]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, timeout=60, check=False)
    assert done.stdout.strip() == "begun\ndone", done.stderr


async def test_a_dead_worker_is_our_failure_not_a_result() -> None:
    box = make_sandbox(SandboxSpec(kind="local"))
    await box.start()
    call = asyncio.ensure_future(box.exec("import os, signal; os.kill(os.getppid(), signal.SIGKILL)"))
    with pytest.raises(SandboxFailure, match="worker is gone"):
        await call
    with pytest.raises(SandboxFailure, match="broken"):
        await box.exec("print(1)")
    await box.close()


async def test_an_answer_that_came_while_the_event_loop_stood_still_is_taken(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandboxes.link.GRACE_S", -9.9)  # so that the time is over after 0.1 s
    monkeypatch.setattr("sandboxes.link.LATE_S", 10.0)
    call = asyncio.create_task(box.exec("print(1)", timeout_s=10))
    await asyncio.sleep(0)
    time.sleep(0.5)  # noqa: ASYNC251  # as a training step does
    assert (await call).stdout == "1\n"
    assert (await box.exec("print(2)")).stdout == "2\n"
