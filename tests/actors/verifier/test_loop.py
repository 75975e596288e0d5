"""The target loop without other replicas: its text is its own, and no message can end its loop."""

import gc
import math
import time
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from msgspec.structs import replace

from actors.ensemble.member import MemberRow
from actors.loops.options import LoopOptions
from actors.verifier import proposers
from actors.verifier.inbox import TargetInbox
from actors.verifier.loop import Target
from actors.verifier.policy import SpeculationPolicy
from actors.verifier.rows import TargetRow
from actors.wire.link import LocalExchange, LocalLink
from actors.wire.messages import (
    Admit,
    Advance,
    AttachDrafter,
    Cancel,
    Commit,
    Failed,
    Join,
    LeaderLost,
    Message,
    Offer,
    Remember,
    ResendRequest,
    Token,
    TokenSource,
)
from decoding.drafts import lookup
from decoding.drafts.draft import Distribution
from decoding.drafts.options import NgramOptions
from decoding.sampling.params import SamplingParams
from decoding.sampling.penalties import TextTable
from engine.model.runner import Runner
from tests.support.models import VOCAB, tiny_model
from tests.support.waiting import wait_until

PROMPT = [5, 6, 7, 8]
offer = partial(Offer, coordinator="coordinator")
GREEDY = SamplingParams(max_tokens=12, temperature=0)


class Stage:
    """A tiny target, and the coordinator's and a drafter's ends of its link."""

    def __init__(self) -> None:
        self.exchange = exchange = LocalExchange()
        self.coordinator: LocalLink = exchange.join("coordinator")
        self.drafter: LocalLink = exchange.join("d")
        self.model = tiny_model("llama-gqa")
        runner = Runner(self.model, slots=2, max_length=64, max_query=64)
        self.target = Target(runner, exchange.join("t"), LoopOptions(prefill_chunk=16, adaptive=False))
        self.advances: list[Advance] = []  # what the drafter received during the last `send`

    def send(self, *messages: Message, turns: int = 30) -> list[Message]:
        """Send messages, run some turns, and return what the coordinator receives."""
        self.coordinator.send("t", [message for message in messages if not isinstance(message, Offer | ResendRequest)])
        self.drafter.send("t", [message for message in messages if isinstance(message, Offer | ResendRequest)])
        for _ in range(turns):
            self.coordinator.send("t", [Cancel(999)])  # something to receive, so that no turn waits
            self.target.turn()
        self.advances = [message for _, message in self.drafter.receive(0) if isinstance(message, Advance)]
        return [message for _, message in self.coordinator.receive(0) if isinstance(message, Commit | Failed)]

    @torch.no_grad()
    def text(self) -> list[int]:
        """Return the prompt and the model's own greedy continuation."""
        tokens = list(PROMPT)
        for _ in range(GREEDY.max_tokens):
            tokens.append(int(self.model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens


def ids(commit: Commit) -> list[int]:
    return [token.id for token in commit.tokens]


def committed(messages: list[Message]) -> list[int]:
    return [token for message in messages if isinstance(message, Commit) for token in ids(message)]


def test_it_writes_without_drafts() -> None:
    stage = Stage()
    messages = stage.send(Admit(1, PROMPT, 4, GREEDY, 0, drafter=False))
    assert committed(messages) == stage.text()[4:]
    assert [m.finish for m in messages if isinstance(m, Commit)][-2:] == [None, "length"]
    assert stage.target.load().active == 0


def test_it_tells_what_share_of_its_time_drafts_take() -> None:
    stage = Stage()
    assert stage.target.load().proposer_shares == {}
    stage.send(Admit(1, PROMPT, 4, GREEDY, 0, drafter=False, ngram=NgramOptions()))
    stage.target.times.waited_s = times_s = stage.target.times.step_s + stage.target.times.prefill_s
    shares = stage.target.load().proposer_shares
    assert shares["drafter"] == pytest.approx(times_s / (2 * times_s + stage.target.times.drafted_s), rel=0.1)
    assert 0 < shares["ngram"] < 1


def test_the_first_token_is_sent_at_the_end_of_its_turn() -> None:
    stage = Stage()
    assert committed(stage.send(Admit(1, PROMPT, 4, GREEDY, 0, drafter=False), turns=1)) == stage.text()[4:5]


def test_rows_of_members_do_not_count_when_speculation_is_judged() -> None:
    stage = Stage()
    stage.send(Join(2, PROMPT, "leader", 4), Admit(1, PROMPT, 4, GREEDY, 0, drafter=False), turns=3)
    assert len(stage.target._rows) == 2
    assert stage.target._policy.active_rows == 1


def test_a_member_forgets_what_has_left_its_leader_but_not_what_came_back_to_it() -> None:
    stage = Stage()
    stage.send(*[Join(request_id, PROMPT, "leader", 4, admission=1) for request_id in (1, 2)], turns=3)
    lost = [LeaderLost(1, "coordinator", 0), LeaderLost(2, "coordinator", 1), LeaderLost(3, "nobody", 0)]
    stage.send(*lost, turns=1)
    assert stage.target._rows.report("coordinator").request_ids == [1]


@pytest.mark.parametrize("done", [1, 5, 11])
def test_it_goes_on_where_another_target_stopped(done: int) -> None:
    stage = Stage()
    text = stage.text()
    messages = stage.send(Admit(1, text[: 4 + done], 4, GREEDY, 0, drafter=False, admission=done))
    assert committed(messages) == text[4 + done :]
    assert {message.admission for message in messages if isinstance(message, Commit)} == {done}


@pytest.mark.parametrize("length", [1, 16, 17, 33, 52])
def test_prompts_of_any_length(length: int) -> None:
    """Prompts shorter than one or several chunks, as long, and one token longer; and as long as fits."""
    stage = Stage()
    prompt = [(7 * i) % VOCAB for i in range(length)]
    tokens = committed(stage.send(Admit(1, prompt, length, GREEDY, 0, drafter=False)))
    with torch.no_grad():
        logits = stage.model(torch.tensor([[*prompt, *tokens]])).logits[0]
    assert tokens == logits[length - 1 : -1].argmax(-1).tolist()


def verdict(base: int, tokens: list[int], own: TokenSource, *, drafted: int, hit: bool = False) -> Commit:
    """The commit of a step that verified `drafted` tokens of the drafter, and accepted all of `tokens` but the last."""
    accepted = [Token(token, "accepted", "drafter") for token in tokens[:-1]]
    return Commit(1, base, [*accepted, Token(tokens[-1], own)], None, drafted, {"drafter": drafted}, hit)


def test_ngrams_of_a_long_prompt_are_indexed_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the second step has a draft, although no turn may index all of the prompt."""
    monkeypatch.setattr(lookup, "_MOST_NEW", 4)
    monkeypatch.setattr(proposers, "_READ_AHEAD", 16)
    prompt = [token % 20 for token in range(48)]
    allowed = SamplingParams(max_tokens=4, temperature=0, allowed_token_ids=tuple(range(20)))
    stage = Stage()
    commits = stage.send(Admit(1, prompt, len(prompt), allowed, 3, drafter=False, ngram=NgramOptions(1)))
    assert [commit.drafted for commit in commits[:2] if isinstance(commit, Commit)] == [0, 2]


@pytest.mark.parametrize(("read_ahead", "turns"), [(48, 1), (16, 3), (6, 8)])
def test_a_text_in_the_cache_is_indexed_in_few_turns(
    read_ahead: int, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of which goes on to write a token meanwhile; the text stays the same."""
    prompt = [token % 20 for token in range(48)]
    allowed = SamplingParams(max_tokens=12, temperature=0, allowed_token_ids=tuple(range(20)))
    stage = Stage()
    expected = committed(stage.send(Admit(1, prompt, len(prompt), allowed, 0, drafter=False)))
    monkeypatch.setattr(lookup, "_MOST_NEW", 1)
    monkeypatch.setattr(proposers, "_READ_AHEAD", read_ahead)
    commits = stage.send(Admit(2, prompt, len(prompt), allowed, 3, drafter=False, ngram=NgramOptions(1)))
    assert committed(commits) == expected
    drafted = [commit.drafted for commit in commits if isinstance(commit, Commit)]
    assert next(turn for turn, count in enumerate(drafted) if count) == turns


def test_look_up_goes_on_while_models_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs nothing until it drafts: 12 tokens of a text that repeats itself take as few steps as before."""
    params = SamplingParams(max_tokens=12, temperature=0, allowed_token_ids=(7, 8))
    admit = Admit(1, [7, 8] * 8, 16, params, 4, drafter=False, ngram=NgramOptions(1))
    expected = Stage().send(admit)
    stage = Stage()
    monkeypatch.setattr(stage.target._policy, "speculates", lambda: False)
    assert stage.send(admit) == expected
    assert not stage.target.load().drafting
    assert len(expected) < 8


def test_a_text_is_taken_over_only_by_a_request_with_the_same_prompt_length() -> None:
    """What counts as the answer decides penalties and `min_tokens`, also where the tokens are the same."""
    row = TargetRow("gone", Admit(1, PROMPT, 4, GREEDY, 0, drafter=False), acceptance=0.5)
    assert row.writes_text_of(Admit(2, PROMPT, 4, GREEDY, 0, drafter=False))
    assert not row.writes_text_of(Admit(2, PROMPT, 3, GREEDY, 0, drafter=False))


def test_a_right_draft_is_committed_in_one_step_with_its_bonus_token() -> None:
    stage = Stage()
    text = stage.text()
    stage.send(Admit(1, PROMPT, 4, GREEDY, 4, drafter=True), turns=1)
    messages = stage.send(offer(1, 4, text[4:10]), turns=1)
    assert messages == [verdict(5, text[5:10], "bonus", drafted=4)]
    assert committed(stage.send(AttachDrafter(1, None))) == text[10:]


def test_a_wrong_draft_token_costs_nothing_but_itself() -> None:
    stage = Stage()
    text = stage.text()
    stage.send(Admit(1, PROMPT, 4, GREEDY, 4, drafter=True), turns=1)
    draft = [*text[4:7], (text[7] + 1) % VOCAB, 3]
    assert stage.send(offer(1, 4, draft), turns=1) == [verdict(5, text[5:8], "recovered", drafted=4)]
    assert committed(stage.send(AttachDrafter(1, None))) == text[8:]


def test_an_end_token_in_place_of_a_wrong_draft_token_is_no_bonus() -> None:
    stage = Stage()
    text = stage.text()
    end = next(index for index in range(5, len(text)) if text[index] not in text[4:index])
    params = SamplingParams(max_tokens=GREEDY.max_tokens, temperature=0, stop_token_ids=(text[end],))
    stage.send(Admit(1, PROMPT, 4, params, end - 4, drafter=True), turns=1)
    (commit,) = stage.send(offer(1, 4, [*text[4:end], (text[end] + 1) % VOCAB]), turns=1)
    assert isinstance(commit, Commit)
    assert [token.source for token in commit.tokens] == ["accepted"] * (end - 5) + ["recovered"]
    assert commit.finish == "stop"


def test_an_alternative_is_verified_beside_the_chain() -> None:
    """A chain is wrong from its third token on; beside it are the right token and what follows."""
    stage = Stage()
    text = stage.text()
    stage.send(Admit(1, PROMPT, 4, GREEDY, 4, drafter=True), turns=1)
    tokens = [text[4], text[5], (text[6] + 1) % VOCAB, 7, 7, text[6], text[7]]
    tree = offer(1, 4, tokens, [-1, 0, 1, 2, 3, 1, 5], [1.0, 0.9, 0.5, 0.2, 0.2, 0.4, 0.9])
    assert stage.send(tree, turns=1) == [verdict(5, text[5:9], "bonus", drafted=4)]
    assert committed(stage.send(AttachDrafter(1, None))) == text[9:]


def test_a_draft_of_what_follows_a_disagreement_is_a_hit() -> None:
    stage = Stage()
    text = stage.text()
    stage.send(Admit(1, PROMPT, 4, GREEDY, 1, drafter=True), turns=1)
    tree = offer(1, 4, [text[4], (text[5] + 1) % VOCAB, *text[5:7]], [-1, 0, 0, 2], [1.0, 0.6, 0.4, 1.0])
    assert stage.send(tree, turns=2) == [
        verdict(5, text[5:6], "recovered", drafted=1, hit=True),
        verdict(6, text[6:8], "bonus", drafted=1),
    ]


def test_the_drafter_is_told_how_the_text_goes_on_and_what_it_missed() -> None:
    stage = Stage()
    text = stage.text()
    stage.send(Admit(1, PROMPT, 4, GREEDY, 4, drafter=True, admission=3, attached_drafter="d"), turns=1)
    assert stage.advances == [Advance(1, "coordinator", 3, 4, text[4:5], 4, rejected_at=0)]
    stage.send(offer(1, 4, [*text[4:7], (text[7] + 1) % VOCAB, 3]), turns=1)
    assert stage.advances == [Advance(1, "coordinator", 3, 5, text[5:8], 4, rejected_at=8)]
    sent = stage.send(ResendRequest(1, "coordinator", 4), turns=1)  # a target that has waited long enough goes on
    assert stage.advances[0] == Advance(1, "coordinator", 3, 4, text[4:8], 4, rejected_at=8)
    assert [*committed(sent), *committed(stage.send(AttachDrafter(1, None)))] == text[8:]
    assert stage.advances == []


def test_only_the_drafter_that_works_on_a_request_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpeculationPolicy, "_patience_s", lambda policy, draft_length: 60.0)  # no step without a draft
    stage = Stage()
    text = stage.text()
    stage.send(Admit(1, PROMPT, 4, GREEDY, 4, drafter=True, attached_drafter="another"), turns=1)
    stage.send(
        ResendRequest(1, "coordinator", 4), ResendRequest(7, "coordinator", 4), ResendRequest(1, "someone", 4), turns=1
    )
    assert stage.advances == []
    stage.send(AttachDrafter(1, "d"), ResendRequest(1, "coordinator", -3), turns=1)
    assert stage.advances == [Advance(1, "coordinator", 0, 0, text[:5], 4, rejected_at=0)]
    assert stage.target._rows.report("coordinator").attached_drafters == {1: "d"}
    stage.send(offer(1, 4, text[4:9]), turns=1)
    assert [(advance.base, advance.tokens) for advance in stage.advances] == [(5, text[5:10])]


def test_a_drafter_that_may_rest_is_told_that_once_and_all_that_it_missed_when_it_may_not() -> None:
    admit = Admit(1, PROMPT, 4, GREEDY, 4, drafter=True, attached_drafter="d")
    row = TargetRow("coordinator", admit, acceptance=0.5)
    advances = []
    for token, draft_length in enumerate([4, 0, 0, 0, 2]):
        row.commit([token], rejected=False)
        advances.append(row.drafts.next_advance(draft_length))
    assert [advance and (advance.base, advance.tokens, advance.draft_length) for advance in advances] == [
        (4, [0], 4),
        (5, [1], 0),
        None,
        None,
        (6, [2, 3, 4], 2),
    ]


def test_a_drafter_with_all_the_text_is_told_only_to_rest_or_to_go_on() -> None:
    row = TargetRow("coordinator", Admit(1, PROMPT, 4, GREEDY, 4, drafter=True, attached_drafter="d"), acceptance=0.5)
    advances = [row.drafts.next_advance(draft_length) for draft_length in (4, 0, 0, 3, 2)]
    assert [advance and advance.draft_length for advance in advances] == [None, 0, None, 3, None]
    assert not any(advance.tokens for advance in advances if advance is not None)


def test_drafters_rest_as_soon_as_plain_decoding_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that follows is not slowed by drafts that nobody will use."""
    stage = Stage()
    stage.send(Admit(1, PROMPT, 4, GREEDY, 4, drafter=True, attached_drafter="d"), turns=3)
    monkeypatch.setattr(stage.target._policy, "speculates", lambda: False)
    stage.target._choose_mode()
    sent = [message for _, message in stage.drafter.receive(0) if isinstance(message, Advance)]
    assert [(message.tokens, message.draft_length) for message in sent] == [([], 0)]
    stage.send(AttachDrafter(1, "d"), turns=1)
    first = stage.advances[0]
    assert (first.tokens, first.draft_length) == ([], 0)


def test_a_drafter_rests_from_the_admission_on_while_plain_decoding_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets one message without text at once, one with the first token, and then none."""
    stage = Stage()
    monkeypatch.setattr(stage.target._policy, "speculates", lambda: False)
    stage.send(Admit(1, PROMPT, 4, GREEDY, 0, drafter=False), turns=1)
    stage.send(Admit(2, PROMPT, 4, GREEDY, 4, drafter=True, attached_drafter="d"))
    assert [(len(message.tokens), message.draft_length) for message in stage.advances] == [(0, 0), (1, 0)]


def test_a_drafter_that_did_not_hear_that_it_may_rest_is_told_at_its_next_offer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The update may be lost, as every message; a drafter would waste its whole lookahead."""
    stage = Stage()
    text = stage.text()
    monkeypatch.setattr(stage.target._policy, "speculates", lambda: False)
    stage.send(Admit(1, PROMPT, 4, GREEDY, 4, drafter=True, attached_drafter="d"), turns=2)
    assert [advance.draft_length for advance in stage.advances][-1] == 0
    stage.send(offer(1, 4, text[4:6]), turns=1)
    assert stage.advances[0].draft_length == 0


def test_a_draft_that_overtakes_its_admission_is_verified_in_the_first_step() -> None:
    """The coordinator and the drafter have links of their own, so either message may be first."""
    stage = Stage()
    text = stage.text()
    stage.send(offer(1, 4, text[4:9]), turns=1)
    commits = stage.send(Admit(1, PROMPT, 4, GREEDY, 4, drafter=True), turns=2)
    assert commits[1] == verdict(5, text[5:10], "bonus", drafted=4)


def test_early_drafts_that_were_drawn_at_random_are_not_kept() -> None:
    """They may have been drawn for an earlier admission, and partly rejected there."""
    stage = Stage()
    stage.send(offer(1, 4, [5], distributions=[Distribution([5], [1.0])]), turns=1)
    rejects = SamplingParams(max_tokens=12, verification="rejection", seed=1)
    stage.send(Admit(1, PROMPT, 4, rejects, 4, drafter=True), turns=0)
    stage.target._receive()
    (row,) = stage.target._rows.writers
    assert row.drafts.trie.best_length == 0


def admit_again(stage: Stage, link: LocalLink, **changes: Any) -> list[Commit]:
    """What another coordinator receives for the request of the stage's own, which has then begun its answer."""
    link.send("t", [replace(Admit(8, PROMPT, 4, GREEDY, 0, drafter=False, admission=2), **changes)])
    for _ in range(30):
        link.send("t", [Cancel(999)])
        stage.target.turn()
    return [message for _, message in link.receive(0) if isinstance(message, Commit)]


def test_a_request_that_is_resumed_takes_over_the_row_of_a_dead_coordinator() -> None:
    """Its text is not computed again, and its slot is free at once."""
    stage = Stage()
    another = stage.exchange.join("another")
    written = committed(stage.send(Admit(1, PROMPT, 4, GREEDY, 0, drafter=False), turns=5))
    stage.coordinator.close()
    stage.target.turn()
    commits = admit_again(stage, another)
    assert (commits[0].base, commits[0].admission) == (4, 2)
    assert len(commits[0].tokens) > len(written)
    assert committed([*commits]) == stage.text()[4:]
    assert commits[-1].finish == "length"
    assert [commit.base for commit in commits[1:]] == list(range(commits[1].base, commits[-1].base + 1))
    assert stage.target.load().active == 0


@pytest.mark.parametrize(
    ("dies", "changes"),
    [
        (False, {}),
        (True, {"params": SamplingParams(max_tokens=12, temperature=0, seed=5)}),
        (True, {"cache_salt": "another client's"}),
        (True, {"tokens": [5, 6, 7, 9]}),
    ],
    ids=["alive", "seed", "client", "prompt"],
)
def test_no_other_request_takes_over_a_row(dies: bool, changes: dict[str, Any]) -> None:
    stage = Stage()
    another = stage.exchange.join("another")
    stage.send(Admit(1, PROMPT, 4, GREEDY, 0, drafter=False), turns=5)
    if dies:
        stage.coordinator.close()
        stage.target.turn()
    commits = admit_again(stage, another, **changes)
    assert len(commits[0].tokens) == 1


@pytest.mark.parametrize(
    "hostile",
    [
        offer(1, 4, [1, 2], [-1]),
        offer(1, 4, [1, 2], [0, 5]),
        offer(1, 4, [1, 2], [-1, -7]),
        offer(1, 5, [1, 2], None, [math.nan, 7.0]),
        offer(1, 5, [1, 2], None, [0.0, -1.0]),
        offer(1, 5, [1, 2], [-1, -1], [0.5]),
        offer(1, 4, [VOCAB]),
        offer(1, 5, [2**40]),
        offer(1, 5, [-1]),
        offer(1, 99, [1]),
        offer(1, -5, [1]),
        offer(7, 5, [1]),
    ],
    ids=str,
)
def test_impossible_offers_change_nothing(hostile: Offer) -> None:
    stage = Stage()
    messages = stage.send(Admit(1, PROMPT, 4, GREEDY, 4, drafter=True), turns=1)

    def is_done() -> bool:
        messages.extend(stage.send(hostile, turns=1))
        return len(committed(messages)) == GREEDY.max_tokens

    wait_until(is_done, "all tokens")
    assert committed(messages) == stage.text()[4:]


def test_a_row_whose_drafter_is_gone_waits_for_no_drafts() -> None:
    stage = Stage()
    first = stage.send(Admit(1, PROMPT, 4, GREEDY, 4, drafter=True), turns=1)
    rest = stage.send(AttachDrafter(1, None), AttachDrafter(7, "d"), turns=11)
    assert committed([*first, *rest]) == stage.text()[4:]


@pytest.mark.parametrize(
    ("tokens", "max_tokens"),
    [([1] * 60, 5), ([], 5), ([1, VOCAB], 5), ([-1], 5)],
    ids=["long", "empty", "too large", "negative"],
)
def test_impossible_requests_fail_and_the_others_go_on(tokens: list[int], max_tokens: int) -> None:
    stage = Stage()
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    messages = stage.send(
        Admit(2, tokens, len(tokens), params, 0, drafter=False), Admit(1, PROMPT, 4, GREEDY, 0, drafter=False)
    )
    assert [message.request_id for message in messages if isinstance(message, Failed)] == [2]
    assert committed(messages) == stage.text()[4:]


def test_a_cancelled_request_frees_its_slot_for_the_next() -> None:
    stage = Stage()
    long = SamplingParams(max_tokens=50, temperature=0)
    stage.send(
        *(Admit(i, PROMPT, 4, long, 0, drafter=False) for i in (2, 3)),
        Admit(1, PROMPT, 4, GREEDY, 0, drafter=False),
        turns=2,
    )
    assert (stage.target.load().active, stage.target.load().waiting) == (2, 1)
    messages = stage.send(Cancel(2), Cancel(3))
    assert committed([m for m in messages if m.request_id == 1]) == stage.text()[4:]  # type: ignore[union-attr]
    assert stage.target.load().active == 0


def test_a_fault_while_a_request_is_taken_up_fails_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault such as one of a tokenizer that reads a leader's text."""

    def broken(*args: object) -> None:
        raise IndexError("piece id is out of range")

    stage = Stage()
    monkeypatch.setattr(MemberRow, "__init__", broken)
    messages = stage.send(
        Join(2, PROMPT, "leader", 4, admission=3, invitation=2), Admit(1, PROMPT, 4, GREEDY, 0, drafter=False)
    )
    assert [message for message in messages if isinstance(message, Failed)] == [
        Failed(2, "IndexError: piece id is out of range", admission=3, invitation=2)
    ]
    assert committed(messages) == stage.text()[4:]


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]], ids=["prefill", "no prefill"])
def test_all_time_counts_while_rows_are_decoded_and_no_other(
    monkeypatch: pytest.MonkeyPatch, prompt: list[int]
) -> None:
    """Messages are read before each step and during it. Those of drafters take time that plain decoding saves."""
    stage = Stage()
    rounds_s: list[float] = []
    monkeypatch.setattr(SpeculationPolicy, "note_round", lambda *given, **values: rounds_s.append(given[3]))
    receive = TargetInbox.receive

    def receive_slowly(inbox: TargetInbox, timeout_s: float) -> None:
        time.sleep(0.02)
        receive(inbox, timeout_s)

    monkeypatch.setattr(TargetInbox, "receive", receive_slowly)
    for request_id in (1, 2):
        time.sleep(1.0)
        stage.send(Admit(request_id, prompt, len(prompt), GREEDY, 0, drafter=False), turns=GREEDY.max_tokens + 1)
    assert len(rounds_s) == 2 * (GREEDY.max_tokens - (len(prompt) > 1))
    assert sorted(rounds_s)[2] >= 0.04  # the first of each request begin after its message
    assert max(rounds_s) < 1.0


def test_a_row_is_freed_without_a_garbage_collection() -> None:
    """What is kept of its text on the device goes with it."""
    row = TargetRow("coordinator", Admit(1, PROMPT, 4, GREEDY, 4, drafter=True), acceptance=0.5)
    history = ref(row.history)
    row.commit([1], rejected=False)
    gc.disable()
    try:
        del row
        assert history() is None
    finally:
        gc.enable()


def test_an_idle_target_keeps_no_table_of_penalised_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[ref[TextTable]] = []
    begin = TextTable.__init__

    def remember(table: TextTable, vocab_size: int, device: torch.device | str) -> None:
        begin(table, vocab_size, device)
        tables.append(ref(table))

    monkeypatch.setattr(TextTable, "__init__", remember)
    stage = Stage()
    penalised = SamplingParams(max_tokens=12, temperature=0, repetition_penalty=1.3)
    assert committed(stage.send(Admit(1, PROMPT, 4, penalised, 0, drafter=False)))
    gc.collect()
    assert tables
    assert [table() for table in tables] == [None] * len(tables)


def test_a_prediction_with_tokens_that_the_model_lacks_is_left_out() -> None:
    """A tokenizer may have more; running them would end all other requests."""
    stage = Stage()
    text = stage.text()
    for prediction in ([*text[4:], VOCAB], [-1, *text[4:]]):
        commits = stage.send(
            Admit(1, PROMPT, 4, GREEDY, 4, drafter=False, prediction=prediction, longest_draft=32),
            Remember([VOCAB, -5]),
        )
        assert committed(commits) == text[4:]
        assert not any(commit.drafted for commit in commits if isinstance(commit, Commit))
