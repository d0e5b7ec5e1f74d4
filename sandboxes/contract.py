"""What every backend promises, as checks that anybody's backend can be put through: ``await check(make)``.

Each check takes a started, clean sandbox and raises ``AssertionError`` where a promise is broken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from sandboxes.base import ExecutionResult, Limits, Sandbox

Check = Callable[[Sandbox], Awaitable[None]]


async def check(make: Callable[[], Sandbox]) -> list[str]:
    """Every check on one sandbox with a reset between two; returns the names of the checks. Takes seconds."""
    box = make()
    await box.start()
    try:
        for one in CHECKS:
            await one(box)
            await box.reset()
    finally:
        await box.close()
    return [one.__name__ for one in CHECKS]


def _is(result: ExecutionResult, stdout: str, status: str = "ok") -> None:
    assert (result.stdout, result.status) == (stdout, status), result


async def empty_source_is_a_program(box: Sandbox) -> None:
    result = await box.exec("")
    assert (result.stdout, result.stderr, result.exit_code, result.status) == ("", "", 0, "ok"), result


async def a_syntax_error_reads_as_python_says_it(box: Sandbox) -> None:
    result = await box.exec("x = 1\ny = = 2\n")
    assert (result.exit_code, result.status) == (1, "error"), result
    assert result.stderr.startswith('  File "main.py", line 2\n    y = = 2\n'), result
    assert result.stderr.endswith("SyntaxError: invalid syntax\n"), result


async def a_source_that_is_no_text_is_the_programs_error(box: Sandbox) -> None:
    for code in ("print(1)\x00", "print('\ud800')"):
        result = await box.exec(code)
        assert result.status == "error", result
        assert "worker" not in result.stderr, result
    result = await box.exec("#" * 100_000_000)
    assert result.status == "error", result
    assert "100000000 characters" in result.stderr, result
    _is(await box.exec("print(1)"), "1\n")


async def the_language_is_not_changed_by_ours(box: Sandbox) -> None:
    # A __future__ import of the worker's own file would turn annotations into strings.
    _is(await box.exec("def f(a: int): pass\nprint(f.__annotations__['a'] is int)"), "True\n")
    _is(await box.exec("import signal; print(signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN)"), "True\n")
    _is(await box.exec("import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)"), "True\n")
    _is(
        await box.exec("import sys; print(sys.argv, __name__, sys.stdout is sys.__stdout__)"),
        "['main.py'] __main__ True\n",
    )


async def the_end_of_a_program_is_the_end_of_an_interpreter(box: Sandbox) -> None:
    # A file never closed is written all the same; exit handlers, threads and finalisers run, in that order.
    code = (
        "import atexit, threading, time\n"
        "f = open('left-open.txt', 'w'); f.write('kept')\n"
        "class A:\n    def __del__(self): print('finaliser')\n"
        "a = A()\n"
        "atexit.register(print, 'handler')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n"
        "print('main')"
    )
    _is(await box.exec(code), "main\nthread\nhandler\nfinaliser\n")
    _is(await box.exec("print(open('left-open.txt').read())"), "kept\n")
    _is(
        await box.exec("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"),
        "",
    )
    _is(await box.exec("import io, sys\nprint('a', end='')\nsys.stdout = io.StringIO()\nprint('b')"), "a")
    _is(await box.exec("import sys\nprint('a')\nsys.stdout.close()"), "a\n")


async def exit_codes_are_the_programs(box: Sandbox) -> None:
    for code, exit_code in (("import os; os._exit(7)", 7), ("raise SystemExit(256 + 3)", 3), ("raise SystemExit", 0)):
        assert (await box.exec(code)).exit_code == exit_code, code
    said = await box.exec("raise SystemExit('why')")
    assert (said.exit_code, said.stderr) == (1, "why\n"), said
    crashed = await box.exec("import os, signal; print('before'); os.kill(os.getpid(), signal.SIGSEGV)")
    assert (crashed.stdout, crashed.exit_code, crashed.status) == ("before\n", 128 + 11, "killed"), crashed


async def a_deep_recursion_or_crash_is_a_result(box: Sandbox) -> None:
    code = "import sys; sys.setrecursionlimit(10**9)\ndef f(): return g()\ndef g(): return [f()][0]\nclass A:\n"
    code += "    def __getattr__(self, n): return getattr(self, n + 'a')\nA().x"
    assert (await box.exec(code, timeout_s=3)).status in ("killed", "memory", "timeout", "error")
    assert (await box.exec("import ctypes; ctypes.string_at(0)")).exit_code == 128 + 11
    _is(await box.exec("print(1)"), "1\n")


async def an_endless_computation_ends_at_the_deadline(box: Sandbox) -> None:
    for code in (
        "10**10**8",
        "import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(60)",
    ):
        result = await box.exec(code, timeout_s=0.5)
        assert (result.status, result.exit_code) == ("timeout", None), result
        assert result.wall_s < 5, result


async def lines_printed_before_the_deadline_come_back(box: Sandbox) -> None:
    _is(await box.exec("for i in range(3): print(i)\nwhile True: pass", timeout_s=1.5), "0\n1\n2\n", "timeout")


async def endless_output_is_bounded_and_counted(box: Sandbox) -> None:
    result = await box.exec("while True: print('x' * 1000)", timeout_s=1)
    assert result.status == "timeout", result
    assert result.stdout_cut_bytes > 100_000, result
    assert len(result.stdout) < 100_000, "output_bytes of the specification must hold"


async def a_cut_never_splits_a_character(box: Sandbox) -> None:
    for lead in range(4):
        result = await box.exec(f"print('x' * {lead} + '\U0001f600' * 50_000, end='')")
        kept = result.stdout.partition("\n[... ")[0] + result.stdout.rpartition(" ...]\n")[2]
        assert "\ufffd" not in result.stdout, result
        assert len(kept.encode()) + result.stdout_cut_bytes == lead + 200_000, result


async def descriptors_run_out_for_the_program_only(box: Sandbox) -> None:
    result = await box.exec("held = []\nwhile True: held.append(open('/dev/null'))")
    assert "Too many open files" in result.stderr, result
    result = await box.exec(
        "import os\nfor fd in range(3, 1000):\n    try: os.close(fd)\n    except OSError: pass\nprint(1)"
    )
    _is(result, "1\n")


async def no_descriptor_of_ours_is_open_in_a_program(box: Sandbox) -> None:
    await box.exec("pass", session="a")
    code = "import os\nopen_ = []\nfor fd in range(256):\n    try: os.fstat(fd); open_.append(fd)\n"
    code += "    except OSError: pass\nprint(open_)"
    _is(await box.exec(code), "[0, 1, 2]\n")
    _is(await box.exec(code, stdin="x"), "[0, 1, 2]\n")


async def a_rewritten_module_is_read_anew(box: Sandbox) -> None:
    for number in range(3):  # same size, same second: a .pyc would be believed
        _is(await box.exec("import helper; print(helper.x)", files={"helper.py": b"x = %d" % number}), f"{number}\n")


async def files_do_not_follow_links(box: Sandbox) -> None:
    await box.exec("import os; open('target', 'w').write('t'); os.symlink('target', 'link')")
    assert (await box.exec("print(1)", files={"link": b"through"})).status == "error"
    _is(await box.exec("print(open('target').read())"), "t\n")


async def large_stdin_need_not_be_read(box: Sandbox) -> None:
    _is(await box.exec("print(1)", stdin="x" * 1_000_000), "1\n")
    _is(await box.exec("import sys; print(len(sys.stdin.read()))", stdin="x" * 1_000_000), "1000000\n")
    _is(await box.exec("print(repr(__import__('sys').stdin.read()))"), "''\n")


async def a_session_keeps_its_variables(box: Sandbox) -> None:
    first = await box.exec("x = 1\ndef f(): return x / 0", session="a")
    assert first.session_began, first
    second = await box.exec("x += 1; print(x, input())", session="a", stdin="in\n")
    _is(second, "2 in\n")
    assert not second.session_began, second
    failed = await box.exec("f()", session="a")
    assert 'File "<cell 1>", line 2, in f\n    def f(): return x / 0\n' in failed.stderr, failed
    assert "worker" not in failed.stderr, failed
    assert (await box.exec("raise SystemExit(4)", session="a")).exit_code == 4
    _is(await box.exec("print(x)", session="a"), "2\n")
    assert "NameError" in (await box.exec("print(x)", session="b")).stderr
    assert "NameError" in (await box.exec("print(x)")).stderr
    _is(await box.exec("print(x)", session="a"), "2\n")  # the fresh call in between did not end it
    await box.reset()
    assert "NameError" in (await box.exec("print(x)", session="a")).stderr


async def a_session_that_dies_begins_anew(box: Sandbox) -> None:
    await box.exec("y = 5", session="other")
    for code, status in (("while True: pass", "timeout"), ("import os; os._exit(3)", "error")):
        await box.exec("x = 1", session="a")
        result = await box.exec("print('said')\n" + code, session="a", timeout_s=1.5)
        _is(result, "said\n", status)
        again = await box.exec("print('x' in globals())", session="a")
        _is(again, "False\n")
        assert again.session_began, again
    _is(await box.exec("print(y)", session="other"), "5\n")


async def a_session_cannot_answer_for_the_next_call(box: Sandbox) -> None:
    # The program finds the socket it is driven by and writes answers of its own.
    write = "for fd in range(3, 64):\n    try: os.write(fd, bytes(%d))\n    except OSError: pass\n"
    forge = f"import os, time\n{write}time.sleep(1)"
    for size in (1, 8, 9, 64, 900):
        assert (await box.exec(forge % size, session="a")).status == "killed"
        for number in range(3):
            _is(await box.exec(f"print({number})", session="a"), f"{number}\n")
    later = "import os, threading, time\ndef late():\n    time.sleep(0.2)\n    for fd in range(3, 64):\n"
    later += "        try: os.write(fd, bytes(9))\n        except OSError: pass\nthreading.Thread(target=late).start()"
    await box.exec(later, session="a")
    await box.exec("import time; time.sleep(0.4)")
    for number in range(3):
        result = await box.exec(f"print({number})", session="a")
        assert result.status == "killed" or result.stdout == f"{number}\n", result
    _is(result, "2\n")


async def a_reset_carries_nothing_over(box: Sandbox) -> None:
    poison = (
        "import builtins, json, os, signal, subprocess, sys, threading, time\n"
        "os.environ['LEFT'] = '1'; os.umask(0); os.makedirs('d/e'); open('d/e/f', 'w').write('x'); "
        "open('json.py', 'w').close()\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); subprocess.Popen(['sleep', '600'])\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start(); sys.setrecursionlimit(70)\n"
        "builtins.LEFT = json.LEFT = 1; os.chdir('d')"
    )
    look = (
        "import builtins, json, os, signal, sys\n"
        "mask = os.umask(0o22)\n"
        "pids = [p for p in os.listdir('/proc') if p.isdigit()] if os.getppid() == 1 else ['1', '2']\n"
        "print(os.environ.get('LEFT'), oct(mask), os.listdir('.'), hasattr(builtins, 'LEFT'), hasattr(json, 'LEFT'),\n"
        "      sys.getrecursionlimit() > 70, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, len(pids) <= 3)"
    )
    clean = "None 0o22 [] False False True True True\n"
    for session in (None, "a"):
        await box.exec(poison, session=session)
        await box.reset()
        _is(await box.exec(look), clean)
        _is(await box.exec(look, session="a"), clean)
        await box.reset()


async def variables_reach_the_call_they_are_given_to(box: Sandbox) -> None:
    code = "import os; print(os.environ.get('GIVEN'), os.environ['HOME'] == os.getcwd())"
    _is(await box.exec(code, environment={"GIVEN": "x y"}), "x y True\n")
    _is(await box.exec(code), "None True\n")


async def files_come_back_and_lead_nowhere_else(box: Sandbox) -> None:
    code = (
        "import os; os.makedirs('d'); open('d/a', 'wb').write(bytes(range(256))); os.symlink('/etc/passwd', 'link');\n"
        "os.symlink('/etc', 'out'); os.mkfifo('pipe'); os.mkdir('folder'); open('locked', 'w').close(); "
        "os.chmod('locked', 0)"
    )
    names = ["d/a", "link", "out/passwd", "pipe", "folder", "missing", "main.py"]
    result = await box.exec(code, fetch=names)
    assert result.files == {"d/a": bytes(range(256))}, result
    again = await box.exec("print(open('d/b/c').read())", files={"d/b/c": b"in"}, fetch=["d/b/c"])
    assert (again.stdout, again.files) == ("in\n", {"d/b/c": b"in"}), again
    assert (await box.exec("", files={"out/x": b""})).status == "error"
    for name in ("../a", "/etc/passwd", "a/../../b", "", "a//b", "a\0"):
        for options in ({"files": {name: b""}}, {"fetch": [name]}):
            try:
                await box.exec("print(1)", **options)  # type: ignore[arg-type]
            except ValueError:
                continue
            raise AssertionError(f"the file name {name!r} was taken")


async def limits_of_a_call_hold_for_it_alone(box: Sandbox) -> None:
    spent = await box.exec("print('said')\nwhile True: pass", limits=Limits(cpu_s=1), timeout_s=20)
    _is(spent, "said\n", "timeout")
    assert spent.wall_s < 10, spent
    taken = await box.exec("x = bytearray(150 * 2**20)", limits=Limits(memory_mb=100))
    assert taken.status == "memory", taken
    opened = await box.exec("held = [open('/dev/null') for _ in range(40)]", limits=Limits(open_files=32))
    assert "Too many open files" in opened.stderr, opened
    cut = await box.exec("print('x' * 1000)", limits=Limits(output_bytes=100))
    assert cut.stdout_cut_bytes == 901, cut
    _is(
        await box.exec("x = bytearray(150 * 2**20); held = [open('/dev/null') for _ in range(40)]; print('y' * 1000)"),
        "y" * 1000 + "\n",
    )


async def other_interpreters_run_as_python_does(box: Sandbox) -> None:
    result = await box.exec(
        "read line; echo $line $A >&2; cat in; exit 3",
        language="sh",
        stdin="said\n",
        environment={"A": "a"},
        files={"in": b"file"},
    )
    assert (result.stdout, result.stderr, result.exit_code, result.status) == ("file", "said a\n", 3, "error"), result
    late = await box.exec("echo before; sleep 60", language="sh", timeout_s=1.5)
    _is(late, "before\n", "timeout")
    _is(await box.exec("yes | head -n 1", language="sh"), "y\n")  # the pipe breaks as it should
    missing = await box.exec("x", language="no-such-interpreter")
    assert (missing.exit_code, missing.status) == (127, "error"), missing
    _is(await box.exec("print(1)"), "1\n")


async def output_is_told_while_the_program_runs(box: Sandbox) -> None:
    loop = asyncio.get_running_loop()
    heard: list[tuple[str, bytes, float]] = []
    code = (
        "import sys, time\nprint('a'); time.sleep(0.5); print('b', file=sys.stderr); "
        "time.sleep(0.5); print('c' * 10**6)"
    )
    for session in (None, "a"):
        for _ in range(5):  # where all stood still for a moment, what was told in time is heard late
            heard.clear()
            result = await box.exec(
                code, session=session, on_output=lambda name, data: heard.append((name, data, loop.time()))
            )
            if len(heard) > 1 and heard[1][2] - heard[0][2] > 0.2:
                break
        assert [(name, data) for name, data, _ in heard[:2]] == [("stdout", b"a\n"), ("stderr", b"b\n")], heard[:2]
        assert heard[1][2] - heard[0][2] > 0.2, heard[:2]
        told = b"".join(data for name, data, _ in heard if name == "stdout")
        assert 1000 < len(told) < 100_000, "the beginning, up to output_bytes"
        assert set(told[2:]) == set(b"c"), told[:20]
        assert result.stdout.startswith("a\nccc"), result
        assert result.stdout_cut_bytes > 900_000, result


CHECKS: tuple[Check, ...] = (
    a_reset_carries_nothing_over,
    variables_reach_the_call_they_are_given_to,
    files_come_back_and_lead_nowhere_else,
    limits_of_a_call_hold_for_it_alone,
    other_interpreters_run_as_python_does,
    output_is_told_while_the_program_runs,
    empty_source_is_a_program,
    a_syntax_error_reads_as_python_says_it,
    a_source_that_is_no_text_is_the_programs_error,
    the_language_is_not_changed_by_ours,
    the_end_of_a_program_is_the_end_of_an_interpreter,
    exit_codes_are_the_programs,
    a_deep_recursion_or_crash_is_a_result,
    an_endless_computation_ends_at_the_deadline,
    lines_printed_before_the_deadline_come_back,
    endless_output_is_bounded_and_counted,
    a_cut_never_splits_a_character,
    descriptors_run_out_for_the_program_only,
    no_descriptor_of_ours_is_open_in_a_program,
    a_rewritten_module_is_read_anew,
    files_do_not_follow_links,
    large_stdin_need_not_be_read,
    a_session_keeps_its_variables,
    a_session_that_dies_begins_anew,
    a_session_cannot_answer_for_the_next_call,
)
