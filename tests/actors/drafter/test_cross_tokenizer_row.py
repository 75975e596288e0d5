"""A drafter with another tokenizer, turn by turn: it offers the right text, and its slots stay right."""

import random
from collections.abc import Callable, Sequence

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from actors.drafter.cross_tokenizer_row import CrossTokenizerRow
from actors.drafter.loop import Drafter
from actors.loops.options import LoopOptions
from actors.wire.link import LocalExchange
from actors.wire.messages import Admit, Advance, Cancel, Failed, Message, Offer, ReplicaAddress, ResendRequest
from decoding.drafts.trie import DraftTrie
from decoding.sampling.params import SamplingParams
from decoding.tokenizers.draft_mapping import DraftMapping
from decoding.tokenizers.text_aligner import TextAligner
from engine.loading.tokenizers import speller_of
from tests.support import tokenizers
from tests.support.advance import advance
from tests.support.byte_level import byte_level_tokenizer
from tests.support.knowing_runner import KnowingRunner
from tests.support.tokenizers import HARD_TEXTS, bundled_tokenizer, held_out_texts, sentencepiece_tokenizer

TARGET = speller_of(AutoTokenizer.from_pretrained("models/target"), 2048)
OTHERS = [sentencepiece_tokenizer, byte_level_tokenizer, bundled_tokenizer]
PROMPT = "def first(self):\n    return"
GREEDY = SamplingParams(max_tokens=400, temperature=0, eos_token_ids=(2,))
EOS = 2


class Stage:
    """A drafter that continues some texts, the other ends of its link, and the trie of its target."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str], *, max_length: int = 512) -> None:
        exchange = LocalExchange()
        self.coordinator = exchange.join("coordinator")
        self.target = exchange.join("t")
        self.speller = tokenizers.speller_of(tokenizer)
        self.runner = KnowingRunner(self.speller, [text.encode() for text in texts], slots=2, max_length=max_length)
        draft_mappings = {"target": DraftMapping.build(TARGET, self.speller)}
        self.drafter = Drafter(self.runner, exchange.join("d"), LoopOptions(draft_mappings=draft_mappings))
        self.trie = DraftTrie([])

    def admit(self, tokens: list[int], params: SamplingParams = GREEDY, draft_length: int = 4) -> list[Message]:
        self.trie = DraftTrie(list(tokens))
        target = ReplicaAddress("t", "target")
        return self.say(Admit(1, tokens, len(tokens), params, draft_length, drafter=True, target=target))

    def commit(self, base: int, tokens: list[int]) -> list[Message]:
        self.trie.commit(tokens)
        return self.say(advance(1, base, tokens))

    def say(self, *messages: Message) -> list[Message]:
        """Return what it sends within some turns; offers also go to the trie."""
        self.coordinator.send("d", [message for message in messages if not isinstance(message, Advance)])
        self.target.send("d", [message for message in messages if isinstance(message, Advance)])
        for _ in range(30):
            self.coordinator.send("d", [Cancel(999)])  # something to receive, so that no turn waits
            self.drafter.turn()
        sent = [message for link in (self.coordinator, self.target) for _, message in link.receive(0)]
        for offer in sent:
            if isinstance(offer, Offer):
                self.trie.offer(offer.base, offer.tokens, offer.parents, offer.probabilities)
        return sent

    def check_slots(self) -> None:
        """The first columns of each slot contain the row's text; later ones do not matter."""
        for row in self.drafter._rows:
            assert self.runner.columns[row.slot][: row.cached_prefix] == row.tokens[: row.cached_prefix]
            assert row.cached_prefix <= row.cached <= len(row.tokens)


def roll_out(stage: Stage, prompt: str, answer: str, sizes: Sequence[int]) -> tuple[int, int]:
    """Commit verdicts of these sizes until the answer is complete. Returns right draft tokens, and wanted ones."""
    text = TARGET.encode(prompt)
    rest = TARGET.encode(prompt + answer)[len(text) :]
    assert TARGET.vocabulary.decode_bytes([*text, *rest]) == (prompt + answer).encode()
    stage.admit(text)
    right = asked = turn = 0
    while rest:
        wanted = rest[:4]
        path = stage.trie.best_path(len(wanted))
        agree = [a == b for a, b in zip(path, wanted, strict=False)]
        right, asked = right + [*agree, False].index(False), asked + len(wanted)
        count = sizes[turn % len(sizes)]
        stage.commit(len(text), rest[:count])
        stage.check_slots()
        text, rest, turn = text + rest[:count], rest[count:], turn + 1
    return right, asked


@pytest.mark.parametrize("tokenizer", OTHERS)
def test_it_offers_the_text_that_it_predicts(tokenizer: Callable[[], Tokenizer]) -> None:
    right = asked = 0
    for number, text in enumerate([*held_out_texts()[:6], *HARD_TEXTS[:3]]):
        stage = Stage(tokenizer(), [PROMPT + text])
        counts = roll_out(stage, PROMPT, text, random.Random(number).choices(range(1, 6), k=7))
        right, asked = right + counts[0], asked + counts[1]
    assert right > 0.75 * asked


@pytest.mark.parametrize("tokenizer", OTHERS)
@pytest.mark.parametrize("seed", [0, 1])
def test_its_slots_are_right_whatever_is_committed(tokenizer: Callable[[], Tokenizer], seed: int) -> None:
    """Offered tokens, other tokens, halves of characters, control tokens."""
    rng = random.Random(seed)
    text = PROMPT + held_out_texts()[0]
    stage = Stage(tokenizer(), [text])
    length = len(TARGET.encode(PROMPT))
    stage.admit(TARGET.encode(PROMPT))
    for _ in range(40):
        verdict = [
            stage.trie.best_path(rng.randint(1, 6)),
            [rng.randrange(2048) for _ in range(rng.randint(1, 3))],
            TARGET.encode(rng.choice(["漢字", " word", "\n\n  ", "é.", "x"]))[: rng.randint(1, 4)],
            [rng.choice([0, 1, 4, 5])],
        ][rng.choice([0, 0, 0, 1, 2, 3])] or [300]
        assert not any(isinstance(message, Failed) for message in stage.commit(length, verdict))
        length += len(verdict)
        stage.check_slots()


def test_half_a_word_leaves_the_draft_of_the_whole() -> None:
    """The drafter's token is longer than the target's: drafts below it stay."""
    stage = Stage(sentencepiece_tokenizer(), [PROMPT + " the file and the file again, and the file again"])
    prompt = TARGET.encode(PROMPT)
    stage.admit(prompt)
    (row,) = stage.drafter._rows
    longest = max((row.tree.root, *row.tree.root.descendants()), key=lambda node: node.position)
    halves = TARGET.encode(" t")
    stage.commit(len(prompt), halves)
    assert longest in row.tree.root.descendants()
    rest = TARGET.vocabulary.decode_bytes(stage.trie.best_path(4))
    assert rest.startswith(b"he file"), rest


def test_a_word_that_may_go_on_has_a_lower_probability_until_it_does() -> None:
    stage = Stage(byte_level_tokenizer(), [PROMPT + " return"])
    offers = [message for message in stage.admit(TARGET.encode(PROMPT)) if isinstance(message, Offer)]
    offered = [dict(zip(offer.tokens, offer.probabilities or [], strict=True)) for offer in offers]
    early = offers[0].tokens[0]
    assert b" return".startswith(TARGET.vocabulary.decode_bytes([early]))
    assert [early] != TARGET.encode(" return")
    assert offered[0][early] > 0.4
    assert next(probabilities[early] for probabilities in reversed(offered) if early in probabilities) < 0.1
    assert stage.trie.best_path(1) == TARGET.encode(" return")


def test_offers_are_not_repeated() -> None:
    stage = Stage(sentencepiece_tokenizer(), [PROMPT + " nothing"])
    assert len(stage.admit(TARGET.encode(PROMPT))) < 12


def test_after_a_rejection_all_is_offered_again() -> None:
    """Rejection sampling has emptied the target's trie."""
    stage = Stage(sentencepiece_tokenizer(), [PROMPT + " the file and the file again"])
    prompt, verdict = TARGET.encode(PROMPT), TARGET.encode(" the")
    stage.admit(prompt, SamplingParams(max_tokens=400, temperature=0.5, verification="rejection"))
    stage.trie = DraftTrie([*prompt, *verdict])
    stage.say(advance(1, len(prompt), verdict, rejected_at=len(prompt) + len(verdict)))
    (row,) = stage.drafter._rows
    assert isinstance(row, CrossTokenizerRow)
    draft = stage.trie.best_draft(1000, 64)
    assert set(row._offered) == set(draft.paths())
    assert stage.trie.best_path(2) == TARGET.encode(" file and")


def test_a_tokenizer_that_takes_back_what_it_wrote_does_no_harm() -> None:
    stage = Stage(byte_level_tokenizer(), [PROMPT])
    encode = stage.speller.encode
    stage.speller.encode = lambda text: encode(text.replace("~", ""))[: -text.count("~") or None]
    prompt, erased = TARGET.encode(PROMPT), TARGET.encode("~")
    stage.admit(prompt)
    stage.commit(len(prompt), erased)
    stage.check_slots()
    stage.commit(len(prompt) + 1, TARGET.encode("x"))
    stage.check_slots()


def test_the_end_is_offered_in_the_targets_way() -> None:
    stage = Stage(sentencepiece_tokenizer(), [PROMPT + " None"])
    stage.admit(TARGET.encode(PROMPT))
    assert stage.trie.best_path(8) == [*TARGET.encode(" None"), EOS]


def test_it_asks_again_for_text_that_was_lost() -> None:
    prompt = TARGET.encode(PROMPT)
    stage = Stage(sentencepiece_tokenizer(), [PROMPT])
    stage.admit(prompt)
    assert ResendRequest(1, "coordinator", len(prompt)) in stage.say(advance(1, len(prompt) + 3, [300]))


def test_unknown_tokens_give_the_request_back() -> None:
    prompt = TARGET.encode(PROMPT)
    stage = Stage(sentencepiece_tokenizer(), [PROMPT])
    stage.admit(prompt)
    assert any(isinstance(message, Failed) for message in stage.say(advance(1, len(prompt), [2048])))
    assert stage.drafter.load().active == 0


@pytest.mark.parametrize("tokens", [[], [-1], [2048], TARGET.encode("x " * 200)], ids=lambda t: str(t[:2]))
def test_texts_that_it_cannot_read_are_given_back(tokens: list[int]) -> None:
    stage = Stage(byte_level_tokenizer(), [], max_length=64)
    assert any(isinstance(message, Failed) for message in stage.admit(tokens))
    assert stage.drafter.load().active == 0


def test_at_the_end_of_its_slot_it_rests() -> None:
    text = PROMPT + held_out_texts()[0]
    stage = Stage(byte_level_tokenizer(), [text], max_length=len(PROMPT) + 30)
    right, asked = roll_out(stage, PROMPT, held_out_texts()[0], [3])
    assert 0 < right < asked


@pytest.mark.parametrize("method", ["commit", "translate"])
def test_a_fault_of_a_tokenizer_ends_no_other_request(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the text can't be read, the request is given back; if a draft can't be translated, there is none."""

    def broken(aligner: TextAligner, tokens: Sequence[int]) -> None:
        raise IndexError("piece id is out of range")

    tokens = TARGET.encode(PROMPT)
    stage = Stage(sentencepiece_tokenizer(), [PROMPT + " first"])
    stage.admit(tokens)
    with monkeypatch.context() as patch:
        patch.setattr(TextAligner, method, broken)
        target = ReplicaAddress("t", "target")
        sent = stage.say(
            Admit(2, tokens, len(tokens), GREEDY, 4, drafter=True, target=target, admission=3),
            advance(1, len(tokens), TARGET.encode(" first")[:1]),
        )
    failed = [(message.request_id, message.admission) for message in sent if isinstance(message, Failed)]
    assert sorted(failed) == ([(1, 0), (2, 3)] if method == "commit" else [])
    assert any(isinstance(message, Offer) for message in stage.admit(tokens))
