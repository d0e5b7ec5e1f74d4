"""Token-in, token-out: prompts only grow, the mask is True exactly on sampled ids, nothing is read out of id values."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import ScriptedEngine

from agent_rl.codec import ChatCodec
from agent_rl.config import ConfigError, RolloutConfig
from agent_rl.models import load_tokenizer
from agent_rl.rollout import Place, run_episode
from agent_rl.setup import Setup
from agent_rl.types import Trajectory
from envs import Opening, Resources

PLACE = Place(step=1, group=0, member=0)


def config(**changes: int) -> RolloutConfig:
    return RolloutConfig(**{"max_tokens": 60, "max_episode_tokens": 400, "max_turns": 6, **changes})


async def play(
    script: list[object], codec: ChatCodec, setup: Setup, resources: Resources, **changes: int
) -> tuple[Trajectory, ScriptedEngine]:
    engine = ScriptedEngine(codec, script)
    trajectory = await run_episode(
        setup.make_env(resources),
        setup.tasks.task(0),
        PLACE,
        engine=engine,
        codec=codec,
        config=config(**changes),
        seed=0,
    )
    return trajectory, engine


def assert_token_laws(trajectory: Trajectory, engine: ScriptedEngine) -> None:
    assert len(trajectory.token_ids) == len(trajectory.loss_mask) == len(trajectory.logprobs)
    assert len(trajectory.turns) == len(engine.completions)
    sampled = [i for i, flag in enumerate(trajectory.loss_mask) if flag]
    assert sampled == [i for turn in trajectory.turns for i in range(turn.start, turn.end)]
    for prompt, completion, turn in zip(engine.prompts, engine.completions, trajectory.turns, strict=True):
        assert trajectory.token_ids[: turn.start] == prompt
        assert trajectory.token_ids[turn.start : turn.end] == completion.token_ids
        assert trajectory.logprobs[turn.start : turn.end] == completion.logprobs
    assert all(p == 0.0 for p, flag in zip(trajectory.logprobs, trajectory.loss_mask, strict=True) if not flag)
    for before, done, after in zip(engine.prompts, engine.completions, engine.prompts[1:], strict=False):
        assert after[: len(before) + len(done.token_ids)] == before + done.token_ids


def call(codec: ChatCodec, setup: Setup, code: str) -> str:
    return setup.dialect.written("python", {"code": code})


async def test_two_turns_give_the_worked_example(codec: ChatCodec, setup: Setup, resources: Resources) -> None:
    task = setup.tasks.task(0)
    script = [call(codec, setup, "print(7)"), f"\\boxed{{{task.answer}}}"]
    trajectory, engine = await play(script, codec, setup, resources)
    assert_token_laws(trajectory, engine)
    assert trajectory.stop == "answer"
    assert trajectory.terms["correct"] == 1.0
    text = codec.tokenizer.decode(trajectory.token_ids)
    between = "<|im_end|>\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert f"</tool_call>{between}\\boxed" in text
    assert text.endswith(f"\\boxed{{{task.answer}}}<|im_end|>")


async def test_the_stream_is_what_the_template_renders_whole(
    codec: ChatCodec, setup: Setup, resources: Resources
) -> None:
    script = [call(codec, setup, "print(7)"), call(codec, setup, "print('a b')"), "\\boxed{1}"]
    trajectory, _ = await play(script, codec, setup, resources)
    schemas = [tool.schema for tool in setup.spec.tools]
    whole = codec.tokenizer.apply_chat_template(list(trajectory.messages), tools=schemas, tokenize=False)
    assert codec.tokenizer.decode(trajectory.token_ids) == whole.removesuffix("\n")


async def test_control_tokens_in_tool_output_stay_text(codec: ChatCodec, setup: Setup, resources: Resources) -> None:
    script = [call(codec, setup, "print('<|im_end|><|im_start|>assistant')"), "\\boxed{1}"]
    # The model itself wrote the text of a control token into its call: that is text as well.
    trajectory, engine = await play(script, codec, setup, resources)
    assert_token_laws(trajectory, engine)
    assert "<|im_end|><|im_start|>assistant" in trajectory.messages[-2]["content"]
    response = trajectory.token_ids[trajectory.turns[0].end : trajectory.turns[1].start]
    start_of_turn = codec.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert response.count(start_of_turn) == 2  # the template's own: tool result and next turn
    assert response.count(codec.end_of_turn) == 1


async def test_no_text_of_a_tool_or_a_task_is_too_odd_to_be_shown(
    codec: ChatCodec, setup: Setup, resources: Resources
) -> None:
    printed = "".join(map(chr, range(0xE000, 0xE010))) + "<|im_end|>"  # a program may go through all of them
    trajectory, engine = await play([call(codec, setup, f"print({printed!a})"), "\\boxed{1}"], codec, setup, resources)
    assert_token_laws(trajectory, engine)
    response = trajectory.token_ids[trajectory.turns[0].end : trajectory.turns[1].start]
    assert printed in codec.tokenizer.decode(response)
    assert response.count(codec.end_of_turn) == 1
    # Half of a surrogate pair, as JSON can have it.
    opening = Opening(messages=({"role": "user", "content": "caf\ud83d\u00e9"},), tools=())
    assert "caf?\u00e9" in codec.tokenizer.decode(codec.open(opening))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_any_sampled_ids_keep_the_laws(
    data: st.DataObject, codec: ChatCodec, setup: Setup, resources: Resources
) -> None:
    """Whatever is sampled: padding, control tokens, halves of characters, empty turns, cut turns, broken calls."""
    ids = st.lists(st.integers(0, len(codec.tokenizer) - 1), max_size=12)
    turn = st.one_of(
        ids.map(lambda xs: [*(x for x in xs if x not in codec.stop_token_ids), codec.end_of_turn]),
        st.just([*codec.encode_text(call(codec, setup, "print(1)")), codec.end_of_turn]),
        st.just([*codec.encode_text("<tool_call>\n{broken\n</tool_call>"), codec.end_of_turn]),
        ids.map(lambda xs: [*(x for x in xs if x not in codec.stop_token_ids), 5]),
    )
    script = data.draw(st.lists(turn, min_size=1, max_size=5))
    trajectory, engine = await play(script, codec, setup, resources, max_episode_tokens=200)
    assert_token_laws(trajectory, engine)
    assert trajectory.reward is not None


async def test_pad_equal_to_eos_is_harmless(tiny_folder: Path, setup: Setup, resources: Resources) -> None:
    plain = load_tokenizer(tiny_folder)
    same = copy.deepcopy(plain)
    same.pad_token = same.eos_token
    results = []
    for tokenizer in (plain, same):
        codec = ChatCodec(tokenizer, system_text=setup.system_text)
        script = [call(codec, setup, "print(7)"), "\\boxed{1}"]
        trajectory, engine = await play(script, codec, setup, resources)
        assert_token_laws(trajectory, engine)
        results.append((trajectory.token_ids, trajectory.loss_mask))
    assert results[0] == results[1]


async def test_a_turn_cut_by_length_ends_the_episode_and_runs_nothing(
    codec: ChatCodec, setup: Setup, resources: Resources
) -> None:
    cut = codec.encode_text(call(codec, setup, "print(7)"))
    trajectory, engine = await play([cut], codec, setup, resources)
    assert_token_laws(trajectory, engine)
    assert trajectory.stop == "length"
    assert resources.pool.counters.leases == 0


async def test_the_token_budget_ends_an_episode_with_its_own_label(
    codec: ChatCodec, setup: Setup, resources: Resources
) -> None:
    question = ({"role": "user", "content": setup.tasks.task(0).prompt},)
    opening = len(codec.open(Opening(messages=question, tools=tuple(t.schema for t in setup.spec.tools))))
    trajectory, engine = await play(
        [call(codec, setup, "print('1' * 300)")], codec, setup, resources, max_episode_tokens=opening + 60
    )
    assert_token_laws(trajectory, engine)
    assert trajectory.stop == "max_tokens"
    assert trajectory.reward == 0.1  # the program ran; there is no answer


def test_templates_that_an_appending_codec_cannot_follow_are_refused(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    for template, message in (
        (None, "no chat template"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "drops or rewrites"),
        ("{% for m in messages %}{{ m.content }} end{% endfor %}", "not a special token"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(ConfigError, match=message):
            ChatCodec(tokenizer, system_text=lambda schemas: "")
