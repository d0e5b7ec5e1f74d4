"""Programs that mean harm, in the isolating backend: each gets its own result, the next call a correct one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from sandboxes import Sandbox, SandboxFailure, SandboxPool, SandboxSpec, make_sandbox
from sandboxes.container import DockerSandbox, connect

pytestmark = [pytest.mark.docker, pytest.mark.slow]


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[asyncio.Runner, Sandbox]]:
    with asyncio.Runner() as runner:
        box = make_sandbox(SandboxSpec(kind="docker", timeout_s=5, memory_mb=128, pids=64, scratch_mb=16, size=1))
        runner.run(box.start())
        yield runner, box
        runner.run(box.close())


LIBC = "import ctypes, os, sys\nlibc = ctypes.CDLL(None, use_errno=True)\ndef no(r): print(r == -1)\n"

REFUSED = {
    "ptrace": LIBC + "no(libc.ptrace(16, 1, None, None))",
    "read the worker's memory": LIBC
    + "class V(ctypes.Structure): _fields_ = [('b', ctypes.c_void_p), ('n', ctypes.c_size_t)]\n"
    + "b = ctypes.create_string_buffer(8); v = V(ctypes.addressof(b), 8)\n"
    + "no(libc.process_vm_readv(1, ctypes.byref(v), 1, ctypes.byref(v), 1, 0))",
    "System V shared memory": LIBC + "no(libc.shmget(77, 4096, 0o1666))",
    "System V semaphores": LIBC + "no(libc.semget(77, 1, 0o1666))",
    "System V messages": LIBC + "no(libc.msgget(77, 0o1666))",
    "POSIX queue": LIBC + "no(ctypes.CDLL('librt.so.1').mq_open(b'/q', os.O_CREAT | os.O_RDWR, 0o666, None))",
    "mount": LIBC + "no(libc.mount(b'none', b'/scratch', b'tmpfs', 0, None))",
    "user namespace": LIBC + "no(libc.unshare(0x10000000))",
    "root again": LIBC + "no(libc.setresuid(0, 0, 0))",
    "stop the worker": LIBC + "no(libc.kill(1, 19))",
    "signal everyone": LIBC + "os.setsid() if os.fork() == 0 else None\nno(libc.kill(1, 15))",
    "raise a limit": "import resource\ntry: resource.setrlimit(resource.RLIMIT_NOFILE, (10**6, 10**6))\n"
    "except (ValueError, PermissionError): print(True)",
    "shield from out-of-memory": "try: open('/proc/self/oom_score_adj', 'w').write('-1000')\n"
    "except OSError: print(True)",
}

ABSENT = {
    "the engine's socket": "import glob; print(not glob.glob('/var/run/docker*') and not glob.glob('/run/docker*'))",
    "a network card": "import os; print(os.listdir('/sys/class/net') == ['lo'])",
    "a capability": "print([w for w in open('/proc/self/status').read().split('\\n') if w.startswith('Cap') "
    "and not w.startswith('CapBnd') and int(w.split()[1], 16)] == [])",
    "new privileges": "print('NoNewPrivs:\\t1' in open('/proc/self/status').read())",
    "an unfiltered system call": "print('Seccomp:\\t2' in open('/proc/self/status').read())",
    "our environment": "import os; print(set(os.environ) <= {'PATH', 'HOME', 'LANG', 'TMPDIR', 'OMP_NUM_THREADS'})",
    "a writable root": "import os; print(not any(os.access(p, os.W_OK) for p in ('/', '/etc', '/usr', '/var')))",
}


@pytest.mark.parametrize("name", [*REFUSED, *ABSENT])
def test_there_is_no_way_out(running: tuple[asyncio.Runner, Sandbox], name: str) -> None:
    runner, box = running
    result = runner.run(box.exec((REFUSED | ABSENT)[name]))
    assert set(result.stdout.split()) == {"True"}, result
    assert runner.run(box.exec("print(1)")).stdout == "1\n"
    runner.run(box.reset())


EGRESS = {
    "tcp": "import socket; socket.create_connection(('1.1.1.1', 443), 2)",
    "udp": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('8.8.8.8', 53))",
    "ipv6": "import socket; socket.create_connection(('2606:4700:4700::1111', 443), 2)",
    "metadata": "import urllib.request; urllib.request.urlopen('http://169.254.169.254/latest/', timeout=2)",
    "the host": "import socket; socket.create_connection(('172.17.0.1', 22), 2)",
    "raw": "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
}


@pytest.mark.parametrize("name", EGRESS)
def test_nothing_reaches_the_network(running: tuple[asyncio.Runner, Sandbox], name: str) -> None:
    runner, box = running
    result = runner.run(box.exec(EGRESS[name]))
    assert result.status == "error", result
    assert "Error" in result.stderr


def test_what_memory_takes_is_told_from_what_a_signal_takes(running: tuple[asyncio.Runner, Sandbox]) -> None:
    runner, box = running
    bombs = {
        "x = bytearray(10**9)": "memory",
        "x = []\nwhile True: x.append(bytearray(10**6))": "memory",
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'x = bytearray(10**9)'], check=True)": "memory",
        "import os; os.kill(os.getpid(), 9)": "killed",
        "print(1)": "ok",
    }
    for code, status in bombs.items():
        result = runner.run(box.exec(code))
        assert result.status == status, (code, result)
    fills = "f = open('/%s/big', 'wb')\nwhile True: f.write(bytes(10**6)); f.flush()"
    for folder in ("scratch", "tmp", "dev/shm"):
        result = runner.run(box.exec(fills % folder))
        assert result.status == "error", (folder, result)
        assert "No space left" in result.stderr or "File too large" in result.stderr
        runner.run(box.reset())
    assert runner.run(box.exec("import os; print(os.listdir('/tmp'), os.listdir('/dev/shm'))")).stdout == "[] []\n"


def test_bombs_of_processes_and_threads_end_with_the_call(running: tuple[asyncio.Runner, Sandbox]) -> None:
    runner, box = running
    bombs = (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(99,)).start()\n"
        "    except RuntimeError: pass",
        "import os, signal\nfor _ in range(40):\n    if os.fork() == 0:\n        os.setsid(); signal.pause()",
        "import os, signal\nfor _ in range(20):\n    if os.fork() == 0: os.kill(os.getpid(), signal.SIGSTOP)",
    )
    for code in bombs:
        result = runner.run(box.exec(code, timeout_s=1))
        assert result.wall_s < 8, (code, result)
        count = "import os; print(sorted(int(p) for p in os.listdir('/proc') if p.isdigit()).index(os.getpid()))"
        assert runner.run(box.exec(count)).stdout == "1\n", code  # PID 1 and the program, nobody else
    runner.run(box.reset())


async def test_a_container_killed_in_mid_call_is_our_failure_and_is_replaced() -> None:
    async with SandboxPool(SandboxSpec(kind="docker", size=1, warm=0)) as pool:
        client = connect()

        async def call() -> None:
            async with pool.lease() as box:
                asyncio.get_running_loop().call_later(0.5, lambda: client.api.kill(box.container_id))
                await box.exec("import time; time.sleep(30)", timeout_s=60)

        with pytest.raises(SandboxFailure, match="worker is gone"):
            await asyncio.wait_for(call(), 10)
        async with pool.lease() as box:
            assert isinstance(box, DockerSandbox)
            assert (await box.exec("print(1)")).stdout == "1\n"
            idle = box.container_id
        await asyncio.to_thread(client.api.kill, idle)
        async with pool.lease() as box:  # one that died while idle is replaced before anybody sees it
            assert (await box.exec("print(2)")).stdout == "2\n"
        client.close()
        assert (pool.counters.started, pool.counters.discarded) == (3, 2)


async def test_nothing_is_left_on_the_engine() -> None:
    async def used(number: int) -> str:
        async with pool.lease() as box:
            assert isinstance(box, DockerSandbox)
            ids.add(str(box.container_id))
            return (await box.exec(f"import os; os.fork(); print({number})")).stdout

    ids: set[str] = set()
    async with SandboxPool(SandboxSpec(kind="docker", size=2)) as pool:
        answers = await asyncio.gather(*(used(number) for number in range(20)))
    assert all(set(answer.split()) == {str(number)} for number, answer in enumerate(answers))
    client = connect()
    left = {container["Id"] for container in client.api.containers(all=True)}
    client.close()
    assert not ids & left
