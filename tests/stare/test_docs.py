"""The programs of docs/stare.md run in a foreign trainer, do what the method says, and are as short as they claim."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from stare import Controller, ControllerConfig, group_advantage, token_weights

PAGE = (Path(__file__).parents[2] / "docs" / "stare.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)


def namespace() -> dict[str, Any]:
    scope: dict[str, Any] = {}
    for block in BLOCKS:
        exec(block, scope)
    return scope


def foreign_batch() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(6, 9, 11, generator=generator)
    token = torch.multinomial(torch.softmax(logits, -1).flatten(0, 1), 1, generator=generator).view(6, 9)
    mask = torch.rand(6, 9, generator=generator) < 0.6
    reward = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    group = torch.tensor([0, 0, 0, 1, 1, 1])
    logp = torch.log_softmax(logits, -1).gather(-1, token[..., None]).squeeze(-1)
    return logits, token, mask, reward, group, logp


def test_the_example_is_about_fifteen_lines() -> None:
    body = BLOCKS[0][BLOCKS[0].index("def ") :]
    assert len([line for line in body.splitlines() if line.strip()]) <= 15


@pytest.mark.parametrize("target", [0.3, 9.0])
def test_the_example_has_the_methods_gradient(target: float) -> None:
    """At ratio 1 the gradient is the weighted policy gradient, by hand, with the gate off and on."""
    scope = namespace()
    scope["controller"] = Controller.start(ControllerConfig(target_entropy=target))
    logits, token, mask, reward, group, logp = foreign_batch()
    logits.requires_grad_()
    (found,) = torch.autograd.grad(scope["stare_loss"](logits, token, mask, reward, group, logp), logits)
    assert scope["controller"].gate_on == (target == 9.0)

    advantage = group_advantage(reward, group)[:, None].expand(6, 9)
    good = (advantage > 0) & mask
    threshold = logp[good].sort().values[: max(1, -(-int(good.sum()) // 10))][-1]
    omega = torch.where(good & (logp <= threshold) & (target == 9.0), 1.1, 1.0)
    step = torch.nn.functional.one_hot(token, 11) - torch.softmax(logits.detach(), -1)
    expected = -(omega * advantage * mask / mask.sum())[..., None] * step
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_the_example_over_ranks_is_that_of_one_process() -> None:
    logits, _, mask, reward, group, logp = foreign_batch()
    advantage_T = group_advantage(reward, group).repeat_interleave(mask.sum(1))
    own = not torch.distributed.is_initialized()  # a learner of another test leaves its group of one process
    if own:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        omega_T, controller = namespace()["omega_of_my_tokens"](
            logp[mask],
            torch.full_like(logp[mask], 0.1),
            advantage_T,
            torch.arange(len(advantage_T)),
            Controller.start(ControllerConfig()),
            torch.distributed.group.WORLD,
        )
    finally:
        if own:
            torch.distributed.destroy_process_group()
    assert controller.gate_on
    alone = token_weights(-logp[mask], advantage_T, gate_on=True, amplify=1.1, attenuate=0.9)
    assert torch.equal(omega_T, alone.omega_T)
    assert logits.shape == (6, 9, 11)


def test_every_setting_of_the_page_exists() -> None:
    from agent_rl.config import StareConfig

    table = PAGE[PAGE.index("| setting |") : PAGE.index("### Variants")]
    named = {
        name for cell in re.findall(r"^\| (`[^|]*) \|", table, flags=re.M) for name in re.findall(r"`(\w+)`", cell)
    }
    fields = set(StareConfig.model_fields)
    assert named <= fields
    assert fields - named <= {"loss_mode", "selection"}  # of GRPO, and the comparison
