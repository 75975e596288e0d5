"""A target that drafts for itself writes the texts that it writes plainly, whatever runs beside them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.coordinator.request import Delta, Endpoint, Request, Timeline
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from actors.replica.roles import Role
from actors.wire.messages import Adapter
from decoding.drafts.options import NgramOptions
from engine.heads.spec import HeadsSpec
from engine.loading.checkpoint import ModelSpec
from engine.loading.lora import read_lora
from engine.loading.runners import load_runner, load_with_heads
from engine.model.runner import Runner
from tests.in_process.test_parameters import PROMPTS, SETTINGS, params, text, tokens
from tests.support.adapters import save_adapter
from tests.support.models import tiny_model
from tests.support.waiting import wait_until

NAMES = [None, "a", "b"]  # adapters of the requests, in turn, where they have any


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("self")
    tiny_model("llama-gqa").save_pretrained(folder / "target")
    for seed, name in enumerate(("draft", "a", "b"), 1):
        save_adapter(folder / name, tiny_model("llama-gqa"), seed)
    return folder


@contextmanager
def running(
    folder: Path,
    *,
    drafts: bool = True,
    targets: int = 1,
    graphs: bool = False,
    adaptive: bool = False,
    **settings: Any,
) -> Iterator[Engine]:
    """Run targets with an adapter to draft by, or plain ones without."""
    size: dict[str, Any] = {
        "max_length": 128,
        "slots": 16,
        "device": "cpu",
        "threads": 1,
        "prefill_chunk": 64,
    } | settings
    replicas: dict[str, tuple[Role, Runner]] = {}
    options: dict[str, LoopOptions] = {}
    for index in range(targets):
        spec = ModelSpec(name="target", path=str(folder / "target"), **size)
        heads, runner = None, None
        if drafts:
            own = HeadsSpec(name="heads", path=str(folder / "draft"), kind="self", min_acceptance=0.0)
            runner, _, heads = load_with_heads(spec, own)
        else:
            runner = load_runner(spec)
        if graphs:
            runner.use_graphs(capture=lambda run: run)
        name = "target" if index == 0 else f"target#{index}"
        replicas[name] = ("target", runner)
        options[name] = LoopOptions(adaptive=adaptive, prefill_chunk=size["prefill_chunk"], heads=heads)
    with Engine(replicas, own_options=options) as engine:
        yield engine
        engine.check()


def requests(folder: Path, *, adapted: bool = False, **more: Any) -> list[Request]:
    """Return requests of all settings, some greedy and some drawn; neighbours share the beginnings of prompts."""
    where = Endpoint("e", "target", None, 4, text, heads="self", **more)
    made = []
    for i, setting in enumerate(SETTINGS):
        name = NAMES[i % 3] if adapted else None
        path = str(folder / str(name))
        adapter = None if name is None else Adapter(name, path, read_lora(path).version)
        prompt = PROMPTS[i // 3] * 5
        made.append(Request(replace(where, adapter=adapter), prompt, params(setting, i), request_id=i))
    return made


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """Return what a plain target without any adapter writes, one request at a time."""
    with running(folder, drafts=False) as engine:
        return [
            tokens([list(engine.stream(replace(request, proposers=frozenset())))])[0] for request in requests(folder)
        ]


def by_itself(answers: Sequence[list[Delta]]) -> int:
    return sum(answer[-1].statistics.accepted_by.get("self", 0) for answer in answers)


def test_alone(folder: Path, expected: list[list[int]]) -> None:
    with running(folder) as engine:
        answers = [list(engine.stream(request)) for request in requests(folder)]
    assert tokens(answers) == expected
    assert by_itself(answers) > 100  # the first token of a draft is the target's own


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"graphs": True},
        {"prefill_chunk": 3},
        {"slots": 3},
        {"kv_tokens": 224},
        {"adaptive": True},
        {"adapters_at_run_time": 1},
    ],
    ids=str,
)
def test_in_company(folder: Path, expected: list[list[int]], how: dict[str, Any]) -> None:
    with running(folder, **how) as engine:
        answers = engine.generate(requests(folder))
    assert tokens(answers) == expected
    assert how.get("adaptive") or by_itself(answers) > 100


def test_beside_look_up(folder: Path, expected: list[list[int]]) -> None:
    with running(folder) as engine:
        answers = engine.generate(requests(folder, ngram=NgramOptions()))
    assert tokens(answers) == expected


@pytest.mark.parametrize("how", [{"adapters": ("a", "b")}, {"adapters_at_run_time": 1}], ids=str)
def test_requests_with_adapters(folder: Path, how: dict[str, Any]) -> None:
    """The draft's slot is never given to a request's adapter. Plain texts are those of the same target."""
    if "adapters" in how:
        how = {"adapters": {name: str(folder / name) for name in how["adapters"]}}
    with running(folder, **how) as engine:
        plain = tokens(engine.generate([replace(r, proposers=frozenset()) for r in requests(folder, adapted=True)]))
        answers = engine.generate(requests(folder, adapted=True))
        again = engine.generate(requests(folder, adapted=True))
    assert tokens(answers) == tokens(again) == plain
    for name in range(3):
        assert by_itself(answers[name::3]) > 30


def test_after_a_lost_target(folder: Path, expected: list[list[int]]) -> None:
    with running(folder, targets=2) as engine:
        answers: list[list[Delta]] = [[] for _ in SETTINGS]
        given = [replace(request, timeline=Timeline()) for request in requests(folder)]
        for request, answer in zip(given, answers, strict=True):
            engine.coordinator.submit(request, answer.append)
        wait_until(lambda: sum(map(len, answers)) > 0, "first tokens")
        engine.lose("target")
        wait_until(lambda: all(answer and answer[-1].finish for answer in answers), "all answers", timeout_s=120)
    assert tokens(answers) == expected
    assert by_itself(answers) > 0


def test_quantised(folder: Path) -> None:
    with running(folder, drafts=False, quantization="int4") as engine:
        plain = tokens(engine.generate(requests(folder)))
    with running(folder, quantization="int4") as engine:
        answers = engine.generate(requests(folder))
    assert tokens(answers) == plain
    assert by_itself(answers) > 100


def test_rejection_draws_from_the_drafts_distribution(folder: Path, expected: list[list[int]]) -> None:
    """Greedy texts stay the same; the others are the target's in distribution, as with any proposer."""
    given = requests(folder)
    rejecting = [replace(request, params=replace(request.params, verification="rejection")) for request in given]
    with running(folder) as engine:
        answers = engine.generate(rejecting)
    greedy = [index for index, request in enumerate(given) if request.params.greedy]
    assert [tokens(answers)[index] for index in greedy] == [expected[index] for index in greedy]
