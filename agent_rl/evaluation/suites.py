"""What can be evaluated by name, where its problems are read from, and under which limits.

No problem text ships with the package. A data set is read from a path, from the folder that ``AGENT_RL_DATA`` names,
from the cache, or from the hub by ``datasets`` (which then fills the cache).
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agent_rl.errors import ConfigError
from agent_rl.seeds import derive_seed
from envs import EnvSpec, Limits, Task, TaskSource, get, ids

Scenario = Literal["short_cot", "long_cot", "tool_use"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The paper's scenarios: an environment and the tokens of one turn and of one episode (prompt included)."""

    env: str
    max_tokens: int
    max_episode_tokens: int
    max_turns: int


SCENARIOS: dict[str, Budget] = {
    # Prompt 1024 and response 3072 (the reference's script of the 7B model).
    "short_cot": Budget(env="agentic/ShortCoT-v1", max_tokens=3072, max_episode_tokens=4096, max_turns=1),
    "long_cot": Budget(env="agentic/LongCoT-v1", max_tokens=16384, max_episode_tokens=17408, max_turns=1),
    # 8k of decoding; the paper states no turn limit, 16 is the ReTool recipe's.
    "tool_use": Budget(env="agentic/MathPython-v1", max_tokens=8192, max_episode_tokens=9216, max_turns=16),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """A named set of problems with checkable answers."""

    name: str
    k: int  # samples of a problem in the paper's tables
    count: int  # problems; another number is another set
    hub: str  # name on the hub, with its configuration behind a colon if it has one
    split: str
    licence: str
    columns: Mapping[str, str] = field(default_factory=dict)  # where the hub's rows have our fields
    files: tuple[str, ...] = ()  # other names that its file goes by


DATA_SETS = {
    data.name: data
    for data in (
        DataSet(
            name="aime24",
            k=32,
            count=30,
            hub="HuggingFaceH4/aime_2024",
            split="train",
            licence="problems (c) MAA; not shipped",
        ),
        DataSet(
            name="aime25",
            k=32,
            count=30,
            hub="math-ai/aime25",
            split="test",
            licence="problems (c) MAA; not shipped",
        ),
        DataSet(
            name="amc23",
            k=32,
            count=40,
            hub="math-ai/amc23",
            split="test",
            columns={"problem": "question"},
            licence="problems (c) MAA; not shipped",
        ),
        DataSet(
            name="math500",
            k=4,
            count=500,
            hub="HuggingFaceH4/MATH-500",
            split="test",
            columns={"id": "unique_id"},
            licence="MIT",
            files=("math-500", "math_500"),
        ),
        DataSet(
            name="minerva",
            k=4,
            count=272,
            hub="math-ai/minervamath",
            split="test",
            columns={"problem": "question"},
            licence="MIT OpenCourseWare, CC BY-NC-SA; not shipped",
            files=("minerva_math", "minervamath"),
        ),
        DataSet(
            name="olympiadbench",
            k=4,
            count=675,
            hub="math-ai/olympiadbench",
            split="test",
            columns={"problem": "question", "answer": "final_answer"},
            licence="Apache-2.0 repository, problems of their competitions; not shipped",
            files=("olympiad",),
        ),
        DataSet(
            name="gsm8k",
            k=1,
            count=1319,
            hub="openai/gsm8k:main",
            split="test",
            columns={"problem": "question"},
            licence="MIT",
            files=("gsm8k_test", "gsm8k-test"),
        ),
    )
}
SUITES: dict[str, tuple[str, ...]] = {
    "stare-math": ("aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench"),
    **{name: (name,) for name in DATA_SETS},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem of a part; ``place`` is its number in the whole source, which its seeds come from."""

    part: str
    place: int
    task: Task

    @property
    def key(self) -> tuple[str, str]:
        return self.part, self.task.id


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The problems of one row of the result table, and the environment that they are solved in."""

    name: str
    env: EnvSpec
    source: TaskSource
    k: int
    problems: tuple[Problem, ...]
    path: Path | None = None  # of the raw problems, where they come from one file
    notes: tuple[str, ...] = ()  # for the reader of the results

    @property
    def digest(self) -> str:
        """Of ids, prompts and gold answers: the same digest, the same problems."""
        text = json.dumps([[p.task.id, p.task.prompt, p.task.answer] for p in self.problems])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_suite(
    suite: str,
    *,
    scenario: Scenario | None = None,
    data: str | None = None,
    options: Mapping[str, Any] | None = None,
    k: int | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> list[Part]:
    """The parts of a suite, of a data set, or of an environment id.

    Args:
        data: a file, or a folder with ``NAME.jsonl`` files; for an environment its option ``path``.
        options: of the environment, where ``suite`` is an environment id.
        k: samples a problem; the suite's own when None (1 for an environment).
        limit: at most so many problems of every part: those that a seeded order has first, so that a larger limit
            keeps the smaller one's.

    Raises:
        ConfigError: unknown name, no data and where to get it, a bad row, too many tasks without a limit.
    """
    if suite in SUITES:
        return [
            _math_part(DATA_SETS[name], scenario, data, len(SUITES[suite]), k, limit, seed) for name in SUITES[suite]
        ]
    if "/" not in suite:
        close = difflib.get_close_matches(suite, SUITES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(SUITES)}, and environment ids"
        raise ConfigError(f"no suite {suite!r}: {hint}")
    if scenario is not None:
        raise ConfigError(f"--scenario chooses the environment of a named suite; {suite} is one already")
    given = dict(options or {}) | ({"path": data} if data else {})
    try:
        spec = get(suite)
        source = spec.tasks(given or spec.example)
    except ValueError as error:
        raise ConfigError(" ".join(str(error).split())) from None
    return [_part(suite, spec, source, k or 1, limit, seed)]


def _math_part(
    data_set: DataSet,
    scenario: Scenario | None,
    data: str | None,
    parts: int,
    k: int | None,
    limit: int | None,
    seed: int,
) -> Part:
    path = find_file(data_set, data, alone=parts == 1)
    spec = get(SCENARIOS[scenario or "short_cot"].env)
    try:
        source = spec.tasks({"path": str(path)})
    except ValueError as error:
        raise ConfigError(f"{data_set.name}: {error}") from None
    notes = []
    if len(source) != data_set.count:
        notes.append(f"{data_set.name}: {len(source)} problems instead of the usual {data_set.count}: another set")
    return _part(data_set.name, spec, source, k or data_set.k, limit, seed, path=path, notes=notes)


MANY = 20_000
"""Tasks that nobody evaluates without saying so."""


def _part(
    name: str,
    spec: EnvSpec,
    source: TaskSource,
    k: int,
    limit: int | None,
    seed: int,
    *,
    path: Path | None = None,
    notes: Sequence[str] = (),
) -> Part:
    if limit is None and len(source) > MANY:
        raise ConfigError(f"{name} has {len(source)} tasks: say how many with --limit")
    places = chosen_places(len(source), limit, seed)
    problems = tuple(Problem(part=name, place=place, task=source.task(place)) for place in places)
    seen: set[str] = set()
    for problem in problems:
        if problem.task.id in seen:
            raise ConfigError(f"{name}: two tasks have the id {problem.task.id!r}")
        seen.add(problem.task.id)
    return Part(name=name, env=spec, source=source, k=k, problems=problems, path=path, notes=tuple(notes))


def chosen_places(size: int, limit: int | None, seed: int) -> list[int]:
    """All places in order, or the first ``limit`` of a seeded order, in order; a larger limit adds to a smaller."""
    if limit is None or limit >= size:
        return list(range(size))
    rng = random.Random(derive_seed(seed, "limit", size))
    if size > 10 * MANY:  # a generator: drawing is as good as shuffling, and keeps the smaller limit's places too
        drawn: dict[int, None] = {}
        while len(drawn) < limit:
            drawn.setdefault(rng.randrange(size))
        return sorted(drawn)
    order = list(range(size))
    rng.shuffle(order)
    return sorted(order[:limit])


def data_folder() -> Path:
    """The cache; ``AGENT_RL_CACHE`` moves its root."""
    return Path(os.environ.get("AGENT_RL_CACHE") or "~/.cache/agent-rl").expanduser() / "data"


def find_file(data_set: DataSet, data: str | None, *, alone: bool) -> Path:
    """The file of a data set: given, in ``$AGENT_RL_DATA``, cached, or fetched from the hub into the cache."""
    names = [f"{name}.jsonl" for name in (data_set.name, *data_set.files)]
    if data is not None:
        path = Path(data).expanduser()
        if path.is_file():
            if not alone:
                raise ConfigError(f"--data {data}: a suite of several sets needs a folder with a file for each")
            return path
        for name in names:
            if (path / name).is_file():
                return path / name
        what = "has no " + " or ".join(names) if path.is_dir() else "does not exist"
        raise ConfigError(f"--data {data}: {what}")
    folders = [Path(os.environ["AGENT_RL_DATA"]).expanduser()] if os.environ.get("AGENT_RL_DATA") else []
    for folder in (*folders, data_folder()):
        for name in names:
            if (folder / name).is_file():
                return folder / name
    return fetch(data_set, data_folder() / names[0])


def fetch(data_set: DataSet, target: Path) -> Path:
    """The data set from the hub, as a file of ours."""
    advice = (
        f"{data_set.name} is not here ({data_set.licence}). Give --data FOLDER with {data_set.name}.jsonl "
        f'({{"id", "problem", "answer"}} a line), or set AGENT_RL_DATA to that folder, or install datasets and be '
        f"online: it is then read from hf:{data_set.hub}"
    )
    try:
        import datasets  # here: optional, and seconds to import
    except ImportError:
        raise ConfigError(advice) from None
    name, _, configuration = data_set.hub.partition(":")
    try:
        rows = datasets.load_dataset(name, *([configuration] if configuration else []), split=data_set.split)
    except Exception as error:  # the package raises whatever its readers and the network raise
        raise ConfigError(f"{advice}; that failed: {' '.join(str(error).split())[:200]}") from None
    lines = []
    for number, row in enumerate(rows):
        given = {ours: row[data_set.columns.get(ours, ours)] for ours in ("problem", "answer")}
        identity = row.get(data_set.columns.get("id", "id"))
        lines.append(
            {
                "id": f"{data_set.name}-{number if identity is None else identity}",
                "problem": given["problem"],
                "answer": plain_answer(data_set.name, given["answer"]),
                "source": f"hf:{data_set.hub}",
            }
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    aside.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    aside.rename(target)
    return target


def plain_answer(name: str, answer: Any) -> str:
    """The gold answer alone: ``["$2$"]`` is ``2``, ``27.0`` is ``27``, GSM8K's is what follows ``####``."""
    if isinstance(answer, (list, tuple)):
        answer = ", ".join(str(item) for item in answer)
    text = str(answer)
    if name == "gsm8k":
        text = text.rsplit("####", 1)[-1].replace(",", "")
    if name == "amc23":
        text = re.sub(r"\.0+$", "", text)
    return text.strip().strip("$").strip()


def known_suites() -> list[str]:
    return [*SUITES, *ids()]


def limits_of(spec: EnvSpec, budget: Budget | None, changes: Mapping[str, Any]) -> Limits:
    """The environment's limits, with the scenario's number of turns and what the user changed."""
    tree = spec.limits.model_dump()
    if budget is not None:
        tree |= {"max_turns": budget.max_turns, "max_tool_calls": max(budget.max_turns, tree["max_tool_calls"])}
    return Limits.model_validate(tree | {name: value for name, value in changes.items() if value is not None})
