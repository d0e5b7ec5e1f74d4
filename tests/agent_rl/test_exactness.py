"""One batch, one update: the same chosen tokens, N, loss and gradient however the batch is cut up.

The reference is written from the formulas, one trajectory at a time, without any of our packing or DeepSpeed. The same
comparison with ``selection = "per_micro_batch"`` (the public reference's way) must fail: that shows that it bites.
"""

from __future__ import annotations

import importlib.util
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


@pytest.fixture(scope="module", params=[1, 2], ids=["1-rank", "2-ranks"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("exactness") / "results.pt"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={request.param}"]
    done = subprocess.run([*launch, str(WORKER), str(out)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    loaded: list[dict[str, Any]] = torch.load(out, weights_only=False)
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


def test_update_is_the_same_for_every_cut(results: list[dict[str, Any]], reference: dict[str, Any]) -> None:
    cuts = [result for result in results if result["case"][-1] == "batch"]
    assert len({result["num_micro_batches"] for result in cuts}) >= 3  # the batch really was cut in different ways
    assert reference["clip_fraction"] > 0.05  # and the clip takes part
    slots = {layout: min(r["num_slots"] for r in cuts if r["case"][0] == layout) for layout in ("packed", "shared")}
    assert slots["shared"] < 0.8 * slots["packed"]  # and common beginnings were laid down once
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
    results: list[dict[str, Any]], reference: dict[str, Any]
) -> None:
    controls = [result for result in results if result["case"][-1] == "per_micro_batch"]
    assert len(controls) == 2
    for result in controls:
        assert result["l_plus"] != reference["l_plus"] or result["l_minus"] != reference["l_minus"], result["case"]
        assert gradient_error(result, reference) > 100 * TOLERANCE, result["case"]
