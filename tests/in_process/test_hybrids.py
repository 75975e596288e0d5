"""Models whose layers carry a state: their bits, and their texts with drafts, in company and after preemption."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.coordinator.request import Endpoint, Request, new_request_id
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from actors.replica.roles import Role
from actors.verifier.judge import judge as plain_judge
from decoding.drafts.options import NgramOptions
from decoding.sampling.params import SamplingParams
from engine.loading.checkpoint import ModelSpec
from engine.loading.runners import load_runner
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.families.configurations import VOCAB, make_config, make_model

LENGTH = 41
EXPERTS = {"qwen3_next", "lfm2_moe", "jamba", "kimi_linear"}  # torch computes fused experts: docs/verification.md


def load(folder: Path, **options: Any) -> Runner:
    spec = ModelSpec(name="m", path=str(folder), device="cpu", slots=4, max_length=96, dtype="float32", threads=1)
    return load_runner(replace(spec, prefill_chunk=32, **options))


SAMPLE = {"qwen3_5_text", "lfm2", "granitemoehybrid", "mamba"}  # a family of each kind
OTHERS = EXPERTS | {"bamba", "falcon_h1", "falcon_mamba", "mamba2", "nemotron_h", "olmo_hybrid", "zamba", "zamba2"}
PARAMS = [*sorted(SAMPLE), *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(OTHERS))]


@pytest.fixture(scope="module", params=PARAMS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make_model(make_config(request.param)).save_pretrained(path)
    return path


def tokens_of(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


def in_steps(runner: Runner, text: Sequence[int], *, seed: int) -> Tensor:
    """Return the logits of a text that is read in a chunk, then in steps with drafts that are partly wrong."""
    assert runner._forward.is_traced
    rng, position = random.Random(seed), 7
    runner.cache.clear(1)
    logits = [runner.logits([RowInput(1, 0, text[:position])]).clone()]
    while position < len(text):
        right = text[position : position + 1 + rng.randrange(5)]
        wrong = [(token + 1) % VOCAB for token in text[position + len(right) : position + 6]]
        step = runner.logits([RowInput(1, position, [*right, *wrong], settled=position + 1)])
        logits.append(step[: len(right)].clone())
        position += len(right)
    return torch.cat(logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tokens_bits_depend_on_its_text_alone(folder: Path, dtype: str) -> None:
    runner = load(folder, dtype=dtype)
    text, *others = (tokens_of(LENGTH, seed) for seed in range(3))
    whole = runner.logits([RowInput(0, 0, text)]).clone()
    beside = runner.logits([RowInput(2, 0, others[0]), RowInput(1, 0, text), RowInput(3, 0, others[1][:5])])
    results = [beside[LENGTH : 2 * LENGTH].clone()]
    for width in (1, 3, 17):
        runner.cache.clear(1)
        starts = range(0, LENGTH, width)
        results.append(torch.cat([runner.logits([RowInput(1, i, text[i : i + width])]).clone() for i in starts]))
    results += [in_steps(runner, text, seed=seed) for seed in range(2)]
    for result in results:
        if dtype == "float32" and any(name in str(folder) for name in EXPERTS):
            torch.testing.assert_close(result, whole, atol=1e-4, rtol=1e-4)
        else:
            assert torch.equal(result, whole)


def texts(engine: Engine, asked: Sequence[Request]) -> list[list[int]]:
    return [[token for delta in answer for token in delta.token_ids] for answer in engine.generate(asked)]


def requests(endpoint: Endpoint, **params: Any) -> list[Request]:
    """Return requests whose texts repeat themselves, and begin alike in pairs."""
    stem = tokens_of(18, 9)
    prompts = [[*stem[: 18 - 4 * (seed % 2)], *tokens_of(3 + seed, seed) * 2] for seed in range(6)]
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24} | params
    return [Request(endpoint, prompt, SamplingParams(seed=seed, **options)) for seed, prompt in enumerate(prompts)]


PLAIN = Endpoint("plain", "target", None, 0, decode=str)
DRAFTED = Endpoint("drafted", "target", "drafter", 4, decode=str)
LOOKED_UP = Endpoint("ngram", "target", None, 4, decode=str, ngram=NgramOptions())


def test_they_draft_for_each_other(folder: Path) -> None:
    with Engine({"target": ("target", load(folder))}, LoopOptions(adaptive=False)) as engine:
        alone = texts(engine, requests(PLAIN))
    replicas: dict[str, tuple[Role, Runner]] = {
        "target": ("target", load(folder)),
        "drafter": ("drafter", noisy(load(folder))),
    }
    with Engine(replicas, LoopOptions(adaptive=False)) as engine:
        drafted = accepted = 0
        while not (0 < accepted < drafted):  # on a busy machine no draft may be in time at first
            answers = engine.generate(requests(DRAFTED))
            assert [[token for delta in answer for token in delta.token_ids] for answer in answers] == alone
            drafted += sum(answer[-1].statistics.drafted for answer in answers)
            accepted += sum(answer[-1].statistics.accepted for answer in answers)


def test_a_rejected_draft_costs_no_second_forward(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each forward begins after the last token that is known, with that one and a draft: none takes tokens in again."""
    target = load(folder)
    logits, forwards = target.logits, list[Sequence[RowInput]]()

    def counted(rows: Sequence[RowInput]) -> Tensor:
        forwards.append(rows)
        return logits(rows)

    monkeypatch.setattr(target, "logits", counted)
    with Engine({"target": ("target", target)}, LoopOptions(adaptive=False)) as engine:
        rejected = 0
        for request in requests(LOOKED_UP):
            forwards.clear()
            (answer,) = engine.generate([request])
            text = [*request.prompt, *[token for delta in answer for token in delta.token_ids]]
            rows = [row for (row,) in forwards]
            starts = [row.start for row in rows]
            assert starts == sorted(set(starts))
            assert all(row.tokens[0] == text[row.start] and len(row.tokens) <= 5 for row in rows[1:])
            assert len(forwards) <= 24 - answer[-1].statistics.accepted + 1
            rejected += answer[-1].statistics.drafted - answer[-1].statistics.accepted
    assert rejected


def noisy(runner: Runner) -> Runner:
    """Change a drafter a little, so that some of its drafts are wrong."""
    with torch.no_grad():
        layer: Any = runner.model.get_input_embeddings()
        layer.weight += 0.03 * torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(1))
    return runner


def test_a_prompt_that_begins_alike_is_not_read_again(folder: Path) -> None:
    target, stem = load(folder), tokens_of(40, 3)
    with Engine({"target": ("target", target)}, LoopOptions(adaptive=False)) as engine:
        params = SamplingParams(max_tokens=6, temperature=0)
        asked = [Request(PLAIN, [*stem, *tokens_of(20, seed)], params) for seed in range(3)]
        reused = []
        for request in asked:
            (answer,) = engine.generate([request])
            reused.append(answer[-1].statistics.cached)
            alone = texts(engine, [replace(request, cache_salt=str(request.request_id), request_id=new_request_id())])
            assert [token for delta in answer for token in delta.token_ids] == alone[0]
    assert reused == [0, 0, 32]


@pytest.mark.parametrize("call", [1, 3], ids=["after a prompt", "after a step"])
def test_memory_that_runs_out_after_a_forward_changes_no_text(
    folder: Path, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states are ahead of the texts then."""
    calls = 0

    def judge(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise torch.OutOfMemoryError("out of memory")
        return plain_judge(*args, **options)

    with Engine({"target": ("target", load(folder))}, LoopOptions(adaptive=False)) as engine:
        alone = texts(engine, requests(PLAIN))
        monkeypatch.setattr("actors.verifier.loop.judge", judge)
        assert texts(engine, requests(PLAIN)) == alone
    assert calls > call
