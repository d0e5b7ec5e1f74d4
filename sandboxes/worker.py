"""The resident worker: started once in a sandbox, it forks a fresh process for every program it is sent.

A program sent with a session's name runs in that session's process instead, which keeps its variables between calls.

Standard library only, Python >= 3.8: it runs in whatever image a user brings. It speaks frames (4 bytes big-endian
length, then JSON) over the descriptors that were its stdin and stdout; programs never hold those. In a container it is
PID 1 and root with the capabilities to change uid and to kill, nothing else; programs run under another uid, so they
can neither signal nor trace nor read it. It exits when its stdin closes, so nothing outlives who started it.
"""

from __future__ import annotations

import atexit
import base64
import ctypes
import gc
import json
import linecache
import os
import resource
import select
import signal
import socket
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


def reap(ended: dict[int, int]) -> None:
    """Collect every child that has ended; their wait statuses go to ``ended``."""
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            ended[pid] = status
    except ChildProcessError:
        return


def kill_all_but(keep: set[int], ended: dict[int, int]) -> bool:
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
            with open(path) as file:
                for line in file:
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        except OSError:
            pass
    return None


def set_limits(settings: dict[str, Any], timeout_s: float) -> None:
    megabyte = 1024 * 1024
    limits = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, settings["scratch_mb"] * megabyte),
        (resource.RLIMIT_NOFILE, 256),
    ]
    if timeout_s:
        # Every thread may use a core until the deadline: the limit is for what a deadline cannot see.
        limits.append((resource.RLIMIT_CPU, int(timeout_s * (os.cpu_count() or 1)) + 2))
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


def die_with_parent(number: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def run_source(code: str, filename: str, module: types.ModuleType) -> int:
    """Run ``code`` in ``module``; returns its exit code. Tracebacks show the program's own frames only."""
    linecache.cache[filename] = (len(code), None, code.splitlines(True), filename)
    try:
        # dont_inherit: this file's own __future__ import is no business of the program.
        exec(compile(code, filename, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        frames = error.__traceback__.tb_next if error.__traceback__ else None  # drop this function's own frame
        traceback.print_exception(type(error), error, frames)
        return 1
    return 0


def finish(module: types.ModuleType) -> None:
    """What the end of an interpreter does and ``os._exit`` does not: threads, exit handlers, then the variables, so
    that files left open are written and finalisers run."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if threading.active_count() > 1:
        return  # a daemon thread would trip over variables that are gone
    names = [name for name in module.__dict__ if name != "__builtins__"]
    for name in sorted(names, key=lambda name: not str(name).startswith("_")):
        module.__dict__[name] = None
    gc.collect()


def open_standard_streams() -> None:
    """Line-buffered, so that what was printed before a deadline or a crash is not lost with the process."""
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="replace", closefd=False)  # type: ignore[misc]
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = open(fd, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def flush_standard_streams(streams: tuple[Any, Any]) -> None:
    for stream in (*streams, sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # closed or replaced by the program, or its reader is gone
            pass


def prepare_child(settings: dict[str, Any], fds: tuple[int, int, int], keep_out: list[int], timeout_s: float) -> None:
    """In the child: descriptors, limits, user and random numbers of a program."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
    for fd in keep_out:
        os.close(fd)
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # out of memory takes the program, not the worker
    except OSError:
        pass
    set_limits(settings, timeout_s)
    become_user(settings)
    die_with_parent(signal.SIGKILL)
    os.chdir(settings["scratch"])
    os.umask(0o022)
    os.environ.clear()
    os.environ.update(settings["environment"])
    # Else every fork draws the same "random" numbers.
    if "random" in sys.modules:
        sys.modules["random"].seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "sympy.core.random" in sys.modules:
        sys.modules["sympy.core.random"].rng.seed()
    # A module that one call writes may be rewritten by the next within the clock tick that .pyc files trust.
    sys.dont_write_bytecode = True
    sys.argv = ["main.py"]
    sys.path.insert(0, settings["scratch"])


def main_module() -> types.ModuleType:
    module = types.ModuleType("__main__")
    module.__dict__["__file__"] = "main.py"
    sys.modules["__main__"] = module
    return module


def child(request: dict[str, Any], settings: dict[str, Any], fds: tuple[int, int, int], keep_out: list[int]) -> None:
    """One program in a process of its own. Never returns."""
    exit_code = 1
    try:
        prepare_child(settings, fds, keep_out, request["timeout_s"])
        write_files(request["files"])
        open_standard_streams()
        streams = (sys.stdout, sys.stderr)
        module = main_module()
        exit_code = run_source(request["code"], "main.py", module)
        finish(module)
        flush_standard_streams(streams)
    except BaseException as error:
        tell(error)
        exit_code = exit_code or 1
    finally:
        os._exit(exit_code)


def tell(error: BaseException) -> None:
    try:
        os.write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "replace"))
    except OSError:
        pass


def session_child(control: socket.socket, settings: dict[str, Any], fds: tuple[int, int, int], out: list[int]) -> None:
    """Programs one after the other in one process that keeps its variables; never returns.

    Each is answered by the token that came with it and one byte, its exit code.
    """
    try:
        prepare_child(settings, fds, out, 0)
        open_standard_streams()
        streams = (sys.stdout, sys.stderr)
        module = main_module()
        count = 0
        while True:
            request = read_frame(control.fileno())
            if request is None:
                break
            count += 1
            code = 1
            try:
                stdin = os.memfd_create("stdin")
                os.write(stdin, request["stdin"].encode("utf-8", "replace"))
                os.lseek(stdin, 0, os.SEEK_SET)
                os.dup2(stdin, 0)
                os.close(stdin)
                sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)
                write_files(request["files"])
                code = run_source(request["code"], f"<cell {count}>", module)
            except Exception as error:
                tell(error)
            flush_standard_streams(streams)
            control.sendall(bytes.fromhex(request["token"]) + bytes([code]))
    finally:
        os._exit(1)


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
            data = memoryview(request["stdin"].encode("utf-8", "replace"))
            while data:
                data = data[os.write(write_fd, data) :]
        finally:
            os._exit(0)
    os.close(write_fd)
    return read_fd


class Session:
    """A process that keeps its variables, the pipes of its output and the socket that programs are sent through."""

    def __init__(self, settings: dict[str, Any], protocol_fds: list[int]) -> None:
        self.control, theirs = socket.socketpair()
        self.out, out_write = os.pipe()
        self.err, err_write = os.pipe()
        null = os.open("/dev/null", os.O_RDONLY)
        self.pid = os.fork()
        if self.pid == 0:
            close = [*protocol_fds, null, out_write, err_write, self.out, self.err, self.control.fileno()]
            session_child(theirs, settings, (null, out_write, err_write), close)
        for fd in (null, out_write, err_write):
            os.close(fd)
        theirs.close()
        self.control.setblocking(False)
        for fd in (self.out, self.err):
            os.set_blocking(fd, False)

    def close(self) -> None:
        self.control.close()
        os.close(self.out)
        os.close(self.err)


class Worker:
    """Settings, the protocol's descriptors, the living sessions, and the wait statuses of children that ended."""

    def __init__(self, settings: dict[str, Any], proto_in: int, proto_out: int, wake_fds: tuple[int, int]) -> None:
        self.settings = settings
        self.proto_in = proto_in
        self.wake_fd = wake_fds[0]
        self.protocol_fds = [proto_in, proto_out, *wake_fds]
        self.sessions: dict[str, Session] = {}
        self.ended: dict[int, int] = {}

    def execute(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Run one program to its end or its deadline; None when the other side hung up meanwhile."""
        started = time.monotonic()
        deadline = started + request["timeout_s"]
        before = other_processes() if self.sessions else set()
        kills = oom_kills()
        stdin_fd = open_stdin(request)
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            sessions = [fd for held in self.sessions.values() for fd in (held.out, held.err, held.control.fileno())]
            keep_out = [*self.protocol_fds, *sessions, out_read, err_read, stdin_fd, out_write, err_write]
            child(request, self.settings, (stdin_fd, out_write, err_write), keep_out)
        for fd in (stdin_fd, out_write, err_write):
            os.close(fd)
        captures = [Capture(fd, self.settings["output_bytes"]) for fd in (out_read, err_read)]
        for fd in (out_read, err_read):
            os.set_blocking(fd, False)
        ending = self.watch(pid, captures, deadline)
        # What was there before this call belongs to sessions; all else is this program's.
        clean = kill_all_but(before, self.ended)
        status = self.ended.pop(pid, None)
        for fd in (out_read, err_read):
            os.close(fd)
        self.forget_dead()
        if ending == "hung up":
            return None
        reply = report(captures, started, clean, kills)
        reply.update(outcome(ending, status))
        return reply

    def execute_in_session(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """The same in the named session, which is started when there is none; it dies at a deadline it misses."""
        started = time.monotonic()
        kills = oom_kills()
        name = request["session"]
        reap(self.ended)
        self.forget_dead()
        fresh = name not in self.sessions
        if fresh:
            held = [fd for other in self.sessions.values() for fd in (other.out, other.err, other.control.fileno())]
            self.sessions[name] = Session(self.settings, [*self.protocol_fds, *held])
        session = self.sessions[name]
        before = other_processes()
        captures = [Capture(fd, self.settings["output_bytes"]) for fd in (session.out, session.err)]
        token = os.urandom(8)
        message = {"token": token.hex(), **{key: request[key] for key in ("code", "stdin", "files")}}
        body = json.dumps(message).encode("utf-8")
        frame = struct.pack(">I", len(body)) + body
        driver = (session.control, token, frame)
        ending = self.watch(session.pid, captures, started + request["timeout_s"], driver)
        clean = True
        if not isinstance(ending, int):
            keep = before - descendants(session.pid) - {session.pid}
            keep = keep if len(self.sessions) > 1 else set()
            clean = kill_all_but(keep, self.ended)
        status = self.ended.get(session.pid)
        self.forget_dead()
        if ending == "hung up":
            return None
        reply = report(captures, started, clean, kills)
        reply["fresh"] = fresh
        if isinstance(ending, int):
            reply.update(exit_code=ending, signal=None, timed_out=False)
        else:
            reply.update(outcome(ending, status))
        return reply

    def watch(
        self,
        pid: int,
        captures: list[Capture],
        deadline: float,
        driver: tuple[socket.socket, bytes, bytes] | None = None,
    ) -> int | str:
        """Collect output until the program ends. Returns a session's exit code, or "ended", "timeout" or "hung up".

        A session's answer that is not this call's ends it: the program has found the socket and writes to it.
        """
        control, token, frame = driver if driver else (None, b"", b"")
        unsent = memoryview(frame)
        readable: list[Capture] = list(captures)
        ending: int | str = ""
        while ending == "":
            left = deadline - time.monotonic()
            if left <= 0:
                ending = "timeout"
                break
            sources: list[Any] = [self.wake_fd, self.proto_in, *(capture.fd for capture in readable)]
            if control is not None:
                sources.append(control)
            targets: list[Any] = [control] if unsent else []
            ready, writable, _ = select.select(sources, targets, [], left)
            if self.proto_in in ready:
                ending = "hung up"  # nothing is sent while a program runs, so this is the end of the stream
                break
            if self.wake_fd in ready:
                os.read(self.wake_fd, 4096)
            readable = [capture for capture in readable if capture.fd not in ready or capture.read()]
            if control is not None:
                try:
                    if writable:
                        unsent = unsent[control.send(unsent) :]
                    if control in ready:
                        answer = control.recv(64)
                        ending = answer[-1] if answer[:-1] == token else "ended"
                except OSError:
                    ending = "ended"
            reap(self.ended)
            if pid in self.ended:
                ending = "ended"
        for capture in readable:
            capture.drain()
        return ending

    def forget_dead(self) -> None:
        """Sessions whose process is gone are over; wait statuses that nobody will ask for are dropped."""
        for name, session in list(self.sessions.items()):
            if session.pid in self.ended:
                session.close()
                del self.sessions[name]
        self.ended.clear()

    def reset(self) -> bool:
        """True when neither session, process nor file of earlier programs is left."""
        clean = kill_all_but(set(), self.ended)
        self.forget_dead()
        return clean and not self.sessions and wipe_all(self.settings)


def report(captures: list[Capture], started: float, clean: bool, kills_before: int | None) -> dict[str, Any]:
    kills = oom_kills()
    return {
        "clean": clean,
        "wall_s": time.monotonic() - started,
        "stdout": captures[0].report(),
        "stderr": captures[1].report(),
        "out_of_memory": None if kills is None or kills_before is None else kills > kills_before,
    }


def outcome(ending: int | str, wait_status: int | None) -> dict[str, Any]:
    if ending == "timeout" or wait_status is None:
        return {"exit_code": None, "signal": None, "timed_out": True}
    if os.WIFSIGNALED(wait_status):
        return {"exit_code": None, "signal": os.WTERMSIG(wait_status), "timed_out": False}
    return {"exit_code": os.WEXITSTATUS(wait_status), "signal": None, "timed_out": False}


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


def wipe_all(settings: dict[str, Any]) -> bool:
    """True when the folders that programs write to are empty."""
    if all(is_empty(folder) for folder in settings["wipe"]):
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
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return status == 0 and all(is_empty(folder) for folder in settings["wipe"])


def serve(worker: Worker, proto_in: int, proto_out: int) -> None:
    while True:
        request = read_frame(proto_in)
        if request is None:
            return
        reply: dict[str, Any] | None
        if request["op"] == "exec":
            reply = worker.execute_in_session(request) if request["session"] else worker.execute(request)
            if reply is None:
                return
        else:
            reply = {"clean": worker.reset()}
        reply["id"] = request["id"]
        write_frame(proto_out, reply)


def leave(number: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: a second one must not break the clearing up
    sys.exit(0)


def main() -> None:
    proto_in, proto_out = os.dup(0), os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    settings = read_frame(proto_in)
    if settings is None:
        return
    signal.signal(signal.SIGTERM, leave)
    if os.getpid() != 1:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # Not SIGKILL: what runs below must be killed first. Another process may hold our stdin open, so its end may
        # not tell us.
        die_with_parent(signal.SIGTERM)
    for name in settings["preload"]:
        try:
            __import__(name)
        except ImportError:
            pass
    gc.collect()
    gc.freeze()  # collections in programs leave the shared pages of preloaded modules alone
    wake_fd, wake_write = os.pipe()
    os.set_blocking(wake_fd, False)
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    write_frame(proto_out, {"ready": True, "python": sys.version.split()[0]})
    worker = Worker(settings, proto_in, proto_out, (wake_fd, wake_write))
    try:
        serve(worker, proto_in, proto_out)
    except BrokenPipeError:
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        kill_all_but(set(), worker.ended)
        if settings["remove_scratch"] and wipe_all(settings):
            os.rmdir(settings["scratch"])


if __name__ == "__main__":
    main()
