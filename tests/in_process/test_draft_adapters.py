"""A drafter with adapters drafts for each request with its own: the text is as without it, and none is refused.

The drafter has the target's weights.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import save_file

from actors.coordinator.request import Delta, Endpoint, Request, Timeline
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from actors.replica.roles import Role
from actors.wire.messages import Adapter
from decoding.sampling.params import SamplingParams
from engine.heads.chain_proposer import ChainProposer
from engine.layers.faster_layers import use_faster_parts
from engine.layers.lora import LoraLayers
from engine.loading.checkpoint import ModelSpec
from engine.loading.lora import read_lora
from engine.loading.runners import load_runner
from engine.model.runner import Runner
from tests.in_process.test_heads import heads_module
from tests.in_process.test_parameters import PROMPTS, TARGET, text, tokens
from tests.support.adapters import save_adapter
from tests.support.heads import STATES
from tests.support.models import tiny_model
from tests.support.waiting import wait_until

LAYER = "base_model.model.fc"
NAMES = [None, "a", "b"]  # adapters of the requests, in turn
COUNT = 9  # requests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, which is target and drafter, and two adapters of it."""
    folder = tmp_path_factory.mktemp("adapters")
    TARGET.save_pretrained(folder / "model")
    for seed, name in enumerate(("a", "b"), 1):
        save_adapter(folder / name, tiny_model("llama-gqa"), seed, r=4 * seed)
    return folder


def load(folder: Path, name: str, *, graphs: bool = False, states: Sequence[int] = (), **settings: Any) -> Runner:
    usual: dict[str, Any] = {"max_length": 128, "slots": 12, "device": "cpu", "threads": 1, "prefill_chunk": 64}
    runner = load_runner(ModelSpec(name=name, path=str(folder / "model"), **usual | settings), hidden_layers=states)
    if graphs:
        runner.use_graphs(capture=lambda run: run)
    return runner


@contextmanager
def running(
    folder: Path, where: str, *, targets: int = 1, graphs: bool = False, drafter: dict[str, Any] | None = None
) -> Iterator[Engine]:
    """where: "", "colocated" or "drafter". drafter: its settings; None: the two adapters."""
    both: dict[str, Any] = {"adapters": {name: str(folder / name) for name in ("a", "b")}}
    replicas: dict[str, tuple[Role, Runner]] = {}
    options: dict[str, LoopOptions] = {}
    for name in ["target", "target#1"][:targets]:
        replicas[name] = ("target", load(folder, "target", graphs=graphs, **both))
        own = load(folder, "drafter", **(drafter or both)) if where == "colocated" else None
        options[name] = LoopOptions(adaptive=False, prefill_chunk=16, colocated=own)
    if where == "drafter":
        replicas["drafter"] = ("drafter", load(folder, "drafter", graphs=graphs, **(drafter or both)))
    with Engine(replicas, LoopOptions(adaptive=False), own_options=options) as engine:
        yield engine
        engine.check()


def adapter(folder: Path, name: str | None) -> Adapter | None:
    if name is None:
        return None
    path, version = str(folder / name), read_lora(str(folder / name)).version
    return Adapter(name, path, version, Adapter(name, path, version))


def mixed(folder: Path, where: str, adapters: Sequence[Adapter | None] = ()) -> list[Request]:
    """Return requests of which each third has the same adapter, or none."""
    adapters = adapters or [adapter(folder, name) for name in NAMES]
    drafter, colocated = "drafter" if where else None, where == "colocated"
    ends = [Endpoint("e", "target", drafter, 4, text, colocated=colocated, adapter=each) for each in adapters]
    params = [SamplingParams(max_tokens=32, temperature=0.8, seed=i) for i in range(COUNT)]
    return [Request(ends[i % 3], PROMPTS[i // 3] * 5, params[i], request_id=i) for i in range(COUNT)]


def refused(answers: Sequence[list[Delta]]) -> list[int]:
    """Return how many of the tokens stand in place of a draft's: without adapter, with the first, with the second."""
    sources = [[token.source for delta in answer for token in delta.tokens] for answer in answers]
    return [sum(kinds.count("recovered") for kinds in sources[first::3]) for first in range(3)]


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[int]]:
    """Return the texts without drafts."""
    with running(folder, "") as engine:
        return tokens(engine.generate(mixed(folder, "")))


@pytest.mark.parametrize(
    "how",
    [
        {"where": "colocated"},
        {"where": "drafter", "graphs": True},
        {"where": "drafter", "drafter": {"adapters_at_run_time": 2}},
        {"where": "colocated", "drafter": {"adapters_at_run_time": 1}},
    ],
    ids=str,
)
def test_each_request_gets_drafts_of_its_own_adapter(how: dict[str, Any], folder: Path, plain: list[list[int]]) -> None:
    with running(folder, **how) as engine:
        answers = engine.generate(mixed(folder, how["where"]))
    assert tokens(answers) == plain
    if how["where"] == "colocated":
        assert all(answer[-1].statistics.accepted for answer in answers)
    assert refused(answers) == [0, 0, 0]


def test_the_base_drafts_where_the_drafter_has_no_adapter(
    folder: Path, plain: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """One adapter comes without the drafter's, the drafter's of the other has changed; then the drafter takes none."""
    first, second = adapter(folder, "a"), adapter(folder, "b")
    assert first is not None
    assert second is not None
    assert second.drafter is not None
    changed = structs.replace(second, drafter=structs.replace(second.drafter, version="another"))
    without = structs.replace(first, drafter=None)
    for adapters, drafter in (([None, without, changed], None), ([None, first, second], {"adapters": {}})):
        with running(folder, "colocated", drafter=drafter) as engine:
            answers = engine.generate(mixed(folder, "colocated", adapters))
        assert tokens(answers) == plain
        alone, *adapted = refused(answers)
        assert alone == 0 < min(adapted)
    assert "the adapter 'b' can't be loaded" in caplog.text
    assert "its requests get drafts of the base" in caplog.text


def test_texts_are_the_same_after_a_fail_over(folder: Path, plain: list[list[int]]) -> None:
    requests = [replace(request, timeline=Timeline()) for request in mixed(folder, "drafter")]
    answers: list[list[Delta]] = [[] for _ in range(COUNT)]
    with running(folder, "drafter", targets=2) as engine:

        def take(answer: list[Delta], delta: Delta) -> None:
            if not any(answers):
                engine.lose("target")
            answer.append(delta)

        for request, answer in zip(requests, answers, strict=True):
            engine.coordinator.submit(request, partial(take, answer))
        wait_until(lambda: all(answer and answer[-1].finish for answer in answers), "all answers", timeout_s=50)
    assert any(request.timeline and len(request.timeline.stays) > 1 for request in requests)
    assert tokens(answers) == plain
    assert refused(answers) == [0, 0, 0]


def test_heads_get_their_adapters_with_the_targets(
    folder: Path, plain: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """The heads' adapter of the second is for other layers, so the base drafts for its requests."""
    first, second = adapter(folder, "a"), adapter(folder, "b")
    assert first is not None
    assert second is not None
    down, up = torch.ones(4, 96) / 96, torch.ones(32, 4) / 4
    save_file({f"{LAYER}.lora_A.weight": down, f"{LAYER}.lora_B.weight": up}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 4}', encoding="utf-8")
    version = read_lora(str(folder)).version
    adapters = [
        None,
        structs.replace(first, heads=Adapter("a", str(folder), version)),
        structs.replace(second, heads=second.drafter),
    ]
    runner, head = load(folder, "target", states=STATES, adapters_at_run_time=2), deepcopy(heads_module("eagle3"))
    lora = LoraLayers(runner.model, slots=2, rank=4, deterministic=False, part=head)
    use_faster_parts(head, lora=lora)
    options = LoopOptions(adaptive=False, heads=ChainProposer(head, runner, lora))
    requests = [
        replace(request, endpoint=replace(request.endpoint, heads="eagle3")) for request in mixed(folder, "", adapters)
    ]
    with Engine({"target": ("target", runner)}, options) as engine:
        answers = engine.generate(requests)
        engine.check()
    assert tokens(answers) == plain
    assert sum(answer[-1].statistics.accepted for answer in answers)
    assert sorted(lora.versions) == ["", version]
    assert "the adapter 'b' can't be loaded" in caplog.text
    assert "heads draft without it" in caplog.text
