"""All methods by name: what each hooks into, its formula, its source, and whether the formula was confirmed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from stare.neighbours.advantage_entries import ADVANTAGES, TURNS
from stare.neighbours.entry import Hook, Method
from stare.neighbours.token_entries import RATIOS, REGULARISERS, SAMPLING, TOKENS

METHODS: Mapping[str, Method] = {
    entry.name: entry for entry in (*ADVANTAGES, *TURNS, *TOKENS, *RATIOS, *REGULARISERS, *SAMPLING)
}


def method(name: str, hook: Hook | None = None) -> Method:
    """The entry of this name; raises ``ValueError`` with the nearest name, or for another hook's method."""
    found = METHODS.get(name)
    if found is not None and hook in (None, found.hook):
        return found
    names = [m.name for m in METHODS.values() if hook in (None, m.hook)]
    if found is not None:
        raise ValueError(f"{name!r} is of hook {found.hook!r}, not {hook!r}: {', '.join(names)}")
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    kind = hook or "method"
    raise ValueError(f"no {kind} {name!r}: " + (f"did you mean {close[0]!r}?" if close else ", ".join(names)))


def options_of(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, checked against the method's own parameters; raises ``ValueError`` for one that it has not."""
    known = method(name).defaults
    for option in options:
        if option not in known:
            raise ValueError(f"{name} has no option {option!r}: " + (", ".join(known) or "it has none"))
    return dict(options)
