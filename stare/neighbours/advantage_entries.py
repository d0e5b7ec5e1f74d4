"""The registry's entries of advantages per trajectory and per turn."""

from __future__ import annotations

from stare.neighbours import advantages, turns
from stare.neighbours.entry import Method

_ZERO = "groups without a difference get 0 (`constant_groups` restores the paper's push)"

ADVANTAGES = (
    Method(
        name="grpo",
        hook="advantage",
        function=advantages.grpo,
        formula="A = (r - mean) / (std + 1e-6), std with n - 1",
        source="DeepSeekMath, arXiv 2402.03300",
        note="a group of one gets 0, not its raw reward",
    ),
    Method(
        name="dr_grpo",
        hook="advantage",
        function=advantages.dr_grpo,
        formula="A = r - mean",
        source="Understanding R1-Zero-Like Training, arXiv 2503.20783",
        note="its other half is the loss mode seq-mean-token-sum",
    ),
    Method(
        name="rloo",
        hook="advantage",
        function=advantages.rloo,
        formula="A = G / (G - 1) (r - mean)",
        source="Back to Basics, arXiv 2402.14740",
    ),
    Method(
        name="reinforce_pp_baseline",
        hook="advantage",
        function=advantages.reinforce_pp_baseline,
        formula="A = (r - mean of group) / std over the batch",
        source="REINFORCE++, arXiv 2501.03262",
    ),
    Method(
        name="w_reinforce",
        hook="advantage",
        function=advantages.w_reinforce,
        formula="A = +0.1 if right, -1 if wrong",
        source="The Surprising Effectiveness of Negative Reinforcement, arXiv 2506.01347",
        note=_ZERO,
    ),
    Method(
        name="psr",
        hook="advantage",
        function=advantages.psr,
        formula="A = +1 if right, 0 if wrong",
        source="The Surprising Effectiveness of Negative Reinforcement, arXiv 2506.01347",
        note=_ZERO,
    ),
    Method(
        name="nsr",
        hook="advantage",
        function=advantages.nsr,
        formula="A = 0 if right, -1 if wrong",
        source="The Surprising Effectiveness of Negative Reinforcement, arXiv 2506.01347",
        note=_ZERO,
    ),
    Method(
        name="ngrpo",
        hook="advantage",
        function=advantages.ngrpo,
        formula="GRPO with one virtual member of the maximal reward in mean and std",
        source="NGRPO, arXiv 2509.18851",
        note=_ZERO,
    ),
    Method(
        name="qae",
        hook="advantage",
        function=advantages.qae,
        formula="A = (r - Q_K) / (std + eps); 0/1 rewards: baseline 0 if p <= 1 - K, else 1",
        source="Quantile Advantage Estimation, arXiv 2509.22611",
    ),
    Method(
        name="a_grae",
        hook="advantage",
        function=advantages.a_grae,
        formula="A = GRPO * w(m, c), times 0.5 where positive; w = 2 ((1 - c) m + c (1 - m)), c = mean reward of batch",
        source="Unveiling Implicit Advantage Symmetry (A-GRAE), arXiv 2602.05548",
        status="formula unconfirmed",
    ),
    Method(
        name="unlikeliness",
        hook="advantage",
        function=advantages.unlikeliness,
        formula="GRPO on r (1 - beta rank / G), rank 0 the least likely of the group",
        source="Rewarding the Unlikely, arXiv 2506.02355",
    ),
    Method(
        name="progrpo",
        hook="advantage",
        function=advantages.progrpo,
        formula="A = GRPO + alpha (c(q) - c(o | q))",
        source="ProGRPO (ARM), arXiv 2602.05281",
        status="formula unconfirmed",
        needs="confidence of the policy in prompt and answer, per rollout",
    ),
    Method(
        name="pass_at_k",
        hook="advantage",
        function=advantages.pass_at_k,
        formula="R = 1 - C(w, k) / C(n, k), s = sqrt(R (1 - R)); right (1 - R) / s; "
        "wrong (1 - R - C(w - 1, k - 1) / C(n - 1, k - 1)) / s",
        source="Pass@k Training, arXiv 2508.10751",
    ),
)

TURNS = (
    Method(
        name="trloo",
        hook="turn advantage",
        function=turns.trloo,
        formula="A = n_t / (n_t - 1) (R_t - mean over the prompt's trajectories that reach turn t)",
        source="Dr. Kernel (TRLOO), arXiv 2602.05885",
        note="a turn that one trajectory alone reaches gets 0, not its return",
    ),
    Method(
        name="turn_norm",
        hook="turn advantage",
        function=turns.turn_norm,
        formula="A = (R_t - mean_t) / std_t over turns of the same prompt and number",
        source="MARS, arXiv 2510.15414",
        status="formula unconfirmed",
    ),
    Method(
        name="mapo",
        hook="turn advantage",
        function=turns.mapo,
        formula="A = share * (turn-normalised R_t) + (1 - share) * (batch-normalised R_t)",
        source="MAPO, arXiv 2603.06194",
        status="formula unconfirmed",
    ),
    Method(
        name="gigpo",
        hook="turn advantage",
        function=turns.gigpo,
        formula="A = A_trajectory + w A_step, A_step among turns that start from the same observation",
        source="GiGPO, arXiv 2505.10978",
        note="the trajectory's baseline counts each trajectory once",
    ),
    Method(
        name="hgpo",
        hook="turn advantage",
        function=turns.hgpo,
        formula="A = sum_k w_k a_k over groups with the same last k observations, w_k ~ (k + 1)^alpha where a_k != 0",
        source="HGPO, arXiv 2602.22817",
    ),
    Method(
        name="igpo",
        hook="turn advantage",
        function=turns.igpo,
        formula="r_t = p(gold | after turn t) - p(gold | before), last turn: outcome; normalised, discounted to go",
        source="IGPO, arXiv 2510.14967",
        needs="the gold answer's mean logprob after every turn (`turns.information_gain`)",
        note="normalised over turns as in the paper, not per token position as in its code",
    ),
    Method(
        name="match_tir",
        hook="turn advantage",
        function=turns.match_tir,
        formula="A = (A_outcome + A_turn) / 2; turn reward: optimal assignment of calls to gold calls",
        source="MatchTIR, arXiv 2601.10712",
        needs="similarity of predicted and gold tool calls (`turns.call_match_rewards`; scipy)",
        note="a true optimal assignment; the public code's is greedy",
    ),
    Method(
        name="spo_chain",
        hook="turn advantage",
        function=turns.spo_chain,
        formula="A = V(end of segment) - V(start of segment), Monte Carlo",
        source="SPO, arXiv 2505.23564",
        needs="rollouts from the ends of segments",
    ),
)
