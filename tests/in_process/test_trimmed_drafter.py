"""Drafters that know a part of the target's tokens: the text is the target's, drafts are those of the known tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from actors.coordinator.request import Delta, Request, Statistics
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from engine.loading.checkpoint import ModelSpec, load_model
from engine.model.runner import Runner
from tests.in_process import test_exactness, test_parameters, test_structured
from tests.in_process.test_exactness import MIXED, Bundle, drafted, greedy, sampled
from tests.in_process.test_parameters import DRAFTER, PROMPTS, TARGET, endpoint, mixed, tokens
from tests.support.models import VOCAB
from tests.support.trimmed import copied, masked, save_trimmed

pytestmark = pytest.mark.timeout(180)  # requests to a dead loop never end
KEPT = [token for token in range(VOCAB) if token % 4]  # without the end token's neighbours 0, 4, 8, …


def trimmed(model: PreTrainedModel, kept: Sequence[int], folder: Path) -> PreTrainedModel:
    save_trimmed(copied(model), kept, folder)
    return load_model(ModelSpec(name="drafter", path=str(folder), dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return trimmed(DRAFTER, KEPT, tmp_path_factory.mktemp("trimmed"))


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return test_parameters.alone(mixed())


def colocated(drafter: PreTrainedModel, requests: Sequence[Request]) -> tuple[list[list[int]], list[Statistics]]:
    """Return texts and statistics of the target with the drafter in its thread, where no draft depends on timing."""
    size: dict[str, Any] = {"slots": 32, "max_length": 128, "max_query": 64}
    options = LoopOptions(adaptive=False, colocated=Runner(drafter, **size))
    where = endpoint(colocated=True)
    asked = [Request(where, r.prompt, r.params, request_id=r.request_id) for r in requests]
    with Engine({"target": ("target", Runner(TARGET, **size))}, options) as engine:
        answers = engine.generate(asked)
    return tokens(answers), [answer[-1].statistics for answer in answers]


def test_every_parameter_gives_the_same_text(
    drafter: PreTrainedModel, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_parameters, "DRAFTER", drafter)
    with test_parameters.running() as engine:
        answers = engine.generate(mixed())
    assert tokens(answers) == expected
    assert sum(answer[-1].statistics.accepted for answer in answers) > 32


def test_drafts_are_those_of_the_full_drafter_without_the_other_tokens(
    drafter: PreTrainedModel, expected: list[list[int]]
) -> None:
    texts, statistics = colocated(drafter, mixed())
    assert texts == expected
    assert (texts, statistics) == colocated(masked(copied(DRAFTER), KEPT), mixed())
    assert sum(each.accepted for each in statistics) > 32


def test_under_rejection_sampling_too(drafter: PreTrainedModel, expected: list[list[int]]) -> None:
    """Drafts are drawn alike, so texts are equal; the greedy ones are the target's."""
    requests = mixed(verification="rejection")
    texts, statistics = colocated(drafter, requests)
    assert (texts, statistics) == colocated(masked(copied(DRAFTER), KEPT), requests)
    greedy_rows = [index for index, request in enumerate(requests) if request.params.greedy]
    assert [texts[index] for index in greedy_rows] == [expected[index] for index in greedy_rows]
    assert sum(each.accepted for each in statistics) > 32


def test_fewer_tokens_than_ranks_are_enough(expected: list[list[int]], tmp_path: Path) -> None:
    texts, statistics = colocated(trimmed(DRAFTER, [17], tmp_path), mixed())
    assert texts == expected
    assert sum(each.drafted for each in statistics) > 0


def test_tokens_that_it_lacks_may_be_all_that_are_allowed(drafter: PreTrainedModel) -> None:
    settings: list[dict[str, Any]] = [{"temperature": 0}, {}, {"verification": "rejection"}]
    requests = [
        Request(endpoint(), prompt, test_parameters.params({"allowed_token_ids": (4, 8, 12, 16), **setting}, index))
        for index, (prompt, setting) in enumerate(zip(PROMPTS, settings, strict=False))
    ]
    texts, _ = colocated(drafter, requests)
    assert texts[:2] == test_parameters.alone(requests)[:2]
    assert set(texts[2]) <= {4, 8, 12, 16}


def test_the_bundled_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle()
    used = sorted({token for prompt in bundle.prompts for token in prompt})
    bundle.drafter = trimmed(bundle.drafter, used, tmp_path)
    assert len(used) < 1900
    requests = bundle.requests([*greedy(8), *sampled(8, *MIXED)])
    with test_exactness.running(bundle) as engine:
        answers = engine.generate(requests)
    bundle.check(requests, answers)
    assert accepted_share(answers) > 0.3


def accepted_share(answers: Sequence[list[Delta]]) -> float:
    return sum(answer[-1].statistics.accepted for answer in answers) / max(drafted(answers), 1)


def test_grammars_of_tokens_that_it_lacks(tmp_path: Path) -> None:
    target, full = test_structured.load("target"), test_structured.load("drafter")
    kept = [token for token in range(2048) if str(test_structured.TOKENIZER.decode(token)).isalpha()]
    wanted = test_structured.MIXES["mixed"][:5]
    with test_structured.running(target, trimmed(full, kept, tmp_path)) as engine:
        answers = test_structured.answers(engine, wanted)
        plain = test_structured.answers(engine, wanted, speculate=False)
    assert [test_structured.tokens(answer) for answer in answers] == [
        test_structured.tokens(answer) for answer in plain
    ]
    assert drafted(answers) > 0
