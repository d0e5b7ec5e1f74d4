"""Terms beside the surrogate as a run uses them: by name, each with its coefficient, and what they remember.

The loss of an optimizer step is ``surrogate + sum over terms of coefficient * sum_t scale_t * penalty_t``, over the
sampled tokens of the step's part of the update batch. ``scale`` is the surrogate's own normaliser, so a term is a mean
over tokens where the loss is (``token-mean``), and nothing depends on micro-batches, packing or ranks. What else:

- A reference policy is the one that the run started with (after the cold start), after a resume too.
- The advantage, STARE's omega and a correction of stale tokens do not touch the terms.
- Groups without a difference in reward are not in the update batch, so no term sees them; a step without any other
  group is not taken. ``adaptive_entropy`` and ``epo_smoothing`` take note of its entropy all the same.
- ``kl_cov`` is silent in a batch's first optimizer step: its gradient there would be the sign of a rounding error.

Dimensions: T sampled tokens of the batch, M of one micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from agent_rl.methods import chosen
from stare.neighbours import Tokens
from stare.neighbours.regularisers import CoefficientState, entropy_bonus

if TYPE_CHECKING:
    from agent_rl.algorithm import Algorithm

OF_REFERENCE = ("kl_k1", "kl_k2", "kl_k3")
"""Terms that compare with the reference policy."""

OF_ENTROPY = ("entropy_bonus", "epo_smoothing", "adaptive_entropy")
"""Terms that need the entropy's own gradient."""

OF_SCORES = ("kl_cov", "adaptive_entropy")
"""Terms that must know the batch's logprobs or entropy before its first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalty:
    """One term of one optimizer step, as the learner adds it."""

    name: str
    coefficient: float
    function: Callable[..., Tensor]  # of entropy or logprob [M], the columns and the options; gives [M]
    of_entropy: bool  # the function's argument: entropy with gradient, else logprob
    scale_T: Tensor  # float32 [T], the surrogate's normaliser
    columns: Mapping[str, Tensor]  # [T] each, by argument of the function
    options: Mapping[str, Any]
    from_second_step: bool = False

    def summed(self, logp_M: Tensor, entropy_M: Tensor, origin_M: Tensor) -> Tensor:
        """``sum_t scale_t * penalty_t`` of one micro-batch, without the coefficient.

        Args:
            logp_M: float32 [M], with gradient.
            entropy_M: float32 [M], with gradient; only read where ``of_entropy``.
            origin_M: int64 [M], place of the tokens among T.
        """
        columns = {name: column[origin_M].to(logp_M.device) for name, column in self.columns.items()}
        penalty_M = self.function(entropy_M if self.of_entropy else logp_M, **columns, **self.options)
        return (self.scale_T[origin_M].to(logp_M.device) * penalty_M).sum()

    def part(self, tokens: slice, scale_T: Tensor) -> Penalty:
        """The same term on a mini-batch, with the normaliser of its own tokens."""
        columns = {name: column[tokens] for name, column in self.columns.items()}
        return replace(self, columns=columns, scale_T=scale_T.float())


@dataclass(frozen=True, slots=True, kw_only=True)
class RegulariserState:
    """What the terms remember from batch to batch: part of a checkpoint."""

    adaptive: CoefficientState | None = None  # of ``adaptive_entropy``; None where it is not chosen
    entropies: tuple[float, ...] | None = None  # mean of every batch so far, nats; None without ``epo_smoothing``

    @staticmethod
    def start(algorithm: Algorithm) -> RegulariserState:
        """Before the first batch."""
        options = algorithm.options.get("adaptive_entropy", {})
        names = algorithm.regularisers
        return RegulariserState(
            adaptive=CoefficientState(**options) if "adaptive_entropy" in names else None,
            entropies=() if "epo_smoothing" in names else None,
        )

    def after(self, entropy: float | None) -> RegulariserState:
        """After a batch of this mean entropy (nats); unknown or not finite, it changes nothing."""
        if entropy is None or not math.isfinite(entropy):
            return self
        return RegulariserState(
            adaptive=None if self.adaptive is None else self.adaptive.update(entropy)[0],
            entropies=None if self.entropies is None else (*self.entropies, entropy),
        )

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> RegulariserState:
        """The object that ``dataclasses.asdict`` took apart; raises ``TypeError`` or ``KeyError`` for anything else."""
        adaptive, entropies = data["adaptive"], data["entropies"]
        return RegulariserState(
            adaptive=None if adaptive is None else CoefficientState(**adaptive),
            entropies=None if entropies is None else tuple(map(float, entropies)),
        )


def penalties(
    algorithm: Algorithm, state: RegulariserState, tokens: Tokens, scale_T: Tensor, entropy: float | None
) -> tuple[Penalty, ...]:
    """The chosen terms over a whole update batch, in their order.

    Args:
        algorithm: names and options.
        state: before this batch.
        tokens: of the batch under the weights before the update, with ``reference_logp_T`` where a term compares with
            the reference policy.
        scale_T: float [T], the surrogate's normaliser.
        entropy: mean of the batch before the update, nats; None where nothing was scored (``adaptive_entropy`` is
            refused there).
    """
    return tuple(_penalty(name, algorithm, state, tokens, scale_T.float(), entropy) for name in algorithm.regularisers)


def _penalty(
    name: str, algorithm: Algorithm, state: RegulariserState, tokens: Tokens, scale_T: Tensor, entropy: float | None
) -> Penalty:
    entry = chosen(name, "regulariser")
    options = dict(algorithm.options.get(name, {}))
    coefficient = float(options.pop("coefficient", entry.defaults["coefficient"]))
    columns: dict[str, Tensor] = {}
    function = entry.function
    if name in OF_REFERENCE:
        columns = {"reference_logp_T": tokens.needed("reference_logp_T")}
    elif entry.choice is not None:  # its options are those of the choice
        columns = {"logp_old_T": tokens.logp_T, "held_T": entry.choice(tokens, **options)}
        options = {}
    elif name == "epo_smoothing":
        assert state.entropies is not None, "the state was started without epo_smoothing"
        options["history"] = state.entropies
    elif name == "adaptive_entropy":
        assert state.adaptive is not None, "the state was started without adaptive_entropy"
        coefficient = 0.0 if entropy is None else state.adaptive.update(entropy)[1]
        function, options = entropy_bonus, {}
    return Penalty(
        name=name,
        coefficient=coefficient,
        function=function,
        of_entropy=name in OF_ENTROPY,
        scale_T=scale_T,
        columns=columns,
        options=options,
        from_second_step=name == "kl_cov",
    )
