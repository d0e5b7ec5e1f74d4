"""Terms beside the surrogate: their gradients against plain autograd, what they do to a policy, what they remember."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from test_exactness import load_worker

from agent_rl.algorithm import Algorithm
from agent_rl.config import ConfigError, LearnerConfig, LoraSettings, RunConfig, StareConfig, load_config
from agent_rl.learner import Learner
from agent_rl.loop import train
from agent_rl.models import load_model
from agent_rl.pack import SampledSequence
from agent_rl.plan import UpdateBatch, scale_of, update_batch
from agent_rl.progress import Clock
from agent_rl.records import read_rows
from agent_rl.regularisers import Penalty, RegulariserState, penalties
from agent_rl.types import Trajectory
from agent_rl.update import start_controllers, update
from envs.types import Task
from stare.neighbours.regularisers import CoefficientState, entropy_bonus

TERMS = ("kl_k1", "kl_k2", "kl_k3", "kl_cov", "entropy_bonus", "epo_smoothing", "adaptive_entropy")
OPTIONS: dict[str, dict[str, float]] = {
    "kl_k1": {"coefficient": 0.7},
    "kl_k2": {"coefficient": 60.0},
    "kl_k3": {"coefficient": 70.0},
    "kl_cov": {"coefficient": 0.9, "fraction": 0.3},
    "entropy_bonus": {"coefficient": 0.5},
    "epo_smoothing": {"coefficient": 2.0, "low": 0.99, "high": 1.01, "penalty": 0.5},
    "adaptive_entropy": {"coefficient": 0.3, "target": 100.0},
}
STATE = RegulariserState(adaptive=CoefficientState(coefficient=0.3, target=100.0), entropies=(4.0, 4.2))
CUTS = [*product(("padded", "packed", "shared"), (1, 3, None))]


def worker_batch() -> UpdateBatch:
    return update_batch(load_worker().make_trajectories())


def old_logp(logp_T: torch.Tensor) -> torch.Tensor:
    return logp_T + 0.3 * torch.randn(len(logp_T), generator=torch.Generator().manual_seed(5))


def terms_of(batch: UpdateBatch, logp_T: torch.Tensor, entropy_T: torch.Tensor, reference_T: torch.Tensor) -> Any:
    algorithm = Algorithm(regularisers=TERMS, options=OPTIONS)
    tokens = batch.tokens(logp_T, entropy_T, reference_T)
    return penalties(algorithm, STATE, tokens, scale_of(batch, "token-mean"), float(entropy_T.mean()))


@pytest.fixture(scope="module")
def naive() -> dict[str, tuple[float, torch.Tensor]]:
    """Value and gradient of each term from full logits, one trajectory at a time, by the formulas."""
    worker = load_worker()
    batch, model, other = worker_batch(), worker.make_model(), worker.make_reference()
    rows: list[tuple[torch.Tensor, torch.Tensor, float, float]] = []  # ln p, H, ln p_ref, A of every sampled token
    for trajectory, advantage in zip(batch.trajectories, batch.advantage_B.tolist(), strict=True):
        ids = torch.tensor([trajectory.token_ids])
        logp_LV = model(input_ids=ids).logits[0].log_softmax(-1)
        reference_LV = other(input_ids=ids).logits[0].log_softmax(-1).detach()
        for place, sampled in enumerate(trajectory.loss_mask):
            if sampled:
                here, token = logp_LV[place - 1], trajectory.token_ids[place]
                entropy = torch.distributions.Categorical(logits=here).entropy()
                rows.append((here[token], entropy, reference_LV[place - 1][token].item(), advantage))
    old = old_logp(torch.stack([logp.detach() for logp, _, _, _ in rows])).tolist()
    mean_old, mean_a = sum(old) / len(rows), sum(row[3] for row in rows) / len(rows)
    covariance = [(o - mean_old) * (row[3] - mean_a) for o, row in zip(old, rows, strict=True)]
    held = set(sorted(range(len(rows)), key=lambda i: -covariance[i])[: math.ceil(0.3 * len(rows))])
    mean = 4.1  # of STATE.entropies
    formulas = {
        "kl_k1": lambda i, logp, entropy, ref: logp - ref,
        "kl_k2": lambda i, logp, entropy, ref: (logp - ref) ** 2 / 2,
        "kl_k3": lambda i, logp, entropy, ref: (ref - logp).exp() - (ref - logp) - 1,
        "kl_cov": lambda i, logp, entropy, ref: (logp - old[i]).abs() if i in held else 0 * logp,
        "entropy_bonus": lambda i, logp, entropy, ref: -entropy,
        "adaptive_entropy": lambda i, logp, entropy, ref: -entropy,
        "epo_smoothing": lambda i, logp, entropy, ref: (
            0.5 * (torch.relu(0.99 * mean - entropy) + torch.relu(entropy - 1.01 * mean))
        ),
    }
    found: dict[str, tuple[float, torch.Tensor]] = {}
    for name, formula in formulas.items():
        value = sum(formula(i, *row[:3]) for i, row in enumerate(rows)) / len(rows)
        gradient = torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
        found[name] = value.item(), torch.cat([g.flatten() for g in gradient])
    return found


@pytest.mark.parametrize(("layout", "size"), CUTS)
def test_every_term_has_the_gradient_of_its_formula_however_the_batch_is_cut(
    naive: dict[str, tuple[float, torch.Tensor]], layout: str, size: int | None
) -> None:
    worker = load_worker()
    batch = worker_batch()
    config = worker.plain_sgd(layout, size, 0, lr=1.0)  # so that the change of a parameter is its gradient
    learner = Learner(worker.make_model(), config, temperature=1.0, reference=worker.make_reference())
    packed = learner.pack(batch.sequences)
    scored = learner.score(packed, batch.num_tokens)
    reference_T = learner.reference_logp(packed, batch.num_tokens)
    logp_old_T = old_logp(scored.logp)
    before = {name: tensor.clone() for name, tensor in learner.named_tensors()}
    nothing_T = torch.zeros(batch.num_tokens)
    for term in terms_of(batch, logp_old_T, scored.entropy, reference_T):
        report = learner.step(packed, nothing_T, logp_old_T, penalties=[term])
        value, expected = naive[term.name]
        assert report.penalties[term.name] == pytest.approx(value, rel=1e-4, abs=1e-6), term.name
        gradient = torch.cat([(before[name] - tensor).flatten() for name, tensor in learner.named_tensors()])
        expected = term.coefficient * expected
        assert expected.norm() > 1e-3, term.name
        assert ((gradient - expected).norm() / expected.norm()).item() < 2e-5, (term.name, layout, size)
        with torch.no_grad():  # back to the weights that everything was scored under
            for name, tensor in learner.named_tensors():
                tensor.copy_(before[name])
    learner.close()


def test_terms_of_a_mini_batch_are_normalised_by_its_own_tokens() -> None:
    batch = worker_batch()
    logp_T = torch.linspace(-3, -1, batch.num_tokens)
    term = next(t for t in terms_of(batch, logp_T, -logp_T, logp_T + 0.5) if t.name == "kl_k2")
    tokens = slice(4, 10)
    part = term.part(tokens, torch.full((6,), 1 / 6))
    assert part.summed(logp_T[tokens], -logp_T[tokens], torch.arange(6)).item() == pytest.approx(0.125)


def synthetic_trajectories() -> list[Trajectory]:
    """Two groups of four with ids that the tiny model knows."""
    generator = torch.Generator().manual_seed(3)
    trajectories = []
    for group, member in product(range(2), range(4)):
        mask = (False,) * 4 + (True,) * (6 + 2 * member)
        trajectories.append(
            Trajectory(
                task=Task(id=f"t{group}", prompt="", answer=""),
                group=group,
                member=member,
                token_ids=tuple(torch.randint(3, 60, (len(mask),), generator=generator).tolist()),
                loss_mask=mask,
                logprobs=tuple(-2.0 if flag else 0.0 for flag in mask),
                turns=(),
                messages=(),
                reward=float(member % 2),
            )
        )
    return trajectories


def trained(folder: Path, algorithm: Algorithm, steps: int = 8, **settings: Any) -> tuple[float, float, list[Any]]:
    """Mean entropy and KL(start || now) a token after some updates on one batch, and the rows."""
    model, start = load_model(folder, "float32"), load_model(folder, "float32")
    config = LearnerConfig(lr=2e-3, zero_stage=0, **settings)
    learner = Learner(model, config, temperature=1.0, reference=None if config.lora.rank else start)
    trajectories = synthetic_trajectories()
    batch, stare = update_batch(trajectories, algorithm), StareConfig(variant="none", mini_batches=2)
    controllers, state, rows = start_controllers(stare), RegulariserState.start(algorithm), []
    for _ in range(steps):
        plan, row = update(
            learner, batch, trajectories, controllers, stare, Clock(), algorithm=algorithm, regularisers=state
        )
        assert plan is not None
        state = plan.regularisers
        rows.append(row)
    packed = learner.pack(batch.sequences)
    scored = learner.score(packed, batch.num_tokens)
    reference_T = learner.reference_logp(packed, batch.num_tokens)
    learner.close()
    return float(scored.entropy.mean()), float((reference_T - scored.logp).square().mean()), rows


@pytest.fixture(scope="module")
def unheld(tiny_folder: Path) -> tuple[float, float, list[Any]]:
    return trained(tiny_folder, Algorithm())


@pytest.mark.parametrize("name", ["kl_k2", "kl_k3"])
def test_a_strong_divergence_term_holds_the_policy_near_its_start(
    tiny_folder: Path, unheld: tuple[float, float, list[Any]], name: str
) -> None:
    algorithm = Algorithm(regularisers=(name,), options={name: {"coefficient": 10.0}})
    _, moved, rows = trained(tiny_folder, algorithm)
    assert moved < 0.2 * unheld[1], (moved, unheld[1])
    assert rows[0][f"coefficient/{name}"] == 10.0
    assert rows[-1][f"penalty/{name}"] > 0


def test_an_entropy_bonus_raises_entropy_and_its_adaptive_coefficient_follows_the_target(
    tiny_folder: Path, unheld: tuple[float, float, list[Any]]
) -> None:
    bonus = Algorithm(regularisers=("entropy_bonus",), options={"entropy_bonus": {"coefficient": 1.0}})
    entropy, _, rows = trained(tiny_folder, bonus)
    assert entropy > unheld[0] + 0.1, (entropy, unheld[0])
    assert rows[-1]["penalty/entropy_bonus"] == pytest.approx(-rows[-1]["entropy"], abs=0.5)
    options = {"adaptive_entropy": {"target": 100.0, "step": 0.25}}
    adaptive = Algorithm(regularisers=("adaptive_entropy",), options=options)
    risen, _, rows = trained(tiny_folder, adaptive)
    assert [row["coefficient/adaptive_entropy"] for row in rows] == [0.25 * i for i in range(8)]
    assert risen > unheld[0] + 0.1


def test_under_adapters_the_reference_is_the_base_and_they_are_back_afterwards(tiny_folder: Path) -> None:
    for stage in (0, 3):
        config = LearnerConfig(lr=1e-2, zero_stage=stage, lora=LoraSettings(rank=4))
        learner = Learner(load_model(tiny_folder, "float32"), config, temperature=1.0)
        sequences = [SampledSequence(token_ids=tuple(range(3, 30)), positions=tuple(range(5, 27)))]
        packed = learner.pack(sequences)
        start = learner.score(packed, 22).logp
        assert torch.equal(learner.reference_logp(packed, 22), start)
        for _ in range(3):
            learner.step(packed, torch.full((22,), 1 / 22), None)
        now = learner.score(packed, 22).logp
        assert (now - start).abs().max() > 1e-2
        torch.testing.assert_close(learner.reference_logp(packed, 22), start, rtol=0, atol=1e-6)
        assert torch.equal(learner.score(packed, 22).logp, now)
        learner.step(packed, torch.full((22,), 1 / 22), None)
        assert not torch.equal(learner.score(packed, 22).logp, now)  # and they are still trained
        learner.close()


def test_with_reused_logprobs_the_terms_are_the_same(tiny_folder: Path) -> None:
    algorithm = Algorithm(
        regularisers=("kl_k3", "entropy_bonus", "epo_smoothing"),
        options={name: {"coefficient": 5.0} for name in ("kl_k3", "entropy_bonus", "epo_smoothing")},
    )
    weights, states = [], []
    for score in ("exact", "reuse"):
        config = LearnerConfig(optimizer="sgd", lr=0.5, zero_stage=0)
        start = load_model(tiny_folder, "float32")
        learner = Learner(load_model(tiny_folder, "float32"), config, temperature=1.0, reference=start)
        trajectories = synthetic_trajectories()
        batch = update_batch(trajectories)
        scored = learner.score(learner.pack(batch.sequences), batch.num_tokens)
        batch = load_worker().with_sampler_logprobs(batch, scored.logp)
        stare = StareConfig(variant="none", score=score)  # type: ignore[arg-type]
        state = RegulariserState(entropies=(1.0,))
        plan, row = update(
            learner,
            batch,
            trajectories,
            start_controllers(stare),
            stare,
            Clock(),
            algorithm=algorithm,
            regularisers=state,
        )
        assert plan is not None
        assert row["penalty/epo_smoothing"] > 0
        states.append(plan.regularisers.entropies)
        weights.append({name: tensor.clone() for name, tensor in learner.named_tensors()})
        learner.close()
    assert states[0] == pytest.approx(states[1])
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-4, atol=1e-6)


def test_a_forward_made_before_the_step_is_not_taken_for_a_term_of_entropy(tiny_folder: Path) -> None:
    batch = update_batch(synthetic_trajectories())
    term = Penalty(
        name="entropy_bonus",
        coefficient=5.0,
        function=entropy_bonus,
        of_entropy=True,
        scale_T=scale_of(batch, "token-mean").float(),
        columns={},
        options={},
    )
    weights = []
    for before_step in (False, True):
        config = LearnerConfig(optimizer="sgd", lr=0.5, zero_stage=0)
        learner = Learner(load_model(tiny_folder, "float32"), config, temperature=1.0)
        packed = learner.pack(batch.sequences)
        scored = learner.score(packed, batch.num_tokens, before_step=before_step)
        learner.step(packed, torch.zeros(batch.num_tokens), scored.logp, penalties=[term])
        weights.append({name: tensor.clone() for name, tensor in learner.named_tensors()})
        learner.close()
    assert all(torch.equal(weights[1][name], tensor) for name, tensor in weights[0].items())


def test_kl_cov_is_silent_in_the_first_step_of_a_batch(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    step = Learner.step

    def noting(self: Learner, *arguments: Any, penalties: Any, **named: Any) -> Any:
        seen.append([penalty.name for penalty in penalties])
        return step(self, *arguments, penalties=penalties, **named)

    monkeypatch.setattr(Learner, "step", noting)
    algorithm = Algorithm(regularisers=("kl_cov", "kl_k3"), options={"kl_cov": {"fraction": 0.3}})
    _, _, rows = trained(tiny_folder, algorithm, steps=1)
    assert seen == [["kl_k3"], ["kl_cov", "kl_k3"]]
    assert rows[0]["penalty/kl_cov"] > 0


def test_state_moves_by_batches_of_known_entropy_and_survives_json() -> None:
    algorithm = Algorithm(regularisers=("epo_smoothing", "adaptive_entropy"))
    state = RegulariserState.start(algorithm)
    for entropy in (0.1, None, math.nan, 0.15, 0.3):
        state = state.after(entropy)
    assert state.entropies == (0.1, 0.15, 0.3)
    assert state.adaptive is not None
    assert state.adaptive.coefficient == pytest.approx(0.005)
    assert RegulariserState.from_dict(json.loads(json.dumps(asdict(state)))) == state
    assert RegulariserState.start(Algorithm()).after(1.0) == RegulariserState()


def test_options_reach_the_terms() -> None:
    batch = worker_batch()
    logp_T = torch.linspace(-3, -1, batch.num_tokens)
    by_name: dict[str, Penalty] = {t.name: t for t in terms_of(batch, logp_T, -logp_T, logp_T)}
    assert by_name["kl_k1"].coefficient == 0.7
    tokens = batch.tokens(logp_T, -logp_T, logp_T)
    (default,) = penalties(Algorithm(regularisers=("kl_k2",)), STATE, tokens, torch.ones(len(logp_T)), None)
    assert default.coefficient == 1e-3  # the registry's
    assert by_name["adaptive_entropy"].coefficient == 0.3
    assert int(by_name["kl_cov"].columns["held_T"].sum()) == math.ceil(0.3 * batch.num_tokens)
    assert by_name["epo_smoothing"].options == {"low": 0.99, "high": 1.01, "penalty": 0.5, "history": (4.0, 4.2)}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--algorithm.regularisers", '["kl"]'], "did you mean 'kl_k"),
        (["--algorithm.regularisers", '["lp_reg"]'], "cannot be trained with"),
        (["--algorithm.regularisers", '["kl_k3", "kl_k3"]'], "named twice"),
        (["--algorithm.regularisers", '["kl_cov"]'], "needs stare.mini_batches > 1"),
        (["--algorithm.regularisers", '["adaptive_entropy"]', "--stare.score", "reuse"], "need stare.score 'exact'"),
        (["--algorithm.correction", "tis", "--stare.score", "reuse"], "tis of algorithm need stare.score 'exact'"),
        (["--algorithm.ratio", "hapo_clip", "--stare.score", "reuse"], "hapo_clip of algorithm need"),
        (["--algorithm.correction", "tis", "--algorithm.token_weights", '["tis"]'], "would count twice"),
        (
            ["--algorithm.regularisers", '["kl_k3"]', "--algorithm.options.kl_k3.coefficient", "strong"],
            "options.kl_k3.coefficient = 'strong': give a finite number",
        ),
        (["--algorithm.regularisers", '["kl_k3"]', "--algorithm.options.kl_k3.beta", "1"], "kl_k3 has no option"),
    ],
)
def test_what_cannot_be_is_said(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("quickstart", overrides)


@pytest.fixture(scope="module")
def run_config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return load_config(
        "quickstart",
        [
            *("--output", str(tmp_path_factory.mktemp("terms")), "--steps", "3", "--threads", "1"),
            *("--sandbox.kind", "local", "--rollout.prompts", "3", "--rollout.group", "4"),
            *("--rollout.max_tokens", "30", "--cold_start.steps", "45", "--cold_start.batch", "24"),
            *("--cold_start.guesses", "0", "--checkpoint.keep", "2", "--checkpoint.every", "2"),
            *("--learner.lr", "1e-3", "--stare.mini_batches", "2", "--records.trajectories", "1"),
            *("--algorithm.regularisers", '["kl_k3", "kl_cov", "epo_smoothing", "adaptive_entropy"]'),
            *("--algorithm.options.adaptive_entropy.target", "5.0", "--algorithm.options.kl_k3.coefficient", "0.1"),
            *("--algorithm.correction", "tis"),
        ],
    )


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_same_reference_and_memory(run_config: RunConfig) -> None:
    folder = train(run_config, Console(quiet=True))
    whole = read_rows(folder / "metrics.jsonl")
    weights = (folder / "model" / "model.safetensors").read_bytes()
    assert whole[-1]["penalty/kl_k3"] > whole[0]["penalty/kl_k3"] > 0
    assert whole[-1]["coefficient/adaptive_entropy"] == pytest.approx(0.01)
    assert whole[-1]["penalty/epo_smoothing"] is not None
    shutil.rmtree(folder / "checkpoints" / "step-000003")
    train(run_config, Console(quiet=True))
    again = read_rows(folder / "metrics.jsonl")
    for ours, theirs in zip(again, whole, strict=True):
        assert {k: v for k, v in ours.items() if not k.startswith("seconds")} == {
            k: v for k, v in theirs.items() if not k.startswith("seconds")
        }
    assert (folder / "model" / "model.safetensors").read_bytes() == weights
