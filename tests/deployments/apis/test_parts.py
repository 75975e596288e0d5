"""Parts of an answer: joining them takes linear, not quadratic, time; tokens of the reasoning are counted."""

import time
from types import SimpleNamespace
from typing import cast

import pytest

from actors.coordinator.request import Delta, Request, Statistics
from actors.wire.messages import Token
from decoding.sampling.logprobs import TokenLogprobs
from decoding.sampling.params import SamplingParams
from deployments.apis.decoder import TokenDecoder
from deployments.apis.parts import Part, TextToken, reasoning_tokens
from deployments.apis.responses.request import ResponsesRequest
from deployments.apis.responses.writer import ResponsesWriter
from deployments.apis.writer import AnswerIdentity
from deployments.endpoints.endpoint import ServedEndpoint


def parts(count: int) -> list[Part]:
    logprobs = TokenLogprobs(7, -1.0, 1, ())
    return [Part("ab ", [TextToken(Token(index, logprobs=logprobs), "ab ", 3 * index)]) for index in range(count)]


def test_all_that_parts_tell_is_joined_in_order() -> None:
    tokens = [TextToken(Token(1), "a", 0), TextToken(Token(2), "b", 1), TextToken(Token(3), "", 2)]
    first, second = Part("a", tokens[:1], prompt_logprobs=[]), Part("b", tokens[1:], finish="stop")
    assert Part.joined([first, second]) == Part("ab", tokens, prompt_logprobs=[], finish="stop", echoed=[])
    assert Part.joined([]).text == ""


def joining_s(count: int) -> float:
    """Least time of some trials, in seconds."""
    made = parts(count)
    times = []
    for _ in range(5):
        began_s = time.thread_time()
        assert len(Part.joined(made).tokens) == count
        times.append(time.thread_time() - began_s)
    return min(times)


def test_sixteen_times_the_parts_take_about_sixteen_times_as_long() -> None:
    """16 times the parts take about 16 times as long; quadratic joining would take 256 times."""
    assert joining_s(8192) < 80 * joining_s(512)


def test_what_is_held_back_comes_as_a_whole(endpoints: dict[str, ServedEndpoint]) -> None:
    """A call whose arguments precede its name emits nothing until its end."""
    served = endpoints["consort"]
    body = ResponsesRequest.model_validate(
        {
            "model": "consort",
            "input": "hi",
            "stream": True,
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            "tool_choice": "required",
        }
    )
    request = Request(served.endpoint, [10], SamplingParams(max_tokens=9000))
    writer = ResponsesWriter(body, [request], served.token_decoder, identity=AnswerIdentity.new(seed=0))
    assert writer.begin()
    pieces = ['[{"parameters": {"a": "', *["word "] * 300, '"}, "name": "f"}]']
    written = [
        writer.add(
            0, Delta(text, [Token(20)], Statistics(committed=count), finish="stop" if count == len(pieces) else None)
        )
        for count, text in enumerate(pieces, 1)
    ]
    assert not any(written[:-1])
    assert "function_call_arguments.done" in written[-1]
    (item,) = writer.whole()["output"]
    assert item["arguments"].count("word ") == 300


def test_the_bytes_of_a_token_are_looked_up_once(endpoints: dict[str, ServedEndpoint]) -> None:
    vocabulary = endpoints["consort"].token_decoder
    vocabulary.bytes_of.cache_clear()
    assert vocabulary.text_of(300) == vocabulary.bytes_of(300).decode(errors="replace")
    assert vocabulary.bytes_of.cache_info().misses == 1


@pytest.mark.parametrize(
    ("text", "reasoning", "count"),
    [
        ("<think>\nLet me see.\n</think>\n\nSo.", "Let me see.", len("<think>\nLet me see.")),
        ("Let me see.</think>So.", "Let me see.", len("Let me see.")),
        ("<think>Let me", "Let me", len("<think>Let me")),
        ("So.", "", 0),
        ("", "", 0),
    ],
)
def test_tokens_up_to_the_end_of_the_reasoning_are_counted(text: str, reasoning: str, count: int) -> None:
    decoder = cast(TokenDecoder, SimpleNamespace(decode_with_special=lambda tokens: "".join(map(chr, tokens))))
    assert reasoning_tokens(reasoning, [ord(character) for character in text], decoder) == count
