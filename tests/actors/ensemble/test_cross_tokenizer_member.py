"""A member with another tokenizer: its replies depend on the text alone."""

import math
from collections.abc import Sequence
from functools import cache
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

from actors.ensemble.cross_tokenizer_member import CrossTokenizerMember
from actors.wire.logits_codec import unpack
from actors.wire.messages import Join, LogitsReply, LogitsRequest, LogitsTransport
from decoding.errors import ConfigError
from decoding.tokenizers.logits_mapping import LogitsMapping
from tests.support.byte_level import byte_level_tokenizer, byte_level_tokenizer_with_end
from tests.support.knowing_runner import KnowingRunner
from tests.support.tokenizers import (
    BOS,
    EOS,
    UNKNOWN,
    bundled_tokenizer,
    sentencepiece_tokenizer,
    speller_of,
    unigram_tokenizer,
)

LEADER = speller_of(bundled_tokenizer())
TEXTS = ["def count(words):\n    total = 0\n    return total", "def counting(words, naïve):\n    return naïve — 漢字"]
TOKENS = [LEADER.encode(text) for text in TEXTS]
PROMPT = 3  # tokens


@cache
def logits_mapping(tokenizer: Tokenizer) -> LogitsMapping:
    return LogitsMapping.build(LEADER, speller_of(tokenizer))


class Member:
    """A row on a runner that knows how the texts go on, and whose logits depend on its cache columns."""

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[int], *, max_query: int = 256) -> None:
        self.runner = KnowingRunner(speller_of(tokenizer), [text.encode() for text in TEXTS])
        self.runner.max_query = max_query
        self.logits_mapping = logits_mapping(tokenizer)
        join = Join(1, list(tokens), "target", PROMPT, best_count=2)
        row = CrossTokenizerMember.make("leader", join, self.runner, self.logits_mapping)
        assert row is not None
        self.row, self.row.slot = row, 0
        self.steps = 0
        self._prefill()
        self.row.joined = True

    def _prefill(self) -> None:
        while self.row.prefilling:
            self.row.take(self.runner.logits(self.row.inputs(8)), range(0))

    def step(self) -> LogitsReply | None:
        self.steps += 1
        (row_input,) = self.row.inputs(8)
        assert row_input.end <= self.runner.cache.capacity
        logits = self.runner.logits([row_input])
        return self.row.take(logits, range(len(logits)))

    def reply(
        self, base: int, text: Sequence[int], draft: Sequence[int] = (), parents: Sequence[int] = ()
    ) -> LogitsReply:
        chain = list(range(-1, len(draft) - 1))
        request = LogitsRequest(1, 7, base, list(text), list(draft), list(parents) or chain, LogitsTransport())
        assert self.row.take_request(request) is None
        self._prefill()
        while True:
            reply = self.step()
            if reply is not None:
                return reply


def alone(tokenizer: Tokenizer, tokens: Sequence[int]) -> tuple[Tensor, list[list[int]]]:
    """Return the reply of a member that has read this text only."""
    reply = Member(tokenizer, tokens).reply(len(tokens), [])
    return unpack(reply.logits), reply.best


@pytest.mark.parametrize("max_query", [256, 12])
@pytest.mark.parametrize("tokenizer", [sentencepiece_tokenizer(), byte_level_tokenizer_with_end(), unigram_tokenizer()])
def test_answers_depend_on_the_text_alone(tokenizer: Tokenizer, max_query: int) -> None:
    """Replies after drafts that were right, that were wrong, that branched, and that ended amid a character."""
    first, second = TOKENS
    same = next(index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    requests = [
        ([], second[PROMPT:9], None),
        (second[PROMPT:5], [first[5], second[5], second[6], second[7]], [-1, -1, 1, 2]),
        (second[5:9], first[same : same + 5], None),
        (second[9:10], second[10 : len(second)], None),
        (second[10:-3], [*second[-3:], *second[-2:]], [-1, 0, 1, -1, 3]),
        (second[-3:-1], second[-1:], None),
    ]
    member = Member(tokenizer, second[:PROMPT], max_query=max_query)
    base = PROMPT
    for text, draft, parents in requests:
        reply = member.reply(base, text, draft, parents or ())
        base += len(text)
        replied = unpack(reply.logits)
        paths: list[list[int]] = [[]]
        for token, parent in zip(draft, parents or range(-1, len(draft) - 1), strict=True):
            paths.append([*paths[parent + 1], token])
        for path, row, best in zip(paths, replied, reply.best, strict=True):
            logits, bests = alone(tokenizer, second[:base] + path)
            assert torch.equal(row, logits[0])
            assert best == bests[0]
    assert (member.steps > len(requests)) == (max_query < 256)


def test_what_was_drafted_rightly_is_not_computed_again() -> None:
    tokenizer, text = sentencepiece_tokenizer(), TOKENS[0]
    member = Member(tokenizer, text[:PROMPT])
    member.reply(PROMPT, [], text[PROMPT:8])
    member.reply(PROMPT, text[PROMPT:9], [])
    assert len(member.row.inputs(8)[0].tokens) <= 4


def test_amid_a_character_that_it_has_no_bytes_for_it_is_silent() -> None:
    tokens = LEADER.encode("漢")
    assert len(tokens) > 1
    for tokenizer, silent in ((unigram_tokenizer(), True), (sentencepiece_tokenizer(), False)):
        reply = Member(tokenizer, LEADER.encode("def count")).reply(len(LEADER.encode("def count")), [], tokens[:1])
        logits = unpack(reply.logits)
        assert not (logits[0] == -math.inf).all()
        assert bool((logits[1] == -math.inf).all()) == silent
        assert bool(reply.best[1]) != silent


def test_without_room_a_text_is_refused_and_a_draft_has_no_logits() -> None:
    tokenizer, text = byte_level_tokenizer_with_end(), TOKENS[0]
    member = Member(tokenizer, text[:PROMPT])
    member.runner.max_length = len(member.row.tokens) + 4
    logits = unpack(member.reply(PROMPT, [], text[PROMPT:8]).logits)
    assert [bool((row == -math.inf).all()) for row in logits] == sorted(
        (row == -math.inf).all().item() for row in logits
    )
    assert (logits[-1] == -math.inf).all()
    request = LogitsRequest(1, 8, PROMPT, text[PROMPT:8], [], [], LogitsTransport())
    assert "no room" in str(member.row.take_request(request))
    join = Join(1, text, "target", PROMPT)
    assert CrossTokenizerMember.make("leader", join, member.runner, member.logits_mapping) is None


@pytest.mark.parametrize("tokens", [[], [-1], [5000]])
def test_tokens_that_are_not_the_leaders_are_refused(tokens: list[int]) -> None:
    member = Member(sentencepiece_tokenizer(), TOKENS[0][:PROMPT])
    join = Join(1, tokens, "target", len(tokens))
    assert CrossTokenizerMember.make("leader", join, member.runner, member.logits_mapping) is None
    if tokens:
        assert "not its tokens" in str(
            member.row.take_request(LogitsRequest(1, 1, PROMPT, tokens, [], [], LogitsTransport()))
        )


def test_tokenizers_with_too_little_in_common_are_refused() -> None:
    with pytest.raises(ConfigError, match='role "eos"'):
        LogitsMapping.build(LEADER, speller_of(byte_level_tokenizer()))


@pytest.mark.parametrize("max_query", [256, 12])
def test_a_reply_after_memory_ran_out_is_right(max_query: int) -> None:
    """In the first step, whose tree begins before the end of what is computed, and where the reply is packed."""
    tokenizer, text = sentencepiece_tokenizer(), TOKENS[0]
    expected = unpack(Member(tokenizer, text[:12], max_query=max_query).reply(12, [], text[12:15]).logits)
    member = Member(tokenizer, text[:12], max_query=max_query)
    row = member.row
    row.resume(0)
    row.joined = False
    member.runner.columns[0] = [-1] * member.runner.cache.capacity
    (run,) = row.inputs(len(row.tokens) - 6)
    member.runner.logits([run])
    row.cached, row.joined = run.end, True
    request = LogitsRequest(1, 7, 12, [], text[12:15], [-1, 0, 1], LogitsTransport())
    assert row.take_request(request) is None
    row.inputs(8)
    row.undo()
    with mock.patch("actors.ensemble.member.pack", side_effect=torch.OutOfMemoryError):
        with pytest.raises(torch.OutOfMemoryError):
            member.reply(12, [], text[12:15])
        row.undo()
    assert torch.equal(unpack(member.reply(12, [], text[12:15]).logits), expected)


def test_what_is_sent_again_begins_nothing_anew() -> None:
    tokenizer, text = sentencepiece_tokenizer(), TOKENS[0]
    member = Member(tokenizer, text[:PROMPT], max_query=4)
    assert member.row.rejoins(Join(1, text[:PROMPT], "target", PROMPT, best_count=2))
    request = LogitsRequest(1, 7, PROMPT, [], text[PROMPT:9], list(range(-1, 5)), LogitsTransport())
    replies: list[LogitsReply | None] = []
    while not any(replies):
        assert member.row.take_request(request) is None
        replies.append(member.step())
    assert len(replies) > 1


def test_a_draft_may_change_all_tokens_of_a_long_run() -> None:
    """A unigram model puts the rest of a run at its beginning, so that the text is no prefix of text and draft."""
    pieces = [*((chr(code), -9.0) for code in range(32, 127)), ("--", -4.0), ("----", -2.0)]
    tokenizer = Tokenizer(models.Unigram([(UNKNOWN, 0.0), (BOS, 0.0), (EOS, 0.0), *pieces], unk_id=0))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([UNKNOWN, BOS, EOS])
    spelt = [tokenizer.encode("-" * count, add_special_tokens=False).ids for count in (298, 299)]
    assert len(spelt[0]) > 64
    assert spelt[0][0] != spelt[1][0]
    text, draft = LEADER.encode("-" * 298), LEADER.encode("-")
    replied = unpack(Member(tokenizer, text).reply(len(text), [], draft).logits)
    for tokens, row in zip((text, text + draft), replied, strict=True):
        assert torch.equal(row, alone(tokenizer, tokens)[0][0])
