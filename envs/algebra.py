"""Whether two expressions are equal, by numbers and by math-verify. Only for a process that may be killed.

Numbers come first: two expressions that differ at a point are not equal, and those that agree at many are, whatever
their form. That is faster and surer than simplification, which math-verify does and which takes seconds.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

POSITIVE, NEGATIVE, WHOLE = 5, 4, 8
"""Points of each kind at which expressions with variables are compared."""
FAR = 1e-6
"""Relative difference that tells two values apart; what is nearer may be one value and its rounded form."""
NEAR = 1e-18
"""Relative difference, at 30 digits, of one value computed in two ways."""
COUNTERS = re.compile(r"[nkmpqNKM]")
"""Variables that stand for whole numbers."""


FORMS = (
    r"x_{0}\cos(\omega t)-3\sqrt{2}", r"k\left(4k^{2}+k-1\right)/2", r"y=2x+1", r"e^{-2t}\sin^{2}\theta", "(6,31,-1)",
    r"\log_{2}8+\ln(x)", r"\binom{n+1}{2}+n!", r"2^{n+1}-1", "x^3+3x-6", "(x-1)^2+(y+2)^2=9",
    r"(-\frac{1}{2},\frac{7}{2})",
    r"\frac{-1+i\sqrt{3}}{2}", r"-\frac{1}{2}x^{-\frac{1}{2}}", r"\sqrt[3]{4}\pi r^{2}", r"|x|+1.5y", "x>3", "f(x)=x-1",
    r"\dot{x}_{0}+\alpha\beta", r"\{1,2\}", r"(1,2]\cup[3,\infty)", r"3\cdot10^{8}\times2", r"[-1,-\frac{1}{2}]",
    r"\left(\gamma^{2}-1\right)m_{p}c^{2}", r"x=\frac{1}{6}\pi+\pi k,\frac{1}{3}\pi",
)  # fmt: skip
"""Expressions of many forms. The parser learns its grammar as it reads, 50 to 500 ms a new form, and under 5 ms after:
a process that has read these hands the knowledge to those that it forks."""


def warm(number: int) -> None:
    """Read one of ``FORMS``."""
    _parsed(FORMS[number])


def algebra_equal(gold: str, answer: str) -> bool:
    """Whether numbers or math-verify say so. It may take forever, or all memory."""
    left, right = _parsed(gold), _parsed(answer)
    if not left or not right:
        return False
    told = by_numbers(left[0], right[0])
    if told is not None:
        return told
    from math_verify import verify  # here, so that importing this module stays cheap

    # Who calls this keeps the time; math-verify's own alarm would only add a second clock.
    return bool(verify(left, right, timeout_seconds=None))


def _parsed(text: str) -> list[Any]:
    """Its reading as sympy's object and as text; products of letters are products, not units."""
    from latex2sympy2_extended import NormalizationConfig  # here: see ``algebra_equal``
    from math_verify import LatexExtractionConfig, parse

    reading = NormalizationConfig(units=False, malformed_operators=True, nits=False, boxed="all")
    config = [LatexExtractionConfig(normalization_config=reading)]
    return list(parse(f"\\boxed{{{_in_radians(text)}}}", extraction_config=config, parsing_timeout=None))


def _in_radians(text: str) -> str:
    """Degrees inside a trigonometric function as radians; math-verify drops the sign for degrees."""
    if not re.search(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])", text):
        return text
    return re.sub(r"(\d+(?:\.\d+)?)\s*\^\s*\\circ", r"(\1\\cdot\\frac{\\pi}{180})", text)


def by_numbers(left: Any, right: Any) -> bool | None:
    """True or False where values tell; None where they cannot (sets, relations, rounded forms, no values)."""
    import sympy

    if isinstance(left, sympy.Eq) and isinstance(right, sympy.Eq):
        return _same_equation(left, right)
    if not isinstance(left, sympy.Expr) or not isinstance(right, sympy.Expr):
        return None
    rounded = bool(left.atoms(sympy.Float) | right.atoms(sympy.Float))
    left, right = _with_constants(left), _with_constants(right)
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    if not symbols:
        return _same_constant(left, right, rounded)
    if len(symbols) > 12 or left.atoms(sympy.core.function.AppliedUndef) | right.atoms(
        sympy.core.function.AppliedUndef
    ):
        return None
    rng = random.Random(7)
    positive = [_points(symbols, rng, 1) for _ in range(POSITIVE)]
    negative = [_points(symbols, rng, -1) for _ in range(NEGATIVE)]
    agreed, told_apart = _compared(left, right, positive, real=False)
    if not told_apart and agreed >= 3:
        told_apart = _compared(left, right, negative, real=True)[1]
        if not told_apart:
            return True
    if told_apart and all(COUNTERS.fullmatch(str(symbol)) for symbol in symbols):
        whole = [
            {symbol: sympy.Integer(start + 2 * place) for place, symbol in enumerate(symbols)}
            for start in range(1, WHOLE + 1)
        ]
        agreed, told_apart = _compared(left, right, whole, real=False)
        return not told_apart and agreed == WHOLE
    return False if told_apart else None


def _with_constants(expression: Any) -> Any:
    """With ``i`` as the imaginary unit, ``e`` as Euler's number and decimals as fractions, and evaluated.

    math-verify takes both letters for variables, and leaves ``log(8, 2)`` as it stands, which has no value then.
    """
    import sympy

    constants = {"i": sympy.I, "e": sympy.E}
    if isinstance(expression, sympy.Symbol):
        return constants.get(expression.name, expression)
    if isinstance(expression, sympy.Float):
        return sympy.Rational(str(expression))
    return expression.func(*map(_with_constants, expression.args)) if expression.args else expression


def _points(symbols: Sequence[Any], rng: random.Random, sign: int) -> dict[Any, Any]:
    import sympy

    return {symbol: sympy.Rational(sign * rng.randint(1001, 2999), 997) for symbol in symbols}


def _compared(left: Any, right: Any, points: Sequence[Mapping[Any, Any]], *, real: bool) -> tuple[int, bool]:
    """At how many points the values agree, and whether they differ at one. ``real``: other values do not count."""
    agreed = 0
    for point in points:
        a, b = _value(left, point), _value(right, point)
        if a is None or b is None or (real and (abs(a.imag) > 1e-12 or abs(b.imag) > 1e-12)):
            continue
        size = max(abs(a), abs(b), 1e-30)
        if abs(a - b) > FAR * size:
            return agreed, True
        agreed += abs(a - b) <= NEAR * 1e3 * size
    return agreed, False


def _value(expression: Any, point: Mapping[Any, Any]) -> Any:
    """A complex number of 30 digits; None where there is none."""
    import mpmath
    import sympy

    try:
        value = expression.subs(point).evalf(30)
        if not value.is_number or value.has(sympy.nan, sympy.zoo, sympy.oo):
            return None
        re_part, im_part = value.as_real_imag()
        with mpmath.workdps(30):
            return mpmath.mpc(mpmath.mpf(str(re_part)), mpmath.mpf(str(im_part)))
    except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError):
        return None


def _same_constant(left: Any, right: Any, rounded: bool) -> bool | None:
    left, right = left.doit(), right.doit()
    if left.is_Rational and right.is_Rational and not rounded:
        return bool(left == right)
    a, b = _value(left, {}), _value(right, {})
    if a is None or b is None:
        return None
    size = max(abs(a), abs(b))
    if size == 0:
        return True
    if abs(a - b) > FAR * size:
        return False
    if rounded:
        return True if abs(a - b) <= NEAR * size else None  # else math-verify's tolerance decides
    return _vanishes(left - right)


def _vanishes(difference: Any) -> bool | None:
    """As far as 200 digits tell: the neighbours of a large integer are not equal to it."""
    size = abs(difference.evalf(20, maxn=200)).evalf(20)
    return bool(size < 1e-15) if size.is_number and size.is_comparable else None


def _same_equation(left: Any, right: Any) -> bool | None:
    """Equations are the same when one difference of sides is a constant multiple of the other."""
    a = _with_constants(left.lhs - left.rhs)
    b = _with_constants(right.lhs - right.rhs)
    if a.free_symbols != b.free_symbols or not a.free_symbols:
        return None
    rng = random.Random(11)
    symbols = sorted(a.free_symbols, key=str)
    ratios = []
    for _ in range(POSITIVE + 1):
        point = _points(symbols, rng, 1)
        top, bottom = _value(a, point), _value(b, point)
        if top is None or bottom is None or abs(top) < 1e-12 or abs(bottom) < 1e-12:
            continue
        ratios.append(top / bottom)
    if len(ratios) < 3:
        return None
    if all(abs(ratio - ratios[0]) <= 1e-12 * abs(ratios[0]) for ratio in ratios):
        return True
    return None  # x = y + 1 and x - 1 = y solved differently, e.g. after a division: math-verify looks
