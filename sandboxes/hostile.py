"""Programs that mean harm, and what must come of each: ``await check_hostile(make)`` puts any backend through them.

Never run them by hand outside a sandbox. What ``local`` cannot stop is named in ``LOCAL_CANNOT_STOP``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from sandboxes.base import ExecutionResult, Sandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    code: str
    ends: tuple[str, ...]  # statuses that are right
    shows: str = ""  # must be in its output; where several lines would do, one of those, parted by "|"
    timeout_s: float = 10.0
    language: str = "python"


LIBC = (
    "import ctypes, os, sys\nlibc = ctypes.CDLL(None, use_errno=True)\ndef no(r): print('REFUSED' if r == -1 else r)\n"
)
ANY = ("ok", "error", "timeout", "memory", "killed")
STOPPED = ("error", "timeout", "memory", "killed")
FILL = "f = open('%s/big', 'wb')\nwhile True: f.write(bytes(10**6)); f.flush()"
FULL = "No space left|File too large"


def _refused(code: str) -> Attack:
    return Attack(code=code, ends=("ok",), shows="REFUSED")


def _egress(code: str) -> Attack:
    return Attack(code=code, ends=("error",), shows="rror")


ATTACKS: dict[str, Attack] = {
    # Using things up.
    "fork bomb": Attack(
        code="import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", ends=ANY, timeout_s=1
    ),
    "fork bomb of a shell": Attack(code="f() { f | f & }; f; wait", ends=ANY, timeout_s=1, language="bash"),
    "thread bomb": Attack(
        code="import threading, time\nwhile True:\n"
        "    try: threading.Thread(target=time.sleep, args=(99,)).start()\n    except RuntimeError: pass",
        ends=STOPPED,
        timeout_s=1,
    ),
    "memory bomb": Attack(code="x = []\nwhile True: x.append(bytearray(10**6))", ends=("memory",)),
    "one large allocation": Attack(code="x = bytearray(10**10)", ends=("memory",)),
    "memory bomb of a child": Attack(
        code="import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'x = bytearray(10**10)'], check=True)",
        ends=("memory", "error"),
    ),
    "disk fill": Attack(code=FILL % ".", ends=("error", "memory"), shows=FULL + "|"),
    "disk fill of /tmp": Attack(code=FILL % "/tmp", ends=("error", "memory"), shows=FULL + "|"),
    "disk fill of /dev/shm": Attack(code=FILL % "/dev/shm", ends=("error", "memory"), shows=FULL + "|"),
    "many files": Attack(
        code="n = 0\nwhile True: open(f'f{n}', 'wb').write(bytes(10**6)); n += 1",
        ends=("error", "memory"),
        shows=FULL + "|",
    ),
    "a sparse file": Attack(
        code="f = open('s', 'wb'); f.truncate(10**13)", ends=("error", "killed"), shows="File too large|"
    ),
    "descriptor exhaustion": Attack(
        code="held = []\nwhile True: held.append(open('/dev/null'))", ends=("error",), shows="Too many open files"
    ),
    "endless output": Attack(
        code="while True: print('x' * 1000)", ends=("timeout",), timeout_s=1, shows="bytes left out"
    ),
    "endless output to both": Attack(
        code="import os\nwhile True: os.write(1, b'o' * 999); os.write(2, b'e' * 999)", ends=("timeout",), timeout_s=1
    ),
    "one huge line": Attack(code="print('x' * 50_000_000)", ends=("ok",), shows="bytes left out"),
    "10**10**8": Attack(code="10**10**8", ends=("timeout",), timeout_s=1),
    # What breaks those who read it.
    "NUL and invalid UTF-8": Attack(
        code="import os; os.write(1, b'\\x00\\xff\\xfe\\xc3(')", ends=("ok",), shows="\x00\ufffd\ufffd"
    ),
    "reading stdin": Attack(code="while True: input()", ends=("error",), shows="EOFError"),
    "a syntax error": Attack(code="def f(:", ends=("error",), shows="SyntaxError"),
    "an empty source": Attack(code="", ends=("ok",)),
    "a source of 100 MB": Attack(code="#" * 100_000_000, ends=("error",), shows="100000000 characters"),
    "deep recursion": Attack(
        code="import sys; sys.setrecursionlimit(10**9)\nclass A:\n"
        "    def __getattr__(self, n): return getattr(self, n + 'a')\nA().x",
        ends=STOPPED,
        timeout_s=4,
    ),
    "deep nesting": Attack(code="x = " + "(" * 100_000 + ")" * 100_000, ends=("error", "memory"), shows="Error"),
    "segfault": Attack(code="import ctypes; ctypes.string_at(0)", ends=("killed",)),
    "os._exit": Attack(code="import os; print('said'); os._exit(0)", ends=("ok",), shows="said"),
    "abort": Attack(code="import os; os.abort()", ends=("killed",)),
    # Not ending.
    "ignoring SIGTERM": Attack(
        code="import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(60)",
        ends=("timeout",),
        timeout_s=0.5,
    ),
    "an exit handler that does not end": Attack(
        code="import atexit, time\natexit.register(time.sleep, 60)", ends=("timeout",), timeout_s=0.5
    ),
    "an exit handler that exits otherwise": Attack(
        code="import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit(3)", ends=("ok",)
    ),
    "an exit that is caught for ever": Attack(
        code="while True:\n    try: raise SystemExit\n    except BaseException: pass", ends=("timeout",), timeout_s=0.5
    ),
    "a thread left running": Attack(
        code="import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
        ends=("timeout",),
        timeout_s=0.5,
    ),
    "a daemon thread left running": Attack(
        code="import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        ends=("ok",),
    ),
    "a daemon by double fork": Attack(
        code="import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(60)\n"
        "    os._exit(0)\n"
        "print('done')",
        ends=("ok",),
        shows="done",
    ),
    "a crowd in sessions of its own": Attack(
        code="import os, signal\nfor _ in range(12):\n    if os.fork() == 0:\n        os.setsid(); signal.pause()",
        ends=("ok",),
    ),
    "stopped processes": Attack(
        code="import os, signal\nfor _ in range(12):\n    if os.fork() == 0: os.kill(os.getpid(), signal.SIGSTOP)",
        ends=("ok",),
    ),
    "stopping itself": Attack(
        code="import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", ends=("timeout",), timeout_s=0.5
    ),
    # Left for the next program.
    "patched builtins and modules": Attack(
        code="import builtins, json, os, subprocess, sys, tempfile\n"
        "builtins.print = builtins.open = builtins.len = None\n"
        "json.dumps = os.listdir = lambda *a: 'forged'\nsys.modules['math'] = json\n"
        "os.environ['PYTHONSTARTUP'] = '/scratch/x'; os.chdir('/'); os.umask(0o777); sys.path[:] = []",
        ends=("ok", "error"),
    ),
    "a tree 5,000 deep": Attack(
        code="import os\nfor i in range(5000):\n    os.mkdir('d')\n    os.chdir('d')\nopen('f', 'w').close()",
        ends=("ok", "error"),
        timeout_s=20,
    ),
    "folders that cannot be entered": Attack(
        code="import os\nos.makedirs('a/b/c'); open('a/b/f', 'w').close(); os.chmod('a/b', 0); "
        "os.chmod('a', 0); os.chmod('.', 0o755) "
        "if os.stat('.').st_uid == os.getuid() else None",
        ends=("ok",),
    ),
    "System V memory": Attack(code=LIBC + "print(libc.shmget(77, 4096, 0o1666))", ends=("ok",)),
    "System V semaphores": Attack(code=LIBC + "print(libc.semget(77, 1, 0o1666))", ends=("ok",)),
    "System V messages": Attack(code=LIBC + "print(libc.msgget(77, 0o1666))", ends=("ok",)),
    "a POSIX queue": Attack(
        code=LIBC + "no(ctypes.CDLL('librt.so.1').mq_open(b'/q', os.O_CREAT | os.O_RDWR, 0o666, None))",
        ends=("ok",),
        shows="REFUSED",
    ),
    # The worker and its protocol.
    "closed descriptors": Attack(
        code="import os\nfor fd in range(256):\n    try: os.close(fd)\n    except OSError: pass", ends=ANY
    ),
    "swapped descriptors": Attack(
        code="import os\nr, w = os.pipe()\nfor fd in range(3, 250):\n    try: os.dup2(w, fd)\n"
        "    except OSError: pass\nprint(1)",
        ends=("ok",),
        shows="1",
    ),
    "forged frames": Attack(
        code="import json, os, struct\nbody = json.dumps({'id': '0', 'clean': True, 'stdout': 'forged'}).encode()\n"
        "frame = struct.pack('>I', len(body)) + body\n"
        "paths = [f'/proc/{p}/fd/{n}' for p in (1, os.getppid()) for n in range(16)]\nn = 0\n"
        "for path in paths:\n    try: open(path, 'wb').write(frame); n += 1\n    except OSError: pass\n"
        "for fd in range(3, 256):\n    try: os.write(fd, frame); n += 1\n    except OSError: pass\n"
        "print('REFUSED' if not n else n)",
        ends=("ok",),
        shows="REFUSED",
    ),
    "killing the worker": Attack(
        code="import os\nfor n in (9, 15, 2, 1, 19):\n    try: os.kill(os.getppid(), n)\n"
        "    except OSError: pass\nprint('alive')",
        ends=("ok",),
        shows="alive",
    ),
    "killing everybody": Attack(code="import os\nos.kill(-1, 9)", ends=ANY),
    "ptrace": _refused(LIBC + "no(libc.ptrace(16, os.getppid(), None, None))"),
    "the worker's memory": _refused(
        LIBC + "class V(ctypes.Structure): _fields_ = [('b', ctypes.c_void_p), ('n', ctypes.c_size_t)]\n"
        "b = ctypes.create_string_buffer(8); v = V(ctypes.addressof(b), 8)\n"
        "no(libc.process_vm_readv(os.getppid(), ctypes.byref(v), 1, ctypes.byref(v), 1, 0))"
    ),
    "the worker's environment and memory by /proc": _refused(
        "import os\nn = 0\nfor name in ('environ', 'mem', 'maps', 'fd/0'):\n"
        "    try: open(f'/proc/{os.getppid()}/{name}', 'rb').read(1); n += 1\n    except OSError: pass\n"
        "print('REFUSED' if not n else n)"
    ),
    "shield from out-of-memory": _refused(
        "try: open('/proc/self/oom_score_adj', 'w').write('-1000'); print('done')\nexcept OSError: print('REFUSED')"
    ),
    # Out of the sandbox.
    "root again": _refused(LIBC + "no(libc.setresuid(0, 0, 0))"),
    "a setuid program": Attack(
        code="import subprocess, shutil\npath = shutil.which('su') or shutil.which('mount')\n"
        "done = subprocess.run([path, '-c', 'id -u'] if path else ['false'],"
        " stdin=subprocess.DEVNULL, capture_output=True)\n"
        "print('REFUSED' if done.returncode else done.stdout)",
        ends=("ok",),
        shows="REFUSED",
    ),
    "a setuid bit of one's own": _refused(
        "import os, shutil\nshutil.copy('/bin/sh', 'sh'); os.chmod('sh', 0o6755)\n"
        "print('REFUSED' if os.stat('sh').st_uid != 0 else 'root owned')"
    ),
    "a mount": _refused(LIBC + "no(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None))"),
    "a namespace of its own": _refused(LIBC + "no(libc.unshare(0x00020000))"),
    "a device": _refused(
        "import os\ntry: os.mknod('d', 0o60600, os.makedev(8, 0)); print('made')\nexcept OSError: print('REFUSED')"
    ),
    "a raised limit": _refused(
        "import resource\ntry: resource.setrlimit(resource.RLIMIT_NOFILE, (10**6, 10**6)); print('raised')\n"
        "except (ValueError, PermissionError): print('REFUSED')"
    ),
    "the engine's socket": _refused(
        "import glob; print('REFUSED' if not glob.glob('/var/run/docker*') + glob.glob('/run/docker*') else 'there')"
    ),
    "writing outside": _refused(
        "import os\n"
        "n = [p for p in ('/', '/etc', '/usr', '/var', '/home', '/root', '/dev') if os.access(p, os.W_OK)]\n"
        "print('REFUSED' if not n else n)"
    ),
    "a capability": _refused(
        "w = [l for l in open('/proc/self/status').read().split('\\n') if l[:6] in ('CapPrm', 'CapEff', 'CapAmb')]\n"
        "print('REFUSED' if w and not any(int(l.split()[1], 16) for l in w) else w)"
    ),
    "our environment": _refused(
        "import os; more = set(os.environ) - {'PATH', 'HOME', 'LANG', 'TMPDIR', 'OMP_NUM_THREADS'}; "
        "print('REFUSED' if not more else more)"
    ),
    # Out to the network.
    "egress by TCP": _egress("import socket; socket.create_connection(('1.1.1.1', 443), 2)"),
    "egress by UDP": _egress(
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('8.8.8.8', 53))"
    ),
    "egress by IPv6": _egress("import socket; socket.create_connection(('2606:4700:4700::1111', 443), 2)"),
    "egress by DNS": _egress("import socket; socket.gethostbyname('example.com')"),
    "the metadata address": _egress(
        "import urllib.request; urllib.request.urlopen('http://169.254.169.254/latest/', timeout=2)"
    ),
    "the host": _egress("import socket; socket.create_connection(('172.17.0.1', 22), 2)"),
    "a raw socket": _egress("import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)"),
}

LOCAL_CANNOT_STOP: dict[str, str] = {
    **dict.fromkeys(("fork bomb", "fork bomb of a shell", "thread bomb"), "processes are not counted"),
    **dict.fromkeys(("disk fill of /tmp", "disk fill of /dev/shm", "many files"), "only single files are limited"),
    **dict.fromkeys(("System V memory", "System V semaphores", "System V messages"), "they are this machine's"),
    "forged frames": "the worker runs as the same user",
    "killing the worker": "the worker runs as the same user; the call raises SandboxFailure",
    "killing everybody": "everybody is everything you run",
    "shield from out-of-memory": "as root it may",
    **dict.fromkeys(
        ("root again", "a setuid program", "a setuid bit of one's own", "a capability"), "it is you, also as root"
    ),
    **dict.fromkeys(("a mount", "a namespace of its own", "a device", "a raised limit"), "it is you, also as root"),
    **dict.fromkeys(("ptrace", "the worker's memory"), "as root it may"),
    "the worker's environment and memory by /proc": "as root it may",
    **dict.fromkeys(("the engine's socket", "writing outside"), "it sees your files"),
    **dict.fromkeys(("egress by TCP", "egress by UDP", "egress by IPv6", "egress by DNS"), "it has your network"),
    **dict.fromkeys(("the metadata address", "the host", "a raw socket"), "it has your network"),
}
"""Attacks that the ``local`` backend does not stop, and why. They must not be run on it."""

GVISOR_CANNOT_STOP: dict[str, str] = {
    "fork bomb": "on a busy machine its kernel may die of it; the call then raises SandboxFailure",
    "fork bomb of a shell": "the same",
    "thread bomb": "the same",
    "a POSIX queue": "its kernel knows no limit of them: one may be left for the next lease of the same sandbox",
    "forged frames": "the worker's /dev/null can be opened; the pipes of the protocol cannot",
    "the worker's environment and memory by /proc": "its /proc asks no right of who reads; there is no secret in it",
    "a namespace of its own": "a namespace of its kernel, not of the host's",
    "a device": "a node of its file system, with no device behind it",
}
"""The same of ``docker`` with ``runtime="runsc"`` (seen with Debian's 20221219)."""

INSPECT = """\
import builtins, json, math, os, sys
left = []
if len(sys.argv) != 1 or os.getcwd() in ('', '/'): left.append('cwd')
if os.umask(0o22) != 0o22: left.append('umask')
if 'PYTHONSTARTUP' in os.environ: left.append('environment')
if json.dumps([1]) != '[1]' or math.floor(1.5) != 1: left.append('modules')
mine = [p for p in os.listdir('/proc') if p.isdigit()] if os.getppid() == 1 else []
if len(mine) > 3: left.append(f'processes {mine}')
for kind in ('shm', 'sem', 'msg') if CLEAN and os.getppid() == 1 else ():
    try: lines = open(f'/proc/sysvipc/{kind}').read().splitlines()[1:]
    except OSError: lines = []
    if lines: left.append(f'System V {kind}')
if CLEAN:
    for folder in ('.', '/tmp', '/dev/shm') if os.getppid() == 1 else ('.',):
        if os.listdir(folder): left.append(f'files {os.listdir(folder)}')
print(left or 'clean')
"""


async def check_attack(box: Sandbox, name: str) -> ExecutionResult:
    """Run one attack on a clean sandbox, then an honest program, then one after a reset.

    Raises ``AssertionError`` when the attack got what it wanted or a later program sees a trace of it.
    """
    attack = ATTACKS[name]
    result = await box.exec(attack.code, timeout_s=attack.timeout_s, language=attack.language)
    said = result.stdout + result.stderr
    assert result.status in attack.ends, f"{name}: {result}"
    assert any(part in said for part in attack.shows.split("|")), f"{name}: {result}"
    assert result.wall_s < attack.timeout_s + 10, f"{name}: {result}"
    for is_clean in (False, True):
        if is_clean:
            await box.reset()
        after = await box.exec(f"CLEAN = {is_clean}\n{INSPECT}")
        assert after.stdout == "clean\n", f"after {name}, {is_clean}: {after}"
    await box.reset()
    return result


async def check_hostile(make: Callable[[], Sandbox], *, cannot_stop: Collection[str] = ()) -> list[str]:
    """Every attack on one sandbox, but those that this backend is known not to stop; returns their names."""
    box = make()
    await box.start()
    try:
        names = [name for name in ATTACKS if name not in cannot_stop]
        for name in names:
            await check_attack(box, name)
    finally:
        await box.close()
    return names
