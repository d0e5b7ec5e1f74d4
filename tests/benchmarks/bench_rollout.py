"""Multi-turn rollouts beside the engine alone and beside a lock-step driver: python tests/benchmarks/bench_rollout.py

SmolLM2-135M on vLLM, or with ``--model tiny`` the quickstart's untrained one, whose sequences grow as fast as a large
model's on a GPU: the time to generate and that of the tools then stand in the proportion of such a machine. Each turn
of each sequence has a length of its own, evenly spread in its logarithm as real turns are uneven, and the same for all
ways; nothing stops it early. The engine alone samples a sequence's tokens in one request, ours and the lock-step driver
in three turns with a tool in between. Tools take 50 ms, or between 50 ms and 5 s with an evenly spread logarithm.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench_trl import untrained_tiny

from agent_rl.codec import ChatCodec
from agent_rl.collect import Collector
from agent_rl.config import RolloutConfig, load_config
from agent_rl.engines.vllm import VllmEngine
from agent_rl.models import load_tokenizer
from agent_rl.smollm2 import prepare_smollm2
from agent_rl.types import Generation, Sampling
from envs.types import Message, ModelTurn, Opening, Task, TurnResult

TURNS = 3
RESULT: Message = {"role": "user", "content": "```output\n42\n```"}
QUESTION: Message = {"role": "user", "content": "A farmer has 12 hens and buys 30 more. How many hens are there?"}


class SlowTool:
    """Three turns; the tool in between takes as long as ``latency`` says."""

    def __init__(self, latency: Callable[[], float]) -> None:
        self._latency = latency

    async def areset(self, seed: int, task: Task) -> Opening:
        self._turn = 0
        return Opening(messages=(QUESTION,), tools=())

    async def astep(self, turn: ModelTurn) -> TurnResult:
        self._turn += 1
        if self._turn == TURNS:
            return TurnResult(messages=(), reward=1.0, terms={}, stop="answer", calls=())
        await asyncio.sleep(self._latency())
        return TurnResult(messages=(RESULT,), reward=None, terms={}, stop=None, calls=())

    async def aclose(self) -> None:
        return None


class PlannedLengths:
    """The engine, with the length of every turn as planned."""

    def __init__(self, engine: VllmEngine, lengths: list[list[int]]) -> None:
        self.engine, self.lengths = engine, lengths
        self._turn: dict[str, int] = {}

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        turn = self._turn[request_id] = self._turn.get(request_id, -1) + 1
        planned = replace(sampling, max_tokens=self.lengths[int(request_id.split("-")[2])][turn])
        return await self.engine.generate(prompt_ids, planned, request_id=request_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class Bench:
    def __init__(self, engine: VllmEngine, codec: ChatCodec, lengths: list[list[int]]) -> None:
        self.engine, self.codec, self.lengths = engine, codec, lengths
        self.codec.stop_token_ids = ()  # every turn is as long as planned
        self.prompt = codec.open(Opening(messages=(QUESTION,), tools=()))
        self.between = codec.extend("length", [RESULT])
        self._ids = iter(range(10**9))

    async def sample(self, prompt: list[int], tokens: int) -> list[int]:
        number = next(self._ids)
        sampling = Sampling(max_tokens=tokens, temperature=1.0, seed=number, stop_token_ids=())
        generation = await self.engine.generate(prompt, sampling, request_id=f"bench-{number}")
        assert len(generation.token_ids) == tokens
        return [*prompt, *generation.token_ids]

    async def alone(self) -> None:
        await asyncio.gather(*(self.sample(self.prompt, sum(turns)) for turns in self.lengths))

    async def ours(self, latency: Callable[[], float]) -> None:
        config = RolloutConfig(
            group=len(self.lengths),
            max_tokens=self.engine.max_model_len,
            max_turns=TURNS,
            max_episode_tokens=self.engine.max_model_len,
        )
        engine: Any = PlannedLengths(self.engine, self.lengths)
        collector = Collector(
            lambda: SlowTool(latency), engine=engine, codec=self.codec, config=config, seed=next(self._ids)
        )
        collected = await collector.groups([Task(id="t", prompt="", answer=None)], next(self._ids))
        assert [t.num_sampled for t in collected.trajectories] == [sum(turns) for turns in self.lengths]

    async def lockstep(self, latency: Callable[[], float]) -> None:
        """All generate, then all run their tools, then all generate: what a driver over ``generate(batch)`` does."""
        prompts = [self.prompt] * len(self.lengths)
        for turn in range(TURNS):
            samples = (self.sample(prompt, turns[turn]) for prompt, turns in zip(prompts, self.lengths, strict=True))
            prompts = list(await asyncio.gather(*samples))
            if turn < TURNS - 1:
                await asyncio.gather(*(asyncio.sleep(latency()) for _ in prompts))
                prompts = [[*prompt, *self.between] for prompt in prompts]

    async def rate(self, way: Awaitable[None]) -> float:
        started = time.perf_counter()
        await way
        return sum(map(sum, self.lengths)) / (time.perf_counter() - started)


async def main(arguments: argparse.Namespace, folder: Path) -> None:
    codec = ChatCodec(load_tokenizer(folder), system_text=lambda schemas: "")
    engine = VllmEngine(model=folder, max_model_len=2048, max_num_seqs=arguments.seats, kv_cache_gb=2.0)
    await engine.start()
    rng = random.Random(0)
    spread = arguments.longest / arguments.shortest
    lengths = [
        [round(arguments.shortest * spread ** rng.random()) for _ in range(TURNS)] for _ in range(arguments.sequences)
    ]
    bench = Bench(engine, codec, lengths)
    short, long = (lambda: 0.05), (lambda: 0.05 * 100 ** rng.random())
    ways: dict[str, Callable[[], Any]] = {
        "engine alone": bench.alone,
        "rollouts, 50 ms tools": lambda: bench.ours(short),
        "lock-step, 50 ms tools": lambda: bench.lockstep(short),
        "rollouts, 50 ms - 5 s tools": lambda: bench.ours(long),
        "lock-step, 50 ms - 5 s tools": lambda: bench.lockstep(long),
    }
    await bench.alone()  # warm
    ways = {name: way for name, way in ways.items() if name == "engine alone" or arguments.only in name}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, way in ways.items():
            rates[name].append(await bench.rate(way()))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    turns = f"{TURNS} turns of {arguments.shortest} to {arguments.longest} tokens"
    total = sum(map(sum, lengths))
    print(f"\n{arguments.sequences} sequences, {arguments.seats} at once, {turns}, {total} together\n")
    print("| way | tokens/s (median) | lowest | highest | of the engine alone |\n|---|---|---|---|---|")
    for name, values in rates.items():
        share = medians[name] / medians["engine alone"]
        print(f"| {name} | {medians[name]:.0f} | {min(values):.0f} | {max(values):.0f} | {share:.2f} |")
    pair = medians.get("rollouts, 50 ms - 5 s tools"), medians.get("lock-step, 50 ms - 5 s tools")
    if pair[0] and pair[1]:
        print(f"\nrollouts over lock-step with 50 ms - 5 s tools: {pair[0] / pair[1]:.2f}x")
    await engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("smollm2", "tiny"), default="smollm2")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--seats", type=int, default=32, help="sequences decoded at once")
    parser.add_argument("--shortest", type=int, default=16, help="tokens of a turn")
    parser.add_argument("--longest", type=int, default=256, help="tokens of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="ways whose name has this in it, beside the engine alone")
    given = parser.parse_args()
    with TemporaryDirectory() as home:
        tiny = given.model == "tiny"
        model = untrained_tiny(Path(home), load_config("quickstart")) if tiny else prepare_smollm2()
        asyncio.run(main(given, model))
