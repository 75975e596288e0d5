"""Beam searches with structures and log-probabilities, compared with `generate` and plain forwards."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from actors.wire.messages import Beams, Failed
from decoding.beams.options import BeamOptions
from decoding.errors import InvalidRequestError
from decoding.grammars.structure import StructureState
from decoding.sampling.params import SamplingParams, Structure
from engine.model.runner import Runner
from tests.actors.verifier.test_beams import Reference, assert_same
from tests.support.beam_loop import beam_row, begin, end, step
from tests.support.structures import END, NO_DRAFT, VOCAB_SIZE, compiled, follow, unpacked

REGEX = "(yes|no|maybe)(, (but|and) [a-z]{1,8}){0,2}"
CHOICES = ["import os", "import sys", "from os import path", "def main():"]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


class Masked(LogitsProcessor):
    """Allows what the grammar allows after each answer; replays the answer from its start each time."""

    def __init__(self, structure: Structure, prompt_length: int) -> None:
        self._grammar, self._start = compiled(structure.kind, structure.definition), prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        masks = [follow(self._grammar, row[self._start :]).masks(NO_DRAFT)[0] for row in input_ids.tolist()]
        return scores.masked_fill(~torch.stack([unpacked(mask) for mask in masks]), -torch.inf)


def search(runner: Runner, prompt: Sequence[int], params: SamplingParams, options: BeamOptions) -> Beams:
    row = beam_row(runner, 1, (prompt, params, options))
    if params.structure is not None:
        grammar = compiled(params.structure.kind, params.structure.definition)
        row.structure = follow(grammar, [])
    result = begin(runner, row)
    while result is None:
        result = step(runner, row)
    end(runner, row)
    assert isinstance(result, Beams)
    return result


@pytest.mark.parametrize(
    "structure",
    [Structure(kind="regex", definition=REGEX), Structure(kind="choice", definition=json.dumps(CHOICES))],
    ids=["regex", "choice"],
)
def test_structured_searches_are_those_of_masked_generate(reference: Reference, structure: Structure) -> None:
    options = BeamOptions(num_beams=4, num_return_sequences=4)
    for prompt in reference.prompts[:2]:
        params = SamplingParams(max_tokens=16, temperature=0, eos_token_ids=(END,), structure=structure)
        masked = LogitsProcessorList([Masked(structure, len(prompt))])
        (expected,) = reference.generate([(prompt, params, options)], logits_processor=masked)
        assert_same(search(reference.runner, prompt, params, options).answers, expected)


class Stuck(StructureState):
    """Fails some beams, as if nothing could follow them."""

    lost: Sequence[int]

    def follow(self, paths: Sequence[Sequence[int]]) -> tuple[Tensor, list[InvalidRequestError | None]]:
        masks, _ = super().follow(paths)
        return masks, [
            InvalidRequestError("stuck", field="x") if index in self.lost else None for index in range(len(paths))
        ]


def test_beams_that_nothing_can_follow_are_left(reference: Reference) -> None:
    prompt = reference.prompts[0]
    params = SamplingParams(max_tokens=5, temperature=0, eos_token_ids=(END,))
    structure = Stuck(compiled("regex", "[a-z ]*"), prompt, len(prompt), end_token_ids=(END,), vocab_size=VOCAB_SIZE)
    for lost, left in ((range(3), 0), (range(1), 3)):
        row = beam_row(reference.runner, 1, (prompt, params, BeamOptions(num_beams=3, num_return_sequences=3)))
        row.structure, structure.lost = structure, ()
        result = begin(reference.runner, row)
        structure.lost = lost
        while result is None:
            result = step(reference.runner, row)
        end(reference.runner, row)
        assert str(row.error) == "stuck"
        assert (len(result.answers) if isinstance(result, Beams) else result) == (left or Failed(1, "stuck", "x"))


def test_log_probabilities_are_those_of_a_plain_forward(reference: Reference) -> None:
    """Answers end at different steps, in all groups and with all processors."""
    params = SamplingParams(max_tokens=12, temperature=0, eos_token_ids=(2, 204), logprobs=3, repetition_penalty=1.3)
    for groups in (1, 2):
        more: dict[str, Any] = {"num_beam_groups": groups, "diversity_penalty": 0.5 * (groups - 1)}
        options = BeamOptions(num_beams=4, num_return_sequences=4, **more)
        result = search(reference.runner, reference.prompts[4], params, options)
        assert result.logprobs is not None
        assert len(result.logprobs) == len(result.answers) == 4
        for answer, logprobs in zip(result.answers, result.logprobs, strict=True):
            text = [*reference.prompts[4], *answer.tokens]
            with torch.no_grad():
                expected = reference.model(torch.tensor([text])).logits[0].log_softmax(-1)[-len(answer.tokens) - 1 : -1]
            assert [token.token for token in logprobs] == answer.tokens
            own = expected[range(len(answer.tokens)), answer.tokens]
            assert [token.logprob for token in logprobs] == pytest.approx(own.tolist(), abs=1e-4)
            assert [token.top[0][1] for token in logprobs] == pytest.approx(expected.amax(-1).tolist(), abs=1e-4)
