"""Requests with different adapters in one batch: each text is transformers' with peft, with drafts and without."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from actors.coordinator.request import Delta, Endpoint, Request, Timeline
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from actors.replica.roles import Role
from actors.wire.messages import Adapter
from decoding.beams.options import BeamOptions
from decoding.drafts.options import NgramOptions
from decoding.errors import InvalidRequestError
from decoding.sampling.params import SamplingParams
from engine.heads.chain_proposer import ChainProposer
from engine.heads.spec import HeadsKind
from engine.loading.checkpoint import ModelSpec
from engine.loading.lora import read_lora
from engine.loading.runners import load_runner
from engine.model.runner import Runner
from tests.in_process.test_heads import heads_module
from tests.in_process.test_parameters import DRAFTER, PROMPTS, TARGET, text, tokens
from tests.support import reference
from tests.support.adapters import save_adapter
from tests.support.heads import STATES
from tests.support.models import tiny_model
from tests.support.waiting import wait_until

GREEDY = SamplingParams(max_tokens=24, temperature=0)
COUNT = 12  # requests
NAMES = [None, "a", "b"]  # adapters of the requests, in turn


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    TARGET.save_pretrained(folder / "target")
    return folder


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str | None, PreTrainedModel]:
    """Return the target, and the target with each adapter."""
    configs: dict[str, dict[str, Any]] = {"a": {}, "b": {"r": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}}
    adapted: dict[str | None, PreTrainedModel] = {
        name: save_adapter(folder / name, tiny_model("llama-gqa"), seed, **config)
        for seed, (name, config) in enumerate(configs.items(), 1)
    }
    models: dict[str | None, PreTrainedModel] = {None: TARGET}
    return models | adapted


@contextmanager
def running(
    folder: Path, *, drafts: str = "", targets: int = 1, graphs: bool = False, chunk: int = 64, **more: Any
) -> Iterator[Engine]:
    settings: dict[str, Any] = {"max_length": 128, "slots": 16, "device": "cpu", "threads": 1, **more}
    if "adapters_at_run_time" not in settings:
        settings.setdefault("adapters", {name: str(folder / name) for name in ("a", "b")})
    replicas: dict[str, tuple[Role, Runner]] = {}
    options: dict[str, LoopOptions] = {}
    for index in range(targets):
        name = "target" if index == 0 else f"target#{index}"
        spec = ModelSpec(name="target", path=str(folder / "target"), prefill_chunk=64, **settings)
        runner = load_runner(spec, hidden_layers=STATES if drafts == "eagle3" else ())
        if graphs:
            runner.use_graphs(capture=lambda run: run)
        colocated = None
        if drafts == "colocated":
            colocated = Runner(DRAFTER, slots=16, max_length=128, max_query=64)
        replicas[name] = ("target", runner)
        heads = ChainProposer(heads_module("eagle3"), runner) if drafts == "eagle3" else None
        options[name] = LoopOptions(adaptive=False, prefill_chunk=chunk, colocated=colocated, heads=heads)
    if drafts == "drafter":
        replicas["drafter"] = ("drafter", Runner(DRAFTER, slots=16, max_length=128, max_query=64))
    with Engine(replicas, LoopOptions(adaptive=False), own_options=options) as engine:
        yield engine
        engine.check()


def adapter(folder: Path, name: str | None) -> Adapter | None:
    if name is None:
        return None
    return Adapter(name, str(folder / name), read_lora(str(folder / name)).version)


def endpoint(folder: Path, name: str | None, drafts: str = "") -> Endpoint:
    drafter = "drafter" if drafts in ("drafter", "colocated") else None
    ngram = NgramOptions() if drafts == "ngram" else None
    colocated = drafts == "colocated"
    heads: HeadsKind | None = "eagle3" if drafts == "eagle3" else None
    own = adapter(folder, name)
    return Endpoint("e", "target", drafter, 4, text, ngram, heads, colocated=colocated, adapter=own)


def mixed(folder: Path, drafts: str = "", **params: Any) -> list[Request]:
    """Return requests of which each third has the same adapter, or none; prompts are shared by neighbours."""
    ends = [endpoint(folder, name, drafts) for name in NAMES]
    return [
        Request(
            ends[i % 3], PROMPTS[i // 3] * 5, SamplingParams(**{"max_tokens": 24, "seed": i} | params), request_id=i
        )
        for i in range(COUNT)
    ]


@pytest.fixture(scope="module")
def expected(folder: Path, models: dict[str | None, PreTrainedModel]) -> list[list[int]]:
    """Return transformers' own greedy texts for the mixed requests."""
    requests = mixed(folder, temperature=0)
    texts = [reference.generate(models[NAMES[i % 3]], [r.prompt], [r.params])[0] for i, r in enumerate(requests)]
    assert len({tuple(line) for line in texts[:3]}) == 3  # each adapter changes the text
    return texts


def accepted(answers: Sequence[list[Delta]]) -> int:
    return sum(answer[-1].statistics.accepted for answer in answers)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"drafts": "ngram", "graphs": True},
        {"drafts": "colocated", "chunk": 3},
        {"drafts": "drafter", "slots": 3},
        {"drafts": "eagle3"},
        {"drafts": "ngram", "kv_tokens": 224},
        {"adapters_at_run_time": 1, "drafts": "ngram"},
    ],
    ids=str,
)
def test_greedy_texts_are_those_of_transformers_with_peft(
    how: dict[str, Any], folder: Path, models: dict[str | None, PreTrainedModel], expected: list[list[int]]
) -> None:
    requests = mixed(folder, how.get("drafts", ""), temperature=0)
    with running(folder, **how) as engine:
        answers = engine.generate(requests)
    for name in NAMES:
        own = [i for i in range(COUNT) if NAMES[i % 3] == name]
        prompts, params = [requests[i].prompt for i in own], [requests[i].params for i in own]
        outputs = tokens([answers[i] for i in own])
        reference.assert_same(models[name], prompts, params, outputs, [expected[i] for i in own])
    if how.get("drafts"):
        assert accepted(answers) > 0


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("drafts", ["ngram", "colocated"])
def test_sampled_texts_are_the_same_with_drafts_and_after_a_fail_over(drafts: str, folder: Path) -> None:
    sampled: dict[str, Any] = {"temperature": 0.8, "max_tokens": 72}
    with running(folder) as engine:
        alone = tokens([engine.generate([request])[0] for request in mixed(folder, **sampled)])
    with running(folder, drafts=drafts, targets=2) as engine:
        answers: list[list[Delta]] = [[] for _ in range(COUNT)]

        def take(answer: list[Delta], delta: Delta) -> None:
            if not any(answers):
                engine.lose("target")
            answer.append(delta)

        requests = [replace(request, timeline=Timeline()) for request in mixed(folder, drafts, **sampled)]
        for request, answer in zip(requests, answers, strict=True):
            engine.coordinator.submit(request, partial(take, answer))
        wait_until(lambda: all(answer and answer[-1].finish for answer in answers), "all answers", timeout_s=120)
    assert any(request.timeline and len(request.timeline.stays) > 1 for request in requests)
    assert tokens(answers) == alone
    assert accepted(answers) > 0


@pytest.mark.usefixtures("models")
def test_prompts_are_shared_by_requests_with_the_same_adapter_only(folder: Path) -> None:
    prompt = PROMPTS[5] * 8
    with running(folder) as engine:
        cached = [
            engine.generate([Request(endpoint(folder, name), prompt, GREEDY)])[0][-1].statistics.cached
            for name in ("a", "b", None, "a", None)
        ]
    assert cached[:3] == [0, 0, 0]
    assert cached[3] == cached[4] >= 16


@pytest.mark.usefixtures("models")
def test_beam_search_has_the_adapter(folder: Path) -> None:
    beams = BeamOptions(num_beams=2, num_return_sequences=1)
    prompt = PROMPTS[3]
    with running(folder) as engine:
        requests = [Request(endpoint(folder, name), prompt, GREEDY, beams=beams) for name in NAMES]
        answers = tokens(engine.generate(requests))
    with running(folder) as engine:
        alone = [tokens(engine.generate([request]))[0] for request in requests]
    assert answers == alone
    assert len({tuple(answer) for answer in answers}) == 3


@pytest.mark.usefixtures("models")
def test_an_adapter_that_cannot_be_loaded_fails_its_requests_alone(folder: Path) -> None:
    changed = Adapter("a", str(folder / "a"), "another version")
    broken = Endpoint("e", "target", None, 4, text, adapter=changed)
    with running(folder, adapters_at_run_time=1) as engine:
        with pytest.raises(InvalidRequestError, match=r"adapter 'a' can't be loaded: .* has changed since"):
            engine.generate([Request(broken, PROMPTS[0], GREEDY)])
        (answer,) = engine.generate([Request(endpoint(folder, "b"), PROMPTS[0], GREEDY)])
    with running(folder, adapters={}) as engine:
        assert engine.generate([Request(endpoint(folder, None), PROMPTS[0], GREEDY)])[0][-1].finish == "length"
        with pytest.raises(InvalidRequestError, match="the target takes no adapters, such as 'b'"):
            engine.generate([Request(endpoint(folder, "b"), PROMPTS[0], GREEDY)])
    assert answer[-1].finish == "length"


@pytest.mark.timeout(60)
def test_requests_that_wait_for_a_slot_do_not_keep_their_adapter(folder: Path, expected: list[list[int]]) -> None:
    """The target has room for one request and one adapter."""
    requests = mixed(folder, temperature=0)
    with running(folder, adapters_at_run_time=1, slots=1) as engine:
        assert tokens(engine.generate(requests)) == expected
