"""Owns parameters and optimiser (DeepSpeed): scores a batch, makes one step of a plan, saves and restores itself.

SPMD: every rank builds the same ``Learner`` and calls the same methods; a rank works on its own micro-batches and the
results of all are the same everywhere. Nothing here ranks, averages or decides: the plan's coefficients are summed.
"""

from __future__ import annotations

import functools
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from agent_rl.algorithm import RatioRule
from agent_rl.config import LearnerConfig
from agent_rl.errors import LearnerFailure
from agent_rl.lora import add_adapter, merged_tensors, without_adapter
from agent_rl.offload import load_partitions, save_partitions, swap_folder
from agent_rl.pack import MicroBatch, SampledSequence, pack
from agent_rl.policy import Policy, check_head
from agent_rl.regularisers import Penalty
from agent_rl.zero import deepspeed_config, init_distributed
from stare import TokenStatistics, surrogate_sum

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_NO_MEMORY = re.compile(
    r"out of memory|(can't|cannot|failed to|unable to) allocate|not enough memory|ALLOC_FAILED", re.I
)
"""What allocators of the CPU, CUDA and its libraries say; an illegal access to memory is another fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one optimizer step did."""

    loss: float  # the summed surrogate
    grad_norm: float  # of the whole gradient, before clipping
    clip_fraction: float  # share of sampled tokens whose clipped branch was active
    lr: float
    num_micro_batches: int  # of this rank, pads included
    num_steps: int = 1  # taken
    skipped_steps: int = 0  # left out because the float16 gradient overflowed; weights and optimizer are untouched
    penalties: Mapping[str, float] = field(default_factory=dict)  # sum of scale * penalty by term, no coefficient
    statistics: TokenStatistics | None = None  # [T] of the step's own forwards, where they were asked for

    @staticmethod
    def joined(reports: Sequence[StepReport], num_tokens: Sequence[int]) -> StepReport:
        """Of several steps, one after the other: means (the clip's by tokens), the last learning rate."""
        weights = [n / max(1, sum(num_tokens)) for n in num_tokens]
        columns = [r.statistics for r in reports if r.statistics is not None]
        terms = dict.fromkeys(name for r in reports for name in r.penalties)
        found = {name: [r.penalties[name] for r in reports if name in r.penalties] for name in terms}
        return StepReport(
            loss=sum(r.loss for r in reports) / len(reports),
            grad_norm=sum(r.grad_norm for r in reports) / len(reports),  # infinite where one overflowed
            clip_fraction=sum(r.clip_fraction * w for r, w in zip(reports, weights, strict=True)),
            lr=reports[-1].lr,
            num_micro_batches=sum(r.num_micro_batches for r in reports),
            num_steps=sum(r.num_steps for r in reports),
            skipped_steps=sum(r.skipped_steps for r in reports),
            penalties={name: sum(values) / len(values) for name, values in found.items()},
            statistics=TokenStatistics(*map(torch.cat, zip(*columns, strict=True))) if columns else None,
        )


def _out_of_memory(method: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """``method``, whose running out of memory names the settings that need less."""

    @functools.wraps(method)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return method(*args, **kwargs)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            is_plain = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
            if is_plain and not _NO_MEMORY.search(str(error)):
                raise
            told = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise LearnerFailure(
                f"the learner ran out of memory in {method.__name__} ({told}): lower "
                "learner.micro_tokens or learner.chunk_tokens, or set learner.activation_checkpointing"
            ) from error

    return guarded


class Learner:
    """The policy under training.

    Args:
        model: a causal language model of transformers, on the CPU or this rank's device.
        config: of the update.
        temperature: of sampling; logprobs and entropy are those of ``logits / temperature``.
        reference: a second copy of the model, for ``reference_logp``; it is frozen. Adapters need none.
    """

    def __init__(self, model: Any, config: LearnerConfig, *, temperature: float, reference: Any | None = None) -> None:
        import deepspeed

        init_distributed()
        self.config = config
        self.model = model
        model.train()  # dropout is zero in current models; training mode is what gradient checkpointing looks at
        model.config.use_cache = False
        if config.lora.rank:
            add_adapter(model, config.lora)
        if config.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.policy = Policy(model, temperature=temperature, chunk_tokens=config.chunk_tokens)
        check_head(self.policy)
        self._swap = swap_folder(config.offload_path) if config.offload_path is not None else None
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=self.policy,
            model_parameters=self._trained(),
            config=deepspeed_config(config, model.dtype, self._swap),
        )
        if config.zero_stage == 0 and model.dtype == torch.float32:
            # Without ZeRO DeepSpeed clips float32 gradients but throws their norm away.
            self.engine.clip_fp32_gradients = self._clip
        elif config.zero_stage == 0:
            # And in bfloat16 it has made a step without a gradient, which Adam's bias correction would count.
            self.optimizer.optimizer.state.clear()
        self.rank, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.device = self.engine.device
        self.dtype: torch.dtype = model.dtype
        self._reference: Policy | None = None
        if reference is not None:
            frozen = reference.to(self.device).requires_grad_(False)
            self._reference = Policy(frozen, temperature=temperature, chunk_tokens=config.chunk_tokens)
        self.steps_taken = 0
        self._scored: tuple[MicroBatch, TokenStatistics] | None = None  # a forward whose backward comes with the step

    def pack(self, sequences: Sequence[SampledSequence]) -> list[list[MicroBatch]]:
        """The batch as micro-batches of every rank."""
        return pack(
            sequences,
            layout=self.config.layout,
            token_budget=self.config.micro_tokens,
            max_sequences=self.config.max_micro_sequences,
            num_ranks=self.world_size,
            width=self.model.config.get_text_config().hidden_size,
        )

    @_out_of_memory
    def score(
        self, micro_batches: Sequence[Sequence[MicroBatch]], num_tokens: int, *, before_step: bool = False
    ) -> TokenStatistics:
        """Logprob, entropy and Phi [T] of every sampled token, on the CPU of every rank, under the current weights.

        With ``before_step`` the next call is ``step`` on the same micro-batches: where they are one a rank, the step
        goes on from this forward instead of making its own, which takes no more memory and changes no bit.
        """
        own = micro_batches[self.rank]
        columns = torch.zeros(3, num_tokens)
        self._scored = None
        with torch.set_grad_enabled(before_step and len(own) == 1):
            for batch in own:
                statistics = self.engine(_to(batch, self.device), statistics=True)
                if not batch.is_pad:
                    columns[:, batch.origin] = torch.stack(statistics).detach().cpu()
                if torch.is_grad_enabled():
                    self._scored = (batch, statistics)
        return TokenStatistics(*self._of_all_ranks(columns))

    @torch.no_grad()
    @_out_of_memory
    def reference_logp(self, micro_batches: Sequence[Sequence[MicroBatch]], num_tokens: int) -> Tensor:
        """Logprob [T] of every sampled token, on the CPU of every rank, under the weights that training started from.

        They are the base model's where adapters are trained, else those of the ``reference`` given at the start.
        """
        assert self._reference is not None or self.config.lora.rank, "the learner was made without a reference"
        logp_T = torch.zeros(num_tokens)
        with without_adapter(self.model) if self._reference is None else nullcontext():
            policy = self.engine if self._reference is None else self._reference
            for batch in micro_batches[self.rank]:
                logp = policy(_to(batch, self.device), statistics=False).logp
                if not batch.is_pad:
                    logp_T[batch.origin] = logp.cpu()
        return self._of_all_ranks(logp_T)

    def _of_all_ranks(self, columns: Tensor) -> Tensor:
        if self.world_size > 1:
            # Each token was filled in by one rank and is zero on the others, so the sum is exact.
            columns = columns.to(self.device)
            torch.distributed.all_reduce(columns)
            columns = columns.cpu()
        return columns

    @_out_of_memory
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
        """One optimizer step on ``-sum_t c_t * clipped ratio_t`` plus the penalties, over all ranks.

        In float16 a step whose gradient overflows is skipped on every rank: ``steps_taken`` stays, and with it the
        learning rate's place in its schedule; the loss is scaled by half from the next step on.

        Args:
            micro_batches: of every rank, from ``pack``.
            coefficient_T: float32 [T].
            logp_old_T: float32 [T]; None takes each token's own logprob (ratio 1, gradient ``c * grad logp``: with
                ``c = 1 / N`` that is maximum likelihood, which is how the cold start uses it).
            statistics: also return logprob, entropy and Phi of these tokens, from the same forwards.
            rule: another rule for the ratio than the clip of this learner's settings.
            penalties: further terms, each times its coefficient.
        """
        lr = self.config.lr_at(self.steps_taken)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        totals = torch.zeros(2 + len(penalties), dtype=torch.float64)  # loss, clipped tokens, each penalty
        entropy_gradient = any(penalty.of_entropy for penalty in penalties)
        columns = torch.zeros(3, coefficient_T.numel() if statistics else 0)
        scored, self._scored = self._scored, None
        for batch in micro_batches[self.rank]:
            # A forward made before the step has an entropy without gradient.
            if scored is not None and scored[0] is batch and not entropy_gradient:
                output = scored[1]
            else:
                moved = _to(batch, self.device)
                output = self.engine(moved, statistics=statistics, entropy_gradient=entropy_gradient)
            logp = output.logp
            if statistics and not batch.is_pad:
                columns[:, batch.origin] = torch.stack(output).detach().cpu()
            coefficient = coefficient_T[batch.origin].to(self.device)
            if batch.is_pad:
                coefficient = torch.zeros_like(coefficient)
            old = logp.detach() if logp_old_T is None or batch.is_pad else logp_old_T[batch.origin].to(self.device)
            if rule is None:
                result = surrogate_sum(
                    logp,
                    old,
                    coefficient,
                    clip_low=self.config.clip_low,
                    clip_high=self.config.clip_high,
                    dual_clip=self.config.dual_clip,
                )
            else:
                result = rule.surrogate(logp, old, coefficient, batch.origin)
            terms = [penalty.summed(logp, output.entropy, batch.origin) for penalty in penalties]
            if batch.is_pad:
                terms = [0 * term for term in terms]
            loss = result.loss
            for penalty, term in zip(penalties, terms, strict=True):
                loss = loss + penalty.coefficient * term
            # DeepSpeed averages gradients over ranks; our terms are already shares of one sum.
            self.engine.backward(loss * self.world_size, scale_wrt_gas=False)
            seen = [result.loss.item(), result.clipped_T.sum().item(), *(term.item() for term in terms)]
            totals += torch.tensor(seen, dtype=torch.float64)
        skipped = self._apply()
        self.steps_taken += 1 - skipped
        if self.world_size > 1:
            totals = totals.to(self.device)
            torch.distributed.all_reduce(totals)
        surrogate, clipped, *values = totals.tolist()
        return StepReport(
            loss=surrogate,
            grad_norm=math.inf if skipped else float(self.engine._global_grad_norm),
            clip_fraction=clipped / max(1, coefficient_T.numel()),
            lr=lr,
            num_micro_batches=len(micro_batches[self.rank]),
            num_steps=1 - skipped,
            skipped_steps=skipped,
            penalties={penalty.name: value for penalty, value in zip(penalties, values, strict=True)},
            statistics=TokenStatistics(*self._of_all_ranks(columns)) if statistics else None,
        )

    def _apply(self) -> int:
        """The optimizer step on what backward has summed up; returns how many were skipped, 0 or 1."""
        before: int = self.engine.skipped_steps
        try:
            self.engine.step()
        except Exception as error:  # DeepSpeed's is a bare one
            if "loss scale already at minimum" not in str(error):
                raise
            raise LearnerFailure(
                "float16 gradients are not finite even with the loss scaled by 1: use model.dtype bfloat16 or float32"
            ) from error
        return int(self.engine.skipped_steps - before)

    def _clip(self) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self._trained(), self.config.grad_clip)
        self.engine._global_grad_norm = norm.item()

    def _trained(self) -> list[Tensor]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Current weights by the model's own names, tied ones once, whole (gathered one by one under ZeRO 3).

        Adapters are merged in.
        """
        import deepspeed

        def gather(parameters: list[Tensor]) -> Any:
            return deepspeed.zero.GatheredParameters(parameters, enabled=self.config.zero_stage == 3)

        if self.config.lora.rank:
            yield from merged_tensors(self.model, gather)
            return
        for name, parameter in self.model.named_parameters():
            with gather([parameter]):
                yield name, parameter.detach()

    def save(self, folder: Path) -> None:
        """Weights and optimizer state, in DeepSpeed's own format but for state on a disk; every rank calls it."""
        if self._swap is not None:
            save_partitions(self.optimizer, self._partitions(folder), self.steps_taken)
            return
        self.engine.save_checkpoint(str(folder), tag="learner", client_state={"steps_taken": self.steps_taken})

    def load(self, folder: Path) -> None:
        """State as it was saved. Raises ``ValueError`` naming the folder when it is not complete."""
        try:
            if self._swap is not None:
                self.steps_taken = load_partitions(self.optimizer, self._partitions(folder), self._idle_step)
                return
            loaded, client_state = self.engine.load_checkpoint(str(folder), tag="learner")
        except Exception as error:  # DeepSpeed raises whatever its readers raise; the user needs the folder's name
            raise ValueError(
                f"checkpoint {folder} cannot be read ({error}): remove it to start from an older one"
            ) from error
        if loaded is None:
            raise ValueError(f"checkpoint {folder} is incomplete: remove it to start from an older one")
        self.steps_taken = int(client_state["steps_taken"])

    def _partitions(self, folder: Path) -> Path:
        return folder / "learner" / f"rank-{self.rank}-of-{self.world_size}"

    def _idle_step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        for batch in self.pack([SampledSequence(token_ids=(0, 0), positions=(1,))])[self.rank]:
            logp = self.engine(_to(batch, self.device), statistics=False).logp
            self.engine.backward(0.0 * logp.sum(), scale_wrt_gas=False)
        self.engine.step()

    def export(self, folder: Path, tokenizer: Any) -> None:
        """A plain transformers model folder (safetensors) that any tool loads; written aside and renamed."""
        # Every rank walks through them, because ZeRO 3 gathers; one keeps them.
        state = {name: tensor.cpu().clone() for name, tensor in self.named_tensors() if self.rank == 0}
        if self.rank != 0:
            return
        aside = folder.with_name(folder.name + ".partial")
        shutil.rmtree(aside, ignore_errors=True)
        self.model.save_pretrained(aside, state_dict=state, safe_serialization=True)
        tokenizer.save_pretrained(aside)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)

    def close(self) -> None:
        """Free what DeepSpeed holds; the process group stays for the next learner of this process."""
        self.engine.destroy()
        if self._swap is not None:
            shutil.rmtree(self._swap, ignore_errors=True)


def _to(batch: MicroBatch, device: torch.device) -> MicroBatch:
    if device.type == "cpu":
        return batch
    return replace(
        batch,
        input_ids=batch.input_ids.to(device),
        position_ids=batch.position_ids.to(device),
        last=None if batch.last is None else batch.last.to(device),
        predict=batch.predict.to(device),
        target=batch.target.to(device),
    )
