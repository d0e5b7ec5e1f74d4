"""Our environments inside verifiers, with its own client against a scripted endpoint, where it is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from envs_scripted import call

from envs.env import Resources
from envs.registration import get
from sandboxes import SandboxSpec

LOCAL = SandboxSpec(kind="local", size=1)


async def test_an_episode_of_verifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    import verifiers as vf

    from envs.verifiers import for_verifiers

    task = get("agentic/Arithmetic-v1").tasks({}).task(0)
    asked: list[list[dict[str, Any]]] = []
    turns = [call("python", code=f"print({task.meta['expression']})"), f"\\boxed{{{task.answer}}}", "\\boxed{nope}"]

    async def answer(request: web.Request) -> web.Response:
        asked.append((await request.json())["messages"])
        message = {"role": "assistant", "content": turns[len(asked) - 1]}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setenv("A_KEY", "k")
    client = vf.ClientConfig(api_base_url=f"http://127.0.0.1:{runner.addresses[0][1]}/v1", api_key_var="A_KEY")
    env = for_verifiers("agentic/Arithmetic-v1", count=2, sandbox=LOCAL)
    try:
        results = await env.evaluate(client=client, model="m", num_examples=2, max_concurrent=1)
        system, question, _, result = asked[1]
        assert system["role"] == "system"
        assert "python" in system["content"]
        assert question["content"] == task.prompt
        assert result == {"role": "user", "content": f"<tool_response>\n{task.answer}\n</tool_response>"}
        outputs = sorted(results["outputs"], key=lambda output: output["example_id"])
        assert [output["reward"] for output in outputs] == [1.0, 0.0]
        assert all(output["error"] is None for output in outputs)

        # Our side breaks: an error of its own kind, not a wrong answer.
        del asked[:]
        await env._resources.pool.close()
        results = await env.evaluate(client=client, model="m", num_examples=1)
        assert "InfraError" in json.dumps(results["outputs"][0]["error"], default=str)
    finally:
        await env._teardown()
        await runner.cleanup()


async def test_episodes_of_verifiers_that_begin_at_once_share_what_they_run_in(monkeypatch: pytest.MonkeyPatch) -> None:
    import envs.verifiers

    opened: list[Resources] = []

    class Counted(Resources):
        async def __aenter__(self) -> Resources:
            opened.append(self)
            return await super().__aenter__()

    async def asks_an_engine(spec: SandboxSpec) -> SandboxSpec:
        await asyncio.sleep(0)
        return spec

    monkeypatch.setattr(envs.verifiers, "Resources", Counted)
    monkeypatch.setattr(envs.verifiers, "resolve", asks_an_engine)
    env = envs.verifiers.for_verifiers("agentic/Arithmetic-v1", count=4, sandbox=LOCAL)
    rows = list(env.get_dataset())
    try:
        await asyncio.gather(*(env.setup_state({"input": {}, "info": row["info"]}) for row in rows))
        assert len(opened) == 1
    finally:
        await env._teardown()


if importlib.util.find_spec("verifiers") is None:
    # Its pins conflict with vLLM's, so it has an environment of its own (`make test-peers`).
    del test_an_episode_of_verifiers, test_episodes_of_verifiers_that_begin_at_once_share_what_they_run_in

    def test_verifiers_is_imported_nowhere_else() -> None:
        users = [
            file.name for file in Path(__file__).parents[2].glob("envs/*.py") if "import verifiers" in file.read_text()
        ]
        assert users == ["verifiers.py"]
