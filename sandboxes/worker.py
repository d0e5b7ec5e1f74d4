"""The resident worker: started once in a sandbox, it forks a fresh process for every program it is sent.

Standard library only, Python >= 3.8: it runs in whatever image a user brings. It speaks frames (4 bytes big-endian
length, then JSON) over the descriptors that were its stdin and stdout; programs never hold those. In a container it is
PID 1 and root with the capabilities to change uid and to kill, nothing else; programs run under another uid, so they
can neither signal nor trace nor read it. It exits when its stdin closes, so nothing outlives who started it.
"""

from __future__ import annotations

import atexit
import base64
import ctypes
import json
import linecache
import os
import resource
import select
import signal
import struct
import sys
import threading
import time
import traceback
import types
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MAX_FRAME = 256 * 1024 * 1024
DRAIN_BYTES = 1 << 20  # read after the program's end: what was already in the pipe, not what a survivor still writes


def read_exactly(fd: int, count: int) -> bytes | None:
    parts = []
    while count:
        part = os.read(fd, min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def read_frame(fd: int) -> Any:
    header = read_exactly(fd, 4)
    if header is None:
        return None
    (size,) = struct.unpack(">I", header)
    if size > MAX_FRAME:
        return None
    body = read_exactly(fd, size)
    return None if body is None else json.loads(body.decode("utf-8"))


def write_frame(fd: int, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode("utf-8")
    data = memoryview(struct.pack(">I", len(body)) + body)
    while data:
        data = data[os.write(fd, data) :]


class Capture:
    """Bounded head and tail of a stream."""

    def __init__(self, fd: int, limit: int) -> None:
        self.fd = fd
        self.half = max(1, limit // 2)
        self.head = b""
        self.tail = b""
        self.total = 0

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        room = self.half - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        if data:
            self.tail = (self.tail + data)[-self.half :]

    def read(self) -> bool:
        """False at the end of the stream."""
        try:
            data = os.read(self.fd, 65536)
        except BlockingIOError:
            return True
        self.feed(data)
        return bool(data)

    def drain(self) -> None:
        """What stands in the pipe now, without waiting for more."""
        taken = 0
        while taken < DRAIN_BYTES:
            try:
                data = os.read(self.fd, 65536)
            except BlockingIOError:
                return
            if not data:
                return
            taken += len(data)
            self.feed(data)

    def report(self) -> dict[str, Any]:
        cut = self.total - len(self.head) - len(self.tail)
        return {
            "head": base64.b64encode(self.head).decode("ascii"),
            "tail": base64.b64encode(self.tail).decode("ascii"),
            "cut": cut,
        }


def children_of(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def kill_everything() -> bool:
    """Kill and reap every process below this one; True when none is left."""
    for _ in range(200):
        if os.getpid() == 1:
            try:
                os.kill(-1, signal.SIGKILL)  # everything in the container but PID 1
            except ProcessLookupError:
                pass
        else:
            # Subreaper: daemons that forked away come back as our children; grandchildren follow as parents die.
            for pid in children_of(os.getpid()):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        try:
            while True:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
        except ChildProcessError:
            if os.getpid() != 1 or not other_processes():
                return True
        time.sleep(0.005)
    return False


def other_processes() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def set_limits(settings: dict[str, Any], timeout_s: float) -> None:
    megabyte = 1024 * 1024
    limits = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, settings["scratch_mb"] * megabyte),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CPU, int(timeout_s) + 2),
    ]
    if settings["address_space_mb"]:
        limits.append((resource.RLIMIT_AS, settings["address_space_mb"] * megabyte))
    for kind, value in limits:
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def become_user(settings: dict[str, Any]) -> None:
    if settings["uid"] is not None:
        os.setgroups([])
        os.setgid(settings["uid"])
        os.setuid(settings["uid"])


def die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def run_program(code: str, settings: dict[str, Any]) -> int:
    """In the child: the program as ``__main__``; returns its exit code. Tracebacks show its own frames only."""
    module = types.ModuleType("__main__")
    module.__dict__["__file__"] = "main.py"
    sys.modules["__main__"] = module
    sys.argv = ["main.py"]
    sys.path.insert(0, settings["scratch"])
    linecache.cache["main.py"] = (len(code), None, code.splitlines(True), "main.py")
    exit_code = 0
    try:
        exec(compile(code, "main.py", "exec"), module.__dict__)
    except SystemExit as error:
        if isinstance(error.code, int):
            exit_code = error.code & 0xFF
        elif error.code is not None:
            exit_code = 1
            sys.stderr.write(f"{error.code}\n")
    except BaseException as error:
        exit_code = 1
        frames = error.__traceback__.tb_next if error.__traceback__ else None  # drop this function's own frame
        traceback.print_exception(type(error), error, frames)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return exit_code


def child(
    request: dict[str, Any], settings: dict[str, Any], out_fd: int, err_fd: int, in_fd: int, keep_out: tuple[int, ...]
) -> None:
    """Never returns."""
    exit_code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        os.dup2(in_fd, 0)
        os.dup2(out_fd, 1)
        os.dup2(err_fd, 2)
        for fd in keep_out:
            os.close(fd)
        try:
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")  # out of memory takes the program, not the worker
        except OSError:
            pass
        set_limits(settings, request["timeout_s"])
        become_user(settings)
        die_with_parent()
        os.chdir(settings["scratch"])
        os.umask(0o022)
        write_files(request["files"])
        os.environ.clear()
        os.environ.update(settings["environment"])
        if "random" in sys.modules:
            sys.modules["random"].seed()
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # else every fork draws the same "random" numbers
        sys.stdin = open(0, encoding="utf-8", errors="replace")
        sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
        exit_code = run_program(request["code"], settings)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:
        try:
            os.write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "replace"))
        except OSError:
            pass
        exit_code = exit_code or 1
    finally:
        os._exit(exit_code)


def write_files(files: dict[str, str]) -> None:
    """In the child, as the program's user, so that the reset can delete them as that user."""
    for name, data in files.items():
        fd = os.open(os.path.basename(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
        with open(fd, "wb") as file:
            file.write(base64.b64decode(data))


def open_stdin(request: dict[str, Any]) -> int:
    """A descriptor that the program reads its stdin from."""
    if not request["stdin"]:
        return os.open("/dev/null", os.O_RDONLY)
    read_fd, write_fd = os.pipe()
    if os.fork() == 0:
        # A writer of its own: stdin may be larger than a pipe holds. The worker kills it with everything else.
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.close(read_fd)
            data = memoryview(request["stdin"].encode("utf-8"))
            while data:
                data = data[os.write(write_fd, data) :]
        finally:
            os._exit(0)
    os.close(write_fd)
    return read_fd


def execute(
    request: dict[str, Any], settings: dict[str, Any], proto_in: int, proto_out: int, wake_fd: int
) -> dict[str, Any] | None:
    """Run one program to its end or its deadline; None when the other side hung up meanwhile."""
    started = time.monotonic()
    stdin_fd = open_stdin(request)
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        keep_out = (proto_in, proto_out, wake_fd, out_read, err_read, stdin_fd, out_write, err_write)
        child(request, settings, out_write, err_write, stdin_fd, keep_out)
    for fd in (stdin_fd, out_write, err_write):
        os.close(fd)
    captures = [Capture(out_read, settings["output_bytes"]), Capture(err_read, settings["output_bytes"])]
    for capture in captures:
        os.set_blocking(capture.fd, False)
    open_captures = list(captures)
    deadline = started + request["timeout_s"]
    wait_status = None
    timed_out = hung_up = False
    while wait_status is None:
        left = deadline - time.monotonic()
        if left <= 0:
            timed_out = True
            break
        ready, _, _ = select.select([wake_fd, proto_in] + [c.fd for c in open_captures], [], [], left)
        if proto_in in ready:
            hung_up = True  # nothing is sent while a program runs, so this is the end of the stream
            break
        if wake_fd in ready:
            os.read(wake_fd, 4096)
        open_captures = [c for c in open_captures if c.fd not in ready or c.read()]
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            wait_status = status
    for capture in open_captures:
        capture.drain()
    clean = kill_everything()
    for capture in captures:
        os.close(capture.fd)
    if hung_up:
        return None
    wall_s = time.monotonic() - started
    reply = {"clean": clean, "wall_s": wall_s, "stdout": captures[0].report(), "stderr": captures[1].report()}
    if timed_out or wait_status is None:
        reply.update(exit_code=None, signal=None, timed_out=True)
    elif os.WIFSIGNALED(wait_status):
        reply.update(exit_code=None, signal=os.WTERMSIG(wait_status), timed_out=False)
    else:
        reply.update(exit_code=os.WEXITSTATUS(wait_status), signal=None, timed_out=False)
    return reply


def wipe(folder: str) -> None:
    """Empty a folder whatever its depth: subfolders' entries move up until only files are left, so paths stay short."""
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


def reset(settings: dict[str, Any]) -> bool:
    """True when neither process nor file of earlier programs is left."""
    if not kill_everything():
        return False
    pid = os.fork()
    if pid == 0:
        # As the programs' user: their files need no privilege of ours to delete.
        code = 1
        try:
            become_user(settings)
            for folder in settings["wipe"]:
                if os.path.isdir(folder):
                    wipe(folder)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return status == 0 and not any(os.listdir(folder) for folder in settings["wipe"] if os.path.isdir(folder))


def main() -> None:
    proto_in, proto_out = os.dup(0), os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    settings = read_frame(proto_in)
    if settings is None:
        return
    if os.getpid() != 1:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        die_with_parent()
    for name in settings["preload"]:
        try:
            __import__(name)
        except ImportError:
            pass
    wake_fd, wake_write = os.pipe()
    os.set_blocking(wake_fd, False)
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    write_frame(proto_out, {"ready": True, "python": sys.version.split()[0]})
    while True:
        request = read_frame(proto_in)
        if request is None:
            break
        if request["op"] == "exec":
            reply = execute(request, settings, proto_in, proto_out, wake_fd)
            if reply is None:
                break
        elif request["op"] == "reset":
            reply = {"clean": reset(settings)}
        else:
            reply = {"pong": True}
        reply["id"] = request["id"]
        write_frame(proto_out, reply)
    kill_everything()


if __name__ == "__main__":
    main()
