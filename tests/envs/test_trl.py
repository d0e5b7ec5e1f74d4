"""Our environments inside TRL's GRPOTrainer: schemas, calls, rewards, and failures that TRL leaves out."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import get_json_schema

from envs import Limits
from envs.registration import get
from envs.trl import LOST, for_trl
from sandboxes import SandboxSpec

LOCAL = SandboxSpec(kind="local", size=1)


def started(**settings: Any) -> tuple[Any, Any, Any]:
    parts = for_trl("agentic/Arithmetic-v1", sandbox=LOCAL, **settings)
    environment = parts.factory()
    (row,) = parts.rows(1)
    environment.reset(**row)
    return parts, environment, get("agentic/Arithmetic-v1").tasks({}).task(0)


@pytest.mark.parametrize("name", ["Arithmetic", "Bash", "SearchQA", "Maze"])
def test_transformers_reads_the_schema_that_we_made(name: str) -> None:
    env_id = f"agentic/{name}-v1"
    environment = for_trl(env_id, sandbox=LOCAL).factory()
    for tool in get(env_id).tools:
        ours, theirs = tool.schema["function"], get_json_schema(getattr(environment, tool.name))["function"]
        assert (theirs["name"], theirs["description"]) == (ours["name"], ours["description"])
        assert set(theirs["parameters"]["properties"]) == set(ours["parameters"]["properties"])
        assert theirs["parameters"].get("required", []) == ours["parameters"]["required"]


def test_calls_and_the_last_turn_go_through_the_environment() -> None:
    parts, environment, task = started()
    assert environment.python(code="print(6*7)") == "42"
    assert "'code' is a required property" in environment.python()
    end = [{"role": "tool", "content": "42"}, {"role": "assistant", "content": f"\\boxed{{{task.answer}}}"}]
    assert parts.reward(completions=[end], environments=[environment], task=["ignored"]) == [1.0]
    environment.reset(**parts.rows(1)[0])
    assert parts.reward([[{"role": "tool", "content": f"\\boxed{{{task.answer}}}"}]], [environment]) == [0.0]


def test_limits_and_failures_end_the_episode() -> None:
    parts, environment, _ = started(limits=Limits(max_turns=2))
    assert environment.python(code="print(1)") == "1"
    assert environment.python(code="print(2)") == LOST
    assert parts.reward([[{"role": "assistant", "content": "\\boxed{1}"}]], [environment]) == [0.0]

    parts, environment, _ = started()
    environment._env.run(environment._env._resources.pool.close())
    assert environment.python(code="print(1)") == LOST
    assert parts.reward([[{"role": "assistant", "content": "\\boxed{1}"}]], [environment]) == [None]


@pytest.mark.slow
def test_a_training_step_of_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_chat_template

    letters = [chr(code) for code in range(32, 127)] + [
        "\n",
        "<|im_start|>",
        "<|im_end|>",
        "<tool_call>",
        "</tool_call>",
    ]
    words = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(letters)}, unk_token=" "))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = qwen3_chat_template
    config = Qwen2Config(
        vocab_size=len(letters),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    parts = for_trl("agentic/Arithmetic-v1", sandbox=LOCAL)
    trainer = GRPOTrainer(
        Qwen2ForCausalLM(config),
        reward_funcs=parts.reward,
        environment_factory=parts.factory,
        train_dataset=Dataset.from_list(parts.rows(2)),
        processing_class=tokenizer,
        args=GRPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            num_generations=2,
            max_steps=1,
            max_completion_length=8,
            report_to=[],
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
        ),
    )
    trainer.train()
    logged = [row for row in trainer.state.log_history if "reward" in row]
    assert logged[0]["reward"] == 0.0
    assert trainer.state.global_step == 1


if importlib.util.find_spec("trl") is None:
    del test_a_training_step_of_trl  # TRL is no dependency of ours; what it reads of us is held above without it
