"""An evaluation under way: what is finished is kept through a kill, what fails is void, what is wrong is one line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from evaluated import GSM8K, QUIET, by_seed, lines_of, settings_for
from served import completion, failing, serving

from agent_rl.cli import main
from agent_rl.errors import ConfigError
from agent_rl.evaluation.run import evaluate
from agent_rl.evaluation.settings import checked
from agent_rl.evaluation.store import Row, Store, cut_torn_line, final_rows, read_rows
from agent_rl.evaluation.targets import find_model, fingerprint


async def test_kill_9_loses_nothing_that_was_finished(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    async def slow(body: dict[str, Any]) -> str:
        await asyncio.sleep(0.02)
        return by_seed(body)

    async with serving(slow) as served:
        command = [sys.executable, "-m", "agent_rl", "eval", served.url, "--suite", "gsm8k", "--data", str(GSM8K)]
        command += ["--limit", "40", "--k", "5", "--concurrency", "2", "--served-name", "scripted", "--name", "run"]
        command += ["--output", str(tmp_path)]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
        while len(lines_of(folder)) < 20:  # a file, not an event
            await asyncio.sleep(0.02)
            assert process.returncode is None
        process.kill()
        await process.wait()
        before = lines_of(folder)
        assert 20 <= len(before) < 200
        # And the worst moment of all: a line half written.
        with (folder / "episodes.jsonl").open("a") as file:
            file.write(before[0][: len(before[0]) // 2])
        asked = len(served.bodies)
        await asyncio.to_thread(evaluate, settings_for(served.url, tmp_path, limit=40, k=5), QUIET)
        after = lines_of(folder)
        assert after[: len(before)] == before
        assert len(served.bodies) - asked == 200 - len(before)
    rows = [row for row, _ in read_rows(folder)]
    assert Counter(Counter(row.key for row in rows).values()) == {1: 200}

    async with serving(by_seed) as served:
        await asyncio.to_thread(evaluate, settings_for(served.url, tmp_path / "whole", limit=40, k=5), QUIET)
    whole = final_rows(row for row, _ in read_rows(tmp_path / "whole" / "run"))
    told = [(row.key, row.answer, row.verdict) for row in final_rows(rows)]
    assert told == [(row.key, row.answer, row.verdict) for row in whole]


async def test_more_samples_and_problems_add_to_what_is_there(tmp_path: Path) -> None:
    async with serving(by_seed) as served:
        folder = await asyncio.to_thread(evaluate, settings_for(served.url, tmp_path), QUIET)
        assert len(served.bodies) == 18
        await asyncio.to_thread(evaluate, settings_for(served.url, tmp_path), QUIET)
        assert len(served.bodies) == 18
        await asyncio.to_thread(evaluate, settings_for(served.url, tmp_path, k=4, limit=8), QUIET)
        assert len(served.bodies) == 32
        tree = json.loads((folder / "results.json").read_text())
        assert (tree["parts"]["gsm8k"]["k"], tree["parts"]["gsm8k"]["complete_problems"]) == (4, 8)
        # A smaller question is answered out of what is there.
        await asyncio.to_thread(evaluate, settings_for(served.url, tmp_path, k=1, limit=6), QUIET)
        assert len(served.bodies) == 32
        tree = json.loads((folder / "results.json").read_text())
        assert (tree["parts"]["gsm8k"]["episodes"], list(tree["parts"]["gsm8k"]["pass"])) == (6, ["1"])


async def test_other_settings_need_another_folder(tmp_path: Path) -> None:
    async with serving(by_seed) as served:
        folder = await asyncio.to_thread(evaluate, settings_for(served.url, tmp_path), QUIET)
        kept = lines_of(folder)
        before = {path.name: path.stat().st_mtime_ns for path in folder.glob("[!.]*")}
        with pytest.raises(ConfigError, match=r"holds an evaluation with other settings \(seed, top_p\)"):
            await asyncio.to_thread(evaluate, settings_for(served.url, tmp_path, top_p=1.0, seed=1), QUIET)
        assert lines_of(folder) == kept
        assert {path.name: path.stat().st_mtime_ns for path in folder.glob("[!.]*")} == before
        with Store(folder) as store:
            store.open(json.loads((folder / "evaluation.json").read_text())["identity"], {})
            with pytest.raises(ConfigError, match="another process is working"):
                Store(folder).open({}, {})


async def test_another_model_at_the_same_address_needs_another_folder(tmp_path: Path) -> None:
    async with serving(by_seed, models=["first"]) as served:
        unnamed = settings_for(served.url, tmp_path, served_name=None)
        folder = await asyncio.to_thread(evaluate, unnamed, QUIET)
        kept = lines_of(folder)
        served.models = ["second"]
        with pytest.raises(ConfigError, match="holds episodes of 'first', and the endpoint serves 'second' now"):
            await asyncio.to_thread(evaluate, unnamed.model_copy(update={"k": 4}), QUIET)
        assert lines_of(folder) == kept
        served.models = ["first"]
        await asyncio.to_thread(evaluate, unnamed.model_copy(update={"k": 4}), QUIET)
        assert len(lines_of(folder)) == len(kept) + 6


def test_a_torn_line_is_cut_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    for text, kept in (("", ""), ("a\nb\n", "a\nb\n"), ("a\nb", "a\n"), ("a", ""), ("x" * 3_000_000, "")):
        path.write_text(text)
        cut_torn_line(path)
        assert path.read_text() == kept


async def test_our_failures_are_void_and_are_tried_again(tmp_path: Path) -> None:
    broken = True

    def answer(body: dict[str, Any]) -> Any:
        return {"choices": []} if broken else "\\boxed{1}"

    async with serving(answer) as served:
        from agent_rl.engines import openai
        from agent_rl.rollout import TooManyFailures

        settings = settings_for(served.url, tmp_path, limit=2, k=1, max_refills=1, max_failures=100)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(openai.tenacity, "wait_random_exponential", lambda **_: lambda state: 0.0)
            folder = await asyncio.to_thread(evaluate, settings, QUIET)
            tree = json.loads((folder / "results.json").read_text())
            assert tree["parts"]["gsm8k"]["avg"]["value"] is None  # not 0: nothing is known
            assert (tree["total"]["void"], tree["total"]["void_causes"]) == (2, {"engine": 2})
            assert len(lines_of(folder)) == 4  # two problems, each with a fresh try
            with pytest.raises(TooManyFailures, match="3 episodes in a row failed on our side"):
                await asyncio.to_thread(evaluate, settings.model_copy(update={"max_failures": 3}), QUIET)
            broken = False
            await asyncio.to_thread(evaluate, settings, QUIET)
    rows = final_rows(row for row, _ in read_rows(folder))
    assert [row.correct is None for row in rows] == [False, False]
    assert all(row.attempt >= 2 for row in rows)


async def test_no_episode_starts_after_the_money_is_spent(tmp_path: Path) -> None:
    async with serving(lambda body: completion("\\boxed{1}", prompt=1000, sampled=500)) as served:
        costly = {"price_in": 1.0, "price_out": 2.0, "max_cost": 0.009, "concurrency": 1}
        settings = settings_for(served.url, tmp_path, **costly)  # 0.002 dollars an episode
        folder = await asyncio.to_thread(evaluate, settings, QUIET)
    tree = json.loads((folder / "results.json").read_text())
    assert tree["total"]["cost"] == pytest.approx(0.010)
    assert tree["total"]["episodes"] == 5
    assert "6 problems have all 3 samples" in (folder / "results.md").read_text()


async def test_a_refused_key_stops_before_anything_is_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    async with serving(lambda body: failing(401, "bad key")) as served:
        command = ["eval", served.url, "--suite", "gsm8k", "--data", str(GSM8K), "--limit", "2", "--k", "1"]
        code = await asyncio.to_thread(main, [*command, "--output", str(tmp_path), "--served-name", "m"])
    told = capsys.readouterr()
    assert code == 2
    assert "the key in $OPENAI_API_KEY is refused" in told.err
    assert "sk-very-secret" not in told.err + told.out
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or "sk-very-secret" not in file.read_text()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["eval", "nothing-here", "--suite", "gsm8k", "--data", str(GSM8K)], "no model 'nothing-here'"),
        (["eval", "http://x", "--suite", "gsm9k"], "did you mean 'gsm8k'"),
        (["eval", "http://x", "--suite", "gsm8k", "--k", "0"], "k = 0"),
        (["eval", "http://x", "--suite", "gsm8k", "--top-p", "0"], "top_p = 0.0"),
        (["eval", "http://x", "--suite", "gsm8k", "--max-cost", "5"], "max_cost needs prices"),
        (["eval", "http://x", "--suite", "gsm8k", "--extra", "[1]"], "a JSON object"),
        (["eval", "http://x", "--suite", "agentic/Maze-v1", "--set", "size"], "write KEY=VALUE"),
        (
            ["eval", "http://x", "--suite", "gsm8k", "--data", str(GSM8K), "--dialect", "klingon"],
            "no tool-call dialect",
        ),
        (["eval", "http://x", "--suite", "gsm8k", "--data", str(GSM8K), "--train-data", "gone.jsonl"], "gone.jsonl"),
        (["eval", "http://x", "--suite", "gsm8k", "--concurrency", "-1"], "concurrency = -1"),
        (["compare", "a", "b"], "a holds no evaluation"),
        (["score", "a"], "a holds no evaluation"),
        (["contamination", "gone.jsonl", "--suite", "gsm8k", "--data", str(GSM8K)], "gone.jsonl"),
    ],
    ids=lambda value: " ".join(value)[-30:] if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert complaint in told.err
    assert (told.err.count("\n"), told.err[:10]) == (1, "agent-rl: ")
    assert list(tmp_path.iterdir()) == []


def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("eval", "compare", "score", "contamination"):
        with pytest.raises(SystemExit) as stop:
            main([name, "--help"])
        assert stop.value.code == 0
        told = capsys.readouterr().out
        assert f"agent-rl {name} " in told.split("example")[1]


def test_an_endpoint_is_evaluated_without_torch() -> None:
    program = (
        "import sys; import agent_rl.evaluation.run, agent_rl.evaluation.cli, agent_rl.evaluation.score; "
        "sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@contextlib.contextmanager
def stopped_after(count: int) -> Iterator[None]:
    """A process that dies after so many episodes are on disk, as far as this process can die."""
    from agent_rl.evaluation import run

    class Stopping(Store):
        left = count

        def add(self, row: Row, transcript: Any) -> None:
            super().add(row, transcript)
            Stopping.left -= 1
            if Stopping.left == 0:
                raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "Store", Stopping)
        yield


def test_a_model_folder_is_evaluated_in_token_space_and_repeats(tiny_folder: Path, tmp_path: Path) -> None:
    """Same seed, same episodes, id for id, whether or not the evaluation was interrupted."""

    def settings(name: str, **changes: Any) -> Any:
        base: dict[str, Any] = {
            "model": str(tiny_folder),
            "suite": "agentic/Arithmetic-v1",
            "options": {"max_digits": 2},
            "limit": 3,
            "k": 4,
            "engine": "transformers",
            "max_tokens": 12,
            "max_episode_tokens": 120,
            "concurrency": 4,
            "sandbox": {"kind": "local", "size": 1},
            "output": str(tmp_path),
            "name": name,
        }
        return checked(**(base | changes))

    def played(folder: Path) -> dict[Any, Any]:
        return {
            row.key: (transcript["token_ids"], transcript["spans"], row.verdict)
            for row, transcript in read_rows(folder)
        }

    whole = played(evaluate(settings("whole"), QUIET))
    assert len(whole) == 12
    with stopped_after(5), pytest.raises(KeyboardInterrupt):
        evaluate(settings("broken"), QUIET)
    assert len(lines_of(tmp_path / "broken")) == 5
    assert (tmp_path / "broken" / "results.json").is_file()
    assert played(evaluate(settings("broken"), QUIET)) == whole
    other = played(evaluate(settings("other", seed=1), QUIET))
    assert {ids for ids in map(str, other.values())} != {ids for ids in map(str, whole.values())}
    page = (tmp_path / "whole" / "transcripts.html").read_text()
    assert page.count("<details") == 12
    assert "&lt;|im_start|&gt;assistant" in page  # decoded from ids, with what the template put there
    tree = json.loads((tmp_path / "whole" / "results.json").read_text())
    assert tree["total"]["tokens_sampled"] == sum(sum(e - s for s, e in spans) for _, spans, _ in whole.values())


def test_a_name_on_the_hub_is_fetched_or_says_why_not(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def snapshot(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name == "org/gone":
            raise OSError("404 not found\nat all")
        return str(tiny_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    told: list[str] = []
    assert find_model("org/small", told.append).folder == tiny_folder
    assert told == ["fetching org/small from the hub (cached afterwards)"]
    assert "*.safetensors" in asked[0][1]
    assert not any(".bin" in pattern or ".pt" in pattern for pattern in asked[0][1])
    with pytest.raises(
        ConfigError, match="org/gone is no folder here, and the hub did not give it: 404 not found at all"
    ):
        find_model("org/gone", told.append)


def test_other_weights_are_another_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(os.urandom(3_000_000))
    before = fingerprint(tmp_path)
    (tmp_path / "notes.txt").write_text("of no matter")
    assert fingerprint(tmp_path) == before
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"!!!!!")
    assert fingerprint(tmp_path) != before
