"""One batch, one update: the same chosen tokens, N, loss and gradient however the batch is cut up.

The reference is written from the formulas, one trajectory at a time, without any of our packing or DeepSpeed. The same
comparison with ``selection = "per_micro_batch"`` (the public reference's way) must fail: that shows that it bites.
"""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

WORKER = Path(__file__).with_name("exactness_worker.py")
TOLERANCE = 1e-5


def load_worker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("exactness_worker", WORKER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=[1, 2, 4], ids=["1-rank", "2-ranks", "4-ranks"])
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("exactness") / "results.pt"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={request.param}"]
    few = ["few"] if request.param == 4 else []
    done = subprocess.run([*launch, str(WORKER), str(out), *few], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    loaded: dict[str, list[dict[str, Any]]] = torch.load(out, weights_only=False)
    return loaded


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """The update by hand: every trajectory alone through the plain model, sums in float64 lists."""
    worker = load_worker()
    model = worker.make_model()
    kept = [t for t in worker.make_trajectories() if t.group < 2 and t.reward is not None]
    advantages: list[float] = []
    for trajectory in kept:
        rewards = torch.tensor([t.reward for t in kept if t.group == trajectory.group], dtype=torch.float64)
        advantages.append(((trajectory.reward - rewards.mean()) / (rewards.std() + 1e-6)).item())
    logps, token_advantages, entropies = [], [], []
    for trajectory, advantage in zip(kept, advantages, strict=True):
        logits = model(input_ids=torch.tensor([trajectory.token_ids])).logits[0]
        distribution = torch.log_softmax(logits, -1)
        for position, flag in enumerate(trajectory.loss_mask):
            if flag:
                row = distribution[position - 1]
                logps.append(row[trajectory.token_ids[position]])
                entropies.append(-(row.exp() * row).sum().item())
                token_advantages.append(advantage)
    chosen: dict[str, list[int]] = {}
    for name, sign in (("l_plus", 1), ("l_minus", -1)):
        candidates = [i for i, a in enumerate(token_advantages) if a * sign > 0]
        count = max(1, -int(-len(candidates) * worker.FRACTION // 1))
        chosen[name] = sorted(sorted(candidates, key=lambda i: logps[i].item())[:count])
    noise = torch.randn(len(logps), generator=torch.Generator().manual_seed(2))
    loss = torch.zeros(())
    clipped_tokens = 0
    for index, (logp, advantage) in enumerate(zip(logps, token_advantages, strict=True)):
        omega = 1.5 if index in chosen["l_plus"] else 0.5 if index in chosen["l_minus"] else 1.0
        ratio = (logp - (logp.detach() + 0.2 * noise[index])).exp()
        plain, clipped = ratio * advantage, ratio.clamp(0.8, 1.28) * advantage
        clipped_tokens += int(clipped < plain)
        objective = torch.minimum(plain, clipped)
        if advantage < 0:
            objective = objective.clamp(min=10.0 * advantage)
        loss = loss - omega * objective / len(logps)
    loss.backward()
    return {
        **chosen,
        "num_tokens": len(logps),
        "entropy": sum(entropies) / len(entropies),
        "loss": loss.item(),
        "clip_fraction": clipped_tokens / len(logps),
        "gradient": {name: p.grad.clone() for name, p in model.named_parameters()},
    }


def gradient_error(result: dict[str, Any], reference: dict[str, Any]) -> float:
    difference = torch.cat([(result["gradient"][n] - g).flatten() for n, g in reference["gradient"].items()])
    return (difference.norm() / torch.cat([g.flatten() for g in reference["gradient"].values()]).norm()).item()


def test_update_is_the_same_for_every_cut(results: dict[str, list[dict[str, Any]]], reference: dict[str, Any]) -> None:
    cuts = [result for result in results["step"] if result["case"][-1] == "batch"]
    assert len({result["num_micro_batches"] for result in cuts}) >= 3  # the batch really was cut in different ways
    assert reference["clip_fraction"] > 0.05  # and the clip takes part
    slots = {layout: min(r["num_slots"] for r in cuts if r["case"][0] == layout) for layout in ("packed", "shared")}
    assert slots["shared"] < 0.9 * slots["packed"]  # and common beginnings were laid down once
    for result in cuts:
        where = result["case"]
        assert result["l_plus"] == reference["l_plus"], where
        assert result["l_minus"] == reference["l_minus"], where
        assert result["num_tokens"] == reference["num_tokens"], where
        assert result["entropy"] == pytest.approx(reference["entropy"], rel=TOLERANCE), where
        assert result["loss"] == pytest.approx(reference["loss"], rel=TOLERANCE), where
        assert result["clip_fraction"] == pytest.approx(reference["clip_fraction"]), where
        assert gradient_error(result, reference) < TOLERANCE, where
        norm = torch.cat([g.flatten() for g in reference["gradient"].values()]).norm().item()
        assert result["grad_norm"] == pytest.approx(norm, rel=1e-4), where


def test_the_public_references_selection_fails_the_same_comparison(
    results: dict[str, list[dict[str, Any]]], reference: dict[str, Any]
) -> None:
    controls = [result for result in results["step"] if result["case"][-1] == "per_micro_batch"]
    assert controls
    for result in controls:
        assert result["l_plus"] != reference["l_plus"] or result["l_minus"] != reference["l_minus"], result["case"]
        assert gradient_error(result, reference) > 100 * TOLERANCE, result["case"]


def updates_by_hand(mode: str) -> dict[str, torch.Tensor]:
    """(Before - after) / lr of the same updates by the formulas: plain model, plain SGD, one trajectory at a time."""
    worker = load_worker()
    model = worker.make_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    kept = [t for t in worker.make_trajectories() if t.group < 2 and t.reward is not None]
    parts = [kept] if mode == "reuse" else [[t for t in kept if t.group == group] for group in (0, 1)]
    old: dict[int, torch.Tensor] = {id(t): logps_of(model, t).detach() for t in kept}
    frozen = chosen_among(kept, old, worker.FRACTION)
    terms = TermsByHand(kept, old) if mode == "terms" else None
    for number, part in enumerate(parts):
        now = {id(t): logps_of(model, t) for t in part}
        weights = chosen_among(part, now, worker.FRACTION) if mode == "refreshed" else frozen
        loss = torch.zeros(())
        for trajectory in part:
            for place, logp in enumerate(now[id(trajectory)]):
                advantage = advantage_of(trajectory, kept)
                if terms is not None:
                    advantage *= terms.correction[id(trajectory), place]
                ratio = (logp - old[id(trajectory)][place]).exp()
                objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
                if advantage < 0:
                    objective = objective.clamp(min=10.0 * advantage)
                loss = loss - weights.get((id(trajectory), place), 1.0) * objective
            if terms is not None:
                loss = loss + terms.of(model, trajectory, is_first=number == 0)
        model.zero_grad()
        (loss / sum(len(values) for values in now.values())).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= worker.UPDATE_LR * parameter.grad
    return {name: (before[name] - p.detach()) / worker.UPDATE_LR for name, p in model.named_parameters()}


class TermsByHand:
    """The worker's regularisers and correction, token by token from whole distributions."""

    def __init__(self, kept: list[Any], old: dict[int, torch.Tensor]) -> None:
        worker = load_worker()
        self.reference, self.old = worker.make_reference(), old
        places = [(id(t), place) for t in kept for place in range(len(old[id(t)]))]
        noise = worker.sampler_noise(len(places)).tolist()  # the sampler's logprob less the learner's
        self.correction = {key: min(math.exp(-n), 1.1) for key, n in zip(places, noise, strict=True)}
        assert 0.2 < sum(weight == 1.1 for weight in self.correction.values()) / len(places) < 0.5
        logps = [old[number][place].item() for number, place in places]
        advantages = [advantage_of(t, kept) for t in kept for _ in old[id(t)]]
        means = sum(logps) / len(logps), sum(advantages) / len(logps)
        covariance = [(x - means[0]) * (a - means[1]) for x, a in zip(logps, advantages, strict=True)]
        order = sorted(range(len(places)), key=lambda i: -covariance[i])
        self.held = {places[i] for i in order[: math.ceil(0.2 * len(places))]}

    def of(self, model: Any, trajectory: Any, *, is_first: bool) -> torch.Tensor:
        """Summed over the trajectory's tokens."""
        total = torch.zeros(())
        reference = logps_of(self.reference, trajectory).detach()
        for place, (logp, row) in enumerate(zip(*sampled_of(model, trajectory), strict=True)):
            entropy = -(row.exp() * row).sum()
            shift = reference[place] - logp
            total = total + 2.0 * (shift.exp() - shift - 1) - (0.2 + 0.3) * entropy
            total = total + 0.5 * (torch.relu(0.99 * 4.1 - entropy) + torch.relu(entropy - 1.01 * 4.1))
            if not is_first and (id(trajectory), place) in self.held:
                total = total + 0.5 * (logp - self.old[id(trajectory)][place]).abs()
        return total


def sampled_of(model: Any, trajectory: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """ln p of each sampled token [n], and of the whole vocabulary at its place [n, V]."""
    distribution = torch.log_softmax(model(input_ids=torch.tensor([trajectory.token_ids])).logits[0], -1)
    places = [i for i, flag in enumerate(trajectory.loss_mask) if flag]
    rows = torch.stack([distribution[i - 1] for i in places])
    return torch.stack([row[trajectory.token_ids[i]] for i, row in zip(places, rows, strict=True)]), rows


def logps_of(model: Any, trajectory: Any) -> torch.Tensor:
    return sampled_of(model, trajectory)[0]


def advantage_of(trajectory: Any, kept: list[Any]) -> float:
    rewards = torch.tensor([t.reward for t in kept if t.group == trajectory.group], dtype=torch.float64)
    return ((trajectory.reward - rewards.mean()) / (rewards.std() + 1e-6)).item()


def chosen_among(
    trajectories: list[Any], logps: dict[int, torch.Tensor], fraction: float
) -> dict[tuple[int, int], float]:
    """Weight by (trajectory, place) of variant C2 over all tokens of ``trajectories``."""
    group_mates = load_worker().make_trajectories()
    kept = [t for t in group_mates if t.group < 2 and t.reward is not None]
    weights: dict[tuple[int, int], float] = {}
    for sign, weight in ((1, 1.5), (-1, 0.5)):
        side = [
            (logp.item(), number, (id(t), place))
            for number, t in enumerate(trajectories)
            if advantage_of(t, kept) * sign > 0
            for place, logp in enumerate(logps[id(t)])
        ]
        count = max(1, -int(-len(side) * fraction // 1))
        weights |= {key: weight for _, _, key in sorted(side)[:count]}
    return weights


@pytest.mark.parametrize("mode", ["frozen", "refreshed", "reuse", "terms"])
def test_whole_updates_are_those_made_by_hand(results: dict[str, list[dict[str, Any]]], mode: str) -> None:
    """Two optimizer steps of one batch, with omega frozen or planned again, with regularisers and a correction, and one
    step on reused logprobs."""
    expected = {"gradient": updates_by_hand(mode)}
    found = [result for result in results["update"] if result["case"][0] == mode]
    assert found
    for result in found:
        row = result["row"]
        assert gradient_error(result, expected) < 10 * TOLERANCE, result["case"]  # the second step multiplies rounding
        assert row["optimizer_steps"] == (1 if mode == "reuse" else 2)
        assert row["logprob_gap_max"] < 1e-6 if mode == "reuse" else row["logprob_gap_max"] > 0
        assert row["entropy_change"] != 0
        assert row["gate"]


def test_the_modes_are_not_the_same_update() -> None:
    frozen, *others = (updates_by_hand(mode) for mode in ("frozen", "refreshed", "terms"))
    for other in others:
        assert gradient_error({"gradient": frozen}, {"gradient": other}) > 1e-3
