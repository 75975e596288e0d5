"""Which proposers are asked before a step: the set that is fastest; whose answers n-gram look-up sees."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from actors.loops.row import RowKey
from actors.verifier import proposers
from actors.verifier.proposers import Delay, Proposer, ProposerChoice, TextLookup
from actors.verifier.rows import TargetRows, Verification
from actors.wire.messages import Admit
from decoding.drafts.corpus import Corpus
from decoding.drafts.draft import ProposerName, Proposers
from decoding.drafts.options import CorpusOptions, NgramOptions
from decoding.drafts.verification import Verdict
from decoding.sampling.params import SamplingParams
from engine.model.page_tables import PageTables

STEP_S = 0.04
CLOCK = [0.0]  # seconds
STEPS = 6_000
LENGTH = 4


class Simulated(Proposer):
    """A proposer that has the text's next tokens with some probability each."""

    def __init__(self, name: ProposerName, rate: float, seconds: float, *, rests_alone: bool = True) -> None:
        self.name, self.rate, self.seconds, self.rests_alone = name, rate, seconds, rests_alone
        self.delay = Delay(seconds / LENGTH, seconds / LENGTH)
        self.log: list[Simulated] = []  # shared by all, in the order in which they are asked

    def drafts_for(self, row: Any) -> bool:
        return True

    def propose(self, rows: Sequence[Any]) -> set[RowKey]:
        self.log.append(self)
        CLOCK[0] += self.seconds
        return {row.key for row in rows}


@pytest.fixture(autouse=True)
def _virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposers, "time", SimpleNamespace(perf_counter=lambda: CLOCK[0]))


def speed(proposers: Sequence[Simulated], *, overlap: float, adaptive: bool, seed: int = 0) -> float:
    """Return tokens per second. overlap: how often two proposers are right about the same tokens."""
    chosen, rng = ProposerChoice(proposers, adaptive=adaptive), random.Random(seed)
    rows: Any = [SimpleNamespace(key=("c", 1))]
    asked: list[Simulated] = []
    for each in proposers:
        each.log = asked
    tokens = seconds = 0.0
    for _ in range(STEPS):
        asked.clear()
        chosen.propose(rows, STEP_S)
        path: list[Proposers] = []
        for _ in range(LENGTH):
            shared = rng.random()
            draws = {each.name: shared if rng.random() < overlap else rng.random() for each in proposers}
            right = [each.name for each in asked if draws[each.name] < each.rate]
            if not right:
                break
            path.append(tuple(right))
        seconds += STEP_S + sum(each.seconds for each in asked)
        tokens += 1 + len(path)
        draft: Any = SimpleNamespace(proposers=path)
        verdict = Verdict(list(range(len(path))), 0, rejected=False)
        chosen.learn([Verification(rows[0], draft, range(0), None)], [verdict])
    return tokens / seconds


@pytest.mark.parametrize("overlap", [0.0, 0.8])
@pytest.mark.parametrize(
    ("drafter", "heads"),
    [
        ((0.6, 0.017), (0.55, 0.004)),
        ((0.8, 0.01), (0.3, 0.01)),
        ((0.5, 0.002), (0.5, 0.002)),
        ((0.1, 0.03), (0.1, 0.03)),
        ((0.51, 0.02), (0.56, 0.012)),
    ],
)
def test_a_mixture_is_as_fast_as_the_best_of_its_parts(
    drafter: tuple[float, float], heads: tuple[float, float], overlap: float
) -> None:
    def proposers() -> list[Simulated]:
        return [Simulated("drafter", *drafter), Simulated("eagle3", *heads)]

    shares: list[float] = []
    for seed in range(3):
        alone = [speed([each], overlap=overlap, adaptive=False, seed=seed) for each in proposers()]
        both = speed(proposers(), overlap=overlap, adaptive=False, seed=seed)
        mixed = speed(proposers(), overlap=overlap, adaptive=True, seed=seed)
        shares.append(mixed / max(*alone, both, 1 / STEP_S))
    assert min(shares) >= 0.97


def test_a_proposer_that_does_not_rest_alone_is_always_asked_if_it_is_the_only_one() -> None:
    useless = Simulated("drafter", 0.0, 0.04, rests_alone=False)
    assert speed([useless], overlap=0.0, adaptive=True) == pytest.approx(0.5 / STEP_S)


def test_a_proposer_that_still_reads_a_prompt_is_not_judged() -> None:
    """Otherwise it would rest before its first draft."""
    heads, drafter = Simulated("eagle3", 0.5, 0.004), Simulated("drafter", 0.5, 0.004)
    drafter.propose = lambda rows: set()  # type: ignore[method-assign]
    chosen = ProposerChoice([drafter, heads], adaptive=True)
    row: Any = SimpleNamespace(key=("c", 1))
    verification: Any = Verification(row, SimpleNamespace(proposers=[("eagle3",)]), range(0), None)  # type: ignore[arg-type]
    for _ in range(100):
        chosen.propose([row], STEP_S)
        chosen.learn([verification], [Verdict([0], 0, rejected=False)])
    del drafter.propose
    chosen.propose([row], STEP_S)
    assert drafter.log == [drafter]


def test_rows_that_had_no_draft_do_not_count_against_a_proposer() -> None:
    """Prompts that end in a step commit a token each, and no proposer could have drafted for them."""
    heads = Simulated("eagle3", 1.0, 0.01)
    chosen = ProposerChoice([heads], adaptive=True)
    row, ending = (SimpleNamespace(key=("c", number)) for number in (1, 2))
    for _ in range(200):
        chosen.propose([row], STEP_S)  # type: ignore[list-item]
        drafted: Any = Verification(row, SimpleNamespace(proposers=[("eagle3",)]), range(0), None)  # type: ignore[arg-type]
        others: Any = [Verification(ending, SimpleNamespace(proposers=[]), range(0), None)] * 32  # type: ignore[arg-type]
        verdicts = [Verdict([0], 0, rejected=False), *[Verdict([], 0, rejected=False)] * 32]
        chosen.learn([drafted, *others], verdicts)
    assert len(heads.log) == 200


def test_one_row_with_drafts_does_not_delay_many_without() -> None:
    """What a call costs, all rows of the step pay."""
    heads = Simulated("eagle3", 1.0, 0.3 * STEP_S)
    heads.drafts_for = lambda row: row.key == ("c", 0)  # type: ignore[method-assign]
    chosen = ProposerChoice([heads], adaptive=True)
    rows: Any = [SimpleNamespace(key=("c", number)) for number in range(16)]
    for _ in range(200):
        chosen.propose(rows, STEP_S)
        drafts: Any = [SimpleNamespace(proposers=[("eagle3",)]), *[SimpleNamespace(proposers=[])] * 15]
        verdicts = [Verdict([0], 0, rejected=False), *[Verdict([], 0, rejected=False)] * 15]
        chosen.learn([Verification(*pair, range(0), None) for pair in zip(rows, drafts, strict=True)], verdicts)
    assert len(heads.log) < 50


def test_the_time_of_draft_tokens_is_known_once_all_that_are_asked_have_warmed_up() -> None:
    heads, drafter = Simulated("eagle3", 0.5, 0.004), Simulated("drafter", 0.5, 0.008)
    chosen = ProposerChoice([drafter, heads], adaptive=False)
    row: Any = SimpleNamespace(key=("c", 1))
    assert chosen.propose([row], STEP_S) is None
    assert chosen.propose([row], STEP_S) == pytest.approx(Delay(0.012 / LENGTH, 0.012 / LENGTH))
    drafter.propose = lambda rows: set()  # type: ignore[method-assign]
    assert chosen.propose([row], STEP_S) is None


def rests(chosen: ProposerChoice, heads: Simulated, rows: Any) -> bool:
    """Take a step in which all drafts are wrong. Returns whether the heads were not asked."""
    asked = len(heads.log)
    chosen.propose(rows, STEP_S)
    verifications: Any = [Verification(row, SimpleNamespace(proposers=[]), range(0), None) for row in rows]  # type: ignore[arg-type]
    chosen.learn(verifications, [Verdict([], 0, rejected=True)] * len(rows))
    return len(heads.log) == asked


def test_what_rests_in_large_batches_is_asked_in_small_ones() -> None:
    heads = Simulated("eagle3", 0.0, 0.04)
    chosen = ProposerChoice([heads], adaptive=True)
    alone, many = ([SimpleNamespace(key=("c", index)) for index in range(count)] for count in (1, 64))
    for _ in range(600):
        rests(chosen, heads, many)
    assert rests(chosen, heads, many)
    assert not rests(chosen, heads, alone)


def test_a_trial_of_speculation_is_one_of_drafts() -> None:
    """Else plain decoding would be compared with plain decoding."""
    heads = Simulated("eagle3", 0.0, 0.04)
    chosen = ProposerChoice([heads], adaptive=True)
    rows: Any = [SimpleNamespace(key=("c", 1))]
    while not rests(chosen, heads, rows):
        pass
    chosen.skip()
    chosen.propose(rows, STEP_S)
    asked = len(heads.log)
    chosen.propose(rows, STEP_S, trying=True)
    assert len(heads.log) == asked + 1


def test_what_did_not_pay_is_tried_again() -> None:
    heads = Simulated("eagle3", 0.0, 0.04)
    chosen = ProposerChoice([heads], adaptive=True)
    rows: Any = [SimpleNamespace(key=("c", 1))]
    rested = [rests(chosen, heads, rows) for _ in range(6000)]
    assert 0 < rested[3000:].count(False) < 0.03 * 3000


@pytest.mark.parametrize("slow_call", [1, 2, 5, 200])
def test_a_slow_call_shuts_no_proposer_out(monkeypatch: pytest.MonkeyPatch, slow_call: int) -> None:
    """A second in which the machine did something else is no reason to think that a proposer takes so long."""
    heads = Simulated("eagle3", 0.6, 0.004)
    propose = heads.propose
    calls: list[int] = []

    def delayed(rows: Sequence[Any]) -> set[RowKey]:
        CLOCK[0] += len(calls) == slow_call
        calls.append(1)
        return propose(rows)

    monkeypatch.setattr(heads, "propose", delayed)
    speed([heads], overlap=0.0, adaptive=True)
    assert len(calls) >= 0.98 * STEPS


def test_rejection_sampling_and_salts_never_see_other_answers() -> None:
    """Other answers may have the same seed, or be secret."""
    lookup = TextLookup(TargetRows(PageTables(slots=2, capacity=64)), Corpus(CorpusOptions(1000)))

    def drafts(params: SamplingParams, *, salt: str = "", corpus: bool = True) -> list[int]:
        admit = Admit(1, [1], 1, params, 2, drafter=False, corpus=corpus, longest_draft=3, cache_salt=salt)
        return [token for made in lookup.make(admit) for token in made.propose([9, 1, 2, 3]).tokens]

    sampled = SamplingParams(max_tokens=8)
    assert lookup.corpus is not None
    lookup.corpus.add([1, 2, 3, 4, 5, 6, 7], "")
    lookup.corpus.wait()
    assert drafts(sampled) == [4, 5, 6]
    assert drafts(SamplingParams(max_tokens=8, verification="rejection")) == []
    assert drafts(sampled, salt="secret") == []
    assert drafts(sampled, corpus=False) == []


@pytest.mark.parametrize(("longest", "drafted"), [(0, 2), (5, 5)])
def test_copies_from_the_own_text_are_as_long_as_those_from_others(longest: int, drafted: int) -> None:
    lookup = TextLookup(TargetRows(PageTables(slots=2, capacity=64)))
    params, text = SamplingParams(max_tokens=8), [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    admit = Admit(1, text, 10, params, 2, drafter=False, ngram=NgramOptions(), longest_draft=longest)
    (own,) = lookup.make(admit)
    assert own.propose(text).tokens == [4, 5, 6, 7, 1][:drafted]
