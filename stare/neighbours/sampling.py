"""Which prompts and rollouts a batch is made of: the neighbours of DAPO's dynamic sampling.

Functions over rewards and counts; who asks them decides what is sampled. Dimensions: B trajectories, Q prompts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stare.advantage import differ
from stare.neighbours.advantages import Groups, grpo
from stare.neighbours.token_weights import entropy_signal


def dynamic_sampling(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """bool [B], the rollouts that stay: those of groups with two different rewards. DAPO, arXiv 2503.14476, Sec. 3.2.

    The trainer draws new prompts until there are enough such groups (``rollout.max_rounds``).
    """
    return Groups.of(reward_B, group_B).differs_B


def overlong_penalty(length_B: Tensor, *, most: int = 20480, buffer: int = 4096, factor: float = 1.0) -> Tensor:
    """0 up to ``most - buffer`` sampled tokens, then linear down to ``-factor`` at ``most``, [B].

    DAPO, arXiv 2503.14476, Eq. 13.
    """
    return factor * ((most - buffer - length_B).double() / buffer).clamp(-1, 0)


VADE_DECAY = 0.9
"""Of what is remembered of a prompt, at every update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difficulty:
    """VADE's belief about each prompt: a Beta posterior of its success rate. VADE, arXiv 2511.18902.

    Formula unconfirmed in its decay: the paper forgets at two scales; here all counts are multiplied by ``decay``
    before new ones are added, and the prior is Beta(1, 1).
    """

    right_Q: Tensor  # float64 [Q], successes as remembered
    wrong_Q: Tensor  # float64 [Q]
    decay: float = VADE_DECAY

    @staticmethod
    def start(num_prompts: int, decay: float = VADE_DECAY) -> Difficulty:
        right_Q, wrong_Q = torch.zeros(2, num_prompts, dtype=torch.float64)
        return Difficulty(right_Q=right_Q, wrong_Q=wrong_Q, decay=decay)

    def update(self, prompt_B: Tensor, is_right_B: Tensor) -> Difficulty:
        """After rollouts of these prompts (int64 [B]; bool [B])."""
        right = torch.zeros_like(self.right_Q).index_add(0, prompt_B, is_right_B.double())
        wrong = torch.zeros_like(self.wrong_Q).index_add(0, prompt_B, (~is_right_B).double())
        return Difficulty(
            right_Q=self.decay * self.right_Q + right, wrong_Q=self.decay * self.wrong_Q + wrong, decay=self.decay
        )


def vade(belief: Difficulty, count: int, *, seed: int) -> Tensor:
    """int64 [count], the prompts whose success rate p, drawn from the belief, has the largest ``p (1 - p)``.

    VADE, arXiv 2511.18902: Thompson sampling of the prompts that promise most variance inside their groups. Formula
    unconfirmed in the measure, which is ours.
    """
    generator = torch.Generator().manual_seed(seed)
    concentration = torch.stack((belief.right_Q + 1, belief.wrong_Q + 1), -1)
    gammas = torch._standard_gamma(concentration, generator=generator)
    rate_Q = gammas[:, 0] / gammas.sum(-1)
    return torch.argsort(rate_Q * (1 - rate_Q), descending=True, stable=True)[:count]


def d3s_samples(reward_B: Tensor, group_B: Tensor, *, keep: int) -> Tensor:
    """bool [B], the ``keep`` rollouts of each group whose advantages vary most. D3S, arXiv 2509.22115.

    For one number per rollout the subset of largest variance is some of the lowest and some of the highest, so all
    splits are tried. Groups without a difference, or of at most ``keep``, stay whole.
    """
    if keep < 2:
        raise ValueError(f"d3s_samples keeps at least 2 rollouts of a group, got {keep}")
    advantage_B = grpo(reward_B, group_B)
    kept_B = torch.ones(len(reward_B), dtype=torch.bool)
    for group in torch.unique(group_B):
        members = (group_B == group).nonzero().flatten()
        if len(members) <= keep or not differ(reward_B[members].min(), reward_B[members].max()):
            continue
        ordered = members[torch.argsort(advantage_B[members], stable=True)]
        choices = [torch.cat((ordered[:low], ordered[len(ordered) - (keep - low) :])) for low in range(keep + 1)]
        best = max(choices, key=lambda chosen: float(advantage_B[chosen].var(unbiased=False)))
        kept_B[members] = False
        kept_B[best] = True
    return kept_B


def adhint_ratio(success_rate_Q: Tensor, *, most: float = 0.8) -> Tensor:
    """Share of the reference solution to show as a hint, [Q]: ``most (1 - p)``, none for prompts that are solved.

    ADHint, arXiv 2512.13095. Formula unconfirmed: the abstract says that the ratio follows the prompt's difficulty
    under the policy; the line is ours. The caller cuts the hint and keeps it out of the loss.
    """
    return most * (1 - success_rate_Q.clamp(0, 1))


def cross_context_replay(
    reward_B: Tensor, group_B: Tensor, remembered_reward_R: Tensor, remembered_group_R: Tensor
) -> Tensor:
    """bool [R], earlier rollouts to add to this batch: for each constant group, the first of a different reward.

    R^3, arXiv 2601.19620 (cross-context replay: a group without a difference recalls an example of the same prompt).
    Formula unconfirmed: which of several is recalled is ours. The caller keeps the buffer and the old logprobs.
    """
    recalled_R = torch.zeros(len(remembered_reward_R), dtype=torch.bool)
    differs_B = Groups.of(reward_B, group_B).differs_B
    for group in torch.unique(group_B[~differs_B]):
        reward = reward_B[group_B == group][0]
        others_R = differ(remembered_reward_R.clamp(max=reward), remembered_reward_R.clamp(min=reward))
        fits = ((remembered_group_R == group) & others_R).nonzero().flatten()
        recalled_R[fits[:1]] = True
    return recalled_R


def branch_after_tool(
    entropy: float, entropy_at_start: float, draw: float, *, threshold: float = 0.5, weight: float = 0.2
) -> bool:
    """Whether to branch after a tool call: ``draw - weight (H - H_start) <= threshold``. ARPO, arXiv 2507.19849.

    Args:
        entropy: ``normalised_entropy`` over the first tokens (20) after the tool's answer.
        entropy_at_start: the same at the start of the episode.
        draw: uniform in [0, 1).
        threshold: base probability, 0.5.
        weight: of the rise; 0.2 in the scripts, 0.5 as the code's default.
    """
    return draw - weight * (entropy - entropy_at_start) <= threshold


def normalised_entropy(top_logp: Tensor, vocabulary: int) -> float:
    """Mean over positions of ``-sum p ln p`` of the given top logprobs [L, K] (10 of them), over ``ln V``."""
    if not top_logp.numel():
        return 0.0
    return float(-(top_logp.exp() * top_logp).sum(-1).mean()) / math.log(vocabulary)


def hapo_temperature(entropy_L: Tensor, earlier_T: Tensor, *, width: float = 0.05, pivot: float = 0.8) -> Tensor:
    """The factor ``1 + width h`` on the temperature of the next token at each of L positions. HAPO, arXiv 2509.16591.

    h is ``entropy_signal`` among the entropies of the batch before: uncertain positions are sampled hotter, certain
    ones colder. Without an earlier batch it is 1. A learner that scores all tokens at one temperature is off-policy by
    the difference.

    Args:
        entropy_L: float [L], of the distributions about to be sampled from, at the plain temperature.
        earlier_T: float [T], of the sampled tokens of the batch before.
        width: tau of the paper.
        pivot: quantile of the earlier entropies at which nothing changes.
    """
    return 1 + width * entropy_signal(entropy_L, pivot, among_T=earlier_T)
