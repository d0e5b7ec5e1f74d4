"""Learner: layouts, memory of the head, publishing: python tests/benchmarks/bench_learner.py [layouts|head|publish]

``layouts`` times score and step of one batch of uneven trajectories with long prompts in each layout. ``head`` takes
the peak memory and time of logprob and entropy, forward and backward, naive and chunked, each in its own process.
``publish`` puts SmolLM2-135M into a running vLLM beside one raw copy of the same bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from agent_rl.config import LearnerConfig
from agent_rl.pack import SampledSequence

LAYOUTS = ("padded", "packed", "shared")


def batch(groups: int, members: int, prompt: int, vocabulary: int) -> list[SampledSequence]:
    """Groups with one prompt each; completions of 16 to 256 tokens in two turns with an observation in between."""
    rng = random.Random(0)
    sequences = []
    for _ in range(groups):
        shared = [rng.randrange(vocabulary) for _ in range(prompt)]
        for _ in range(members):
            first, second = rng.randint(8, 128), rng.randint(8, 128)
            ids = [*shared, *(rng.randrange(vocabulary) for _ in range(first + 20 + second))]
            sampled = (*range(prompt, prompt + first), *range(prompt + first + 20, len(ids)))
            sequences.append(SampledSequence(token_ids=tuple(ids), positions=sampled))
    return sequences


def layouts(arguments: argparse.Namespace) -> None:
    from agent_rl.learner import Learner
    from agent_rl.models import load_model
    from agent_rl.smollm2 import prepare_smollm2

    folder = prepare_smollm2()
    sequences = batch(arguments.groups, 8, arguments.prompt, 40_000)
    tokens = sum(len(s.token_ids) for s in sequences)
    num_sampled = sum(len(s.positions) for s in sequences)
    taken: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    slots: dict[str, int] = {}
    learners: dict[str, Any] = {}
    for layout in LAYOUTS:
        config = LearnerConfig(layout=layout, micro_tokens=2048, optimizer="sgd")  # type: ignore[arg-type]
        learners[layout] = Learner(load_model(folder, "float32"), config, temperature=1.0)
    for _ in range(arguments.rounds):
        for layout, learner in learners.items():
            started = time.perf_counter()
            micro_batches = learner.pack(sequences)
            slots[layout] = sum(m.num_slots for m in micro_batches[0])
            logp = learner.score(micro_batches, num_sampled).logp
            learner.step(micro_batches, torch.full((num_sampled,), 1e-9), logp)
            taken[layout].append(time.perf_counter() - started)
    print(
        f"\nSmolLM2-135M float32, {len(sequences)} trajectories in groups of 8, prompts of {arguments.prompt}, "
        f"{tokens} tokens ({num_sampled} sampled); score and step, {arguments.rounds} rounds\n"
    )
    print("| layout | slots | padding | s (median) | tokens/s | to packed |\n|---|---|---|---|---|---|")
    packed = statistics.median(taken["packed"])
    for layout in LAYOUTS:
        median = statistics.median(taken[layout])
        padding = max(0.0, 1 - tokens / slots[layout])
        rate, gain = tokens / median, packed / median
        print(f"| {layout} | {slots[layout]} | {padding:.3f} | {median:.2f} | {rate:.0f} | {gain:.2f}x |")


def head(arguments: argparse.Namespace) -> None:
    print("\nlogprob and entropy of T = 4,096 tokens, hidden 576, forward and backward, float32\n")
    print("| V | way | peak MiB above the inputs | s |\n|---|---|---|---|")
    for vocabulary in (49_152, 151_936):
        peaks = {}
        for way in ("naive", "chunked"):
            command = [sys.executable, __file__, "one-head", "--way", way, "--vocabulary", str(vocabulary)]
            peak, seconds = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            peaks[way] = float(peak)
            print(f"| {vocabulary:,} | {way} | {float(peak):.0f} | {float(seconds):.1f} |", flush=True)
        print(f"| | naive / chunked | {peaks['naive'] / peaks['chunked']:.1f}x | |")


class Headed(torch.nn.Module):
    """As much of a model as the learner's way through the head asks for."""

    def __init__(self, head_layer: torch.nn.Module) -> None:
        super().__init__()
        self.head = head_layer

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


def one_head(arguments: argparse.Namespace) -> None:
    from torch.utils.checkpoint import checkpoint

    from agent_rl.policy import Policy

    torch.manual_seed(0)
    tokens, width, vocabulary = 4096, 576, arguments.vocabulary
    hidden = torch.randn(tokens, width, requires_grad=True)
    head_layer = torch.nn.Linear(width, vocabulary, bias=False)
    weight = head_layer.weight
    weight.grad, hidden.grad = torch.zeros_like(weight), torch.zeros_like(hidden)
    policy = Policy(Headed(head_layer), temperature=1.0)
    target = torch.randint(vocabulary, (tokens,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    if arguments.way == "naive":
        logp = torch.log_softmax(hidden @ weight.T, -1)
        entropy = -(logp.exp() * logp).sum(-1)
        chosen = logp.gather(-1, target[:, None]).squeeze(-1)
    else:
        pairs = zip(hidden.split(arguments.chunk), target.split(arguments.chunk), strict=True)
        parts = [checkpoint(policy._chunk, rows, ids, True, use_reentrant=False) for rows, ids in pairs]
        chosen, entropy, _ = (torch.cat(column) for column in zip(*parts, strict=True))
    chosen.sum().backward()
    assert torch.isfinite(entropy.sum())
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(peak, time.perf_counter() - started)


async def publish(arguments: argparse.Namespace) -> None:
    from agent_rl.engines.vllm import VllmEngine
    from agent_rl.models import load_model
    from agent_rl.smollm2 import prepare_smollm2

    folder = prepare_smollm2()
    started = time.perf_counter()
    engine = VllmEngine(model=folder, max_model_len=512, max_num_seqs=8, kv_cache_gb=0.5)
    await engine.start()
    cold = time.perf_counter() - started
    tensors = list(load_model(folder, "float32").named_parameters())
    size = sum(t.numel() * t.element_size() for _, t in tensors)
    copies, updates = [], []
    for version in range(1, arguments.rounds + 1):
        with TemporaryDirectory(dir="/dev/shm") as memory:
            started = time.perf_counter()
            with (Path(memory) / "raw").open("wb") as file:
                for _, tensor in tensors:
                    file.write(tensor.detach().contiguous().view(torch.uint8).numpy().data)
            for _, tensor in tensors:
                tensor.detach().clone()
            copies.append(time.perf_counter() - started)
        started = time.perf_counter()
        await engine.update_weights(tensors, version)
        updates.append(time.perf_counter() - started)
    copy, update = statistics.median(copies), statistics.median(updates)
    print(f"\nSmolLM2-135M float32, {size / 1e6:.0f} MB into vLLM on the CPU, {arguments.rounds} rounds\n")
    print("| way | s (median) | lowest | highest |\n|---|---|---|---|")
    print(f"| raw: once into shared memory, once out | {copy:.2f} | {min(copies):.2f} | {max(copies):.2f} |")
    print(f"| publish | {update:.2f} | {min(updates):.2f} | {max(updates):.2f} |")
    print(f"\npublish / raw copy {update / copy:.1f}x; engine cold start {cold:.1f} s")
    await engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("layouts", "head", "publish", "one-head"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--way", choices=("naive", "chunked"), default="chunked", help=argparse.SUPPRESS)
    parser.add_argument("--vocabulary", type=int, default=49_152, help=argparse.SUPPRESS)
    parser.add_argument("--chunk", type=int, default=256, help="tokens projected at once")
    given = parser.parse_args()
    if given.what in (None, "layouts"):
        layouts(given)
    if given.what in (None, "head"):
        head(given)
    if given.what in (None, "publish"):
        asyncio.run(publish(given))
    if given.what == "one-head":
        one_head(given)
