"""Whether two answers mean the same: exactly where spelling or rational numbers decide, piece by piece elsewhere.

An answer is a value with perhaps a unit, or a structure (list, tuple, set, interval, union, matrix) of answers. The
pieces are compared as numbers, as words, or by ``leaf``, which may need algebra and is therefore given from outside.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from envs.answers import normalised
from envs.quantities import measured, number, without_unit

Leaf = Callable[[str, str], bool]

MAX_ITEMS = 32
"""Pieces of a structure; longer ones are compared by spelling alone."""


def exact_number(answer: str) -> Fraction | None:
    """The rational number that an integer, decimal, fraction, mixed number or e-notation is; None for anything else."""
    found = number(normalised(answer))
    return found.value if found else None


def same_exactly(gold: str, answer: str) -> bool | None:
    """True or False where spelling, words or rational values decide; None where structure or algebra must."""
    left, right = normalised(gold), re.sub(r"^([A-Z])\)\s*", r"(\1) ", normalised(answer))
    if _squeezed(left) == _squeezed(right):
        return True
    if not _balanced(right):
        return False
    # A letter that is glued to a number is a variable of the gold answer: 2m is not 2.
    left_value = None if re.fullmatch(r".*[\d}][a-zA-Z]", left) else measured(left)
    right_value = measured(right)
    if left_value and right_value:
        return left_value.equals(right_value)
    if _is_words(left) and _is_words(right):
        if _word(left) == _word(right):
            return True
        # "ab" may be a word or a product.
        return None if re.fullmatch("[a-z]{2,3}", left) and re.fullmatch("[a-z]{2,3}", right) else False
    return None


def equal(gold: str, answer: str, leaf: Leaf) -> bool:
    """Whether the answers mean the same; ``leaf`` decides what neither spelling nor numbers do.

    A unit set in text is forgiven when the other side has none, and must be the same otherwise.
    """
    exactly = same_exactly(gold, answer)
    if exactly is not None:
        return exactly
    (left, left_unit), (right, right_unit) = without_unit(gold), without_unit(answer)
    if left_unit or right_unit:
        if left_unit and right_unit and left_unit != right_unit:
            return False
        gold, answer = left, right
    return _equal(normalised(gold), normalised(answer), leaf, 0)


def _equal(gold: str, answer: str, leaf: Leaf, depth: int) -> bool:
    exactly = same_exactly(gold, answer)
    if exactly is not None:
        return exactly
    if depth > 4:
        return False
    gold, answer = _plain(gold), _plain(_of_choice(answer, gold))
    again = same_exactly(gold, answer)
    if again is not None:
        return again

    def every(left: Sequence[str], right: Sequence[str]) -> bool:
        return len(left) == len(right) and all(_equal(a, b, leaf, depth + 1) for a, b in zip(left, right, strict=True))

    def covers(left: Sequence[str], right: Sequence[str]) -> bool:
        return max(len(left), len(right)) <= MAX_ITEMS and all(
            any(_equal(a, b, leaf, depth + 1) for a in left) for b in right
        )

    def as_sets(left: Sequence[str], right: Sequence[str]) -> bool:
        return covers(left, right) and all(any(_equal(a, b, leaf, depth + 1) for b in right) for a in left)

    matrices = _matrix(gold), _matrix(answer)
    if matrices[0] and matrices[1]:
        return len(matrices[0]) == len(matrices[1]) and all(
            every(a, b) for a, b in zip(matrices[0], matrices[1], strict=True)
        )
    unions = _split(_as_interval(gold), r"\cup"), _split(_as_interval(answer), r"\cup")
    if len(unions[0]) > 1 or len(unions[1]) > 1:
        return as_sets(*unions)
    shapes = _shape(gold, matrices[0]), _shape(answer, matrices[1])
    if shapes[0] is not None or shapes[1] is not None:
        return _same_shape(gold, answer, shapes, every, as_sets)
    lists = _listed(gold), _listed(answer)
    if len(lists[0]) > 1 or len(lists[1]) > 1:
        # "1/2 or 0.5" is one value in two forms; "5, 5" is two.
        return (len(lists[0]) > 1 or bool(re.search(r"\bor\b", answer))) and as_sets(*lists)
    if r"\approx" in answer and r"\approx" not in gold:
        return any(_equal(gold, piece, leaf, depth + 1) for piece in _rounded(answer))
    bases = _in_base(gold), _in_base(answer)
    if bases[0] or bases[1]:
        digits, other_digits = bases[0] or (gold.upper(), ""), bases[1] or (answer.upper(), "")
        return digits[0] == other_digits[0] and (digits[1] == other_digits[1] or "" in (digits[1], other_digits[1]))
    sides = _sides(gold), _sides(answer)
    if len(sides[0]) == len(sides[1]) == 2:
        if sides[0] == sides[1][::-1]:
            return True
        names = [side[0] for side in sides]
        if all(len(name) == 1 and name.isalpha() for name in names) and names[0].lower() != names[1].lower():
            return leaf(_for_algebra(gold), _for_algebra(answer))  # x = 2 is another line than y = 2
    if len(sides[1]) > 1 and (len(sides[0]) == 1 or _is_name(sides[0][0])):
        right = sides[1][0] if _is_name(sides[1][-1]) and not _is_name(sides[1][0]) else sides[1][-1]
        if len(sides[0]) == 1 or _is_name(sides[1][0]):
            return _equal(sides[0][-1], right, leaf, depth + 1)
    if len(sides[1]) == 1 and len(sides[0]) == 2 and _is_name(sides[0][0]):
        return _equal(sides[0][1], answer, leaf, depth + 1)
    if _has_loose_digits(gold) or _has_loose_digits(answer):
        return False
    return leaf(_for_algebra(gold), _for_algebra(answer))


def _rounded(answer: str) -> list[str]:
    """What ``a \\approx b`` may stand for: ``a``, and ``b`` where it is a rounded ``a`` and no second try."""
    first, *others = (piece.strip() for piece in re.split(r"\\approx", answer))
    if _is_name(first):
        return others[:1]
    a, b = number(first), number(others[-1])
    return [first, others[-1]] if a and b and abs(a.value - b.value) * 20 <= abs(a.value) else [first]


def _has_loose_digits(text: str) -> bool:
    """``80 9`` is no number, and another sequence than ``9 80``; algebra would multiply."""
    return number(text) is None and bool(re.search(r"(?<![_^\d])\d+\s+\d", text))


def _for_algebra(text: str) -> str:
    """``7e37`` as a product, where algebra would read Euler's number; without what only says "modulo"."""
    text = re.sub(r"(?<![\w.])(\d+\.?\d*|\.\d+)[eE]([-+]?\d{1,3})(?!\w)", r"\1\\cdot 10^{\2}", text)
    return re.sub(r"\\p?mod\s*\{?[^{}]*\}?$|\\bmod\s*\w+$", "", text).strip()


def _same_shape(
    gold: str,
    answer: str,
    shapes: tuple[tuple[str, list[str]] | None, tuple[str, list[str]] | None],
    every: Callable[[Sequence[str], Sequence[str]], bool],
    as_sets: Callable[[Sequence[str], Sequence[str]], bool],
) -> bool:
    left, right = shapes
    if left and right:
        if "{" in (left[0], right[0]):
            return left[0] == right[0] and as_sets(left[1], right[1])
        return left[0] == right[0] and every(left[1], right[1])
    kind, items = left or right or ("", [])
    other = _listed(answer if left else gold)
    if kind == "{":  # a set without its braces
        return as_sets(items, other)
    if kind == "()" and len(other) == len(items):
        if all("=" in item for item in other):
            other = [_sides(item)[-1] for item in other]  # "x=1, y=2" for a pair
        elif not left or any("=" in item for item in other):
            return False  # a bare list stands for a pair that was asked for, not the other way round
        return every(items, other)
    return False


# Words and structures.

_NOTHING = {"nosolution", "nosolutions", "norealsolution", "norealsolutions", "emptyset", "\\emptyset", "\\{\\}"}


def _squeezed(text: str) -> str:
    """Without blanks, but for those between digits."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def _is_words(text: str) -> bool:
    return re.sub(r"\s", "", text).lower() in _NOTHING or bool(
        re.fullmatch(r"\(?[A-Za-z]{2,}[A-Za-z .,'\d]*\)?|\([A-Z]\)", text)
    )


def _word(text: str) -> str:
    word = re.sub(r"[\s()]", "", text).lower()
    return "\\emptyset" if word in _NOTHING else word


def _balanced(text: str) -> bool:
    """As many opening as closing brackets; which kind does not matter, because of half-open intervals."""
    bare = re.sub(r"\\[{}]", "", text)
    return sum(map(bare.count, "([{")) == sum(map(bare.count, ")]}"))


def _plain(text: str) -> str:
    """Without what only introduces the answer: "the answer is", "x \\in", a lone pair of braces."""
    text = re.sub(r"(?i)^.*\banswer\s*(?:is|:)\s*", "", text)
    text = re.sub(r"^[a-zA-Z]\s*\\in\s*|^[A-Za-z ]{2,}:\s*", "", text)
    text = re.sub(r"^\([a-zA-Z](?:\s*,\s*[a-zA-Z])+\)\s*=\s*(?=\()|^[A-Z]\s*=?\s*(?=\(.*,.*\)$)", "", text)
    text = re.sub(r"(?<=\d)\s*\([a-z -]{3,}\)$", "", text)
    text = text.replace(r"\langle", "(").replace(r"\rangle", ")")
    return text.strip()


def _of_choice(answer: str, gold: str) -> str:
    """``(A) 55`` without its letter, unless the gold is a letter too; then the letter alone."""
    choice = re.match(r"\(?([A-Z])\)\s*(?=\S)", answer)
    if choice is None:
        return answer
    return choice[1] if re.fullmatch(r"\(?[A-Z]\)?", gold) else answer[choice.end() :]


def _split(text: str, separator: str) -> list[str]:
    """The top-level pieces between separators."""
    pieces, depth, start, index = [], 0, 0, 0
    while index < len(text):
        if text[index] in "([{":
            depth += 1
        elif text[index] in ")]}":
            depth -= 1
        elif depth == 0 and (text.startswith(separator, index) or (separator == "," and text[index] == ";")):
            pieces.append(text[start:index].strip())
            start = index + len(separator)
        index += 1
    return [*pieces, text[start:].strip()]


_PLUS_MINUS = re.compile(r"\\(pm|mp)(?![a-z])")


def _listed(text: str) -> list[str]:
    """The items of "1, 2 and 3", of "x=1 or x=2" and of "1 \\pm a"; one item otherwise."""
    text = re.sub(r"(?<![a-zA-Z])(?:and|or)(?![a-zA-Z])", ",", text)
    items = [item for item in _split(text, ",") if item]
    spread = []
    for item in items:
        if re.search(_PLUS_MINUS, item):
            spread.append(re.sub(_PLUS_MINUS, lambda m: "+" if m[1] == "pm" else "-", item))
            spread.append(re.sub(_PLUS_MINUS, lambda m: "-" if m[1] == "pm" else "+", item))
        else:
            spread.append(item)
    return [re.sub(r"^\+\s*", "", item) for item in spread]


def _shape(text: str, matrix: list[list[str]] | None) -> tuple[str, list[str]] | None:
    """Brackets and items of a tuple, set or interval; a column or row vector is a tuple."""
    if matrix and (len(matrix) == 1 or all(len(row) == 1 for row in matrix)):
        return "()", [cell for row in matrix for cell in row]
    text = _as_interval(text)
    braces = re.fullmatch(r"\\\{(.*)\\\}", text, flags=re.DOTALL)
    if braces:
        return "{", _listed(braces[1])
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]" or not _wraps(text):
        return None
    items = _split(text[1:-1], ",")
    brackets = text[0] + text[-1] if len(items) == 2 else "()"  # two items may be an interval, three are a tuple
    return (brackets, items) if len(items) > 1 else None


def _wraps(text: str) -> bool:
    """Whether the first bracket is closed by the last character."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return index == len(text) - 1
    return False


def _matrix(text: str) -> list[list[str]] | None:
    inner = re.fullmatch(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}", text, flags=re.DOTALL)
    if inner is None:
        return None
    rows = [row for row in re.split(r"\\\\", inner[2]) if row.strip()]
    return [[cell.strip() for cell in row.split("&")] for row in rows]


_RELATION = re.compile(r"\\le(?![a-z])|\\ge(?![a-z])|<|>")


def _as_interval(text: str) -> str:
    """``x \\ge 0`` as ``[0,\\infty)`` and ``1 < x \\le 2`` as ``(1,2]``; anything else as it is."""
    if re.fullmatch(r"(?:[a-z]\s*\\in\s*)?\\mathbb\{R\}|(?i:all reals|all real numbers|the real numbers)", text):
        return r"(-\infty,\infty)"
    builder = re.fullmatch(r"\\\{\s*[a-zA-Z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid|\||:)\s*(.*)\\\}", text)
    if builder:
        return _as_interval(builder[1].strip())
    other = re.fullmatch(r"[a-z]\s*\\ne\s*([^,]+)", text)
    if other:
        return rf"(-\infty,{other[1]})\cup({other[1]},\infty)"
    size = re.fullmatch(r"(?:\||\\lvert)\s*[a-z]\s*(?:\||\\rvert)\s*(\\le(?![a-z])|<)\s*([^,<>|]+)", text)
    if size:
        ends = "[]" if size[1] == r"\le" else "()"
        return f"{ends[0]}-{size[2].strip()},{size[2].strip()}{ends[1]}"
    alternatives = re.split(r"\s+or\s+", text)
    if len(alternatives) > 1 and all(_RELATION.search(part) for part in alternatives):
        return r"\cup".join(map(_as_interval, alternatives))
    relations = _RELATION.findall(text)
    sides = [side.strip() for side in _RELATION.split(text)]
    if len(relations) == 1 and (_is_variable(sides[0]) or _is_variable(sides[1])):
        relation = relations[0] if _is_variable(sides[0]) else _turned(relations[0])
        bound = sides[1] if _is_variable(sides[0]) else sides[0]
        if relation in ("<", r"\le"):
            return f"(-\\infty,{bound}{')' if relation == '<' else ']'}"
        return f"{'(' if relation == '>' else '['}{bound},\\infty)"
    if len(relations) == 2 and _is_variable(sides[1]) and len(set(map(_direction, relations))) == 1:
        if _direction(relations[0]) == ">":
            sides, relations = sides[::-1], [_turned(relation) for relation in relations[::-1]]
        opening, closing = "(" if relations[0] == "<" else "[", ")" if relations[1] == "<" else "]"
        return f"{opening}{sides[0]},{sides[2]}{closing}"
    return text


def _turned(relation: str) -> str:
    return {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}[relation]


def _direction(relation: str) -> str:
    return "<" if relation in ("<", r"\le") else ">"


def _is_variable(text: str) -> bool:
    return bool(re.fullmatch(r"[a-zA-Z]|\\[a-z]+", text)) and text not in (r"\pi", r"\infty", "e", "i")


def _is_name(text: str) -> bool:
    """A variable, perhaps with an index or its argument: ``x``, ``a_1``, ``f(x)``."""
    return bool(
        re.fullmatch(r"(?:[a-zA-Z]|\\[a-z]+)(?:_\{?\w+\}?)?(?:\s*\(\s*[a-z](?:,\s*[a-z])*\s*\))?", text.strip())
    )


def _sides(text: str) -> list[str]:
    if _RELATION.search(text) or r"\ne" in text:
        return [text]
    return [side for side in _split(text, "=") if side] or [text]


_BASES = {name: 2 + place for place, name in enumerate("two three four five six seven eight nine ten".split())}
_BASES |= {"twelve": 12, "sixteen": 16}


def _in_base(text: str) -> tuple[str, str] | None:
    """Digits and base of ``2516_8`` or ``(2516)_{10}``."""
    m = re.fullmatch(r"\(?\s*([0-9A-Fa-f]+)\s*\)?_\{?\s*(\d{1,2}|[a-z]+)\s*\}?", text)
    if m is None or not (m[2].isdigit() or m[2] in _BASES):
        return None
    return m[1].upper(), str(_BASES.get(m[2], m[2]))
