"""A drafter colocated with its target: the text stays the target's own, and drafts are really made."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from actors.coordinator.request import Endpoint, Request, Statistics
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from actors.verifier.colocated_drafter import ColocatedDrafter
from actors.verifier.loop import Target
from actors.verifier.rows import TargetRow
from actors.wire.link import LocalExchange
from actors.wire.messages import Admit, Ensemble, Failed, Member, ReplicaAddress
from decoding.blending.params import EnsembleOptions
from decoding.drafts.options import NgramOptions
from decoding.sampling.params import SamplingParams
from engine.model.runner import Runner
from tests.support.models import tiny_model

pytestmark = pytest.mark.timeout(120)

PROMPTS = [[1, 2, 3, 4], [5, 6, 7], [8], [9, 10, 11, 12, 13, 14]]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 12, "repetition_penalty": 1.2},
    {"temperature": 1.0, "verification": "rejection"},
]


def runner(seed: int, *, slots: int = 4, max_length: int = 96, pages: int | None = None) -> Runner:
    """seed: 0 gives the target's own weights."""
    model = tiny_model("llama-gqa")
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters() if seed else ():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return Runner(model, slots=slots, max_length=max_length, max_query=64, pages=pages)


@contextmanager
def engine(*, drafter: Runner | None, adaptive: bool = False) -> Iterator[Engine]:
    """The drafter, if any, is colocated with the target."""
    options = LoopOptions(adaptive=adaptive, colocated=drafter)
    with Engine({"target": ("target", runner(0))}, options) as made:
        yield made


def requests(settings: Sequence[dict[str, Any]], *, colocated: bool) -> list[Request]:
    drafter, draft_length = ("drafter", 4) if colocated else (None, 0)
    endpoint = Endpoint("e", "target", drafter, draft_length, lambda tokens: "", colocated=colocated)
    return [
        Request(endpoint, prompt, SamplingParams(max_tokens=40, seed=7 + index, **setting), request_id=index)
        for index, (prompt, setting) in enumerate(zip(PROMPTS, settings, strict=True))
    ]


def run(made: Engine, batch: Sequence[Request]) -> tuple[list[list[int]], Statistics]:
    answers = made.generate(batch)
    texts = [[token for delta in answer for token in delta.token_ids] for answer in answers]
    return texts, sum((answer[-1].statistics for answer in answers), Statistics())


@pytest.mark.parametrize("seed", [0, 1], ids=["its own copy", "a stranger"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_the_text_is_that_of_plain_decoding(seed: int, adaptive: bool) -> None:
    settings = [setting for setting in SETTINGS if setting.get("verification") != "rejection"]
    settings.append({"temperature": 0.0, "min_tokens": 10})
    with engine(drafter=None) as plain:
        expected, _ = run(plain, requests(settings, colocated=False))
    with engine(drafter=runner(seed), adaptive=adaptive) as drafted:
        for _ in range(2):  # slots and prefixes are used again
            texts, _ = run(drafted, requests(settings, colocated=True))
            assert texts == expected


@pytest.mark.timeout(20)
@pytest.mark.parametrize("seed", range(4))
def test_a_drafter_without_pages_for_all_rows_does_not_stop_the_target(seed: int) -> None:
    """Its six pages are enough for each row alone, but not for two long ones."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(60) for _ in range(length)] for length in (7, 54, 44)]
    settings = SamplingParams(max_tokens=40, temperature=0)
    endpoints = [Endpoint("e", "target", name, 4, str, colocated=bool(name)) for name in (None, "drafter")]
    plain, drafted = ([Request(endpoint, prompt, settings) for prompt in prompts] for endpoint in endpoints)
    with engine(drafter=runner(0, pages=6)) as made:
        texts, statistics = run(made, drafted)
        assert statistics.accepted > 0
        assert texts == run(made, plain)[0]


def test_a_copy_of_the_target_is_always_right() -> None:
    with engine(drafter=runner(0)) as drafted:
        _, statistics = run(drafted, requests([{"temperature": 0.0}] * 4, colocated=True))
    assert statistics.missed == 0
    assert statistics.acceptance_length > 4


@pytest.mark.parametrize("length", [5, 40, 300])
def test_the_first_step_after_a_prompt_has_a_draft(length: int) -> None:
    """The drafter reads a long prompt beside the target's chunks."""
    models = [runner(0, max_length=340) for _ in range(2)]
    endpoint = Endpoint("e", "target", "drafter", 4, str, colocated=True)
    prompt = [(7 * index) % 60 for index in range(length)]
    options = LoopOptions(adaptive=False, prefill_chunk=32, colocated=models[1])
    with Engine({"target": ("target", models[0])}, options) as made:
        (answer,) = made.generate([Request(endpoint, prompt, SamplingParams(max_tokens=12, temperature=0))])
    assert [delta.statistics.drafted for delta in answer[:2]] == [0, 4]


def test_a_step_is_delayed_by_one_chunk_of_the_drafter() -> None:
    """Rows that can't draft a chain take a turn of the drafter for each token. Only one turn reads."""
    drafter = runner(0, max_length=340)
    colocated = ColocatedDrafter(drafter, lambda tokens: True, LoopOptions(prefill_chunk=32))
    penalised = SamplingParams(max_tokens=20, temperature=0, repetition_penalty=1.2)
    admits = [Admit(1, [1, 2, 3], 3, penalised, 4, drafter=True), Admit(2, [4] * 300, 300, penalised, 4, drafter=True)]
    rows = [TargetRow("c", admit, acceptance=0.5) for admit in admits]
    rows[0].slot = rows[1].slot = 0
    assert colocated.read(rows)
    assert colocated.propose(rows[:1]) == {rows[0].key}
    long = colocated._drafter._rows.get(("target", 2))
    assert long is not None
    assert long.cached == 32
    while colocated.read(rows):
        pass
    assert colocated.propose(rows[1:]) == {rows[1].key}


def test_its_rows_have_the_order_of_the_targets() -> None:
    colocated = ColocatedDrafter(runner(0), lambda tokens: True)
    admit = Admit(1, [1, 2, 3], 3, SamplingParams(max_tokens=9), 4, drafter=True, arrived_at_s=7.0)
    row = TargetRow("c", admit, acceptance=0.5)
    row.slot = 0
    colocated.read([row])
    drafted = colocated._drafter._rows.get(("target", 1))
    assert drafted is not None
    assert drafted.arrived_at_s == 7.0


def test_a_target_that_waits_for_members_does_not_wait_while_its_drafter_reads() -> None:
    """The drafter reads less than the target in a turn: the target knows the first pages."""
    exchange = LocalExchange()
    coordinator, _ = exchange.join("c"), exchange.join("m")
    models = [runner(0, max_length=340) for _ in range(2)]
    target = Target(models[0], exchange.join("t"), LoopOptions(adaptive=False, prefill_chunk=32, colocated=models[1]))
    ensemble = Ensemble("leader", [Member("m", ReplicaAddress("m", "m"))], EnsembleOptions())
    params = SamplingParams(max_tokens=9, temperature=0)
    coordinator.send("t", [Admit(1, [4] * 300, 300, params, 4, drafter=True, ensemble=ensemble)])
    target.turn()
    (row,) = target._rows
    row.cached = 299  # as if it had taken over what the drafter lacks
    colocated = target._colocated_drafter
    assert colocated is not None
    timeouts = []
    while colocated.reading:
        timeouts.append(target._timeout_s())
        target.turn()
    assert len(timeouts) >= 8
    assert not any(timeouts)
    assert target._timeout_s() > 0


def test_rejection_sampling_takes_what_is_drawn() -> None:
    with engine(drafter=runner(0)) as drafted:
        texts, statistics = run(drafted, requests(SETTINGS[3:] * 4, colocated=True))
    assert all(len(text) == 40 for text in texts)
    assert statistics.missed == 0  # the distributions are equal
    assert statistics.acceptance_length > 4


def test_it_does_without_drafts_where_the_drafter_has_no_room() -> None:
    with engine(drafter=None) as plain:
        expected, _ = run(plain, requests([{"temperature": 0.0}] * 4, colocated=False))
    with engine(drafter=runner(0, max_length=3)) as drafted:
        texts, statistics = run(drafted, requests([{"temperature": 0.0}] * 4, colocated=True))
    assert texts == expected
    assert statistics.drafted < 20


def test_the_drafter_keeps_nothing_of_a_request() -> None:
    drafter = runner(0)
    with engine(drafter=drafter) as drafted:
        run(drafted, requests([{"temperature": 0.0}] * 4, colocated=True))
        target = drafted.loops["target"]
        assert isinstance(target, Target)
        colocated = target._colocated_drafter
        assert isinstance(colocated, ColocatedDrafter)
        assert not colocated._sent_lengths
        colocated.propose([])  # takes in what was cancelled
        assert drafter.cache.free == drafter.cache.slots


def test_a_row_that_is_given_back_between_its_steps_goes_on_without_drafts() -> None:
    colocated = ColocatedDrafter(runner(0), lambda tokens: True)
    admit = Admit(1, [1, 2, 3], 3, SamplingParams(max_tokens=9), 4, drafter=True, admission=2)
    row = TargetRow("c", admit, acceptance=0.5)
    colocated.propose([row])
    has_drafter = []
    for admission in (1, 2):
        colocated._drafter._mailbox.put("target", Failed(1, "its grammar", admission=admission))
        colocated.propose([])
        colocated.propose([])
        has_drafter.append(row.drafts.drafter)
    assert has_drafter == [True, False]
    assert not colocated._sent_lengths


def test_a_request_that_is_given_back_too_late_changes_nothing() -> None:
    colocated = ColocatedDrafter(runner(0), lambda tokens: True)
    colocated._drafter._mailbox.put("target", Failed(99, "late"))
    colocated.propose([])
    assert colocated.propose([]) == set()


def test_other_endpoints_of_the_target_are_not_drafted_for() -> None:
    endpoint = Endpoint("e", "target", None, 4, lambda tokens: "", ngram=NgramOptions())
    drafter = runner(0)
    with engine(drafter=drafter) as drafted, mock.patch.object(drafter, "logits", wraps=drafter.logits) as logits:
        _, statistics = run(drafted, [Request(endpoint, [1, 2, 3], SamplingParams(max_tokens=20, temperature=0.0))])
    logits.assert_not_called()
    assert statistics.committed == 20


def test_drafts_with_tokens_that_the_target_lacks_are_dropped() -> None:
    larger = Runner(tiny_model("llama-gqa", vocab_size=96), slots=8, max_length=128, max_query=64)
    with engine(drafter=None) as plain:
        expected, _ = run(plain, requests([{"temperature": 1.0}] * 4, colocated=False))
    with engine(drafter=larger) as drafted:
        texts, statistics = run(drafted, requests([{"temperature": 1.0}] * 4, colocated=True))
    assert texts == expected
    assert statistics.drafted > 0
