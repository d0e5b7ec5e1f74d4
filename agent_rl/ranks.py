"""A learner of several ranks: the same ``Learner`` in one Ray actor each, behind the same methods.

One machine by default; where Ray was told of a cluster (``RAY_ADDRESS``), ranks may lie on several. A rank that dies
ends the step with one line; the run goes on from its last checkpoint when it is started again.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from agent_rl.algorithm import RatioRule
from agent_rl.config import LearnerConfig
from agent_rl.errors import ConfigError, LearnerFailure
from agent_rl.learner import Learner, StepReport
from agent_rl.models import DTYPES, load_model
from agent_rl.pack import MicroBatch, SampledSequence, pack
from agent_rl.regularisers import Penalty
from stare import TokenStatistics

AnyLearner: TypeAlias = "Learner | LearnerRanks"

PLACEMENT_S = 60.0
"""How long all ranks may take to get a place."""


def make_learner(
    folder: Path,
    dtype: str,
    config: LearnerConfig,
    *,
    temperature: float,
    threads: int = 0,
    keep_reference: bool = False,
) -> AnyLearner:
    """In this process, or with ``config.ranks`` > 1 one Ray actor a rank.

    With ``keep_reference`` it can score under the weights of ``folder`` for ever (``Learner.reference_logp``).
    """
    if config.ranks == 1:
        return _one_learner(folder, dtype, config, temperature, keep_reference)
    return LearnerRanks(folder, dtype, config, temperature=temperature, threads=threads, keep_reference=keep_reference)


def _one_learner(folder: Path, dtype: str, config: LearnerConfig, temperature: float, keep_reference: bool) -> Learner:
    # Adapters leave the base as it was: no second copy.
    reference = load_model(folder, dtype) if keep_reference and not config.lora.rank else None
    return Learner(load_model(folder, dtype), config, temperature=temperature, reference=reference)


class LearnerRanks:
    """All ranks of a learner; see ``Learner`` for what its methods do.

    Args:
        folder: model folder, which every rank can read.
        threads: of each rank on the CPU; 0 shares the cores out.
        keep_reference: as in ``make_learner``.

    Raises:
        ConfigError: there is no room for so many ranks.
        LearnerFailure: a rank did not come up.
    """

    def __init__(
        self,
        folder: Path,
        dtype: str,
        config: LearnerConfig,
        *,
        temperature: float,
        threads: int,
        keep_reference: bool = False,
    ) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
        from transformers import AutoConfig

        self.config = config
        self.dtype = DTYPES[dtype]
        self.steps_taken = 0
        self._width: int = AutoConfig.from_pretrained(folder).get_text_config().hidden_size
        self._ranks: list[Any] = []
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            local: dict[str, Any] = {}
            if "RAY_ADDRESS" not in os.environ:
                local = {"num_cpus": max(config.ranks, os.cpu_count() or 1), "object_store_memory": 2**30}
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, **local)
        bundle = {"GPU": 1, "CPU": 1} if torch.cuda.is_available() else {"CPU": 1}
        self._places = ray.util.placement_group([bundle] * config.ranks, strategy="PACK")
        if not self._places.wait(PLACEMENT_S):
            found = {name: ray.cluster_resources().get(name, 0) for name in bundle}  # type: ignore[no-untyped-call]
            self.close()
            raise ConfigError(f"learner.ranks = {config.ranks}: each takes {bundle}, and Ray has {found}")
        threads = threads or max(1, (os.cpu_count() or 1) // config.ranks)
        actor = ray.remote(_Rank)
        for rank in range(config.ranks):
            strategy = PlacementGroupSchedulingStrategy(self._places, placement_group_bundle_index=rank)
            options = {"num_cpus": 1, "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": strategy}
            self._ranks.append(actor.options(**options).remote(rank, config.ranks, threads))
        address = ray.get(self._ranks[0].address.remote())
        self._all("start", address, str(folder), dtype, config, temperature, keep_reference)

    def pack(self, sequences: Sequence[SampledSequence]) -> list[list[MicroBatch]]:
        return pack(
            sequences,
            layout=self.config.layout,
            token_budget=self.config.micro_tokens,
            max_sequences=self.config.max_micro_sequences,
            num_ranks=self.config.ranks,
            width=self._width,
        )

    def score(
        self, micro_batches: Sequence[Sequence[MicroBatch]], num_tokens: int, *, before_step: bool = False
    ) -> TokenStatistics:
        # What travels to an actor arrives as another object, so a step there always makes its own forward.
        statistics: TokenStatistics = self._all("call", "score", micro_batches, num_tokens)
        return statistics

    def reference_logp(self, micro_batches: Sequence[Sequence[MicroBatch]], num_tokens: int) -> Tensor:
        logp_T: Tensor = self._all("call", "reference_logp", micro_batches, num_tokens)
        return logp_T

    def step(
        self,
        micro_batches: Sequence[Sequence[MicroBatch]],
        coefficient_T: Tensor,
        logp_old_T: Tensor | None,
        *,
        statistics: bool = False,
        rule: RatioRule | None = None,
        penalties: Sequence[Penalty] = (),
    ) -> StepReport:
        options = {"statistics": statistics, "rule": rule, "penalties": penalties}
        report: StepReport = self._all("call", "step", micro_batches, coefficient_T, logp_old_T, **options)
        self.steps_taken += report.num_steps
        return report

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._all("tensors")

    def save(self, folder: Path) -> None:
        self._all("call", "save", folder)

    def load(self, folder: Path) -> None:
        self._all("call", "load", folder)
        self.steps_taken = self._all("steps")

    def export(self, folder: Path, tokenizer: Any) -> None:
        self._all("call", "export", folder, tokenizer)

    def close(self) -> None:
        """All actors are gone; may be called twice."""
        import ray

        for rank in self._ranks:
            ray.kill(rank)
        self._ranks = []
        if self._places is not None:
            ray.util.remove_placement_group(self._places)
            self._places = None
        if self._owns_ray and ray.is_initialized():
            ray.shutdown()

    def _all(self, method: str, *arguments: Any, **named: Any) -> Any:
        """What rank 0 returned once every rank has.

        Raises:
            LearnerFailure: a rank died, or failed in a way that is not the caller's.
        """
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        if not self._ranks:
            raise LearnerFailure("the learner's ranks are gone")
        shared = [ray.put(argument) for argument in arguments]
        refs = [getattr(rank, method).remote(*shared, **named) for rank in self._ranks]
        waiting = list(refs)
        failed: dict[int, Exception] = {}

        def note(done: list[Any]) -> None:
            for ref in done:
                try:
                    ray.get(ref)
                except (RayActorError, RayTaskError) as error:
                    failed[refs.index(ref)] = error

        while waiting and not failed:
            done, waiting = ray.wait(waiting)
            note(done)
        if not failed:
            return ray.get(refs[0])
        if waiting:
            # When one dies the others may be the first to notice, by a broken connection: name the one that is gone.
            note(ray.wait(waiting, num_returns=len(waiting), timeout=5.0)[0])
        dead = [rank for rank, error in failed.items() if isinstance(error, RayActorError)]
        rank = min(dead or failed)
        first = failed[rank]
        self.close()
        cause = first.cause if isinstance(first, RayTaskError) else None
        if isinstance(cause, (ConfigError, ValueError, LearnerFailure)):
            raise cause
        told = "died" if dead else f"failed: {str(first).strip().splitlines()[-1]}"
        raise LearnerFailure(f"learner rank {rank} of {len(refs)} {told}") from first


class _Rank:
    """One rank, in a process of its own."""

    def __init__(self, rank: int, world_size: int, threads: int) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0")  # a rank sees its own GPU alone
        torch.set_num_threads(threads)
        self.learner: Learner | None = None

    def address(self) -> tuple[str, int]:
        """Where this rank can be met by the others."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            return host, probe.getsockname()[1]

    def start(
        self,
        address: tuple[str, int],
        folder: str,
        dtype: str,
        config: LearnerConfig,
        temperature: float,
        keep_reference: bool,
    ) -> None:
        os.environ.update(MASTER_ADDR=address[0], MASTER_PORT=str(address[1]))
        self.learner = _one_learner(Path(folder), dtype, config, temperature, keep_reference)

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        result = getattr(self.learner, method)(*arguments, **named)
        return result if os.environ["RANK"] == "0" else None

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Every rank walks through them, because ZeRO 3 gathers; rank 0's are returned."""
        assert self.learner is not None
        keep = os.environ["RANK"] == "0"
        return [(name, tensor.cpu().clone()) for name, tensor in self.learner.named_tensors() if keep]

    def process(self) -> int:
        return os.getpid()

    def steps(self) -> int:
        assert self.learner is not None
        return self.learner.steps_taken
