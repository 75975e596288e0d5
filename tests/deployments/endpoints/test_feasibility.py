"""Parameters that forbid every token are refused, at a cost independent of the vocabulary's size."""

import tracemalloc
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.errors import InvalidRequestError
from decoding.sampling.params import SamplingParams
from deployments.apis.completions.request import CompletionRequest
from deployments.endpoints.bounds import check_feasible
from deployments.endpoints.endpoint import ServedEndpoint
from tests.support.properties import repeatable

VOCAB = 5
some = st.lists(st.integers(0, VOCAB - 1), max_size=6).map(tuple)


def wrong_field(params: SamplingParams) -> str | None:
    """Reference that builds sets of all tokens."""
    allowed = set(params.allowed_token_ids or range(VOCAB)) - set(params.suppress_tokens)
    allowed -= {word[0] for word in params.bad_words_ids if len(word) == 1}
    if not allowed:
        return "allowed_token_ids" if params.allowed_token_ids else "suppress_tokens"
    if params.forced_bos_token_id is None and not allowed - set(params.begin_suppress_tokens):
        return "begin_suppress_tokens"
    return "min_tokens" if params.min_tokens and not allowed - set(params.end_token_ids) else None


@repeatable
@given(some, some, some, some, st.lists(some.filter(len), max_size=3).map(tuple), st.booleans(), st.integers(0, 1))
def test_it_names_the_field_that_leaves_nothing(
    allowed: tuple[int, ...],
    suppressed: tuple[int, ...],
    at_first: tuple[int, ...],
    ends: tuple[int, ...],
    words: tuple[tuple[int, ...], ...],
    forced: bool,
    min_tokens: int,
) -> None:
    params = SamplingParams(
        max_tokens=4,
        allowed_token_ids=allowed,
        suppress_tokens=suppressed,
        begin_suppress_tokens=at_first,
        bad_words_ids=words,
        forced_bos_token_id=1 if forced else None,
        eos_token_ids=(2, VOCAB + 3),
        stop_token_ids=ends,
        min_tokens=min_tokens,
    )
    wrong = wrong_field(params)
    with pytest.raises(InvalidRequestError) if wrong else nullcontext() as caught:
        check_feasible(params, VOCAB)
    assert (caught.value.field if caught else None) == wrong


def test_the_size_of_the_vocabulary_does_not_matter() -> None:
    params = SamplingParams(max_tokens=4, min_tokens=1, eos_token_ids=(2,), begin_suppress_tokens=(3,))
    tracemalloc.start()
    check_feasible(params, 262_144)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 20_000


def test_what_choices_and_prompts_share_is_made_and_checked_once(
    endpoints: dict[str, ServedEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    sampling = CompletionRequest.sampling

    def count(self: CompletionRequest, **options: Any) -> SamplingParams:
        made.append(options["max_tokens"])
        return sampling(self, **options)

    monkeypatch.setattr(CompletionRequest, "sampling", count)
    body = CompletionRequest(model="consort", prompt=["One", "Two words"], n=8, allowed_token_ids=[*range(6, 2000)])
    requests = endpoints["consort"].prepare(body, seed=3)
    assert len(requests) == len({request.request_id for request in requests}) == 16
    assert [request.params.seed for request in requests[:8]] == [request.params.seed for request in requests[8:]]
    assert len({request.params.seed for request in requests}) == 8
    assert made == [16]
    assert len({id(request.params.allowed_token_ids) for request in requests}) == 1
