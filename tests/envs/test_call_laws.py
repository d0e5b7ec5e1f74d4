"""Laws of every dialect: reading never raises, never invents a call, and gives back what was written."""

from __future__ import annotations

import string
import time
from typing import Any

import pytest
from golden_calls import GOLDEN, read_tools
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.answers import final_answer
from envs.parsers import DIALECTS, get_dialect, outside_reasoning, parsed_turn

TOOLS = read_tools(GOLDEN)
PIECES = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "now", "arguments": {}}', "<function=now>",
    "</function>", "<parameter=code>", "</parameter>", "[TOOL_CALLS]", "[ARGS]", "now", "[", "]", "{", "}", '"', "'",
    "(", ")", ",", "\n", "```python\n", "```\n", "<code>", "</code>", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<|tool_call_begin|>",
    "functions.now:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|python_tag|>", "\\", "\ud800", "é",
]  # fmt: skip
SOUP = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=30).map("".join)
NAMES = sorted(DIALECTS)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150)
@given(text=SOUP, finish=st.sampled_from(["stop", "length"]))
def test_reading_never_raises_and_spans_are_in_order(name: str, text: str, finish: Any) -> None:
    turn = parsed_turn(get_dialect(name), text, finish, TOOLS)
    end = 0
    for call in turn.calls:
        assert end <= call.span[0] < call.span[1] <= len(text)
        end = call.span[1]
        assert (call.status == "ok") == (call.arguments is not None) == (call.error == "")
        assert not any(start < call.span[1] and call.span[0] < stop for start, stop in turn.reasoning)
        assert call.status != "ok" or TOOLS[call.name or ""].fault(call.arguments or {}) == ""


@pytest.mark.parametrize("piece", ["```\n", "```js\nx\n```\n", "<code>x</code>", "<tool_call>", "<answer>", "<think>"])
def test_a_policy_that_repeats_itself_does_not_hold_up_the_others(piece: str) -> None:
    """Readers run in the event loop of all episodes. 130,000 characters took some over a minute, now under a second."""
    text = (piece * 130_000)[:130_000]
    started = time.process_time()
    for name in NAMES:
        get_dialect(name).parse(text, "stop", TOOLS)
    assert final_answer(text) is None
    assert time.process_time() - started < 6


PROSE = st.text(alphabet=string.ascii_letters + string.digits + " .,;:!?\n=+-*/\\$()'\"", max_size=200)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50)
@given(text=PROSE)
def test_prose_calls_nothing(name: str, text: str) -> None:
    turn = parsed_turn(get_dialect(name), text, "stop", TOOLS)
    assert turn.calls == ()
    assert turn.content == text.strip()


VALUES = st.fixed_dictionaries(
    {"query": st.text(max_size=30)},
    optional={
        "k": st.integers(-(10**6), 10**6),
        "exact": st.booleans(),
        "tags": st.lists(st.text(alphabet=string.ascii_letters, max_size=5), max_size=3),
    },
)
WITH_ARGUMENTS = [name for name in NAMES if name not in ("codefence", "retool")]
UNQUOTED = {"qwen3_xml": ("<", "\r", "\n"), "glm45": ("<",)}  # what a value of these cannot carry, by their form


def _sayable(name: str, arguments: dict[str, Any]) -> bool:
    text = arguments["query"]
    return not any(mark in text for mark in UNQUOTED.get(name, ()))


@pytest.mark.parametrize("name", WITH_ARGUMENTS)
@settings(max_examples=60)
@given(arguments=VALUES, thought=st.sampled_from(["", "<think>hm</think>\n", "hm</think>\n"]))
def test_what_was_written_is_read_back(name: str, arguments: dict[str, Any], thought: str) -> None:
    if not _sayable(name, arguments):
        return
    dialect = get_dialect(name)
    turn = parsed_turn(dialect, thought + dialect.written("search", arguments), "stop", TOOLS)
    assert [(call.status, call.name, call.arguments) for call in turn.calls] == [("ok", "search", arguments)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "frame", ["<think>{}</think>done", "so {}\n</think>done", "<think>{}", "<think>a</think>b <think>\n{}\n</think>"]
)
def test_nothing_in_reasoning_is_a_call(name: str, frame: str) -> None:
    dialect = get_dialect(name)
    text = frame.format("\n" + dialect.written("python", {"code": "print(1)"}))
    assert dialect.parse(text, "stop", TOOLS) == ()


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_that_breaks_off_in_reasoning_does_not_swallow_the_call(name: str) -> None:
    dialect = get_dialect(name)
    call = dialect.written("python", {"code": "print(1)"})
    for length in range(1, len(call)):
        calls = dialect.parse(f"\n{call[:length]}</think>\n{call}", "stop", TOOLS)
        assert [(c.status, c.arguments) for c in calls] == [("ok", {"code": "print(1)"})], call[:length]


@pytest.mark.parametrize("name", NAMES)
def test_no_prefix_of_a_call_runs(name: str) -> None:
    dialect = get_dialect(name)
    call = dialect.written("python", {"code": "print(1) # and more"})
    whole = dialect.parse(call, "length", TOOLS)
    assert [c.status for c in whole] == ["ok"]
    for length in range(len(call)):
        for cut in dialect.parse(call[:length], "length", TOOLS):
            # Section tags after the call may be missing; the call itself may not.
            assert cut.status == "unclosed" or cut.arguments == whole[0].arguments, call[:length]


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("codefence", "retool", "qwen3_xml", "glm45")])
def test_think_tags_inside_a_quoted_string_are_text(name: str) -> None:
    dialect = get_dialect(name)
    for code in ("print('<think>')", "print('</think>')", "'<think></think>'"):
        calls = dialect.parse(dialect.written("python", {"code": code}), "stop", TOOLS)
        assert [(c.status, c.arguments) for c in calls] == [("ok", {"code": code})]


def test_blanked_reasoning_keeps_positions() -> None:
    assert outside_reasoning("a <think>b</think> c") == "a                  c"
    assert outside_reasoning("draft</think>x") == " " * 13 + "x"
    assert outside_reasoning("x<think>draft") == "x" + " " * 12


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', [("invalid_args", "now")]),
        ("hermes", '<tool_call>{"name": "now", "arguments": []}</tool_call>', [("invalid_args", "now")]),
        ("hermes", '<tool_call>{"name": "nope", "arguments": {}}</tool_call>', [("unknown_tool", "nope")]),
        ("hermes", '<tool_call>{"name":"add","arguments":{"a":1e999,"b":1}}</tool_call>', [("invalid_json", None)]),
        ("hermes", '<tool_call>{"name":"python","arguments":{"code":"\\ud800"}}</tool_call>', [("invalid_json", None)]),
        ("hermes", '<tool_call>{"name":"add","arguments":{"a":true,"b":1}}</tool_call>', [("invalid_args", "add")]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}} {}</tool_call>', [("invalid_json", None)]),
        ("hermes", '<tool_call>{"name":"now","arguments":{}}</tool_call><tool_call>{"na',
         [("ok", "now"), ("unclosed", None)]),
        ("llama3_json", '{"answer": 42}', []),
        ("llama3_json", '{"name": "Bob", "age": 3}', []),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1,}}', [("invalid_json", None)]),
        ("pythonic", "[add(1, 2), now()]", [("malformed", "add"), ("ok", "now")]),
        ("pythonic", "[add(a=1, b=2)] and so on", [("ok", "add")]),
        ("pythonic", "[1, 2]", []),
        ("pythonic", "[search(query='a]b)')]", [("ok", "search")]),
        ("mistral_v3", '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"na', [("ok", "now"), ("unclosed", None)]),
        ("mistral_v11", "[TOOL_CALLS]now{}[TOOL_CALLS]now[ARGS]{}", [("malformed", None), ("ok", "now")]),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:3<|tool_call_argument_begin|>{}"
         "<|tool_call_end|><|tool_call_begin|>functions.add:4<|tool_call_argument_begin|>{\"a\": 1}<|tool_call_end|>",
         [("ok", "now"), ("invalid_args", "add")]),
        ("glm45", "<tool_call>python\n<arg_key>code</arg_key>\n<arg_value>s='</arg_value>'</arg_value>\n</tool_call>",
         [("malformed", "python")]),
        ("qwen3_xml", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=a>\n2\n</parameter>\n"
         "</function>\n</tool_call>", [("malformed", "add")]),
        ("codefence", "```text\n```python\nprint(1)\n```\n", []),
        ("codefence", "```python\nprint(1\n```", [("ok", "python")]),  # Python itself says what is wrong with it
        ("retool", "<code>\ns = '</code>'\n</code>", [("malformed", "python")]),
    ],
)  # fmt: skip
def test_worked_examples(name: str, text: str, expected: list[tuple[str, str | None]]) -> None:
    calls = get_dialect(name).parse(text, "stop", TOOLS)
    assert [(call.status, call.name) for call in calls] == expected
