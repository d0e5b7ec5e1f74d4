"""One gloo rank of ``test_selection``: shares of a batch against the whole of it, with four and with two ranks."""

from __future__ import annotations

import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from stare import entropy_dynamics, quadrants, selection_report, token_sets, token_weights, top_fraction

CASES = 24


def shares(num_tokens: int, world: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Every token on one rank, in scattered order; some ranks have few tokens or none."""
    owner = torch.randint(0, world, (num_tokens,), generator=generator)
    if torch.rand((), generator=generator) < 0.3:
        owner[owner == world - 1] = 0
    return [
        (owner == rank).nonzero().flatten()[torch.randperm(int((owner == rank).sum()), generator=generator)]
        for rank in range(world)
    ]


def check(rank: int, world: int, group: dist.ProcessGroup, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_tokens = int(torch.randint(1, 3000, (1,), generator=generator))
    score = torch.empty(num_tokens).exponential_(generator=generator)
    if seed % 2:
        score = (score * 3).round() / 3  # ties everywhere
    if seed % 5 == 0:
        score = score.double()
    advantage = torch.randint(-1, 2, (num_tokens,), generator=generator).double() * 0.7
    phi = torch.randn(num_tokens, generator=generator)
    mine = shares(num_tokens, world, generator)[rank]
    fraction = (0.001, 0.1, 0.35, 1.0)[seed % 4]

    candidate = advantage != 0
    whole = top_fraction(score, candidate, fraction)
    part = top_fraction(score[mine], candidate[mine], fraction, place_T=mine, group=group)
    assert torch.equal(part, whole[mine]), ("top", world, seed)

    whole_weights = token_weights(score, advantage, gate_on=True, amplify=1.1, attenuate=0.9, variant="C2")
    weights = token_weights(
        score[mine], advantage[mine], gate_on=True, amplify=1.1, attenuate=0.9, variant="C2", place_T=mine, group=group
    )
    assert torch.equal(weights.omega_T, whole_weights.omega_T[mine]), ("omega", world, seed)

    whole_sets = token_sets(score, advantage, fraction)
    sets = token_sets(score[mine], advantage[mine], fraction, place_T=mine, group=group)
    expected = entropy_dynamics(advantage, phi, whole_sets, "C2")
    got = entropy_dynamics(advantage[mine], phi[mine], sets, "C2", group=group)
    assert got.num_tokens == expected.num_tokens
    for name in ("residual", "amplified", "attenuated"):
        assert abs(getattr(got, name) - getattr(expected, name)) < 1e-9, (name, world, seed)
    expected_quadrants = quadrants(advantage, phi)
    for name, quadrant in quadrants(advantage[mine], phi[mine], group=group).items():
        assert quadrant.share == expected_quadrants[name].share
        assert abs(quadrant.drift - expected_quadrants[name].drift) < 1e-12
    report = selection_report(sets, score[mine], phi[mine], place_T=mine, group=group)
    assert report == selection_report(whole_sets, score, phi)


def check_nan_is_raised_everywhere(rank: int, group: dist.ProcessGroup) -> None:
    score = torch.tensor([1.0, float("nan") if rank == 1 else 2.0])
    with pytest.raises(ValueError, match="NaN"):  # on all ranks, or the others would wait for ever
        top_fraction(score, torch.ones(2, dtype=torch.bool), 0.5, place_T=torch.arange(2) + 2 * rank, group=group)


def main(store: str, rank: int, world: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(60))
    pair = dist.new_group([0, 1])
    for seed in range(CASES):
        check(rank, world, dist.group.WORLD, seed)
        if rank < 2:
            check(rank, 2, pair, seed)
    check_nan_is_raised_everywhere(rank, dist.group.WORLD)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
