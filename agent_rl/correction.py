"""Tokens that another policy sampled: a fixed weight per token for the ratio of learner to sampler (TIS, MIS).

The learner's logprob is that of the weights before the update, the sampler's the one that the token was drawn with.
They differ by the engines' arithmetic, and by whole updates where rollouts go on across a publish. The weight
multiplies the token's advantage like the other token weights: what it masks is not ranked by STARE either. The ratio
inside the clip stays that of the new weights to those before the update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from agent_rl.methods import chosen
from stare.neighbours import Tokens
from stare.neighbours.token_weights import importance_ratio

if TYPE_CHECKING:
    from agent_rl.algorithm import Algorithm

CorrectionName = Literal["none", "tis", "mis", "seq_tis", "seq_mis"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Of every sampled token of the batch."""

    weight_T: Tensor  # float64 [T], 1 where the two policies agree
    bounded_T: Tensor  # bool [T], truncated or masked

    def part(self, tokens: slice) -> Correction:
        """Of a part of the tokens."""
        return Correction(weight_T=self.weight_T[tokens], bounded_T=self.bounded_T[tokens])


def correction_of(algorithm: Algorithm, tokens: Tokens) -> Correction | None:
    """The algorithm's correction over a whole update batch; None where it has none."""
    name = algorithm.correction
    if name == "none":
        return None
    weight_T = chosen(name, "token weight").function(tokens, **algorithm.options.get(name, {}))
    ratio_T = importance_ratio(tokens, sequence=name.startswith("seq_")).to(weight_T.dtype)
    return Correction(weight_T=weight_T, bounded_T=tokens.acts_T & (weight_T != ratio_T))
