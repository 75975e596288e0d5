"""The drafter alone, turn by turn: it offers its own continuation of the committed text."""

import random
from functools import partial

import pytest
import torch

from actors.drafter.loop import Drafter, Shares
from actors.wire.link import LocalExchange, LocalLink
from actors.wire.messages import Admit, Advance, Cancel, Failed, Message, Offer, ReplicaAddress, ResendRequest
from decoding.errors import OutOfPagesError
from decoding.sampling.params import SamplingParams
from engine.model.runner import Runner
from tests.support.advance import advance
from tests.support.models import tiny_model

PROMPT = [5, 6, 7, 8]
admit = partial(Admit, target=ReplicaAddress("t", "target"))
GREEDY = SamplingParams(max_tokens=40, temperature=0)


class Stage:
    """A tiny drafter, and the coordinator's and the target's ends of its link."""

    def __init__(self) -> None:
        exchange = LocalExchange()
        self.coordinator: LocalLink = exchange.join("coordinator")
        self.target = exchange.join("t")
        self.model = tiny_model("llama-gqa")
        self.link = exchange.join("d")
        self.drafter = Drafter(Runner(self.model, slots=2, max_length=64, max_query=32), self.link)
        self.requests: list[ResendRequest] = []  # sent with its last offers

    def say(self, *messages: Message) -> list[Offer]:
        """Return its offers after a few turns."""
        self.coordinator.send("d", [message for message in messages if not isinstance(message, Advance)])
        self.target.send("d", [message for message in messages if isinstance(message, Advance)])
        for _ in range(20):
            self.coordinator.send("d", [Cancel(999)])  # something to receive, so that no turn waits
            self.drafter.turn()
        received = [message for _, message in self.target.receive(0)]
        self.requests = [message for message in received if isinstance(message, ResendRequest)]
        return [message for message in received if isinstance(message, Offer)]

    @torch.no_grad()
    def continuation(self, tokens: list[int], count: int) -> list[int]:
        for _ in range(count):
            tokens = [*tokens, int(self.model(torch.tensor([tokens])).logits[0, -1].argmax())]
        return tokens[-count:]


def paths(offer: Offer) -> list[list[int]]:
    """Return the path to each of the offer's tokens."""
    offered: list[list[int]] = []
    assert offer.parents is not None
    for token, parent in zip(offer.tokens, offer.parents, strict=True):
        offered.append([*(offered[parent] if parent >= 0 else []), token])
    return offered


def longest(offers: list[Offer]) -> tuple[int, list[int]]:
    """Return the first of the longest paths: the chain, which comes before alternatives."""
    return max(
        ((offer.base, path) for offer in offers for path in paths(offer)), key=lambda offer_path: len(offer_path[1])
    )


def test_it_runs_ahead_up_to_its_lookahead() -> None:
    stage = Stage()
    base, tokens = longest(stage.say(admit(1, PROMPT, 4, GREEDY, 3, drafter=True)))
    assert base == 4
    assert len(tokens) > 3
    assert tokens == stage.continuation(PROMPT, len(tokens))
    assert stage.say() == []


def test_an_agreeing_verdict_extends_its_draft() -> None:
    stage = Stage()
    _, first = longest(stage.say(admit(1, PROMPT, 4, GREEDY, 3, drafter=True)))
    base, tokens = longest(stage.say(advance(1, 4, first[:4], 3)))
    assert base == 8
    assert tokens == stage.continuation([*PROMPT, *first[:4]], len(tokens))


def test_after_a_rejection_it_starts_from_the_true_token() -> None:
    stage = Stage()
    _, first = longest(stage.say(admit(1, PROMPT, 4, GREEDY, 3, drafter=True)))
    verdict = [first[0], (first[1] + 1) % 64]
    base, tokens = longest(stage.say(advance(1, 4, verdict, 3)))
    assert base == 6
    assert tokens == stage.continuation([*PROMPT, *verdict], len(tokens))


def test_a_verdict_beyond_its_draft_is_followed_and_a_repeated_one_changes_nothing() -> None:
    stage = Stage()
    stage.say(admit(1, PROMPT, 4, GREEDY, 1, drafter=True))
    verdict = advance(1, 4, list(range(20, 32)), 3)
    base, tokens = longest(stage.say(verdict))
    assert base == 16
    assert tokens == stage.continuation([*PROMPT, *range(20, 32)], len(tokens))
    assert stage.say(verdict) == []


def test_it_does_not_draft_beyond_the_end_of_the_request() -> None:
    stage = Stage()
    params = SamplingParams(max_tokens=2, temperature=0)
    _, tokens = longest(stage.say(admit(1, PROMPT, 4, params, 8, drafter=True)))
    assert len(tokens) <= 3
    eos = stage.continuation(PROMPT, 1)[0]
    params = SamplingParams(max_tokens=30, temperature=0, eos_token_ids=(eos,))
    offered = [path for offer in stage.say(admit(2, PROMPT, 4, params, 8, drafter=True)) for path in paths(offer)]
    assert [eos] in offered
    assert all(eos not in path[:-1] for path in offered)


def test_a_text_that_is_too_long_for_it_is_not_drafted() -> None:
    stage = Stage()
    assert stage.say(admit(1, [1] * 64, 64, GREEDY, 4, drafter=True)) == []
    load = stage.drafter.load()
    assert (load.active, load.waiting, load.used_pages) == (0, 0, 0)


def test_a_cancelled_request_frees_its_slot() -> None:
    stage = Stage()
    stage.say(*(admit(i, PROMPT, 4, GREEDY, 2, drafter=True) for i in range(3)))
    assert (stage.drafter.load().active, stage.drafter.load().waiting) == (2, 1)
    assert longest(stage.say(Cancel(0)))[0] == 4
    stage.say(Cancel(1), Cancel(2))
    assert stage.drafter.load().active == 0


def test_a_prompt_after_which_nothing_is_drafted_delays_no_other_with_its_pages() -> None:
    stage = Stage()
    prompt = list(range(40))
    ended = SamplingParams(max_tokens=20, temperature=0, stop_token_ids=(39,))
    assert stage.say(admit(1, prompt, 40, ended, 3, drafter=True)) == []
    base, tokens = longest(stage.say(admit(2, prompt, 40, GREEDY, 3, drafter=True)))
    assert (base, tokens) == (40, stage.continuation(prompt, len(tokens)))


def test_it_asks_again_for_what_was_lost() -> None:
    stage = Stage()
    stage.say(admit(1, PROMPT, 4, GREEDY, 3, drafter=True))
    assert stage.say(advance(1, 9, [1])) == []
    assert stage.requests == [ResendRequest(1, "coordinator", 4)]
    base, _ = longest(stage.say(advance(1, 4, [1, 2, 3, 4, 5, 1])))
    assert base == 10
    assert stage.requests == []


def test_what_comes_from_an_earlier_admission_changes_nothing() -> None:
    stage = Stage()
    stage.say(admit(1, PROMPT, 4, GREEDY, 3, drafter=True, admission=2))
    assert stage.say(advance(1, 4, [1, 2], admission=1), advance(1, 9, [1], admission=0)) == []
    assert stage.requests == []


def test_a_request_whose_latest_admission_was_lost_is_no_longer_reported() -> None:
    """So its coordinator notices. It is not given back: the admission may only be late."""
    stage = Stage()
    stage.say(admit(1, PROMPT, 4, GREEDY, 3, drafter=True, admission=2))
    stage.coordinator.receive(0)
    stage.say(advance(1, 4, [1, 2], admission=3))
    assert not any(isinstance(message, Failed) for _, message in stage.coordinator.receive(0))
    assert stage.drafter.load("coordinator").request_ids == []


@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "its cancellation was lost"])
def test_an_update_that_overtakes_its_admission_is_applied_after_it(cancelled: bool) -> None:
    """The coordinator and the target have links of their own, so either message may be first."""
    stage = Stage()
    stage.say(admit(1, PROMPT, 4, GREEDY, 3, drafter=True, admission=0))
    stage.coordinator.receive(0)
    assert stage.say(advance(1, 4, [9, 9], admission=1)) == []
    again = admit(1, PROMPT, 4, GREEDY, 3, drafter=True, admission=1)
    base, tokens = longest(stage.say(*([Cancel(1), again] if cancelled else [again])))
    assert (base, tokens) == (6, stage.continuation([*PROMPT, 9, 9], len(tokens)))
    assert stage.requests == []
    assert not any(isinstance(message, Failed) for _, message in stage.coordinator.receive(0))


def test_a_rest_that_overtakes_the_admission_costs_no_offers() -> None:
    stage = Stage()
    assert stage.say(advance(1, 4, [], 0)) == []
    assert stage.say(admit(1, PROMPT, 4, GREEDY, 3, drafter=True)) == []


def test_an_early_update_of_another_admission_or_target_changes_nothing() -> None:
    stage = Stage()
    stage.say(advance(1, 4, [9], admission=1), advance(2, 4, [9]))
    stage.say(admit(1, PROMPT, 4, GREEDY, 3, drafter=True, admission=2))
    elsewhere = ReplicaAddress("t2", "target")
    stage.say(Admit(2, PROMPT, 4, GREEDY, 3, drafter=True, target=elsewhere))
    assert [row.tokens for row in stage.drafter._rows] == [PROMPT, PROMPT]


@pytest.mark.parametrize("rejected_at", [0, 4, 5, 6])
def test_under_rejection_sampling_it_starts_a_new_tree_after_an_unknown_rejection(rejected_at: int) -> None:
    stage = Stage()
    params = SamplingParams(max_tokens=40, temperature=1, seed=3, verification="rejection")
    base, drafted = longest(stage.say(admit(1, PROMPT, 4, params, 3, drafter=True)))
    assert base == 4
    stage.say(advance(1, 4, drafted[:2], 3, rejected_at=rejected_at))
    (row,) = stage.drafter._rows
    assert row.restarted_at == (6 if rejected_at > 4 else 4)


def test_text_that_it_cannot_read_gives_the_request_back() -> None:
    stage = Stage()
    stage.say(admit(1, PROMPT, 4, GREEDY, 3, drafter=True))
    stage.target.send("d", [advance(1, 4, [10**6])])
    stage.drafter.turn()
    assert isinstance(stage.coordinator.receive(0)[-1][1], Failed)
    assert stage.drafter.load().active == 0


def test_it_rests_while_drafts_do_not_pay_and_resumes_when_they_do() -> None:
    stage = Stage()
    _, first = longest(stage.say(admit(1, PROMPT, 4, GREEDY, 3, drafter=True)))
    text = [*PROMPT, *first[:1]]
    wrong = (stage.continuation(text, 1)[0] + 1) % stage.model.config.vocab_size
    assert stage.say(advance(1, 4, [first[0], wrong], 0)) == []
    base, tokens = longest(stage.say(advance(1, 6, [9], 1)))
    assert base == 7
    assert tokens == stage.continuation([*text, wrong, 9], 3)


def test_updates_without_text_let_it_rest_and_go_on() -> None:
    stage = Stage()
    assert stage.say(admit(1, PROMPT, 4, GREEDY, 0, drafter=True)) == []
    base, tokens = longest(stage.say(advance(1, 4, [], 1)))
    assert (base, tokens) == (4, stage.continuation(PROMPT, 3))
    assert stage.say(advance(1, 4, [], 0), advance(1, 4, tokens, 0)) == []
    assert longest(stage.say(advance(1, 7, [], 1))) == (7, stage.continuation([*PROMPT, *tokens], 3))


def test_what_follows_an_alternative_is_there_before_the_verdict() -> None:
    stage = Stage()
    offers = stage.say(admit(1, PROMPT, 4, GREEDY, 3, drafter=True))
    _, chain = longest(offers)
    offered = [path for offer in offers for path in paths(offer)]
    beside = [path for path in offered if len(path) > 1 and path[0] != chain[0]]
    assert beside
    assert all([path[0], *stage.continuation([*PROMPT, path[0]], 1)] in beside for path in beside)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_after_any_verdicts_its_chain_is_its_own_continuation(seed: int) -> None:
    """Verdicts that agree, take an alternative, or something else, up to the end of the slot."""
    stage = Stage()
    rng = random.Random(seed)
    params = SamplingParams(max_tokens=60, temperature=0)
    offers = stage.say(admit(1, PROMPT, 4, params, 4, drafter=True))
    offered: set[tuple[int, ...]] = set()
    text = list(PROMPT)
    while True:
        offered |= {(*text[: offer.base], *path) for offer in offers for path in paths(offer)}
        ahead = stage.continuation(text, max(0, min(5, 64 - len(text))))
        for count in range(1, len(ahead) + 1):
            assert (*text, *ahead[:count]) in offered
        below = [path[len(text) :] for path in sorted(offered) if list(path[: len(text)]) == text]
        verdict = rng.choice([[*rng.choice(below), 3], rng.choice(below), ahead[:2], [rng.randrange(64)]])
        verdict = list(verdict)[: rng.randint(1, 6)]
        if len(text) + len(verdict) > 60:
            return
        offers = stage.say(advance(1, len(text), verdict))
        text += verdict


@pytest.mark.parametrize("tokens", [[], [-1], [10**6]], ids=str)
def test_requests_that_it_cannot_read_are_given_back(tokens: list[int]) -> None:
    stage = Stage()
    stage.coordinator.send("d", [admit(1, tokens, len(tokens), GREEDY, 3, drafter=True)])
    stage.drafter.turn()
    assert Failed in [type(message) for _, message in stage.coordinator.receive(0)]
    assert stage.drafter.load().active == 0


def test_it_connects_to_targets_and_disconnects_from_those_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    calls: list[str] = []
    monkeypatch.setattr(stage.link, "connect", lambda address: calls.append(f"connect {address.name}"))
    monkeypatch.setattr(stage.link, "disconnect", lambda name: calls.append(f"disconnect {name}"))
    first, second = ReplicaAddress("t", "target"), ReplicaAddress("t2", "target")
    stage.say(*(Admit(i, PROMPT, 4, GREEDY, 3, drafter=True, target=first) for i in (1, 2)))
    stage.say(Cancel(1), Admit(3, PROMPT, 4, GREEDY, 3, drafter=True, target=second))
    assert calls == ["connect t", "connect t2"]
    stage.say(Admit(2, PROMPT, 4, GREEDY, 3, drafter=True, target=second), Cancel(3))
    assert calls == ["connect t", "connect t2"]
    stage.say(Admit(4, PROMPT, 4, GREEDY, 3, drafter=True, target=ReplicaAddress("t3", "target")))
    assert calls == ["connect t", "connect t2", "disconnect t", "connect t3"]


def test_a_row_that_others_displaced_in_the_same_turn_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of prompts and chains are two forwards. If the first lacks pages, a row of the second may lose its own."""
    stage = Stage()
    drafter = stage.drafter
    stage.coordinator.send("d", [admit(number, PROMPT, 4, GREEDY, 4, drafter=True) for number in (1, 2)])
    drafter.turn()
    step, calls = drafter._step, []

    def run(shares: Shares) -> None:
        calls.append([share.row.slot for share in shares])
        if len(calls) == 1:
            raise OutOfPagesError("no pages")
        step(shares)

    monkeypatch.setattr(drafter, "_parts", lambda shares: [[share] for share in shares])
    monkeypatch.setattr(drafter, "_step", run)
    drafter.turn()
    assert calls == [[0]]
    drafter.turn()  # without the row that made room
    assert calls == [[0], [0]]
    drafter.turn()
    assert calls[2:] == [[0], [1]]
