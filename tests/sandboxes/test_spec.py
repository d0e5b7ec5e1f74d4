"""Profiles, runtimes and networks: what a name stands for reaches the engine, and holds."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import pytest
from pydantic import ValidationError

from sandboxes import SandboxPool, SandboxSpec, SandboxUnavailable, make_sandbox, resolve
from sandboxes.base import PROFILES
from sandboxes.container import GVISOR_PIDS, RUN_ID, DockerSandbox, connect
from sandboxes.hostile import check_attack
from sandboxes.reaper import remove_orphans


def test_a_profile_fills_in_what_is_not_given() -> None:
    assert SandboxSpec(profile="strict").memory_mb == PROFILES["strict"]["memory_mb"] < SandboxSpec().memory_mb
    assert SandboxSpec(profile="strict", memory_mb=700).memory_mb == 700
    assert SandboxSpec(profile="networked").network
    assert not SandboxSpec(profile="default").network
    assert SandboxSpec(profile="default") == SandboxSpec()
    with pytest.raises(ValidationError, match="'strict', 'default' or 'networked'"):
        SandboxSpec(profile="lax")  # type: ignore[arg-type]


@pytest.mark.docker
@pytest.mark.slow
async def test_every_limit_of_a_specification_stands_on_the_container() -> None:
    box = DockerSandbox(SandboxSpec(kind="docker", profile="strict"))
    await box.start()
    client = connect()
    about = client.api.inspect_container(box.container_id)
    client.close()
    host = about["HostConfig"]
    assert (host["Memory"], host["MemorySwap"], host["PidsLimit"]) == (256 * 2**20, 256 * 2**20, 32)
    assert (host["NanoCpus"], host["NetworkMode"], host["ReadonlyRootfs"]) == (5 * 10**8, "none", True)
    assert (host["CapDrop"], host["SecurityOpt"]) == (["ALL"], ["no-new-privileges"])
    assert sorted(one.removeprefix("CAP_") for one in host["CapAdd"]) == ["KILL", "SETGID", "SETUID"]
    assert host["Tmpfs"]["/scratch"] == "size=16m,mode=1777"
    assert not host["Binds"]
    labels = about["Config"]["Labels"]
    assert labels["agent-rl.run"] == RUN_ID
    assert labels["agent-rl.owner"]
    result = await box.exec("import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE), 'x' * 10_000)")
    assert result.stdout.startswith("(64, 64) xxx")
    assert result.stdout_cut_bytes > 0
    await box.close()


@pytest.mark.docker
@pytest.mark.slow
async def test_a_networked_sandbox_reaches_out_but_not_its_neighbour() -> None:
    spec = SandboxSpec(kind="docker", profile="networked")
    served = await asyncio.start_server(lambda reader, writer: writer.close(), "0.0.0.0", 0)
    port = served.sockets[0].getsockname()[1]
    boxes = [DockerSandbox(spec), DockerSandbox(spec)]
    await asyncio.gather(*(box.start() for box in boxes))
    gateway = "next(l.split()[2] for l in open('/proc/net/route') if l.split()[1] == '00000000')"
    host = f"import socket, struct; host = socket.inet_ntoa(struct.pack('<I', int({gateway}, 16)))\n"
    reached = await boxes[0].exec(host + f"socket.create_connection((host, {port}), 5); print('reached', host)")
    assert reached.stdout.startswith("reached "), reached
    mine = await boxes[0].exec("import socket; print(socket.gethostbyname(socket.gethostname()))")
    listen = "import socket; s = socket.socket(); s.bind(('0.0.0.0', 7777)); s.listen(); s.settimeout(4); s.accept()"
    listening = asyncio.create_task(boxes[0].exec(listen))
    await asyncio.sleep(0.5)
    knock = await boxes[1].exec(f"import socket; socket.create_connection(('{mine.stdout.strip()}', 7777), 2)")
    assert knock.status == "error"
    assert "imed out" in knock.stderr or "unreachable" in knock.stderr, knock
    assert (await listening).status == "error"
    for box in boxes:
        await box.close()
    served.close()


@pytest.mark.docker
@pytest.mark.slow
def test_a_runs_network_goes_with_it() -> None:
    code = (
        "import asyncio\nfrom sandboxes import SandboxSpec, make_sandbox\nasync def main():\n"
        "    box = make_sandbox(SandboxSpec(kind='docker', network=True, preload=()))\n"
        "    await box.start()\n    await box.close()\n"
        "asyncio.run(main())"
    )
    client = connect()
    before = {one["Id"] for one in client.api.networks()}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert {one["Id"] for one in client.api.networks()} == before
    client.close()


@pytest.mark.docker
@pytest.mark.slow
async def test_orphaned_networks_and_volumes_are_removed() -> None:
    client = connect()
    dead = {"agent-rl.sandbox": "1", "agent-rl.owner": f"{socket.gethostname()}:999999:1"}
    client.api.create_network("agent-rl-test-orphan", driver="bridge", labels=dead)
    client.api.create_volume("agent-rl-test-orphan", labels=dead)
    removed = await asyncio.to_thread(remove_orphans)
    assert {"network agent-rl-test-orphan", "volume agent-rl-test-orphan"} <= set(removed)
    assert not client.api.networks(names=["agent-rl-test-orphan"])
    client.close()


@pytest.mark.docker
@pytest.mark.slow
async def test_a_runtime_the_engine_lacks_is_named() -> None:
    spec = SandboxSpec(kind="docker", runtime="no-such-runtime")
    with pytest.raises(SandboxUnavailable, match=r"no runtime 'no-such-runtime' \(it has .*runc.*daemon\.json"):
        await resolve(spec)
    with pytest.raises(SandboxUnavailable, match="no runtime 'no-such-runtime'"):
        async with SandboxPool(spec) as pool, pool.lease():
            pass


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.runsc
async def test_a_runtime_reaches_the_container() -> None:
    box = make_sandbox(await resolve(SandboxSpec(kind="docker", runtime="runsc")))
    assert isinstance(box, DockerSandbox)
    await box.start()
    client = connect()
    host = client.api.inspect_container(box.container_id)["HostConfig"]
    client.close()
    assert (host["Runtime"], host["PidsLimit"]) == ("runsc", GVISOR_PIDS)
    version = (await box.exec("print(open('/proc/version').read())")).stdout
    assert version.startswith("Linux version 4.4.0"), "gVisor's own kernel says so"
    await check_attack(box, "memory bomb")
    await box.close()


HARDENING = {
    "no new privileges": "print('NoNewPrivs:\\t1' in open('/proc/self/status').read())",
    "a filter of system calls": "print('Seccomp:\\t2' in open('/proc/self/status').read())",
    "no network card": "import os; print(os.listdir('/sys/class/net') == ['lo'])",
    "a uid of its own": "import os; print({os.getuid(), os.geteuid(), os.getgid(), *os.getgroups()} == {65534})",
    "another one for the worker": "import os; print(os.stat('/proc/1').st_uid == 0)",
    "no capability left in the set": "print('CapEff:\\t0000000000000000' in open('/proc/self/status').read())",
    "sized folders": "import os; print([os.statvfs(p).f_blocks * os.statvfs(p).f_frsize >> 20 for p in "
    "('/scratch', '/tmp', '/dev/shm')] == [64, 16, 16])",
    "nothing of the host mounted": "print(not [m for m in open('/proc/mounts') if 'docker.sock' in m or '/home' in m])",
}


@pytest.mark.docker
@pytest.mark.slow
async def test_hardening_is_on_by_default() -> None:
    async with SandboxPool(SandboxSpec(kind="docker", size=1)) as pool, pool.lease() as box:
        for what, code in HARDENING.items():
            result = await box.exec(code)
            assert result.stdout == "True\n", (what, result)


@pytest.mark.docker
@pytest.mark.slow
async def test_a_running_pool_removes_what_dead_runs_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandboxes.pool.TEND_S", 0.3)
    dead = {"agent-rl.sandbox": "1", "agent-rl.owner": f"{socket.gethostname()}:999999:1"}
    client = connect()
    async with SandboxPool(SandboxSpec(kind="docker", size=1, warm=0)):
        orphan = client.api.create_container(SandboxSpec().image, command=["true"], labels=dead)["Id"]
        async with asyncio.timeout(20):
            while orphan in {one["Id"] for one in client.api.containers(all=True)}:  # noqa: ASYNC110  # the engine tells nobody
                await asyncio.sleep(0.1)
    client.close()


@pytest.mark.docker
@pytest.mark.slow
async def test_the_cpu_share_is_a_limit() -> None:
    async with SandboxPool(SandboxSpec(kind="docker", size=1, cpus=0.25)) as pool, pool.lease() as box:
        spin = "import os, time\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass\n"
        result = await box.exec(f"{spin}print(time.process_time())")
        assert float(result.stdout) < 1.2, "a quarter of two seconds, and a burst"
