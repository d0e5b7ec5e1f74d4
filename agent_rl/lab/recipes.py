"""What the lab compares: names of the registry, combinations of them, and STARE's own variants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agent_rl.errors import ConfigError
from agent_rl.lab.world import Recipe, stare_settings
from stare.neighbours import method

STARE = Recipe(name="stare", variant="C2")
"""Adaptive W and M around the gate, variant C2; what ``stare`` means in the lab."""

PRESETS: dict[str, Recipe] = {
    "stare": STARE,
    "stare-o1": replace(STARE, name="stare-o1", variant="O1"),
    "stare-fixed": replace(
        STARE, name="stare-fixed", controller=stare_settings(kind="fixed", amplify=4.0, attenuate=0.1)
    ),
    "stare-pi": replace(STARE, name="stare-pi", controller=stare_settings(kind="pi")),
    "stare-model": replace(STARE, name="stare-model", controller=stare_settings(kind="model")),
}

EVERY_WAY = ("grpo", "stare", "rloo", "ngrpo", "forking", "steer", "entropy_advantage", "cispo")
"""A walk through the hooks."""


MISSING = {
    "unlikeliness": "logprobs of whole rollouts",
    "ace": "a reference policy",
    "hapo_clip": "the entropies that its bounds follow",
    "turn_ratio": "turns",
}
"""What the trainer gives to a method and the lab does not."""


def recipe_of(name: str) -> Recipe:
    """A preset, a method of the registry, or several joined by ``+`` (``rloo+stare-o1+cispo``).

    Raises:
        ConfigError: unknown, of a hook that the lab has no place for, one that needs more than the lab has, or two
            where there is a place for one.
    """
    recipe = Recipe(name=name)
    taken: dict[str, str] = {}
    for part in name.split("+"):
        if part in PRESETS:
            _take(taken, "variant of STARE", part)
            preset = PRESETS[part]
            recipe = replace(recipe, variant=preset.variant, fraction=preset.fraction, controller=preset.controller)
            continue
        try:
            entry = method(part)
        except ValueError as error:
            raise ConfigError(f"{error} (or one of {', '.join(PRESETS)})") from None
        place = {"advantage": "advantage", "token weight": "token_weights", "ratio": "ratio"}.get(entry.hook)
        if place is None:
            raise ConfigError(f"{part} cannot run in the lab: it has no place for {entry.hook}")
        if missing := entry.needs or MISSING.get(part):
            raise ConfigError(f"{part} cannot run in the lab: it has not got {missing}")
        _take(taken, entry.hook, part)
        changes: dict[str, Any] = {place: part}
        recipe = replace(recipe, **changes)
    return recipe


def _take(taken: dict[str, str], kind: str, part: str) -> None:
    before = taken.setdefault(kind, part)
    if before != part:
        raise ConfigError(f"{before} and {part}: the lab runs one {kind} at a time")


def ablation() -> dict[str, list[Recipe]]:
    """The paper's ablation in miniature, and the controllers side by side, by question."""

    def settings(name: str, **changes: Any) -> Recipe:
        return replace(STARE, name=name, controller=stare_settings(**changes))

    return {
        "W, with the gate and without it (fixed, O1)": [
            replace(settings(f"W {w:g}{', no gate' * (not gated)}", kind="fixed", amplify=w), variant="O1", gated=gated)
            for w in (1.1, 2.0, 4.0)
            for gated in (True, False)
        ],
        "P (adaptive C2)": [replace(STARE, name=f"P {p:g}", fraction=p) for p in (0.05, 0.1, 0.3, 0.6)],
        "target (adaptive C2)": [settings(f"H_tgt {t:g}", target_entropy=t) for t in (1.0, 1.25, 1.5)],
        "variant (adaptive)": [
            replace(STARE, name=str(v), variant=v) for v in ("O1", "O2", "O3", "O4", "C1", "C2", "C3", "C4")
        ],
        "controller (C2)": [
            settings("on/off gate, W 4 and M 0.1", kind="fixed", amplify=4.0, attenuate=0.1),
            settings("adaptive (sign)"),
            settings("proportional-integral", kind="pi"),
            settings("around W* (model)", kind="model"),
        ],
    }
