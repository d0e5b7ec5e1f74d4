"""The options of the chosen methods, tried on a made-up group before a run begins: a method checks its own parameters
where it computes, which in a run is after the first rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from agent_rl.algorithm import Algorithm
from agent_rl.methods import chosen
from agent_rl.regularisers import RegulariserState, penalties
from agent_rl.types import Trajectory
from envs.types import Task
from stare.neighbours import Tokens

SAMPLED = 4
"""Tokens of each made-up rollout."""

RIGHT = (1.0, 1e6)
"""Rewards of the one that is right; the second is above any threshold that suits other scales."""


def try_out(algorithm: Algorithm, group: int) -> None:
    """One update of a group of which one member is right, without a model.

    Raises:
        ValueError: a method cannot compute with its options, or nothing of such a group would be learned.
    """
    for reward in RIGHT:
        trajectories = [_rollout(member, 0.0 if member else reward) for member in range(group)]
        advantage = _tried(algorithm, algorithm.advantage, partial(algorithm.advantages, trajectories))
        if (advantage != 0).any():
            break
    else:
        raise ValueError(
            f"{_named(algorithm, algorithm.advantage)}: advantage 0 throughout in a group of {group} with one right: "
            "nothing would be learned"
        )
    tokens = _tokens(torch.repeat_interleave(advantage, SAMPLED))
    for name in (*algorithm.token_weights, *([] if algorithm.correction == "none" else [algorithm.correction])):
        function = partial(chosen(name, "token weight").function, tokens, **algorithm.options.get(name, {}))
        weight = _tried(algorithm, name, function)
        if not (weight != 0).any():
            raise ValueError(f"{_named(algorithm, name)}: weight 0 for every token: nothing would be learned")
    origin = torch.arange(len(tokens.logp_T))
    logp_T = tokens.logp_T.clone().requires_grad_()

    def ratio() -> Tensor:
        rule = algorithm.ratio_rule(trajectories, torch.zeros_like(tokens.logp_T))
        return logp_T.sum() if rule is None else rule.surrogate(logp_T, tokens.logp_T, tokens.advantage_T, origin).loss

    _tried(algorithm, algorithm.ratio, ratio)
    for name in algorithm.regularisers:
        alone = Algorithm(regularisers=(name,), options={name: dict(algorithm.options.get(name, {}))})

        def penalty(alone: Algorithm = alone) -> Tensor:
            (term,) = penalties(alone, RegulariserState.start(alone), tokens, torch.ones_like(logp_T), 1.0)
            return term.coefficient * term.summed(logp_T, tokens.entropy_T, origin)

        _tried(algorithm, name, penalty)


def _tried(algorithm: Algorithm, name: str, compute: Callable[[], Tensor]) -> Tensor:
    try:
        found = compute()
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{_named(algorithm, name)}: {str(error).strip().splitlines()[0]}") from None
    if not torch.isfinite(found).all():
        raise ValueError(f"{_named(algorithm, name)}: gives numbers that are not finite")
    return found


def _named(algorithm: Algorithm, name: str) -> str:
    options = algorithm.options.get(name)
    return f"algorithm's {name}" + (f" with options {dict(options)}" if options else "")


def _rollout(member: int, reward: float) -> Trajectory:
    return Trajectory(
        task=Task(id="made-up", prompt=""),
        group=0,
        member=member,
        token_ids=(0,) * (1 + SAMPLED),
        loss_mask=(False, *[True] * SAMPLED),
        logprobs=(0.0, *[-0.1 * (1 + member)] * SAMPLED),
        turns=(),
        messages=(),
        reward=reward,
    )


def _tokens(advantage_T: Tensor) -> Tokens:
    def spread(values: Sequence[float]) -> Tensor:
        return torch.tensor(values).repeat(-(-len(advantage_T) // len(values)))[: len(advantage_T)]

    logp_T = spread([-0.1, -3.0, -0.7, -6.0])
    return Tokens(
        logp_T=logp_T,
        entropy_T=spread([0.2, 2.5, 0.9, 1.4]),
        advantage_T=advantage_T,
        row_T=torch.arange(len(advantage_T)) // SAMPLED,
        sampler_logp_T=logp_T - 0.01,
        reference_logp_T=logp_T + 0.1,
    )
