"""Reference vectors: advantage, omega, loss and gradient to 1e-6, gate traces exactly.

``STARE_GOLDEN_DIR`` names a folder with more files of the same two forms.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from stare import (
    Controller,
    ControllerConfig,
    group_advantage,
    surrogate_sum,
    token_scale,
    token_weights,
)

FOLDERS = [Path(__file__).parents[1] / "data" / "stare"]
if os.environ.get("STARE_GOLDEN_DIR"):
    FOLDERS.append(Path(os.environ["STARE_GOLDEN_DIR"]))
CASES = [
    (f"{path.name}-{number}", case)
    for folder in FOLDERS
    for path in sorted(folder.glob("*.json"))
    for number, case in enumerate(json.loads(path.read_text()))
    if isinstance(case, dict)
]
VECTORS = [pytest.param(case, id=name) for name, case in CASES if "log_prob" in case]
TRACES = [pytest.param(case, id=name) for name, case in CASES if "trace" in case]


def assert_close(actual: torch.Tensor, expected: Any) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", VECTORS)
def test_advantage_omega_loss_and_gradient_equal_the_reference(case: dict[str, Any]) -> None:
    logp = torch.tensor(case["log_prob"], dtype=torch.float64, requires_grad=True)
    logp_old = torch.tensor(case["old_log_prob"], dtype=torch.float64)
    mask = torch.tensor(case["mask"], dtype=torch.bool)
    advantage_B = group_advantage(torch.tensor(case["reward"], dtype=torch.float64), torch.tensor(case["group"]))
    assert_close(advantage_B, case["advantage"])

    row, _ = mask.nonzero(as_tuple=True)
    weights = token_weights(
        -logp.detach()[mask],
        advantage_B[row],
        gate_on=case["gate_on"],
        amplify=case["w"],
        attenuate=case["m"],
        fraction=case["top_p_ratio"],
        variant=case["variant"],
    )
    omega = torch.ones_like(logp_old)
    omega[mask] = weights.omega_T
    assert_close(omega, case["omega"])
    assert weights.l_plus_T.float().mean().item() == pytest.approx(case["selected_pos"], abs=1e-6)
    if case["variant"] == "C2":
        assert weights.l_minus_T.float().mean().item() == pytest.approx(case["selected_neg"], abs=1e-6)

    coefficient_T = weights.omega_T * advantage_B[row] * token_scale(mask.sum(1), case["loss_agg"])[row]
    result = surrogate_sum(
        logp[mask],
        logp_old[mask],
        coefficient_T,
        clip_low=case["clip_low"],
        clip_high=case["clip_high"],
        dual_clip=case["dual_clip"],
    )
    result.loss.backward()
    assert_close(result.loss.detach(), case["loss"])
    assert logp.grad is not None
    assert_close(logp.grad, case["grad"])
    assert result.clipped_T.double().mean().item() == pytest.approx(case["clip_frac"], abs=1e-6)


@pytest.mark.parametrize("case", TRACES)
def test_gate_traces_equal_the_reference(case: dict[str, Any]) -> None:
    names = {"reweight_w": "amplify", "reweight_m": "attenuate", "w_max": "amplify_max", "m_min": "attenuate_min"}
    params = {names.get(key, key): value for key, value in case["params"].items() if key != "adaptive"}
    state = Controller.start(ControllerConfig(kind="adaptive" if case["params"].get("adaptive") else "fixed", **params))
    for number, (entropy, expected) in enumerate(zip(case["entropy"], case["trace"], strict=True)):
        state = Controller.from_json(state.update(math.nan if entropy is None else entropy).to_json())
        assert [state.gate_on, round(state.amplify, 9), round(state.attenuate, 9)] == expected, number


def test_golden_files_were_found() -> None:
    assert len(VECTORS) >= 16
    assert len(TRACES) >= 3
