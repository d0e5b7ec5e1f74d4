"""The inside of a forked process: it becomes an ordinary program of the sandbox's user and never returns.

Standard library only, Python >= 3.8.
"""

from __future__ import annotations

import _signal  # signal's own functions look up enumerations, which writes to 40 pages that a fork shares
import atexit
import base64
import errno
import gc
import json
import linecache
import os
import signal
import socket
import stat
import struct
import sys
import threading
import traceback
import types
from typing import Any

from .system import PR_SET_DUMPABLE, PR_SET_PDEATHSIG, become_user, libc, set_limits

CONTROL_FD = 3
"""Where a program's process is told what to run; closed before a program of one call begins."""

OWN_MODULES = tuple(f"agent_rl_worker{name}" for name in ("", ".system", ".program", ".main"))

FETCH_BYTES = 64 << 20  # of one file that a call takes out

SUFFIXES = {"bash": ".sh", "sh": ".sh", "node": ".js", "perl": ".pl", "ruby": ".rb"}


def read_exactly(fd: int, count: int) -> bytes | None:
    parts = []
    while count:
        part = os.read(fd, min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def read_frame(fd: int) -> bytes | None:
    """The body of the next frame; None at the end of the stream."""
    header = read_exactly(fd, 4)
    return None if header is None else read_exactly(fd, struct.unpack(">I", header)[0])


def prepare(settings: dict[str, Any]) -> None:
    """Make ready in the worker, once, what is the same for all programs: a fork shares it, and each page that a fork
    writes to costs it some microseconds."""
    os.environ.clear()
    os.environ.update(settings["environment"])
    os.umask(0o022)
    # A module that one call writes may be rewritten by the next within the clock tick that .pyc files trust.
    sys.dont_write_bytecode = True
    sys.argv = ["main.py"]
    module = types.ModuleType("__main__")
    module.__dict__["__file__"] = "main.py"
    sys.modules["__main__"] = module
    held = [os.dup(fd) for fd in range(3)]
    pipe = os.pipe()  # streams remember whether what they were opened on can seek: for programs it cannot
    for fd, end in enumerate((pipe[0], pipe[1], pipe[1])):
        os.dup2(end, fd)
    open_stdin()
    # Line-buffered, so that what was printed before a deadline or a crash is not lost with the process.
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = open(fd, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    for fd, kept in enumerate(held):
        os.dup2(kept, fd)
    for fd in (*held, *pipe):
        os.close(fd)


def open_stdin() -> None:
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="replace", closefd=False)  # type: ignore[misc]


def become_program(settings: dict[str, Any], control: socket.socket, out: int, err: int) -> None:
    """The part of becoming a program that does not depend on which: descriptors, signals, random numbers."""
    _signal.set_wakeup_fd(-1)
    for number in (_signal.SIGCHLD, _signal.SIGTERM):
        _signal.signal(number, _signal.SIG_DFL)
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    os.setsid()
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.dup2(control.fileno(), CONTROL_FD, inheritable=False)
    if control.fileno() == CONTROL_FD:
        control.detach()  # its finaliser would close what is in use
    os.closerange(CONTROL_FD + 1, 4096)
    if os.getppid() != 1:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # below PID 1 the kernel sees to that
    os.chdir(settings["scratch"])
    sys.path.insert(0, settings["scratch"])
    # Else every fork draws the same "random" numbers.
    if "random" in sys.modules:
        sys.modules["random"].seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(int.from_bytes(os.urandom(4), "big"))  # a seed of its own choice costs 0.5 ms
    if "sympy.core.random" in sys.modules:
        sys.modules["sympy.core.random"].rng.seed()
    for name in OWN_MODULES:
        sys.modules.pop(name, None)


def drop_rights(settings: dict[str, Any], request: dict[str, Any]) -> None:
    """Limits and user. Last, so that until there is a program nobody of its user can touch this process."""
    if settings["uid"] is None:
        libc.prctl(
            PR_SET_DUMPABLE, 1, 0, 0, 0
        )  # programs are ordinary processes; the worker, whose uid they share, is not
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(fd, b"1000")  # out of memory takes the program, not the worker
        os.close(fd)
    except OSError:
        pass
    set_limits(settings, request)
    become_user(settings)
    if os.getppid() != 1:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a change of user has cleared it


def take_input(request: dict[str, Any]) -> None:
    """Standard input, files and environment of one call, as the program's user."""
    if request["stdin"]:
        stdin = os.memfd_create("stdin")
        data = memoryview(request["stdin"].encode("utf-8", "replace"))
        while data:
            data = data[os.write(stdin, data) :]
        os.lseek(stdin, 0, os.SEEK_SET)
    else:
        stdin = os.open("/dev/null", os.O_RDONLY)
    os.dup2(stdin, 0)
    os.close(stdin)
    os.environ.update(request["environment"])
    for name, content in request["files"].items():
        write_file(name, base64.b64decode(content))


def open_folder(name: str, at: int) -> int:
    """A folder in an open one; a link is none, also where the kernel would follow it all the same (gVisor)."""
    if stat.S_ISLNK(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "a link is no folder", name)
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)


def write_file(name: str, content: bytes) -> None:
    """Below the working folder, following no link: what a program put in the way must not lead outside."""
    *folders, last = name.split("/")
    at = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        for folder in folders:
            try:
                os.mkdir(folder, dir_fd=at)
            except FileExistsError:
                pass
            inner = open_folder(folder, at)
            os.close(at)
            at = inner
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(last, flags, 0o644, dir_fd=at), "wb") as file:
            file.write(content)
    finally:
        os.close(at)


def read_file(scratch: str, name: str) -> list[str]:
    """The content in base64, or nothing."""
    at = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY)
    try:
        *folders, last = name.split("/")
        for folder in folders:
            inner = open_folder(folder, at)
            os.close(at)
            at = inner
        fd = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
    except OSError:
        return []
    finally:
        os.close(at)
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode) or about.st_size > FETCH_BYTES:
        os.close(fd)
        return []
    with open(fd, "rb") as file:
        return [base64.b64encode(file.read(FETCH_BYTES)).decode("ascii")]


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


def run_other(request: dict[str, Any]) -> int:
    """Become the interpreter that the request names; returns only when there is none."""
    name = request["language"]
    path = "main" + SUFFIXES.get(name, "")
    write_file(path, request["code"].encode("utf-8", "surrogateescape"))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and what it executes would inherit that
    try:
        os.execvp(name, [name, path])
    except OSError as error:
        print(f"{name}: {error.strerror}", file=sys.stderr)
    return 127


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


def flush(streams: tuple[Any, ...]) -> None:
    for stream in (*streams, sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # closed or replaced by the program, or its reader is gone
            pass


def tell(error: BaseException) -> None:
    try:
        os.write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "replace"))
    except OSError:
        pass


def run_once(settings: dict[str, Any], control: socket.socket, out: int, err: int) -> None:
    """One program in a process of its own, prepared before the request for it comes. Never returns."""
    exit_code = 1
    try:
        become_program(settings, control, out, err)
        streams = (sys.stdout, sys.stderr)
        module = sys.modules["__main__"]
        body = read_frame(CONTROL_FD)
        if body is None:
            return
        os.close(CONTROL_FD)
        request = json.loads(body)
        del body
        drop_rights(settings, request)
        take_input(request)
        if request["language"] != "python":
            exit_code = run_other(request)
        else:
            exit_code = run_source(request["code"], "main.py", module)
            finish(module)
        flush(streams)
    except BaseException as error:
        tell(error)
        exit_code = exit_code or 1
    finally:
        os._exit(exit_code)


def run_session(settings: dict[str, Any], control: socket.socket, out: int, err: int) -> None:
    """Programs one after the other in one process that keeps its variables; never returns.

    Each comes as a token of 8 bytes and a frame; it is answered by the token and one byte, its exit code.
    """
    try:
        become_program(settings, control, out, err)
        drop_rights(settings, {})
        streams = (sys.stdout, sys.stderr)
        module = sys.modules["__main__"]
        count = 0
        while True:
            token = read_exactly(CONTROL_FD, 8)
            body = None if token is None else read_frame(CONTROL_FD)
            if token is None or body is None:
                break
            request = json.loads(body)
            count += 1
            code = 1
            try:
                take_input(request)
                open_stdin()
                code = run_source(request["code"], f"<cell {count}>", module)
            except Exception as error:
                tell(error)
            flush(streams)
            answer = token + bytes([code])
            while answer:
                answer = answer[os.write(CONTROL_FD, answer) :]
    finally:
        os._exit(1)
