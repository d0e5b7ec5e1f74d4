"""The service over HTTP: who may ask, what comes back, limits, leases, draining."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from sandbox_services import TOKEN, ServiceProcess, until_there

from sandboxes import SandboxPool, SandboxSpec
from sandboxes.service import Service, ServiceLimits


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str, service: Service) -> None:
        self.session, self.url, self.service = session, url, service

    async def ask(self, method: str, path: str, body: Any = None, token: str = TOKEN) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {token}"}
        async with self.session.request(method, self.url + path, json=body, headers=headers) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if answer.content_type == "application/json" else text

    async def run(self, code: str, path: str = "/v1/run", **more: Any) -> Any:
        return (await self.ask("POST", path, {"code": code, **more}))[1]


@asynccontextmanager
async def serving(size: int = 2, max_waiting: int | None = None, **limits: Any) -> AsyncIterator[Client]:
    async with SandboxPool(SandboxSpec(kind="local", size=size), max_waiting=max_waiting) as pool:
        service = Service(pool, {TOKEN: "ann", "another-token": "bob"}, ServiceLimits(**limits))
        runner = web.AppRunner(service.app(), handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession() as session:
            yield Client(session, f"http://127.0.0.1:{runner.addresses[0][1]}", service)
        await runner.cleanup()


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with serving() as client:
        yield client


async def test_only_known_tokens_are_served(client: Client) -> None:
    status, said = await client.ask("POST", "/v1/run", {"code": "print(1)"}, token="guess")
    assert (status, said["error"]) == (401, "token")
    async with client.session.post(client.url + "/run_code", json={"code": "", "language": "python"}) as answer:
        assert answer.status == 401
    assert (await client.ask("GET", "/healthz", token=""))[0] == 200


async def test_a_program_comes_back_as_a_result(client: Client) -> None:
    said = await client.run(
        "import os; print(input(), os.environ['A'], open('d/in').read()); open('out', 'wb').write(b'\\xff')",
        stdin="hello",
        environment={"A": "b"},
        files={"d/in": base64.b64encode(b"file").decode()},
        fetch=["out", "missing"],
    )
    assert (said["status"], said["stdout"], said["isolated"]) == ("ok", "hello b file\n", False)
    assert {name: base64.b64decode(data) for name, data in said["files"].items()} == {"out": b"\xff"}
    assert (await client.run("while 1: pass", timeout_s=0.3))["status"] == "timeout"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/run", {"code": "", "timeout_s": -1}, "timeout_s: Input should be greater than 0"),
        ("/v1/run", {"code": "", "tiemout_s": 1}, "tiemout_s: Extra inputs are not permitted"),
        ("/v1/run", {"code": "", "files": {"../a": "eA=="}}, "file name '../a': a path inside the working folder"),
        ("/v1/run", {"code": "", "session": "a"}, "session: only within a lease"),
        ("/run_code", {"code": "", "language": "cobol"}, "language 'cobol': one of python, bash"),
        ("/v1/leases/abcdefgh/run", {"code": ""}, "no such lease"),
    ],
)
async def test_what_is_wrong_is_said(client: Client, path: str, body: Any, message: str) -> None:
    status, said = await client.ask("POST", path, body)
    assert status in (400, 404)
    assert message in said["message"]
    assert client.service.pool.counters.discarded <= 1


async def test_run_code_speaks_as_sandbox_fusion_does(client: Client) -> None:
    async def ask(code: str, **more: Any) -> Any:
        return (await client.ask("POST", "/run_code", {"code": code, "language": "python", **more}))[1]

    said = await ask("print(6 * 7)")
    assert (said["status"], said["message"], said["compile_result"]) == ("Success", "", None)
    assert said["run_result"].pop("execution_time") > 0
    assert said["run_result"] == {"status": "Finished", "return_code": 0, "stdout": "42\n", "stderr": ""}
    failed = await ask("import sys; sys.exit(3)")
    assert (failed["status"], failed["run_result"]["return_code"]) == ("Failed", 3)
    late = await ask("print('said', flush=True)\nwhile 1: pass", run_timeout=2, compile_timeout=1, memory_limit_MB=-1)
    assert (late["status"], late["run_result"]["status"]) == ("Failed", "TimeLimitExceeded")
    assert late["run_result"]["stdout"] == "said\n"
    bash = await ask("cat a/b", language="bash", files={"a/b": "eA==", "c": None}, fetch_files=["a/b"])
    assert (bash["run_result"]["stdout"], bash["files"]) == ("x", {"a/b": "eA=="})
    dead = await ask("import os; os.kill(os.getppid(), 9)")
    assert (dead["status"], dead["run_result"]) == ("SandboxError", None)
    assert "worker is gone" in dead["message"]


async def test_output_streams_while_the_program_runs(client: Client) -> None:
    code = "import sys, time\nfor i in range(3): print(i); time.sleep(0.3)\nprint('e', file=sys.stderr)"
    body = {"code": code, "stream": True}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    for _ in range(5):  # where all stood still for a moment, what came in time is read late
        lines, when = [], []
        async with client.session.post(client.url + "/v1/run", json=body, headers=headers) as answer:
            assert answer.content_type == "application/x-ndjson"
            async for line in answer.content:
                lines.append(json.loads(line))
                when.append(time.monotonic())
        pieces = [(line["stream"], base64.b64decode(line["data"])) for line in lines[:-1]]
        if len(pieces) == 4 and when[2] - when[0] > 0.4:
            break
    assert pieces == [("stdout", b"0\n"), ("stdout", b"1\n"), ("stdout", b"2\n"), ("stderr", b"e\n")]
    assert when[2] - when[0] > 0.4, "pieces come as they are printed"
    assert (lines[-1]["result"]["status"], lines[-1]["result"]["stdout"]) == ("ok", "0\n1\n2\n")


async def test_a_lease_keeps_files_and_sessions_and_is_its_owners_alone(client: Client) -> None:
    lease = "/v1/leases/0123456789"
    assert (await client.ask("PUT", lease))[0] == 201
    assert (await client.ask("PUT", lease))[0] == 201  # again is the same one
    assert client.service.pool.counters.leased == 1
    await client.run("open('f', 'w').write('kept'); x = 1", lease + "/run", session="s")
    assert (await client.run("print(open('f').read(), x)", lease + "/run", session="s"))["stdout"] == "kept 1\n"
    for method, path in (("GET", lease), ("POST", lease + "/reset")):
        assert (await client.ask(method, path, token="another-token"))[0] == 404
    assert (await client.ask("POST", lease + "/reset"))[0] == 204
    assert "FileNotFoundError" in (await client.run("open('f')", lease + "/run"))["stderr"]
    assert (await client.ask("DELETE", lease, token="another-token"))[0] == 204  # says nothing, does nothing
    assert (await client.ask("GET", lease))[0] == 200
    assert (await client.ask("DELETE", lease))[0] == 204
    assert (await client.ask("GET", lease))[0] == 404
    assert client.service.pool.counters.leased == 0


async def test_to_look_at_a_lease_does_not_end_what_runs_in_it(client: Client, tmp_path: Path) -> None:
    lease, begun, enough = "/v1/leases/0123456789", tmp_path / "begun", tmp_path / "enough"
    await client.ask("PUT", lease)
    program = f"open({str(begun)!r}, 'w')\n{until_there(enough)}print('done')"
    running = asyncio.create_task(client.run(program, lease + "/run", timeout_s=60))
    while not begun.exists():  # noqa: ASYNC110  # a file, not an event
        await asyncio.sleep(0.01)
    assert (await client.ask("GET", lease))[0] == 200
    enough.touch()
    assert (await running)["stdout"] == "done\n"


async def test_the_same_call_again_is_answered_and_not_run_again(client: Client) -> None:
    await client.ask("PUT", "/v1/leases/0123456789")
    code = "open('log', 'a').write('ran '); print(open('log').read())"
    answers = [await client.run(code, "/v1/leases/0123456789/run", id=one) for one in ("a", "a", "b")]
    assert [answer["stdout"] for answer in answers] == ["ran \n", "ran \n", "ran ran \n"]


async def test_a_client_and_the_queue_have_limits(tmp_path: Path) -> None:
    async with serving(size=1, max_waiting=1, per_client=2) as client:
        busy = [asyncio.create_task(client.run(until_there(tmp_path / "enough"))) for _ in range(2)]
        while (client.service.pool.counters.leased, client.service.pool.counters.waiting) != (1, 1):  # noqa: ASYNC110  # counters
            await asyncio.sleep(0.01)
        status, said = await client.ask("POST", "/v1/run", {"code": ""})
        assert (status, said["error"]) == (429, "busy")
        assert "ann holds or waits for 2" in said["message"]
        status, said = await client.ask("POST", "/v1/run", {"code": ""}, token="another-token")
        assert (status, said["error"]) == (429, "busy")
        assert "1 others wait" in said["message"]
        (tmp_path / "enough").touch()
        assert [answer["status"] for answer in await asyncio.gather(*busy)] == ["ok", "ok"]
        assert (await client.run("print(1)"))["stdout"] == "1\n"


async def test_a_lease_that_nobody_uses_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(size=1, idle_s=300) as client:
        lease, begun, enough, now = "/v1/leases/0123456789", tmp_path / "begun", tmp_path / "enough", 0.0
        monkeypatch.setattr(client.service, "_now", lambda: now)
        await client.ask("PUT", lease)
        program = f"open({str(begun)!r}, 'w')\n{until_there(enough)}print('done')"
        running = asyncio.create_task(client.run(program, lease + "/run", timeout_s=60))
        while not begun.exists():  # noqa: ASYNC110  # a file, not an event
            await asyncio.sleep(0.01)
        now = 400.0  # in use is used
        await asyncio.sleep(1.2)  # leases are looked at each second
        enough.touch()
        assert (await running)["stdout"] == "done\n"
        assert (await client.ask("GET", lease))[0] == 200
        now = 800.0
        assert (await client.run("print(1)"))["stdout"] == "1\n"  # waits for the one sandbox
        assert (await client.ask("GET", lease))[0] == 404


async def test_a_client_that_hangs_up_frees_its_place() -> None:
    async with serving(size=1) as client:
        task = asyncio.create_task(client.run("import time; time.sleep(30)", timeout_s=60))
        await asyncio.sleep(0.7)
        task.cancel()
        async with asyncio.timeout(20):
            assert (await client.run("print(1)"))["stdout"] == "1\n"


async def test_metrics_are_prometheus_and_right(client: Client) -> None:
    await client.run("print(1)")
    await client.run("while 1: pass", timeout_s=0.2)
    families = {one.name: one for one in text_string_to_metric_families((await client.ask("GET", "/metrics"))[1])}
    programs = {sample.labels["status"]: sample.value for sample in families["agent_rl_sandbox_programs"].samples}
    assert programs == {"ok": 1, "timeout": 1}
    assert families["agent_rl_sandbox_leases"].samples[0].value == 2
    exec_ = {sample.name: sample.value for sample in families["agent_rl_sandbox_exec_seconds"].samples}
    assert exec_["agent_rl_sandbox_exec_seconds_count"] == 2
    assert 0.2 < exec_["agent_rl_sandbox_exec_seconds_sum"] < 5


async def test_sigterm_drains_and_leaves(tmp_path: Path) -> None:
    async with ServiceProcess() as server, aiohttp.ClientSession() as session:
        client = Client(session, server.url, None)  # type: ignore[arg-type]
        begun, enough = tmp_path / "begun", tmp_path / "enough"
        running = asyncio.create_task(client.run(f"open({str(begun)!r}, 'w')\n{until_there(enough)}print('done')"))
        while not begun.exists():  # noqa: ASYNC110  # a file, not an event
            await asyncio.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        while (await client.ask("GET", "/healthz"))[0] != 503:  # noqa: ASYNC110  # over HTTP
            await asyncio.sleep(0.01)
        status, said = await client.ask("POST", "/v1/run", {"code": "print(1)"})
        assert (status, said["error"]) == (503, "draining")
        enough.touch()
        assert (await running)["stdout"] == "done\n"
        assert await asyncio.wait_for(server.process.wait(), 10) == 0
