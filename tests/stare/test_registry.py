"""The registry: every entry is whole, names its paper, and its page is up to date."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from agent_rl.methods import add_parser, markdown, use_of
from stare.neighbours import METHODS, method, options_of

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"


@pytest.mark.parametrize("name", METHODS)
def test_every_entry_says_what_it_is(name: str) -> None:
    entry = METHODS[name]
    assert entry.name == name
    assert callable(entry.function)
    assert entry.formula
    assert re.search(r"arXiv \d{4}\.\d{5}|, .* 20\d\d$", entry.source)
    documentation = entry.function.__doc__ or ""
    for paper in re.findall(r"\d{4}\.\d{5}", entry.source):
        assert paper in documentation or paper in (__import__(entry.function.__module__, fromlist="x").__doc__ or "")
    if entry.status == "formula unconfirmed":
        assert re.search(r"unconfirmed|second-hand", documentation), "the docstring must say so too"
    assert use_of(entry)


def test_docs_page_is_the_registry() -> None:
    assert PAGE.read_text() == markdown(), "run: agent-rl methods list --markdown > docs/methods.md"


def test_names_are_found_or_the_nearest_is_offered() -> None:
    assert method("gspo").hook == "ratio"
    with pytest.raises(ValueError, match="did you mean 'rloo'"):
        method("rlo", "advantage")
    with pytest.raises(ValueError, match="'gspo' is of hook 'ratio', not 'advantage'"):
        method("gspo", "advantage")
    assert options_of("cispo", {"clip_high": 5.0}) == {"clip_high": 5.0}
    with pytest.raises(ValueError, match="no option 'clip_hi'"):
        options_of("cispo", {"clip_hi": 5.0})


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    parsed = parser.parse_args(arguments)
    code: int = parsed.func(parsed)
    return code


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "list"]) == 0
    assert "methods" in capsys.readouterr().out
    assert main(["methods", "show", "trloo"]) == 0
    shown = capsys.readouterr().out
    assert "n_t / (n_t - 1)" in shown
    assert "discount = 1.0" in shown
    assert main(["methods", "show", "grpi"]) == 2
    assert "did you mean 'grpo'" in capsys.readouterr().err
    assert main(["methods", "list", "--markdown"]) == 0
    assert capsys.readouterr().out == markdown()
