"""The resident worker: started once in a sandbox, it hands every program to a process forked for it.

A program sent with a session's name runs in that session's process instead, which keeps its variables between calls.
The process of the next call is forked ahead of it, while nobody waits.

Standard library only, Python >= 3.8. It speaks frames (4 bytes big-endian length, then JSON) over the descriptors that
were its stdin and stdout; programs never hold those. In a container it is PID 1 and root with the capabilities to
change uid and to kill, nothing else; programs run under another uid, so they can neither signal nor trace nor read it.
It exits when its stdin closes, so nothing outlives who started it.
"""

from __future__ import annotations

import base64
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from .program import prepare, read_file, read_frame, run_once, run_session, tell
from .system import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    become_user,
    collapse_pages,
    descendants,
    kill_all_but,
    libc,
    oom_kills,
    other_processes,
    reap,
    wipe_all,
)

T = TypeVar("T")

DRAIN_BYTES = 1 << 20  # read after the program's end: what was already in the pipe, not what a survivor still writes


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

    def read(self) -> bytes | None:
        """What came; None at the end of the stream."""
        try:
            data = os.read(self.fd, 65536)
        except BlockingIOError:
            return b""
        self.feed(data)
        return data or None

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


class Process:
    """A forked process that waits for what to run: the pipes of its output, and the socket it is told through."""

    def __init__(self, settings: dict[str, Any], *, is_session: bool) -> None:
        self.is_session = is_session
        self.control, theirs = socket.socketpair()
        self.out, out_write = os.pipe()
        self.err, err_write = os.pipe()
        try:
            self.pid = os.fork()
        except OSError:
            self.close()
            for fd in (out_write, err_write):
                os.close(fd)
            raise
        if self.pid == 0:
            (run_session if is_session else run_once)(settings, theirs, out_write, err_write)
        os.close(out_write)
        os.close(err_write)
        theirs.close()
        self.control.setblocking(False)
        for fd in (self.out, self.err):
            os.set_blocking(fd, False)

    def close(self) -> None:
        self.control.close()
        os.close(self.out)
        os.close(self.err)


class Worker:
    """Settings, the protocol's descriptors, the living sessions, and what is known of processes that ended."""

    def __init__(self, settings: dict[str, Any], proto_in: int, proto_out: int, wake_fd: int) -> None:
        self.settings = settings
        self.proto_in = proto_in
        self.proto_out = proto_out
        self.wake_fd = wake_fd
        self.sessions: dict[str, Process] = {}
        self.next: Process | None = None  # for the next program, forked ahead
        self.ended: dict[int, tuple[int, float]] = {}

    def fork_ahead(self) -> None:
        if self.next is None:
            self.next = self.with_room(lambda: Process(self.settings, is_session=False))

    def with_room(self, work: Callable[[], T]) -> T:
        """What ``work``, which forks, returns. Where sessions have taken every place for a process, they end first."""
        try:
            return work()
        except BlockingIOError:
            kill_all_but(set(), self.ended)
            self.forget_dead()
            return work()

    def execute(self, request: dict[str, Any], body: bytes) -> dict[str, Any] | None:
        """Run one program to its end or its deadline; None when the other side hung up meanwhile."""
        started = time.monotonic()
        kills = oom_kills()
        reap(self.ended)
        self.forget_dead()
        process, fresh = self.process_for(request["session"])
        before = other_processes() if self.sessions else set()
        captures = [Capture(fd, request["output_bytes"]) for fd in (process.out, process.err)]
        token = os.urandom(8) if process.is_session else b""
        frame = token + struct.pack(">I", len(body)) + body
        ending = self.watch(process, captures, started + request["timeout_s"], frame, token, request)
        clean = True
        if not process.is_session:
            # What was there before this call belongs to sessions; all else is this program's.
            clean = kill_all_but(before - {process.pid}, self.ended)
        elif not isinstance(ending, int):
            keep = before - descendants(process.pid) - {process.pid} if len(self.sessions) > 1 else set()
            clean = kill_all_but(keep, self.ended)
        # What a session left running may fork faster than it can be killed one by one: then sessions end, too.
        clean = clean or kill_all_but(set(), self.ended)
        wait_status, cpu_s = self.ended.get(process.pid, (None, None))
        self.forget_dead()
        if not process.is_session:
            process.close()
        if ending == "hung up":
            return None
        kills_now = oom_kills()
        reply = {
            "clean": clean,
            "wall_s": time.monotonic() - started,
            "cpu_s": cpu_s,
            "stdout": captures[0].report(),
            "stderr": captures[1].report(),
            "out_of_memory": None if kills is None or kills_now is None else kills_now > kills,
            "fresh": fresh,
            "files": self.with_room(lambda: fetch(request["fetch"], self.settings)) if request["fetch"] else {},
        }
        reply.update(outcome(ending, wait_status, cpu_s, request["cpu_s"]))
        return reply

    def process_for(self, session: str | None) -> tuple[Process, bool]:
        """The process to run in, and whether it is a session's that begins."""
        if session is None:
            self.fork_ahead()
            process, self.next = self.next, None
            assert process is not None
            return process, False
        fresh = session not in self.sessions
        if fresh:
            self.sessions[session] = self.with_room(lambda: Process(self.settings, is_session=True))
        return self.sessions[session], fresh

    def watch(
        self,
        process: Process,
        captures: list[Capture],
        deadline: float,
        frame: bytes,
        token: bytes,
        request: dict[str, Any],
    ) -> int | str:
        """Collect output until the program ends. Returns a session's exit code, or "ended", "timeout" or "hung up".

        A session's answer that is not this call's ends it: the program has found the socket and writes to it.
        """
        control = process.control
        unsent = memoryview(frame)
        readable: list[Capture] = list(captures)
        ending: int | str = ""
        while ending == "":
            left = deadline - time.monotonic()
            if left <= 0:
                ending = "timeout"
                break
            sources: list[Any] = [self.wake_fd, self.proto_in, *(capture.fd for capture in readable)]
            if process.is_session:
                sources.append(control)
            ready, writable, _ = select.select(sources, [control] if unsent else [], [], left)
            if self.proto_in in ready:
                ending = "hung up"  # nothing is sent while a program runs, so this is the end of the stream
                break
            if self.wake_fd in ready:
                os.read(self.wake_fd, 4096)
            for capture in [capture for capture in readable if capture.fd in ready]:
                seen = capture.total
                data = capture.read()
                if data is None:
                    readable.remove(capture)
                elif data and request["stream"] and seen < request["output_bytes"]:
                    self.pass_on(request, captures.index(capture), data[: request["output_bytes"] - seen])
            try:
                if writable:
                    unsent = unsent[control.send(unsent) :]
                if control in ready:
                    answer = control.recv(64)
                    ending = answer[-1] if answer[:-1] == token else "ended"
            except OSError:
                if process.is_session:
                    ending = "ended"
                unsent = memoryview(b"")  # it is dead or dying, which its wait status tells
            reap(self.ended)
            if process.pid in self.ended:
                ending = "ended"
        for capture in readable:
            capture.drain()
        return ending

    def pass_on(self, request: dict[str, Any], index: int, data: bytes) -> None:
        text = base64.b64encode(data).decode("ascii")
        write_frame(self.proto_out, {"id": request["id"], "stream": ("stdout", "stderr")[index], "data": text})

    def forget_dead(self) -> None:
        """Sessions whose process is gone are over; what is known of others that ended is dropped."""
        for name, session in list(self.sessions.items()):
            if session.pid in self.ended:
                session.close()
                del self.sessions[name]
        if self.next is not None and self.next.pid in self.ended:
            self.next.close()
            self.next = None
        self.ended.clear()

    def reset(self) -> bool:
        """True when neither session, process nor file of earlier programs is left."""
        # The process forked ahead has run nothing yet, and nobody of the programs' user can touch it.
        keep = {self.next.pid} if self.next is not None and not self.sessions else set()
        clean = kill_all_but(keep, self.ended)
        self.forget_dead()
        return clean and not self.sessions and wipe_all(self.settings)

    def serve(self) -> None:
        while True:
            self.fork_ahead()
            body = read_frame(self.proto_in)
            if body is None:
                return
            request = json.loads(body)
            reply: dict[str, Any] | None
            if request["op"] == "exec":
                reply = self.execute(request, body)
                if reply is None:
                    return
            else:
                reply = {"clean": self.reset()}
            reply["id"] = request["id"]
            write_frame(self.proto_out, reply)


def outcome(
    ending: int | str, wait_status: int | None, cpu_s: float | None, cpu_limit_s: float | None
) -> dict[str, Any]:
    if isinstance(ending, int):
        return {"exit_code": ending, "signal": None, "timed_out": False}
    if ending == "timeout" or wait_status is None:
        return {"exit_code": None, "signal": None, "timed_out": True}
    if os.WIFSIGNALED(wait_status):
        number = os.WTERMSIG(wait_status)
        is_spent = number == signal.SIGXCPU or (
            number == signal.SIGKILL and (cpu_s or 0.0) > 0.8 * (cpu_limit_s or 0.0)
        )
        if cpu_limit_s and is_spent:
            return {"exit_code": None, "signal": None, "timed_out": True}
        return {"exit_code": None, "signal": number, "timed_out": False}
    return {"exit_code": os.WEXITSTATUS(wait_status), "signal": None, "timed_out": False}


def fetch(names: list[str], settings: dict[str, Any]) -> dict[str, str]:
    """Regular files below the working folder, read as the programs' user; links lead nowhere, the rest is left out."""
    read_fd, write_fd = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(read_fd)
        os.close(write_fd)
        raise
    if pid == 0:
        try:
            os.close(read_fd)
            become_user(settings)
            write_frame(write_fd, {name: content for name in names for content in read_file(settings["scratch"], name)})
        except BaseException as error:
            tell(error)
        finally:
            os._exit(0)
    os.close(write_fd)
    body = read_frame(read_fd)
    os.close(read_fd)
    os.waitpid(pid, 0)
    found: dict[str, str] = {} if body is None else json.loads(body)
    return found


def leave(number: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: a second one must not break the clearing up
    sys.exit(0)


def warm_up(snippets: list[str]) -> None:
    """What a program does first is slow once (types of the compiler, modules, caches): done here, every fork has it."""
    for code in ["1", "try: 1 / 0\nexcept ZeroDivisionError:\n import traceback; traceback.format_exc()", *snippets]:
        try:
            exec(compile(code, "<warm-up>", "exec"), {"__name__": "warm-up"})
        except Exception:  # a module that this image lacks
            pass
    gc.collect()
    collapse_pages()
    gc.freeze()  # collections in programs leave the shared pages of preloaded modules alone


def main() -> None:
    proto_in, proto_out = os.dup(0), os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    first = read_frame(proto_in)
    if first is None:
        return
    settings = json.loads(first)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # where programs share our uid they cannot trace or read us even so
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.getpid() != 1:  # PID 1 is deaf to signals without a handler, also to those of its own uid
        signal.signal(signal.SIGTERM, leave)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # Not SIGKILL: what runs below must be killed first. Another process may hold our stdin open, so its end may
        # not tell us.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    prepare(settings)
    warm_up(settings["warm_up"])
    wake_fd, wake_write = os.pipe()
    os.set_blocking(wake_fd, False)
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    write_frame(proto_out, {"ready": True, "python": sys.version.split()[0]})
    worker = Worker(settings, proto_in, proto_out, wake_fd)
    try:
        worker.serve()
    except BrokenPipeError:
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        kill_all_but(set(), worker.ended)
        if settings["remove_scratch"] and wipe_all(settings):
            os.rmdir(settings["scratch"])
