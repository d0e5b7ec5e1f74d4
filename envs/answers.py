"""Math answers: found in what the policy wrote, then compared, exactly where that is possible.

Whole model output never goes to math-verify: it merges all boxes of a text into one set. The last box is cut out here,
outside reasoning, calls and code; only that goes further. What is not settled exactly is decided by math-verify in a
process that can be killed (``envs.grader``).
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

from envs.parsers import outside_reasoning

MAX_ANSWER = 2048
"""Characters; a longer answer is not one."""


def final_answer(text: str) -> str | None:
    """Content of the last closed top-level ``\\boxed{...}`` outside think tags, calls and code; None without one."""
    visible = outside_reasoning(text)
    for pattern in (r"<tool_call>.*?(?:</tool_call>|\Z)", r"```.*?(?:```|\Z)"):
        visible = re.sub(pattern, " ", visible, flags=re.DOTALL)
    answer = None
    position = visible.find("\\boxed{")
    while position >= 0:
        start = position + len("\\boxed{")
        end = _closing_brace(visible, start)
        if end is None:
            break
        answer = visible[start:end]
        position = visible.find("\\boxed{", end)
    return answer.strip() if answer is not None and len(answer) <= MAX_ANSWER else None


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0) if text[index - 1] != "\\" else 0
        if depth == 0:
            return index
    return None


def normalised(answer: str) -> str:
    """One spelling for what differs only in typesetting."""
    text = unicodedata.normalize("NFKC", answer).translate({0x2212: "-", 0x2013: "-", 0x200B: None})
    text = re.sub(r"\\(?:left|right|displaystyle|,|!|;|:|quad|qquad)(?![a-zA-Z])", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"^\\?\$|\\?\$$", "", text.strip())
    return re.sub(r"\s+", " ", text).strip().rstrip(".")


def exact_number(answer: str) -> Fraction | None:
    """The rational number that a plain integer, decimal, fraction or e-notation is; None for anything else."""
    text = normalised(answer).replace(" ", "")
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", text):
        text = text.replace(",", "")
    fraction = re.fullmatch(r"([-+]?)\\frac\{([-+]?\d{1,30})\}\{(\d{1,30})\}", text)
    if fraction:
        text = f"{fraction[1]}{fraction[2]}/{fraction[3]}" if not fraction[1] or fraction[2][0].isdigit() else ""
    if not re.fullmatch(r"[-+]?(\d{1,300}(\.\d{0,300})?|\.\d{1,300})(e[-+]?\d{1,3})?|[-+]?\d{1,30}/\d{1,30}", text):
        return None
    try:
        return Fraction(text.rstrip("."))
    except (ValueError, ZeroDivisionError):
        return None


def same_exactly(gold: str, answer: str) -> bool | None:
    """True or False where spelling or rational value decide; None where only algebra can."""
    if normalised(gold) == normalised(answer):
        return True
    left, right = exact_number(gold), exact_number(answer)
    if left is None or right is None:
        return None
    if left.denominator == right.denominator == 1:
        return left == right
    return abs(left - right) <= Fraction(1, 10**6) * abs(left)
