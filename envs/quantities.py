"""Rational numbers as people write them, with the units that they may carry."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A rational value; ``exact`` when written as an integer or a fraction, so that no tolerance applies."""

    value: Fraction
    exact: bool


_UNITS: dict[str, tuple[str, Fraction]] = {}
for _dimension, _listing in {
    "length": "mm millimeter 1/1000;cm centimeter 1/100;dm decimeter 1/10;m meter 1;km kilometer 1000",
    "mass": "mg milligram 1/1000000;g gram 1/1000;kg kilogram 1",
    "time": "ms millisecond 1/1000;s second 1;min minute 60;h hour 3600;day day 86400;week week 604800",
    "volume": "ml milliliter 1/1000;l liter 1",
    "angle": "deg degree 1",
    "percent": "% percent 1",
}.items():
    for _entry in _listing.split(";"):
        _short, _long, _factor = _entry.split()
        for _name in (
            _short,
            _long,
            _long + "s",
            _long.replace("meter", "metre"),
            _long.replace("meter", "metre") + "s",
        ):
            _UNITS[_name] = (_dimension, Fraction(_factor))
for _spellings, _metres in (
    (("in", "inch", "inches"), Fraction(127, 5000)),
    (("ft", "foot", "feet"), Fraction(381, 1250)),
    (("yd", "yard", "yards"), Fraction(1143, 1250)),
    (("mi", "mile", "miles"), Fraction(201168, 125)),
):
    _UNITS |= {spelling: ("length", _metres) for spelling in _spellings}
_UNITS |= {"sec": _UNITS["s"], "hr": _UNITS["h"], "hrs": _UNITS["h"], "mins": _UNITS["min"], "°": _UNITS["deg"]}
_CURRENCIES = {r"\$": "dollar", "USD": "dollar", "US$": "dollar", "dollar": "dollar", "dollars": "dollar"}
_CURRENCIES |= {"€": "euro", "EUR": "euro", "euro": "euro", "euros": "euro", "£": "pound", "GBP": "pound"}
_UNITS |= {"dollar": ("money", Fraction(1)), "cent": ("money", Fraction(1, 100)), "cents": ("money", Fraction(1, 100))}
_NOT_UNITS = {"or", "and", "sin", "cos", "tan", "log", "ln", "exp", "pi", "mod", "base", "import", "sqrt", "nan", "inf"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A number with its unit; the unit is empty when none was written."""

    number: Number
    unit: str

    def equals(self, answer: Measured) -> bool:
        """Whether ``answer`` is this: a missing unit is forgiven, another one is not."""
        left, right = self.number, answer.number
        percent = [_UNITS.get(unit, ("",))[0] == "percent" for unit in (self.unit, answer.unit)]
        if percent[0] != percent[1] and not (self.unit and answer.unit):
            shares = [Fraction(1, 100) if is_percent else Fraction(1) for is_percent in percent]
            return _close(left, right, Fraction(1)) or _close(left, right, shares[1] / shares[0])
        if self.unit and answer.unit and self.unit != answer.unit:
            a, b = _UNITS.get(self.unit), _UNITS.get(answer.unit)
            return bool(a and b and a[0] == b[0] and _close(left, right, b[1] / a[1]))
        return _close(left, right, Fraction(1))


def _close(gold: Number, answer: Number, factor: Fraction) -> bool:
    """Equal; or within 1e-6 of the gold value where one of them is a rounded form and the gold is no integer."""
    value = answer.value * factor
    if gold.value == value:
        return True
    if gold.exact and gold.value.denominator == 1:
        return False
    if gold.exact and answer.exact:
        return False
    return abs(gold.value - value) <= abs(gold.value) / 10**6


def measured(text: str) -> Measured | None:
    """The number with its unit that the normalised text is; None for anything else."""
    value = number(text)
    if value:
        return Measured(number=value, unit="")
    currency = re.fullmatch(
        r"(\\\$|US\$|USD|EUR|GBP|€|£)\s*(\S.*)|(\S.*?)\s*(\\\$|USD|EUR|GBP|€|£|dollars?|euros?)", text
    )
    if currency:
        value = number(currency[2] or currency[3])
        return Measured(number=value, unit=_CURRENCIES[currency[1] or currency[4]]) if value else None
    degrees = re.fullmatch(r"(.+?)\s*(?:\^\s*\\circ|\\degree)", text)
    if degrees:
        value = number(degrees[1])
        return Measured(number=value, unit="deg") if value else None
    percent = re.fullmatch(r"(.+?)\s*\\?%", text)
    if percent:
        value = number(percent[1])
        return Measured(number=value, unit="percent") if value else None
    # Words need something between them, or a long word could be cut up in exponentially many ways.
    worded = re.fullmatch(r"(.*?[\d}])\s*([a-zA-Z]+(?:[ /.]+[a-zA-Z]+)*[ /.]*)(?:\^\s*\{?(\d)\}?)?", text)
    if not worded:
        return None
    unit = " ".join(worded[2].split()).strip(" .")
    value = number(worded[1])
    words = set(re.findall(r"[a-zA-Z]+", unit.lower()))
    if value is None or words & _NOT_UNITS:
        return None
    known = all(word in _UNITS or word in ("square", "sq", "cubic", "per", "mph") for word in words)
    if not known and min(map(len, words)) < 3:
        return None
    unit = {"square units": "", "units": "", "unit": "", "sq units": ""}.get(unit.lower(), unit)
    power = worded[3] or ""
    if raised := re.fullmatch(r"(?:(sq|square)|(cubic)) (\w+)", unit):
        unit, power = raised[3], "2" if raised[1] else "3"
    if re.search(r"/|\bper\b|\bmph\b", unit):
        return Measured(number=value, unit=_product_of_units(unit + (f"^{power}" if power else "")))
    key = unit.lower() if unit.lower() in _UNITS else unit
    return Measured(number=value, unit=_canonical_unit(key) + (f"^{power}" if power and key else ""))


def _canonical_unit(unit: str) -> str:
    """``meters`` and ``m`` are one; ``minutes`` and ``min`` too; an unknown word loses its plural."""
    if unit in _UNITS:
        return next(name for name, entry in _UNITS.items() if entry == _UNITS[unit])
    return unit[:-1] if len(unit) > 3 and unit.endswith("s") else unit


_DIGITS = r"(?:\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})"


def number(text: str) -> Number | None:
    text = text.strip()
    while wrapped := re.fullmatch(r"\{\s*([^{}]*?)\s*\}", text):
        text = wrapped[1]
    sign = 1
    signed = re.match(r"([-+])\s*(?=[\d.\\])", text)
    if signed:
        sign, text = (-1 if signed[1] == "-" else 1), text[signed.end() :]
    if re.fullmatch(r"\d{1,3}(?:, ?\d{3})+(?:\.\d+)?|\d{1,3}(?: \d{3})+", text) and not re.search(r", \d", text):
        text = re.sub(r"[, ]", "", text)
    found = _unsigned(text)
    return Number(value=sign * found.value, exact=found.exact) if found else None


def _unsigned(text: str) -> Number | None:
    if m := re.fullmatch(
        r"(\d{0,40})\.(\d{0,20}?)(\d{1,10}?)\3{2,}\.\.\.", text
    ):  # 0.333..., the same digits three times
        return _unsigned(f"{m[1]}.{m[2]}\\overline{{{m[3]}}}")
    if re.fullmatch(r"\d{1,400}", text):
        return Number(value=Fraction(int(text)), exact=True)
    if re.fullmatch(_DIGITS, text):
        return Number(value=Fraction("0" + text.rstrip(".")), exact=False)
    if m := re.fullmatch(rf"({_DIGITS})[eE]([-+]?\d{{1,3}})", text):
        return Number(value=Fraction("0" + m[1].rstrip(".")) * Fraction(10) ** int(m[2]), exact=False)
    if m := re.fullmatch(
        rf"(?:({_DIGITS})\s*(?:\\times|\\cdot|\*|x)\s*)?10\s*\^\s*(?:\{{\s*([-+]?\d{{1,3}})\s*\}}|([-+]?\d{{1,3}}))",
        text,
    ):
        value = Fraction("0" + (m[1] or "1").rstrip(".")) * Fraction(10) ** int(m[2] or m[3])
        return Number(value=value, exact=m[1] is None)
    if m := re.fullmatch(r"(\d{0,40})\.(\d{0,40})\\overline\{(\d{1,40})\}", text):
        whole, fixed, repeated = (m[1] or "0"), m[2], m[3]
        value = Fraction(
            int(whole + fixed + repeated) - int(whole + fixed), 10 ** len(fixed) * (10 ** len(repeated) - 1)
        )
        return Number(value=value, exact=True)
    m = re.fullmatch(rf"(?:(\d{{1,30}})\s*)?\\frac\{{\s*(-?{_DIGITS})\s*\}}\{{\s*(-?{_DIGITS})\s*\}}", text)
    m = m or re.fullmatch(rf"(?:(\d{{1,30}})\s+)?(-?{_DIGITS})\s*/\s*({_DIGITS})", text)
    if m:
        top, bottom = (Fraction(part.rstrip(".").replace("-.", "-0.")) for part in (m[2], m[3]))
        if bottom == 0 or (m[1] and (top < 0 or bottom < 0)):
            return None
        return Number(value=(int(m[1]) if m[1] else 0) + top / bottom, exact=True)
    return None


_IN_TEXT = re.compile(
    r"\\(?:text|textrm|textnormal|mathrm|mbox|rm|operatorname)\s*\{([^{}]*)\}(\s*\^\s*\{?\s*-?\d\s*\}?)?$"
)
_NO_UNIT_WORDS = _NOT_UNITS | set(
    "is are if for where when with even odd only all any real integer integers positive negative prime to in below "
    "above none no".split()
)


def without_unit(answer: str) -> tuple[str, str]:
    """An expression and the unit that is set in text behind it: ``36\\sqrt{3}`` and ``cm^2``; "" without one.

    Several pieces may follow each other: ``\\mathrm{m}/\\mathrm{s}^2``.
    """
    rest, unit = answer.strip().rstrip(".").strip(), ""
    while match := _IN_TEXT.search(rest):
        words = re.findall(r"[a-z]+", match[1].lower())
        if (
            not words
            or words in (["i"], ["j"], ["e"])
            or set(words) & _NO_UNIT_WORDS
            or not re.fullmatch(r"[\sA-Za-z/.^\d%~°µ\\-]*", match[1])
        ):
            break
        power = re.sub(r"[\s^{}]", "", match[2] or "")
        piece = re.sub(r"[\s~\\]+", " ", match[1]).strip() + (f"^{power}" if power else "")
        rest = rest[: match.start()].rstrip()
        joined = re.search(r"(?:/|\\cdot|\\times|\\,|\\ |~|\\;|\\!)\s*$", rest)
        division = "/" if joined and "/" in joined[0] else ""
        unit = f"{division}{piece} {unit}"
        while joined:
            rest = rest[: joined.start()].rstrip()
            joined = re.search(r"(?:\\cdot|\\,|\\ |~|\\;|\\!|/)\s*$", rest)
    if not unit or not re.search(r"[\w})]$", rest):
        return answer, ""
    return rest, _product_of_units(unit)


def _product_of_units(text: str) -> str:
    """One spelling for units that are multiplied and divided: ``m/s`` and ``m s^-1`` are ``m s^-1``."""
    powers: dict[str, int] = {}
    text = re.sub(r"\bmph\b", "mi/h", re.sub(r"\s*\bper\b\s*", "/", text))
    for division, name, power in re.findall(r"(/?)\s*([A-Za-z°µ%]+)(?:\^(-?\d+))?", text):
        key = _canonical_unit(name.lower() if name.lower() in _UNITS else name)
        powers[key] = powers.get(key, 0) + int(power or 1) * (-1 if division else 1)
    return " ".join(key if power == 1 else f"{key}^{power}" for key, power in sorted(powers.items()) if power)
