"""Drafts that are run several tokens at a time equal those that are run one by one."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from actors.drafter.loop import Drafter
from actors.wire.link import LocalExchange
from actors.wire.messages import Admit, Advance, Cancel, Message, Offer, ReplicaAddress
from decoding.sampling.params import SamplingParams
from engine.model.cuda import Replay
from engine.model.runner import Runner
from tests.support.advance import advance
from tests.support.models import VOCAB, tiny_model

TARGET = ReplicaAddress("t", "t")
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
PARAMS = [
    SamplingParams(max_tokens=40, temperature=0),
    SamplingParams(max_tokens=40, temperature=0.8, seed=3, top_k=9, eos_token_ids=(17,)),
    SamplingParams(max_tokens=12, temperature=1.3, seed=4, top_p=0.9, min_p=0.02),
]
Paths = dict[tuple[int, ...], float]  # single_device texts with drafts, by request; probabilities of their last tokens


class Stage:
    """A drafter, and what it has offered for each request."""

    def __init__(
        self, family: str, *, single_device: bool, graphs: bool = False, alternatives: int = 8, **changes: int
    ) -> None:
        """single_device: chains need it. graphs: bucketed shapes and fixed buffers, but calls, not replays."""
        exchange = LocalExchange()
        self._link, self._target = exchange.join("coordinator"), exchange.join("t")
        self.runner = Runner(tiny_model(family, **changes), slots=3, max_length=64, max_query=32)
        if graphs:
            self.runner.use_graphs(capture=lambda run: run)
        self.runner.single_device = single_device
        self.drafter = Drafter(self.runner, exchange.join("d"), alternatives=alternatives)
        self.texts: dict[int, list[int]] = {}
        self.offered: dict[int, Paths] = {}
        self.turns = 0  # that computed something

    def say(self, *messages: Message) -> None:
        """Send messages and let it work until it is idle."""
        for message in messages:
            if isinstance(message, Admit):
                self.texts[message.request_id] = list(message.tokens)
                self.offered[message.request_id] = {}
            if isinstance(message, Advance):
                self.texts[message.request_id] += message.tokens
        self._link.send("d", [message for message in messages if not isinstance(message, Advance)])
        self._target.send("d", [message for message in messages if isinstance(message, Advance)])
        while True:
            before = replace(self.drafter.times, waited_s=0, idle_s=0)
            self._link.send("d", [Cancel(999)])  # something to receive, so that no turn waits
            self.drafter.turn()
            for _, message in self._target.receive(0):
                if isinstance(message, Offer):
                    self._note(message)
            if replace(self.drafter.times, waited_s=0, idle_s=0) == before:
                return
            self.turns += 1

    def _note(self, offer: Offer) -> None:
        assert offer.parents is not None
        assert offer.probabilities is not None
        paths: list[tuple[int, ...]] = []
        text = tuple(self.texts[offer.request_id][: offer.base])
        for token, parent, probability in zip(offer.tokens, offer.parents, offer.probabilities, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else text), token))
            self.offered[offer.request_id][paths[-1]] = probability


def admissions(params: Sequence[SamplingParams], draft_length: int = 4) -> list[Admit]:
    return [
        Admit(i, prompt, len(prompt), row_params, draft_length, drafter=True, target=TARGET)
        for i, (prompt, row_params) in enumerate(zip(PROMPTS, params, strict=False))
    ]


def assert_same(actual: Stage, expected: Stage) -> None:
    for request, paths in expected.offered.items():
        assert paths
        assert actual.offered[request].keys() == paths.keys()
        assert actual.offered[request] == pytest.approx(paths, abs=1e-6)


@pytest.mark.parametrize(
    ("family", "graphs"),
    [
        ("llama-gqa", False),
        ("llama-gqa", True),
        ("gemma3", False),
        ("gpt2", False),
        ("llama4", False),
        ("mixtral", False),
    ],
)
def test_chains_offer_what_single_steps_offer(family: str, graphs: bool) -> None:
    """After verdicts that agree, take an alternative or something else; with all alternatives."""
    chains, steps = Stage(family, single_device=True, graphs=graphs), Stage(family, single_device=False)
    for stage in (chains, steps):
        stage.say(*admissions(PARAMS))
    assert_same(chains, steps)
    rng = random.Random(family)
    for _ in range(3):
        verdicts = []
        for request, text in steps.texts.items():
            below = [path[len(text) :] for path in steps.offered[request] if list(path[: len(text)]) == text]
            tokens = [*rng.choice(below or [()]), *rng.choice([(), (rng.randrange(VOCAB),)])]
            if tokens and len(text) + len(tokens) < len(PROMPTS[request]) + PARAMS[request].max_tokens:
                verdicts.append(advance(request, len(text), tokens))
        for stage in (chains, steps):
            stage.say(*verdicts)
        assert_same(chains, steps)
    assert chains.turns < steps.turns or family in ("gemma3", "llama4")


def test_a_draft_and_its_bonus_token_take_one_turn() -> None:
    """So do the other tokens of the lookahead."""
    stage = Stage("llama-gqa", single_device=True, graphs=True, alternatives=0)
    stage.say(*admissions(PARAMS[:1]))
    before, base = stage.turns, len(PROMPTS[0])
    stage.say(advance(0, base, [1, 2]))  # not what it drafted
    assert max(map(len, stage.offered[0])) == base + 2 + 9  # 2 γ + 1
    assert stage.turns - before == 3  # the first of the two is run as text


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=40, temperature=0, repetition_penalty=1.3),
        SamplingParams(max_tokens=40, temperature=1, seed=1, no_repeat_ngram_size=2),
        SamplingParams(max_tokens=40, temperature=1, seed=1, min_tokens=5, eos_token_ids=(3,)),
    ],
    ids=str,
)
def test_rows_whose_tokens_depend_on_the_text_take_one_step_at_a_time(params: SamplingParams) -> None:
    chains, steps = Stage("llama-gqa", single_device=True), Stage("llama-gqa", single_device=False)
    for stage in (chains, steps):
        stage.say(*admissions([PARAMS[0], params]))
    assert_same(chains, steps)
    assert chains.turns == steps.turns


def test_chains_end_with_the_slot() -> None:
    """Close to the end of the drafter's slots, and of the request."""
    chains, steps = (Stage("llama-gqa", single_device=single_device) for single_device in (True, False))
    prompt = [token % VOCAB for token in range(50)]
    for stage in (chains, steps):
        stage.say(Admit(0, prompt, 50, PARAMS[0], 8, drafter=True, target=TARGET))
        stage.say(advance(0, 50, [1, 2, 3, 4, 5, 6, 7, 8, 9], 8))
    assert_same(chains, steps)
    assert max(map(len, steps.offered[0])) == 64


def test_usual_graphs_are_recorded_before_the_first_request() -> None:
    runner = Runner(tiny_model("llama-gqa"), slots=2, max_length=64, max_query=32)
    recorded: list[Replay] = []

    def capture(run: Replay) -> Replay:
        recorded.append(run)
        return run

    runner.use_graphs(capture=capture)
    exchange = LocalExchange()
    link, drafter = exchange.join("coordinator"), Drafter(runner, exchange.join("d"), alternatives=0)
    before = len(recorded)
    assert before == 1  # for two rows
    link.send("d", [Admit(0, [5], 1, params, 2, drafter=True) for params in PARAMS[:1]])
    drafter.turn()
    assert drafter.times.steps == 3
    assert len(recorded) == before


def test_a_chain_ends_with_the_positions_of_the_model() -> None:
    """GPT-2 learns an embedding for each position, so there is none beyond. The other row wants more tokens."""
    stage = Stage("gpt2", single_device=True, alternatives=0, n_positions=64)
    texts = [[token % VOCAB for token in range(62)], [5, 6]]
    settings = [SamplingParams(max_tokens=count, temperature=0) for count in (2, 40)]
    for index, text in enumerate(texts):
        stage.say(Admit(index, text, len(text), settings[index], 1, drafter=True, target=TARGET))
    stage.say(*(advance(index, len(text), [7], 4) for index, text in enumerate(texts)))
    assert max(map(len, stage.offered[0])) == 64
    assert stage.offered[1]
