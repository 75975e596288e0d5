"""The text of a request: assembled from commits, cut at stop strings and criteria, complete at the end."""

import time
from unittest import mock

import pytest

from actors.coordinator.active_request import ActiveRequest, TextStream
from actors.coordinator.request import Delta, Endpoint, Request, Statistics, new_request_id
from actors.wire.messages import Adapter, Commit, ReplicaAddress, Token
from decoding.beams.options import BeamOptions
from decoding.errors import InvalidRequestError
from decoding.prompt_positions import PromptPositions
from decoding.sampling.params import SamplingParams
from tests.support.byte_level import byte_level_tokenizer


def decode(tokens: list[int]) -> str:
    return str(byte_level_tokenizer().decode(tokens))


def encode(text: str) -> list[int]:
    return list(byte_level_tokenizer().encode(text).ids)


def make_active(prompt: str = "the", *stop: str) -> ActiveRequest:
    endpoint = Endpoint("e", "t", "d", 4, decode)
    params = SamplingParams(max_tokens=100, stop=stop)
    return ActiveRequest(Request(endpoint, encode(prompt), params), lambda delta: None, 0.0)


def commit(active: ActiveRequest, tokens: list[int], finish: str | None = None) -> Delta:
    records = [*(Token(token, "accepted", "drafter") for token in tokens[:-1]), Token(tokens[-1], "bonus")]
    return active.commit(Commit(1, len(active.tokens), records, finish, len(tokens)))  # type: ignore[arg-type]


def test_deltas_add_up_to_the_text() -> None:
    text = "cat 👩‍👩‍👧 — 漢字"
    active = make_active()
    tokens = encode(text)
    deltas = [commit(active, tokens[start : start + 3]) for start in range(0, len(tokens), 3)]
    deltas.append(commit(active, encode("."), "length"))
    assert "".join(delta.text for delta in deltas) == text + "."
    assert [token for delta in deltas for token in delta.token_ids] == [*tokens, *encode(".")]
    assert (deltas[-1].finish, deltas[-2].finish) == ("length", None)


def test_a_stop_string_ends_the_text_in_the_midst_of_a_step() -> None:
    active = make_active("the", "\n\n", "END")
    first = commit(active, encode("a\n"))
    last = commit(active, encode("\nb and more"), "length")
    assert first.text + last.text == "a"
    assert last.finish == "stop"
    assert last.token_ids == encode("\n")
    assert active.tokens == [*encode("the"), *encode("a\n"), *encode("\n")]
    assert last.statistics.committed == len(encode("a\n")) + 1


def test_text_held_back_for_a_stop_string_is_sent_at_the_end() -> None:
    active = make_active("the", "END")
    deltas = [commit(active, encode("x E")), commit(active, encode("N"), "length")]
    assert [delta.text for delta in deltas] == ["x ", "EN"]
    assert deltas[-1].finish == "length"


def test_an_incomplete_character_at_the_end_is_decoded_as_by_the_tokenizer() -> None:
    active = make_active()
    tokens = encode("𐍈")[:2]
    assert commit(active, tokens, "length").text == decode(tokens)


@pytest.mark.parametrize("drafter", ["d1", None])
def test_the_admission_carries_all_committed_tokens(drafter: str | None) -> None:
    active = make_active()
    commit(active, encode("cat"))
    active.drafter = drafter
    admit = active.admit(ReplicaAddress("t1", "t"))
    assert admit.tokens == encode("the") + encode("cat")
    assert admit.prompt_length == len(encode("the"))
    assert admit.attached_drafter == drafter
    assert admit.drafter == (drafter is not None)
    assert admit.draft_length == 4  # a drafter may come yet


def test_a_shortened_prompt_keeps_its_positions_wherever_it_goes() -> None:
    prompt, positions = encode("the cat"), PromptPositions(list(range(3, 3 + len(encode("the cat")))), 40)
    params = SamplingParams(max_tokens=100)
    request = Request(Endpoint("e", "t", "d", 4, decode), prompt, params, prompt_positions=positions)
    active = ActiveRequest(request, lambda delta: None, 0.0)
    commit(active, encode("s"))
    admit = active.admit(ReplicaAddress("t2", "t"))
    assert (admit.prompt_positions, admit.prompt_length) == (positions, len(prompt))
    with pytest.raises(InvalidRequestError, match=f"one for each of {len(prompt) + 1} tokens"):
        Request(request.endpoint, [*prompt, 1], params, prompt_positions=positions)


def test_ids_of_later_requests_are_greater_and_those_of_one_moment_differ() -> None:
    now_ns = time.time_ns() >> 50 << 50  # the clock's 20 bits begin anew
    with mock.patch("time.time_ns") as clock:
        ids = []
        for clock.return_value in (now_ns, now_ns + 2 * 10**9, now_ns + 12 * 24 * 3600 * 10**9):
            ids.append({new_request_id() for _ in range(100)})
    assert [len(same) for same in ids] == [100] * 3
    assert 0 <= min(ids[0]) < max(ids[0]) < min(ids[1]) < max(ids[1]) < min(ids[2])
    assert max(ids[2]) < 2**63


def test_the_rates() -> None:
    assert Statistics().acceptance_rate == Statistics().acceptance_length == Statistics().hit_rate == 0.0
    statistics = Statistics(steps=4, drafted=8, accepted=6, committed=10, missed=4, hits=1)
    assert (statistics.acceptance_rate, statistics.acceptance_length, statistics.hit_rate) == (0.75, 2.5, 0.25)


def test_prefixes_belong_to_an_adapter() -> None:
    def keys(adapter: Adapter | None) -> set[int]:
        request = Request(
            Endpoint("e", "t", None, 0, str, adapter=adapter), list(range(200)), SamplingParams(max_tokens=1)
        )
        return {prefix.key for prefix in ActiveRequest(request, print, 0.0).prefixes}

    first, other, none = keys(Adapter("a", "/a", "1")), keys(Adapter("a", "/a", "2")), keys(None)
    assert not first & other
    assert not first & none
    assert first == keys(Adapter("b", "/b", "1"))


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(max_tokens=9, max_time_s=1.0), "max_time"),
        (SamplingParams(max_tokens=9, prompt_logprobs=0), "prompt_logprobs"),
    ],
)
def test_a_beam_search_refuses_what_it_would_ignore(params: SamplingParams, field: str) -> None:
    """Its answers come at its end: ended early, it would have none."""
    with pytest.raises(InvalidRequestError, match="absent from a beam search") as caught:
        Request(Endpoint("e", "t", None, 0, decode), [1], params, beams=BeamOptions(num_beams=2))
    assert caught.value.field == field


def spell(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


@pytest.mark.parametrize(
    ("text", "stop", "min_tokens", "shown", "used"),
    [
        ("abENDxyzEND", "END", 0, "ab", 5),
        ("abENDxyzEND", "END", 3, "ab", 5),
        ("abENDxyzEND", "END", 4, "ab", 5),
        ("abENDxyzEND", "END", 5, "ab", 5),
        ("abENDxyzEND", "END", 6, "abENDxyz", 11),
        ("aaaa", "aa", 3, "a", 3),  # one that ended too early may be the next one's beginning
        ("abEN", "END", 3, "abEN", 4),
    ],
)
@pytest.mark.parametrize("together", [1, 3, 11])
def test_a_stop_string_counts_if_it_ends_after_min_tokens(
    text: str, stop: str, min_tokens: int, shown: str, used: int, together: int
) -> None:
    stream = TextStream(spell, [32], SamplingParams(max_tokens=99, stop=(stop,), min_tokens=min_tokens))
    pieces = []
    for begin in range(0, len(text), together):
        pieces.append(stream.add([ord(char) for char in text[begin : begin + together]], None))
        if pieces[-1].finish is not None:
            break
    assert "".join(piece.text for piece in pieces) + stream.flush() == shown
    assert sum(piece.used for piece in pieces) == used
