"""Every case of the golden file, and of one more file of that form that TOOL_CALL_CASES may name."""

from __future__ import annotations

from typing import Any

import pytest
from golden_calls import FILES, read_cases, read_tools

from envs.parsers import ALIASES, DIALECTS, get_dialect, guess_dialect, parsed_turn

CASES = [pytest.param(file, case, id=f"{case['fmt']}-{case['id']}") for file in FILES for case in read_cases(file)]


@pytest.mark.parametrize(("file", "case"), CASES)
def test_attempts_are_read_as_the_golden_file_says(file: Any, case: dict[str, Any]) -> None:
    turn = parsed_turn(get_dialect(case["fmt"]), case["text"], case["finish"], read_tools(file))
    assert [[call.status, call.name, call.arguments] for call in turn.calls] == case["expect"]
    assert "content" not in case or turn.content == case["content"].strip()
    assert all(call.error == "" if call.status == "ok" else call.error for call in turn.calls)


def test_every_dialect_has_a_golden_case_but_those_named() -> None:
    assert set(DIALECTS) - {case["fmt"] for case in read_cases(FILES[0])} == {"kimi_k2"}


TEMPLATES = [
    ("{%- for tool in tools %}<tools></tools> return <tool_call>\n", "hermes"),
    ("<tool_call>\n<function=example>\n<parameter=a>", "qwen3_xml"),
    ("[TOOL_CALLS][{...", "mistral_v3"),
    ("[TOOL_CALLS]' + name + '[ARGS]'", "mistral_v11"),
    ("<｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n' + '```json' + ", "deepseek_v3"),
    ("<｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>' + arguments", "deepseek_v31"),
    ("<tool_call>{{ name }}\n<arg_key>", "glm45"),
    ("<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>", "kimi_k2"),
    ('Environment: ipython <|python_tag|> {"name": , "parameters": }', "llama3_json"),
    ("{{ message['role'] }}: {{ message['content'] }}", None),
]


@pytest.mark.parametrize(("template", "name"), TEMPLATES)
def test_dialect_is_guessed_from_the_chat_template(template: str, name: str | None) -> None:
    guessed = guess_dialect(template)
    assert (guessed.name if guessed else None) == name


def test_unknown_dialect_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'hermes'"):
        get_dialect("hermess")
    assert all(get_dialect(alias) is DIALECTS[name] for alias, name in ALIASES.items())
