"""A member's replies to requests for logits, the wrong ones included."""

from unittest import mock

import pytest
import torch

from actors.ensemble.member import MemberRow
from actors.wire.logits_codec import pack, unpack
from actors.wire.messages import Join, LogitsRequest, LogitsTransport, PackedLogits
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.support.models import VOCAB, tiny_model

RUNNER = Runner(tiny_model("llama-gqa"), slots=2, max_length=32, max_query=16)
TEXT = list(range(5, 15))


def member() -> MemberRow:
    row = MemberRow("leader", Join(1, list(TEXT), "leader", len(TEXT), invitation=3), RUNNER)
    row.slot = 0
    row.take(RUNNER.logits(row.inputs(16)), range(0))
    assert row.cached == len(TEXT) - 1
    return row


def logits_request(base: int, text: list[int], tokens: list[int], parents: list[int] | None = None) -> LogitsRequest:
    chain = list(range(-1, len(tokens) - 1))
    return LogitsRequest(1, 1, base, text, tokens, chain if parents is None else parents, LogitsTransport())


def test_its_answers_name_the_invitation() -> None:
    row = member()
    joined = row.announce()
    assert row.take_request(logits_request(10, [], [])) is None
    reply = row.take(RUNNER.logits(row.inputs(16)), range(1))
    assert joined is not None
    assert reply is not None
    assert (joined.invitation, reply.invitation) == (3, 3)


def test_what_became_text_of_a_draft_is_not_computed_again() -> None:
    row = member()
    assert row.take_request(logits_request(10, [], [20, 21, 22, 30], [-1, 0, 1, 0])) is None
    logits = RUNNER.logits(row.inputs(16))
    row.take(logits, range(len(logits)))
    assert row.take_request(logits_request(10, [20, 30, 7], [8])) is None
    assert (row.cached, row.pending) == (12, 1)
    computed = RUNNER.logits(row.inputs(16))
    plain = RUNNER.logits([RowInput(1, 0, [*TEXT, 20, 30, 7, 8])])
    assert computed.allclose(plain[-2:], atol=1e-5)
    assert logits[4].allclose(plain[11], atol=1e-5)  # after 20, 30, as a branch of the draft


@pytest.mark.parametrize(
    ("wrong_request", "problem"),
    [
        (logits_request(11, [1], []), "lost on the way"),
        (logits_request(10, [], [1, 2], [-1]), "no tree"),
        (logits_request(10, [], [1, 2], [-1, 1]), "no tree"),
        (logits_request(10, [], [1, 2], [-1, -2]), "no tree"),
        (logits_request(10, [VOCAB], []), "not its tokens"),
        (logits_request(10, [], [-1]), "not its tokens"),
        (logits_request(10, [1] * 22, []), "no room"),
        (logits_request(10, [], [1] * 39), "no room"),
        (logits_request(10, [], [1] * 64, [-1] * 64), "no room"),
    ],
)
def test_a_wrong_request_is_refused(wrong_request: LogitsRequest, problem: str) -> None:
    error = member().take_request(wrong_request)
    assert error is not None
    assert problem in error


def test_logits_that_make_no_sense_are_refused() -> None:
    good = pack(RUNNER.logits([RowInput(1, 0, TEXT)]), LogitsTransport(top_k=3))
    assert unpack(good).shape == (10, VOCAB)
    for bad in (
        PackedLogits(0, 8, "float32", b"", None),
        PackedLogits(1, 8, "float32", b"1234", None),
        PackedLogits(1, 8, "float64", bytes(64), None),
        PackedLogits(3, 8, "float32", bytes(32), None),
        PackedLogits(1, 2, "float32", bytes(4), b"\x09\x00\x00\x00"),
        PackedLogits(1, 2, "float32", bytes(4), b""),
        PackedLogits(1, 2, "float32", bytes(3), None),
    ):
        with pytest.raises(ValueError, match=r".+"):
            unpack(bad)


@pytest.mark.parametrize("failing", ["torch.Tensor.topk", "actors.ensemble.member.pack"])
def test_a_reply_after_memory_ran_out_is_right(failing: str) -> None:
    row = member()
    assert row.take_request(logits_request(10, [], [20, 21])) is None
    with mock.patch(failing, side_effect=torch.OutOfMemoryError), pytest.raises(torch.OutOfMemoryError):
        row.take(RUNNER.logits(row.inputs(16)), range(3))
    row.undo()
    assert row.due
    reply = row.take(RUNNER.logits(row.inputs(16)), range(3))
    assert reply is not None
    right = RUNNER.logits([RowInput(1, 0, [*TEXT, 20, 21])])[-3:]
    torch.testing.assert_close(unpack(reply.logits), right, atol=1e-4, rtol=0)
