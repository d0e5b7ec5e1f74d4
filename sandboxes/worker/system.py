"""What the worker asks of the kernel: processes to kill, limits to set, folders to empty, pages to share.

Standard library only, Python >= 3.8.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
MADV_COLLAPSE = 25
RLIMIT_MSGQUEUE = 12  # resource has it from Python 3.13 on, if at all
IPC_RMID = 0
HUGE_PAGE = 2 * 1024 * 1024

libc = ctypes.CDLL(None, use_errno=True)


def children_of(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        fresh = [child for child in children_of(waiting.pop()) if child not in found]
        found.update(fresh)
        waiting.extend(fresh)
    return found


def other_processes() -> set[int]:
    """Every process but this one: of the container, or (outside one) below this process, which adopts orphans."""
    if os.getpid() != 1:
        return descendants(os.getpid())
    return {int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != 1}


def reap(ended: dict[int, tuple[int, float]]) -> None:
    """Collect every child that has ended: its wait status, and the seconds of processor time that it took."""
    try:
        while True:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            ended[pid] = (status, usage.ru_utime + usage.ru_stime)
    except ChildProcessError:
        return


def kill_all_but(keep: set[int], ended: dict[int, tuple[int, float]]) -> bool:
    """Kill and reap every other process that is not in ``keep``; True when none is left."""
    for _ in range(200):
        if not keep and os.getpid() == 1:
            try:
                os.kill(-1, signal.SIGKILL)  # everything in the container but PID 1, in one step
            except ProcessLookupError:
                pass
        else:
            for pid in other_processes() - keep:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        reap(ended)
        if not other_processes() - keep:
            return True
        time.sleep(0.005)
    return False


def oom_kills() -> int | None:
    """How often the kernel killed for memory in this container; None outside one."""
    if os.getpid() != 1:
        return None
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            fd = os.open(path, os.O_RDONLY)  # read twice a call: open() would cost several times as much
        except OSError:
            continue
        _, found, rest = os.read(fd, 4096).partition(b"\noom_kill ")
        os.close(fd)
        if found:
            return int(rest.split()[0])
    return None


def set_limits(settings: dict[str, Any], request: dict[str, Any]) -> None:
    """The limits of one program, where lower than what holds already. A request without ``timeout_s`` is a session's,
    whose process outlives its calls."""
    megabyte = 1024 * 1024
    limits = [
        (resource.RLIMIT_CORE, 0, 0),
        (RLIMIT_MSGQUEUE, 0, 0),  # a POSIX queue outlives its maker, and cannot be listed to be removed
        (resource.RLIMIT_FSIZE, settings["scratch_mb"] * megabyte, 0),
        (resource.RLIMIT_NOFILE, request.get("open_files") or settings["open_files"], 0),
    ]
    if request.get("cpu_s"):
        limits.append((resource.RLIMIT_CPU, max(1, round(request["cpu_s"])), 1))
    elif request.get("timeout_s"):
        # Every thread may use a core until the deadline: the limit is for what a deadline cannot see.
        limits.append((resource.RLIMIT_CPU, int(request["timeout_s"] * (os.cpu_count() or 1)) + 2, 0))
    if settings["address_space_mb"]:
        space_mb = settings["address_space_mb"]
        if request.get("memory_mb"):
            with open("/proc/self/statm") as file:
                held_mb = int(file.read().split()[0]) * resource.getpagesize() // megabyte
            space_mb = min(space_mb, held_mb + request["memory_mb"])
        limits.append((resource.RLIMIT_AS, space_mb * megabyte, 0))
    if request.get("memory_mb"):
        limits.append((resource.RLIMIT_DATA, request["memory_mb"] * megabyte, 0))
    if settings["processes"]:
        limits.append((resource.RLIMIT_NPROC, settings["processes"], 0))
    for kind, soft, room in limits:
        _, most = resource.getrlimit(kind)
        hard = soft + room if most == resource.RLIM_INFINITY else min(soft + room, most)
        try:
            resource.setrlimit(kind, (min(soft, hard), hard))
        except ValueError:
            if kind != RLIMIT_MSGQUEUE:  # gVisor lets nobody change it
                raise


def become_user(settings: dict[str, Any]) -> None:
    if settings["uid"] is not None:
        os.setgroups([])
        os.setgid(settings["uid"])
        os.setuid(settings["uid"])


def collapse_pages() -> None:
    """Huge pages for what this process holds in memory: a fork then copies a 512th of the page tables.

    Measured with numpy and sympy loaded: 3.1 -> 2.1 ms a fork and exit. Older kernels (before 6.1) refuse, harmlessly.
    """
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with open("/proc/self/maps") as file:
        lines = file.read().splitlines()
    for line in lines:
        fields = line.split()
        if fields[1].startswith("rw") and (len(fields) < 6 or fields[5] == "[heap]"):
            start, end = (int(word, 16) for word in fields[0].split("-"))
            start, end = -(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
            if start < end:
                libc.madvise(start, end - start, MADV_COLLAPSE)


def wipe(folder: str) -> None:
    """Empty a folder whatever its depth: subfolders' entries move up until only files are left, so paths stay short."""
    try:
        os.chmod(folder, 0o700)
    except PermissionError:
        pass  # not ours, so the program could not change its mode either
    moved = 0
    while True:
        folders = []
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            else:
                os.unlink(entry.path)
        if not folders:
            return
        for path in folders:
            os.chmod(path, 0o700)
            for name in os.listdir(path):
                inner = os.path.join(path, name)
                if os.path.islink(inner) or not os.path.isdir(inner):
                    os.unlink(inner)
                else:
                    os.chmod(inner, 0o700)
                    os.rename(inner, os.path.join(folder, f".wipe-{moved}"))
                    moved += 1
            os.rmdir(path)


def is_empty(folder: str) -> bool:
    """Also for a folder that is not there; False for one that cannot be read."""
    try:
        return not os.listdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False


def system_v() -> list[tuple[str, int]]:
    """Kind and id of every System V object of our namespace."""
    found = []
    for kind in ("shm", "sem", "msg"):
        try:
            with open(f"/proc/sysvipc/{kind}") as file:
                found += [(kind, int(line.split()[1])) for line in file.read().splitlines()[1:]]
        except OSError:
            pass
    return found


def remove_system_v() -> None:
    for kind, number in system_v():
        if kind == "sem":
            libc.semctl(number, 0, IPC_RMID)
        else:
            (libc.shmctl if kind == "shm" else libc.msgctl)(number, IPC_RMID, None)


def wipe_all(settings: dict[str, Any]) -> bool:
    """True when the folders that programs write to are empty, the working folder is there, and no System V object is
    left where some may be."""

    def is_clean() -> bool:
        # A program that runs as the worker's user may have removed the working folder itself.
        is_there = os.path.isdir(settings["scratch"])
        return (
            is_there
            and all(is_empty(folder) for folder in settings["wipe"])
            and not (settings["system_v"] and system_v())
        )

    if is_clean():
        return True  # the usual case; a fork would cost more than all the rest of a reset
    pid = os.fork()
    if pid == 0:
        # As the programs' user: their files need no privilege of ours to delete.
        code = 1
        try:
            become_user(settings)
            for folder in settings["wipe"]:
                if os.path.isdir(folder):
                    wipe(folder)
            if settings["system_v"]:
                remove_system_v()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return status == 0 and is_clean()
