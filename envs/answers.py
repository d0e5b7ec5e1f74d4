"""Finds the answer in what the policy wrote, and gives it one spelling.

Whole model output never goes to math-verify: it merges all boxes of a text into one set. The answer is cut out here,
outside reasoning, calls, code and forged tool output; only that goes further (``envs.equality``, ``envs.grader``).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from envs.reading import outside_reasoning

MAX_ANSWER = 2048
"""Characters; a longer answer is not one."""


def final_answer(text: str) -> str | None:
    """Content of the last closed ``\\boxed{...}`` outside think tags, calls and code; None without one.

    An ``<answer>`` element wins over what stands around it. Boxes joined by "and", "or" or a comma are one answer:
    ``"\\boxed{1} and \\boxed{2}"`` gives ``"1, 2"``. When the last box is not closed there is no answer.
    """
    visible = _visible(text)
    tagged = _last_element(visible)
    if tagged is not None:
        visible = tagged
    boxes = list(_boxes(visible))
    if not boxes:
        answer = tagged.strip() if tagged is not None and "\\boxed" not in tagged else None
    elif boxes[-1][2] is None:
        answer = None
    else:
        parts = [boxes[-1][2]]
        for (_, end, content), (start, _, _) in zip(boxes[-2::-1], boxes[:0:-1], strict=True):
            if content is None or not re.fullmatch(r"[\s$]*(,|and|or|,\s*and)[\s$]*", visible[end:start]):
                break
            parts.insert(0, content)
        answer = ", ".join(part.strip() for part in parts)
    return answer if answer is not None and len(answer) <= MAX_ANSWER else None


def _last_element(text: str) -> str | None:
    """Content of the last ``<answer>`` element. By hand, as a pattern would look for an end from every beginning."""
    opening, closing = "<answer>", "</answer>"
    found, position = None, 0
    while (start := text.find(opening, position)) >= 0 and (end := text.find(closing, start)) >= 0:
        found, position = text[start + len(opening) : end], end + len(closing)
    return found


def stated_answer(text: str) -> str | None:
    """``final_answer``, or without any box what follows the last "answer is" or "answer:" on its line.

    For grading texts that nobody asked to use a box; rewards use ``final_answer``.
    """
    boxed = final_answer(text)
    visible = _visible(text)
    if boxed is not None or "\\boxed{" in visible or "\\fbox{" in visible:
        return boxed
    bare = re.findall(r"\\boxed\s*(-?[\w.]+)", visible)
    if bare:
        return str(bare[-1])
    return _anchored(visible)


def _anchored(text: str) -> str | None:
    matches = list(
        re.finditer(r"(?i)\banswer(?:\s+is\s*:?|\s*:|\*\*\s*:|:\*\*)\s*(?=\S)|答案[是为：:]+\s*|^####\s*", text, re.M)
    )
    if not matches:
        return None
    line = text[matches[-1].end() :].split("\n", 1)[0][: MAX_ANSWER + 1]
    answer = re.split(r"\.(?:\s|$)|。|,\s+(?=[a-z])", line, maxsplit=1)[0].strip(" *$")
    return answer if answer and len(answer) <= MAX_ANSWER else None


def _visible(text: str) -> str:
    visible = outside_reasoning(text)
    for tag in ("tool_call", "interpreter", "code", "tool_response"):
        visible = re.sub(rf"<{tag}>.*?(?:</{tag}>|\Z)", " ", visible, flags=re.DOTALL)
    visible = re.sub(r"```.*?(?:```|\Z)", " ", visible, flags=re.DOTALL)
    return re.sub(r"<\|[a-z_]{1,32}\|>", " ", visible)


def _boxes(text: str) -> Iterator[tuple[int, int, str | None]]:
    """Start, end and content of every top-level box; content None for one that is not closed, which is the last."""
    position = 0
    while match := re.compile(r"\\(?:boxed|fbox)\s*\{").search(text, position):
        end = _closing_brace(text, match.end())
        if end is None:
            yield match.start(), len(text), None
            return
        content = text[match.end() : end].strip()
        while inner := re.fullmatch(r"\\(?:boxed|fbox)\s*\{(.*)\}", content, flags=re.DOTALL):
            content = inner[1].strip()
        yield match.start(), end + 1, content
        position = end + 1


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for match in re.compile(r"\\.|[{}]", flags=re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return match.start()
    return None


_SIGNS = {
    "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "⁄": "/", "π": r"\pi ",
    ">=": r"\ge ", "<=": r"\le ",
    "∞": r"\infty ", "°": r"^\circ ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∓": r"\mp ",
    "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in ", "≈": r"\approx ", "θ": r"\theta ",
    "\u200b": "", "\u200c": "", "\u2060": "", "\ufeff": "", "ℝ": r"\mathbb{R}", "½": r"\frac{1}{2}",
    "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅕": r"\frac{1}{5}",
    "⅛": r"\frac{1}{8}", "⟨": r"\langle ", "⟩": r"\rangle ", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]", "…": "...",
}  # fmt: skip
_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ", "0123456789-n", strict=True))
_LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))


def normalised(answer: str) -> str:
    """One spelling for what differs only in typesetting.

    ``"\\dfrac12 "`` becomes ``"\\frac{1}{2}"``, ``"10\\,000"`` becomes ``"10000"``, ``"√2"`` becomes ``"\\sqrt{2}"``.
    """
    text = re.sub(f"[{''.join(_RAISED)}]+", lambda m: "^{" + "".join(_RAISED[c] for c in m.group()) + "}", answer)
    text = re.sub(f"[{''.join(_LOWERED)}]+", lambda m: "_{" + "".join(_LOWERED[c] for c in m.group()) + "}", text)
    text = re.sub(r"([∛∜])\s*(\w+)", r"\1{\2}", text)
    text = re.sub(r"√\s*(\w+|(?=\())", lambda m: rf"\sqrt{{{m[1]}}}" if m[1] else r"\sqrt", text)
    for sign, spelled in _SIGNS.items():
        text = text.replace(sign, spelled)
    text = unicodedata.normalize("NFKC", text)
    # Groups of thousands, before the blanks that hold them go. Applied twice: neighbours share their digits.
    for _ in range(2):
        text = re.sub(r"(?<![\d.])(\d{1,3})((?:(?:\\[,;! ]|\{,\}|,\\!|~)\d{3})+)(?!\d)", _without_marks, text)
    text = re.sub(r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\s*(?:\.(?=\s|$))?", "", text)
    text = re.sub(r"\\(?:displaystyle|textstyle|limits|qquad|quad)(?![a-zA-Z])|(?<!\\)\\[,;:! ]|~", " ", text)
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(r"\\(?:geq|geqslant)(?![a-zA-Z])", r"\\ge", text)
    text = re.sub(r"\\(?:leq|leqslant)(?![a-zA-Z])", r"\\le", text)
    text = re.sub(r"\\neq(?![a-zA-Z])", r"\\ne", text)
    text = re.sub(r"\\varnothing", r"\\emptyset", text)
    text = re.sub(r"\\(?:textcolor\s*\{[^{}]*\}|color\s*\{[^{}]*\})", "", text)
    text = re.sub(r"\{([.,])\}", r"\1", text)
    text = re.sub(r"\\(?:l|c|v)?dots(?![a-zA-Z])", "...", text)
    for _ in range(3):  # nested font commands
        text = re.sub(
            r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it|sf|normal)|mbox|operatorname\*?|boldsymbol|bm)\s*\{([^{}]*)\}",
            r" \1 ",
            text,
        )
    text = re.sub(r"\\\(|\\\)|\\\[|\\\]|(?<!\\)\$", " ", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"(\\frac\{[^{}]*\})\s*(\d)", r"\1{\2}", text)
    text = re.sub(r"\\sqrt\s*(\d+)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\sqrt\s+(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<![\\a-zA-Z])(ln|log|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|pi)(?![a-zA-Z])", r"\\\1", text)
    text = text.replace("**", "^")
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"_\{\s*(\w)\s*\}", r"_\1", text)
    text = re.sub(r"\^\{\\circ\}", r"^\\circ", text)
    text = re.sub(r"\\?\bcis\s*(\\[a-z]+|\w+|\{[^{}]*\}|\([^()]*\))", r"e^{i\1}", text)
    text = (
        re.sub(r"\s+", " ", text).strip().strip('`"').removeprefix("=").removesuffix("\\\\").removesuffix(" =").strip()
    )
    return text.rstrip(".,;").strip() if not text.endswith("...") else text


def _without_marks(match: re.Match[str]) -> str:
    return match[1] + re.sub(r"\D", "", match[2])
