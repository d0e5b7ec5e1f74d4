"""Multi-turn rollouts beside the engine alone and beside a lock-step driver: python tests/benchmarks/bench_rollout.py

SmolLM2-135M on vLLM. Every turn samples a fixed number of tokens (nothing stops it early), so all ways make the same
tokens: the engine alone in one request a sequence, ours and the lock-step driver in three turns with a tool in between.
Tools take 50 ms, or between 50 ms and 5 s with an evenly spread logarithm.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

from agent_rl.codec import ChatCodec
from agent_rl.collect import Collector
from agent_rl.config import RolloutConfig
from agent_rl.engines.vllm import VllmEngine
from agent_rl.models import load_tokenizer
from agent_rl.smollm2 import prepare_smollm2
from agent_rl.types import Sampling
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


class Bench:
    def __init__(self, engine: VllmEngine, codec: ChatCodec, sequences: int, tokens: int) -> None:
        self.engine, self.codec, self.sequences, self.tokens = engine, codec, sequences, tokens
        self.codec.stop_token_ids = ()  # every turn is as long as the limit
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
        await asyncio.gather(*(self.sample(self.prompt, TURNS * self.tokens) for _ in range(self.sequences)))

    async def ours(self, latency: Callable[[], float]) -> None:
        config = RolloutConfig(
            group=self.sequences, max_tokens=self.tokens, max_turns=TURNS, max_episode_tokens=self.engine.max_model_len
        )
        collector = Collector(
            lambda: SlowTool(latency), engine=self.engine, codec=self.codec, config=config, seed=next(self._ids)
        )
        collected = await collector.groups([Task(id="t", prompt="", answer=None)], next(self._ids))
        assert all(t.num_sampled == TURNS * self.tokens for t in collected.trajectories)

    async def lockstep(self, latency: Callable[[], float]) -> None:
        """All generate, then all run their tools, then all generate: what a driver over ``generate(batch)`` does."""
        prompts = [self.prompt] * self.sequences
        for turn in range(TURNS):
            prompts = list(await asyncio.gather(*(self.sample(prompt, self.tokens) for prompt in prompts)))
            if turn < TURNS - 1:
                await asyncio.gather(*(asyncio.sleep(latency()) for _ in prompts))
                prompts = [[*prompt, *self.between] for prompt in prompts]

    async def rate(self, way: Awaitable[None]) -> float:
        started = time.perf_counter()
        await way
        return self.sequences * TURNS * self.tokens / (time.perf_counter() - started)


async def main(arguments: argparse.Namespace) -> None:
    folder = prepare_smollm2()
    codec = ChatCodec(load_tokenizer(folder), system_text=lambda schemas: "")
    engine = VllmEngine(model=folder, max_model_len=1024, max_num_seqs=arguments.sequences, kv_cache_gb=2.0)
    await engine.start()
    bench = Bench(engine, codec, arguments.sequences, arguments.tokens)
    rng = random.Random(0)
    short, long = (lambda: 0.05), (lambda: 0.05 * 100 ** rng.random())
    ways: dict[str, Callable[[], Any]] = {
        "engine alone": bench.alone,
        "rollouts, 50 ms tools": lambda: bench.ours(short),
        "lock-step, 50 ms tools": lambda: bench.lockstep(short),
        "rollouts, 50 ms - 5 s tools": lambda: bench.ours(long),
        "lock-step, 50 ms - 5 s tools": lambda: bench.lockstep(long),
    }
    await bench.alone()  # warm
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, way in ways.items():
            rates[name].append(await bench.rate(way()))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"\n{arguments.sequences} sequences, {TURNS} turns of {arguments.tokens} tokens, {arguments.rounds} rounds\n")
    print("| way | tokens/s (median) | lowest | highest | of the engine alone |\n|---|---|---|---|---|")
    for name, values in rates.items():
        share = medians[name] / medians["engine alone"]
        print(f"| {name} | {medians[name]:.0f} | {min(values):.0f} | {max(values):.0f} | {share:.2f} |")
    gain = medians["rollouts, 50 ms - 5 s tools"] / medians["lock-step, 50 ms - 5 s tools"]
    print(f"\nrollouts over lock-step with 50 ms - 5 s tools: {gain:.2f}x")
    await engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32, help="of one turn")
    parser.add_argument("--rounds", type=int, default=3)
    asyncio.run(main(parser.parse_args()))
