"""Predicted answers: the same text, in fewer steps."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.coordinator.request import Request, Statistics
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from decoding.drafts.options import NgramOptions
from decoding.sampling.params import SamplingParams
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.decoding.drafts.test_prediction import EDITS, FILE, flat
from tests.in_process.test_parameters import alone, endpoint, mixed, running, tokens
from tests.support.models import VOCAB, tiny_model

PROMPT = [1, 2, 3]
FORCED = [*PROMPT, *(token % VOCAB for token in flat(EDITS["a line is changed"]))]


def forced_logits(rows: Sequence[RowInput], text: Sequence[int], vocab_size: int) -> Tensor:
    """Return logits that choose what follows in one text, [N, V]."""
    wanted = [position for row in rows for position in list(row.text_positions)[len(row.tokens) - row.logits_count :]]
    following = [text[min(position + 1, len(text) - 1)] for position in wanted]
    return torch.zeros(len(wanted), vocab_size).scatter(1, torch.tensor(following, dtype=torch.int64)[:, None], 50.0)


class ForcedRunner(Runner):
    """Writes one text, whatever the model says."""

    def logits(self, rows: Sequence[RowInput]) -> Tensor:
        return forced_logits(rows, FORCED, self.vocab_size)


def edit(**options: Any) -> Statistics:
    """Let the forced target write the edited file, and return what it took."""
    params = SamplingParams(max_tokens=len(FORCED) - len(PROMPT), temperature=0)
    runner = ForcedRunner(tiny_model("llama-gqa"), slots=1, max_length=1024, max_query=64)
    request = Request(endpoint(drafter=None), PROMPT, params, **options)
    with Engine({"target": ("target", runner)}, LoopOptions(adaptive=False)) as engine:
        (answer,) = engine.generate([request])
    assert tokens([answer]) == [FORCED[len(PROMPT) :]]
    return answer[-1].statistics


@pytest.mark.parametrize(("draft_length", "most"), [(None, 0.1), (4, 0.25), (0, 1.0)])
def test_an_edit_takes_a_fraction_of_the_steps(draft_length: int | None, most: float) -> None:
    prediction = [token % VOCAB for token in FILE]
    statistics = edit(prediction=prediction, draft_length=draft_length)
    assert 500 < statistics.committed < 600
    assert statistics.steps <= most * statistics.committed
    assert statistics.accepted == sum(statistics.accepted_by.values())
    assert set(statistics.accepted_by) <= {"prediction"}


def test_without_speculation_a_prediction_does_nothing() -> None:
    assert edit(prediction=[token % VOCAB for token in FILE], speculate=False).drafted == 0


def test_the_text_is_the_same_with_any_prediction() -> None:
    """Sampled, penalised and under both rules; predictions that are right, right in parts, and wrong."""
    requests = mixed()
    expected = alone(requests)
    for where in (endpoint(drafter=None), endpoint(drafter=None, ngram=NgramOptions()), endpoint()):
        predicted = [
            Request(where, r.prompt, r.params, prediction=[*text[:8], *text[9 + i % 3 :], 5], request_id=r.request_id)
            for i, (r, text) in enumerate(zip(requests, expected, strict=True))
        ]
        with running() as engine:
            answers = engine.generate(predicted)
        assert tokens(answers) == expected
        assert sum(answer[-1].statistics.accepted_by.get("prediction", 0) for answer in answers) > 100


@pytest.mark.parametrize("seeded", [False, True])
def test_under_rejection_the_noise_that_may_have_written_the_prediction_does_not_judge_it(seeded: bool) -> None:
    params = SamplingParams(max_tokens=20, verification="rejection")
    request = Request(endpoint(drafter=None), PROMPT, params, prediction=FILE[:9], seeded=seeded)
    with running() as engine:
        (answer,) = engine.generate([request])
    assert (answer[-1].statistics.drafted > 0) != seeded
