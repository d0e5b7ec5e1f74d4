"""Left-over groups: oldest first, within the staleness bound, every prompt once, nothing left at the end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timed import Codec, Engine, Env, run

from agent_rl.collect import Collected, Collector
from agent_rl.config import RolloutConfig
from agent_rl.leftovers import Leftovers
from agent_rl.plan import update_batch
from agent_rl.records import leftover_metrics, trajectory_record
from agent_rl.report import episode_text
from agent_rl.rollout import TooManyFailures
from agent_rl.types import Trajectory, Turn, WeightChange
from envs.types import ModelTurn, Task, TurnResult

UPDATE_S = 5.0


class Run:
    """Steps of a run without a learner: collect, update for a while, publish.

    Args:
        tokens: of the completions of a request; its id is step-group-member-attempt.
        answer: of the task at a place: ``differs`` inside its group, or ``same``.
    """

    def __init__(
        self,
        tokens: Callable[[str], int] = lambda request: 3,
        *,
        fails: Callable[[str], bool] = lambda request: False,
        answer: Callable[[int], str] = lambda place: "differs",
        seed: int = 0,
        turns: int = 1,
        tool_s: float = 0.0,
        env: type[Env] = Env,
        **config: Any,
    ) -> None:
        Env.opened = 0
        self.engine = Engine(tokens, fails)
        self.config = RolloutConfig(
            **{"leftovers": "keep", "group": 2, "wall_s": 1e6, "max_failures": 10_000, **config}
        )
        self.answer = answer
        rng = random.Random(seed)
        self.collector = Collector(
            lambda: env(rng, rng.randint(1, turns), tool_s),
            engine=self.engine,
            codec=Codec(),  # type: ignore[arg-type]
            config=self.config,
            seed=seed,
        )

    def open(self, cursor: int = 0, pending: tuple[int, ...] = ()) -> Leftovers:
        def task_at(place: int) -> Task:
            return Task(id=str(place), prompt="", answer=self.answer(place))

        return Leftovers(
            self.collector,
            task_at=task_at,
            engine=self.engine,
            config=self.config,
            cursor=cursor,
            pending=pending,
        )

    async def step(self, leftovers: Leftovers, step: int, *, is_last: bool = False) -> Collected:
        """Step ``step`` starts with weights ``step - 1`` and ends with the next ones in the engine."""
        collected = await leftovers.collect(step, is_last=is_last)
        await asyncio.sleep(UPDATE_S)
        self.engine.weight_version = step
        return collected

    def assert_nothing_is_left(self) -> None:
        assert not +self.engine.joined, "an episode has not left"
        assert self.engine.at_once == 0
        assert Env.opened == 0, "an environment was not closed"


def places(collected: Collected) -> list[int]:
    """Of the prompts, in the order of their groups."""
    return [int(task) for task in dict.fromkeys(t.task.id for t in collected.trajectories)]


def steps(given_run: Run, count: int) -> tuple[list[Collected], Leftovers]:
    async def main() -> tuple[list[Collected], Leftovers]:
        async with given_run.open() as leftovers:
            done = [await given_run.step(leftovers, step) for step in range(1, count + 1)]
        given_run.assert_nothing_is_left()
        return done, leftovers

    return run(main())


def test_left_over_groups_come_first_and_the_oldest_of_them_first() -> None:
    # Two of four prompts are wanted. Those begun in step 1 take 30, 3, 3 and 12 seconds, later ones 3.
    long = {"000001-0000": 30, "000001-0003": 12}
    done, leftovers = steps(Run(lambda request: long.get(request[:11], 3), prompts=2, oversample=1.0), 3)
    assert places(done[0]) == [1, 2]
    # 3 was ready during the update; 0 too, or the step waits for it, because in step 3 it would be too stale.
    assert places(done[1]) == [0, 3]
    assert places(done[2]) == [4, 5]
    assert [c.groups_carried for c in done] == [0, 2, 2]
    assert [c.groups_waiting for c in done] == [2, 2, 2]  # as many are in play in every step
    assert leftovers.cursor == 4 + 2 + 2
    assert [t.group for t in done[1].trajectories] == [0, 0, 1, 1]
    assert all(c.groups_dropped == 0 for c in done)


def test_a_completion_that_crosses_an_update_says_so_in_its_trajectory() -> None:
    done, _ = steps(Run(lambda r: 30 if r.startswith("000001-0000-001") else 3, prompts=2, oversample=1.0), 2)
    (crossed,) = (t for t in done[1].trajectories if t.turns[0].weight_changes)
    (change,) = crossed.turns[0].weight_changes
    assert 2 < change.position < 32  # behind the two ids of the prompt
    assert crossed.weight_versions == (0,) * (change.position - 2) + (1,) * (32 - change.position)
    # As in the fake engine's logprobs, which say whose each token is.
    assert [-1.0 - v for v in crossed.weight_versions] == list(crossed.logprobs[2:])


def test_the_age_of_a_group_is_that_of_its_oldest_token_and_not_of_its_lost_attempts() -> None:
    # Prompts 1 and 2 are under way at the update, 5 s after 3 s. The members of 1 are lost then and tried again by the
    # new weights; those of 2 began with the old ones. So 2 comes first, and 1 is not too stale in step 3.
    seconds = {"000001-0001-000-0": 9, "000001-0001-001-0": 9, "000001-0002-000-0": 10, "000001-0002-001-0": 10}
    lost = {"000001-0001-000-0", "000001-0001-001-0"}
    done, _ = steps(Run(lambda r: seconds.get(r, 3), fails=lambda r: r in lost, prompts=1, oversample=2.0), 3)
    assert [places(c) for c in done] == [[0], [2], [1]]
    assert done[2].groups_dropped == 0


def test_what_no_step_has_taken_in_time_is_dropped_reported_and_begun_anew() -> None:
    # Six groups a step, all at once ready; two are wanted; a group may be one version behind.
    done, leftovers = steps(Run(prompts=2, oversample=2.0), 3)
    assert [places(c) for c in done[:2]] == [[0, 1], [2, 3]]
    assert [c.groups_dropped for c in done] == [0, 0, 2]
    assert done[2].dropped_tokens == (5, 5, 5, 5)  # two groups of two rollouts of 2 + 3 tokens
    assert [c.groups_waiting for c in done] == [4, 6 - 2, 4]
    # 4 and 5 were begun again before a new prompt was.
    assert not {4, 5} & set(places(done[2]))
    assert {4, 5} <= set(leftovers.pending)


def test_groups_without_a_difference_are_consumed_and_make_room_for_new_prompts() -> None:
    plain = Run(answer=lambda place: "same" if place < 4 else "differs", prompts=2, oversample=1.0, max_rounds=3)
    done, leftovers = steps(plain, 1)
    assert set(places(done[0])) >= {0, 1, 2, 3}
    assert len({t.group for t in update_batch(done[0].trajectories).trajectories}) == 2
    assert leftovers.cursor == 8
    assert set(leftovers.pending) == {4, 5, 6, 7} - set(places(done[0]))


def test_the_last_step_cancels_the_rest_reports_its_lengths_and_leaves_it_pending() -> None:
    async def main() -> None:
        last = Run(lambda request: 50 if request[:11] == "000001-0002" else 3, prompts=2, oversample=1.0)
        async with last.open() as leftovers:
            collected = await leftovers.collect(1, is_last=True)
            last.assert_nothing_is_left()
            assert asyncio.get_running_loop().time() < 10  # nobody waited for the long ones
        assert places(collected) == [0, 1]
        assert leftovers.pending == (2, 3)
        assert len(collected.cancelled_tokens) == 4
        assert collected.cancelled_tokens.count(2) == 2  # the two long ones: so far only their prompt

    run(main())


@settings(max_examples=60)
@given(data=st.data())
def test_every_prompt_is_consumed_once_whatever_was_slow_lost_or_killed(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 999), "seed")
    prompts = data.draw(st.integers(1, 3), "prompts")
    max_staleness = data.draw(st.integers(1, 3), "max_staleness")
    every = data.draw(st.integers(1, 3), "checkpoint.every")
    failures = data.draw(st.sampled_from([0.0, 0.2]), "failures")
    settled = {
        "prompts": prompts,
        "oversample": data.draw(st.sampled_from([0.5, 1.0, 2.5]), "oversample"),
        "max_rounds": data.draw(st.integers(1, 3), "max_rounds"),
        "max_staleness": max_staleness,
        "max_refills": data.draw(st.integers(0, 2), "max_refills"),
        "group": 3,
        "concurrency": data.draw(st.one_of(st.none(), st.integers(1, 12)), "concurrency"),
    }

    def chance(*parts: object) -> float:
        return random.Random("-".join(map(str, (seed, *parts)))).random()

    def tokens(request: str) -> int:
        return 1 + int(40 * chance("tokens", request) ** 4)  # few are long

    def answer(place: int) -> str:
        return "same" if chance("answer", place) < 0.3 else "differs"

    # Where the run is killed: while it collects, or while it updates; it goes on from the last checkpoint.
    kills = data.draw(st.lists(st.tuples(st.integers(1, 6), st.floats(0, 60)), max_size=3), "kills")

    async def main() -> None:
        consumed: dict[int, Collected] = {}
        saved: tuple[int, int, tuple[int, ...]] = (0, 0, ())
        deaths = list(kills)
        while saved[0] < 7:
            a_run = Run(
                tokens,
                fails=lambda request: chance("fails", request) < failures,
                answer=answer,
                seed=seed,
                turns=3,
                tool_s=3.0,
                **settled,
            )
            done, cursor, pending = saved
            a_run.engine.weight_version = done
            async with a_run.open(cursor, pending) as leftovers:
                for step in range(done + 1, 8):
                    death = next((d for d in deaths if d[0] == step), None)
                    try:
                        async with asyncio.timeout(death[1] if death else None):
                            consumed[step] = await a_run.step(leftovers, step)
                    except TimeoutError:
                        assert death is not None
                        deaths.remove(death)
                        break
                    if step % every == 0 or step == 7:
                        saved = (step, leftovers.cursor, leftovers.pending)
            a_run.assert_nothing_is_left()
            if settled["concurrency"]:
                assert a_run.engine.most_at_once <= settled["concurrency"]

        everything = [place for step in range(1, 8) for place in places(consumed[step])]
        assert sorted((*everything, *saved[2])) == list(range(saved[1]))
        for step, collected in consumed.items():
            check_step(collected, step, settled, answer)

    run(main())


def check_step(collected: Collected, step: int, config: dict[str, Any], answer: Callable[[int], str]) -> None:
    """Groups whole, tokens labelled, none too stale, the oldest first."""
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in collected.trajectories:
        groups.setdefault(trajectory.group, []).append(trajectory)
    assert list(groups) == list(range(len(groups)))
    oldest = []
    for members in groups.values():
        assert len({t.task.id for t in members}) == 1
        assert {t.member for t in members} == {0, 1, 2}
        scored = [t for t in members if not t.is_void]
        assert len({t.member for t in scored}) == len(scored)
        for member in {0, 1, 2} - {t.member for t in scored}:
            assert sum(t.member == member for t in members) == 1 + config["max_refills"]
        for trajectory in scored:
            assert list(trajectory.weight_versions) == sorted(trajectory.weight_versions)
            sampled = [p for p, flag in zip(trajectory.logprobs, trajectory.loss_mask, strict=True) if flag]
            assert sampled == [-1.0 - version for version in trajectory.weight_versions]
            assert step - 1 - min(trajectory.weight_versions) <= config["max_staleness"]
        if scored:
            oldest.append(min(min(t.weight_versions) for t in scored))
    assert oldest == sorted(oldest)
    assert len(collected.dropped_tokens) >= 3 * collected.groups_dropped
    assert len({t.group for t in update_batch(collected.trajectories).trajectories}) <= config["prompts"]


def test_a_long_episode_is_late_and_never_lost() -> None:
    """Begun with every step, one of ten times the length: as many are trained as were begun and had the time."""
    long_ones = Run(lambda request: 60 if "-0001-" in request else 4, prompts=2, oversample=0.5)
    done, leftovers = steps(long_ones, 12)
    assert all(c.groups_dropped == 0 for c in done)
    lengths = [len(t.token_ids) for c in done for t in c.trajectories]
    assert lengths.count(62) >= 2 * 10
    assert not set(leftovers.pending) - {leftovers.cursor - 1, leftovers.cursor - 2, leftovers.cursor - 3}


def test_failures_and_bugs_of_the_background_stop_the_next_step_and_leave_nothing() -> None:
    class Broken(Env):
        async def astep(self, turn: ModelTurn) -> TurnResult:
            if self.task.id == "3":
                raise KeyError("a bug")
            return await super().astep(turn)

    def tokens(request: str) -> int:
        return 8 if request[:11] == "000001-0003" else 3  # ends while the update is made

    async def two_steps(a_run: Run) -> None:
        try:
            async with a_run.open() as leftovers:
                await a_run.step(leftovers, 1)
                await a_run.step(leftovers, 2)
        finally:
            a_run.assert_nothing_is_left()

    shape = {"prompts": 2, "oversample": 1.0, "max_refills": 0}
    with pytest.raises(KeyError, match="a bug"):
        run(two_steps(Run(tokens, env=Broken, **shape)))
    failing = Run(tokens, fails=lambda request: request[:11] == "000001-0003", max_failures=2, **shape)
    with pytest.raises(TooManyFailures, match="2 episodes in a row failed on our side"):
        run(two_steps(failing))


def test_a_cancelled_step_leaves_nothing() -> None:
    async def main() -> None:
        a_run = Run(lambda request: 30, prompts=2, oversample=1.0, concurrency=3)

        async def training() -> None:
            async with a_run.open() as leftovers:
                await a_run.step(leftovers, 1)

        task = asyncio.create_task(training())
        await asyncio.sleep(10)
        assert a_run.engine.at_once == 3
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.get_running_loop().time() == 10
        a_run.assert_nothing_is_left()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())


def trajectory_of(*turns: Turn, group: int = 0, member: int = 0, reward: float = 0.0) -> Trajectory:
    length = turns[-1].end
    mask = tuple(any(turn.start <= i < turn.end for turn in turns) for i in range(length))
    return Trajectory(
        task=Task(id="0", prompt=""),
        group=group,
        member=member,
        token_ids=(5,) * length,
        loss_mask=mask,
        logprobs=(0.0,) * length,
        turns=turns,
        messages=(),
        reward=reward,
    )


def test_versions_and_staleness_are_those_of_the_worked_example() -> None:
    first = Turn(start=2, end=5, weight_version=3, finish_reason="stop", weight_changes=(WeightChange(4, 4),))
    second = Turn(start=7, end=8, weight_version=4, finish_reason="stop")
    crossed = trajectory_of(first, second)
    assert crossed.weight_versions == (3, 3, 4, 4)
    fresh = trajectory_of(Turn(start=1, end=5, weight_version=5, finish_reason="stop"), member=1, reward=1.0)
    record = trajectory_record(crossed, 6)
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "")
    assert "\nweights 3 from token 2, 4 from token 4, 4 from token 7\n" in episode_text(record, tokenizer).plain
    assert "weights" not in episode_text(trajectory_record(fresh, 6), tokenizer).plain
    collected = Collected(
        trajectories=(crossed, fresh), groups_carried=1, groups_waiting=2, groups_dropped=1, dropped_tokens=(4, 6)
    )
    assert leftover_metrics(update_batch(collected.trajectories), collected, version=5) == {
        "staleness_mean": (2 + 2 + 1 + 1) / 8,
        "staleness_max": 2,
        "stale_tokens": 0.5,
        "groups_carried": 1,
        "groups_waiting": 2,
        "groups_dropped": 1,
        "dropped_tokens": 5.0,
    }
