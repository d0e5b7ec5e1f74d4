"""A world small enough to be exact: prompts, positions, a softmax table, and answers that can be verified.

Each prompt wants a sequence of ``positions`` tokens and accepts, at every position, a set of its own; reward is 1 where
all fit, else 0. The sets are drawn from a pool common to all prompts, and the logits are a table common to all prompts
plus one for each, so that prompts teach one another: what
the easy ones make certain, the hard ones can no longer explore. Prompts differ in how many tokens they accept, from
``fewest_right`` to ``most_right``. Nothing is approximated: entropy and expected reward are computed from the table,
and the update is the gradient of the very surrogate that the trainer uses, by plain gradient descent.

Dimensions: S seeds (side by side, independent), Q prompts, L positions, V tokens, G rollouts, T = Q G L tokens a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from stare import (
    Controller,
    ControllerConfig,
    TokenStatistics,
    Variant,
    entropy_dynamics,
    omega,
    token_scale,
    token_sets,
    token_statistics,
)
from stare.neighbours import METHODS, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Sizes; the defaults are those of the README's figure."""

    seeds: int = 10
    prompts: int = 16
    positions: int = 4
    vocabulary: int = 32
    pool: int = 16
    fewest_right: int = 6
    most_right: int = 12
    group: int = 8
    step_size: float = 6.0  # of the table, per unit of the mean gradient over the tokens of a prompt
    own_rate: float = 0.3  # the prompt's own table learns this much more slowly than each prompt moves the common one
    spread: float = 0.6  # standard deviation of the starting logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What is trained with: names out of the registry, and STARE's settings where its weights are chosen."""

    name: str
    advantage: str = "grpo"
    token_weights: str | None = None
    ratio: str = "dapo"
    variant: Variant = "none"
    fraction: float = 0.3  # P
    gated: bool = True  # False: the weights act in every batch
    controller: ControllerConfig = field(default_factory=lambda: stare_settings())
    options: dict[str, Any] = field(default_factory=dict)  # of the token weights


def stare_settings(**changes: Any) -> ControllerConfig:
    """STARE's settings in the lab: its tokens are few and their signal strong, so the weights may go further."""
    start = ControllerConfig(
        kind="adaptive",
        target_entropy=1.5,
        alpha=0.05,
        gain=2.0,
        integral_gain=0.05,
        amplify_max=4.0,
        attenuate_min=0.1,
    )
    return replace(start, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """What a recipe did, before every step; float64 [steps, S]."""

    recipe: Recipe
    entropy: Tensor  # mean over prompts and positions, nats
    reward: Tensor  # expected, exact
    amplify: Tensor  # W; 1 where the weights were off


def simulate(
    world: World, recipe: Recipe, steps: int, *, seed: int = 0, on_step: Callable[[], None] = lambda: None
) -> Curves:
    """``steps`` updates of every seed; the same arguments give the same curves (on one machine).

    Raises:
        ValueError: the recipe's methods need what the lab has not got.
    """
    chosen = [METHODS[name] for name in (recipe.advantage, recipe.ratio, recipe.token_weights or "stare")]
    for entry in chosen:
        if entry.needs:
            raise ValueError(f"{entry.name} cannot run in the lab: it needs {entry.needs}")
    generator = torch.Generator().manual_seed(seed)
    right, shared, own = _start(world, generator)
    controllers = [Controller.start(recipe.controller) for _ in range(world.seeds)]
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(steps):
        table = (shared + own).requires_grad_()  # [S, Q, L, V]
        logp_V = torch.log_softmax(table, -1)
        p_V = logp_V.detach().exp()
        flat = p_V.flatten(0, 2)
        token = torch.multinomial(flat, world.group, replacement=True, generator=generator)
        token = token.view(world.seeds, world.prompts, world.positions, world.group).transpose(2, 3)  # [S, Q, G, L]
        per_position = right.unsqueeze(2).expand(-1, -1, world.group, -1, -1)
        reward = per_position.gather(-1, token.unsqueeze(-1)).all(3).squeeze(-1).double()  # [S, Q, G]
        statistics = token_statistics(table.detach().unsqueeze(2).expand_as(per_position), token)
        entropy_S = -(p_V * logp_V.detach()).sum(-1).mean((1, 2))
        coefficient = torch.zeros(token.shape)
        weights = []
        for number in range(world.seeds):
            of_seed = TokenStatistics(*(column[number].flatten() for column in statistics))
            controllers[number], values = _coefficients(
                recipe, reward[number], of_seed, world.positions, controllers[number], float(entropy_S[number])
            )
            coefficient[number] = values.view(token.shape[1:])
            state = controllers[number]
            weights.append(state.amplify if state.gate_on or not recipe.gated else 1.0)
        logp = logp_V.unsqueeze(2).expand_as(per_position).gather(-1, token.unsqueeze(-1)).squeeze(-1)
        rule = METHODS[recipe.ratio]
        extra = {}
        if "segment_M" in rule.function.__annotations__:
            rows_of = torch.arange(token[..., 0].numel()).repeat_interleave(world.positions)
            extra["segment_M"] = rows_of
        loss = rule.function(logp.flatten(), logp.detach().flatten(), coefficient.flatten(), **extra).loss
        (gradient,) = torch.autograd.grad(loss, table)
        gradient = gradient * (world.step_size * 0.1 * world.prompts * world.positions)
        rows.append((entropy_S, (p_V * right).sum(-1).prod(-1).mean(-1), torch.tensor(weights)))
        own = own - world.own_rate * gradient
        shared = shared - gradient.mean(1, keepdim=True)
        on_step()
    entropy, expected, amplify = (torch.stack(column).double() for column in zip(*rows, strict=True))
    return Curves(recipe=recipe, entropy=entropy, reward=expected, amplify=amplify)


def _start(world: World, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Accepted tokens bool [S, Q, L, V], and the tables: common [S, 1, L, V], own [S, Q, L, V]."""
    shape = (world.seeds, world.prompts, world.positions, world.vocabulary)
    common = (world.seeds, 1, *shape[2:])
    in_pool = _ranks(torch.rand(common, generator=generator)) < world.pool
    count = torch.linspace(world.fewest_right, world.most_right, world.prompts).round()
    right = _ranks(torch.rand(shape, generator=generator) + 2.0 * ~in_pool) < count[None, :, None, None]
    shared = world.spread * torch.randn(common, generator=generator)
    own = world.spread / 2 * torch.randn(shape, generator=generator)
    return right, shared, own


def _ranks(value_V: Tensor) -> Tensor:
    return value_V.argsort(-1).argsort(-1)


def _coefficients(
    recipe: Recipe, reward: Tensor, of_seed: TokenStatistics, positions: int, controller: Controller, entropy: float
) -> tuple[Controller, Tensor]:
    """The plan of one seed's batch, as the trainer makes it: advantages, controller, weights, token mean; [T]."""
    num_prompts, group = reward.shape
    group_B = torch.arange(num_prompts).repeat_interleave(group)
    advantage_B = METHODS[recipe.advantage].function(reward.flatten(), group_B)
    counts_B = torch.full((len(advantage_B),), positions)
    advantage_T = torch.repeat_interleave(advantage_B, counts_B)
    scale_T = torch.repeat_interleave(token_scale(counts_B, "token-mean"), counts_B)
    if recipe.token_weights not in (None, "stare"):
        tokens = Tokens(
            logp_T=of_seed.logp.double(),
            entropy_T=of_seed.entropy.double(),
            advantage_T=advantage_T,
            row_T=torch.repeat_interleave(torch.arange(len(advantage_B)), counts_B),
            sampler_logp_T=of_seed.logp.double(),
        )
        # As in the trainer: STARE ranks what these leave.
        advantage_T = advantage_T * METHODS[recipe.token_weights].function(tokens, **recipe.options)
    if recipe.variant == "none":
        return controller, (advantage_T * scale_T).float()
    sets = token_sets(-of_seed.logp, advantage_T, recipe.fraction)
    dynamics = entropy_dynamics(advantage_T, of_seed.phi, sets, recipe.variant)
    controller = controller.update(entropy, dynamics)
    omega_T = omega(
        sets,
        recipe.variant,
        gate=controller.gate_on or not recipe.gated,
        amplify=controller.amplify,
        attenuate=controller.attenuate,
        dtype=torch.float64,
    )
    return controller, (omega_T * advantage_T * scale_T).float()
