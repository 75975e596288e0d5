"""Drafts from earlier texts: the same text in fewer steps, on every replica."""

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from actors.coordinator.request import Delta, Request
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from actors.replica.roles import Role
from decoding.drafts.options import CorpusOptions
from decoding.sampling.params import SamplingParams
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.in_process.test_parameters import endpoint, tokens
from tests.in_process.test_predictions import forced_logits
from tests.support.models import VOCAB, tiny_model
from tests.support.waiting import wait_until

RNG = random.Random(5)
CALL = [3, 40, 4, 41, 5, 42, 6]  # as {"tool": "write", "path": … begins


def transcript() -> tuple[list[int], list[int]]:
    """Return an agent's conversation, and where each of its 20 answers begins; the last entry is its end.

    Each answer writes a file anew, with one line of twelve changed. Between answers the tool says something new.
    """
    file = [[RNG.randrange(10, VOCAB) for _ in range(8)] for _ in range(12)]
    text, starts = [1, 2, 3], []
    for _ in range(20):
        file[RNG.randrange(12)] = [RNG.randrange(10, VOCAB) for _ in range(8)]
        text += [RNG.randrange(10, VOCAB) for _ in range(12)]
        starts.append(len(text))
        text += [*CALL, *(token for line in file for token in line), 7]
    return text, [*starts, len(text)]


TRANSCRIPT, STARTS = transcript()


class AgentRunner(Runner):
    """Writes the transcript, whatever the model says."""

    def logits(self, rows: Sequence[RowInput]) -> Tensor:
        return forced_logits(rows, TRANSCRIPT, self.vocab_size)


def steps(**options: Any) -> int:
    """Return how many steps the agent's answers take, one request after the other."""
    runner = AgentRunner(tiny_model("llama-gqa"), slots=2, max_length=4096, max_query=256)
    count = 0
    with Engine({"target": ("target", runner)}, LoopOptions(adaptive=False, corpus=CorpusOptions(10_000))) as engine:
        for start, end in pairwise(STARTS):
            length = min(end - start, len(CALL) + 12 * 8 + 1)
            params = SamplingParams(max_tokens=length, temperature=0)
            where = endpoint(drafter=None, **options)
            (answer,) = engine.generate([Request(where, TRANSCRIPT[:start], params, cache_salt="tenant")])
            assert tokens([answer]) == [TRANSCRIPT[start : start + length]]
            count += answer[-1].statistics.steps
    return count


def test_an_agent_that_repeats_itself_takes_a_fraction_of_the_steps() -> None:
    written = 20 * (len(CALL) + 12 * 8 + 1)
    assert steps() == written
    assert 2.5 * steps(corpus=True) < written


def corpora(engine: Engine) -> list[int]:
    return [loop.load().corpus_tokens for loop in engine.loops.values()]


def test_all_replicas_learn_of_a_text() -> None:
    sizes: dict[str, Any] = {"slots": 2, "max_length": 128, "max_query": 64}
    replicas: dict[str, tuple[Role, Runner]] = {
        name: ("target", Runner(tiny_model("llama-gqa"), **sizes)) for name in ("target#a", "target#b")
    }
    with Engine(replicas, LoopOptions(adaptive=False, corpus=CorpusOptions(1000))) as engine:

        def answer(salt: str) -> list[Delta]:
            params, where = SamplingParams(max_tokens=40, seed=1), endpoint(drafter=None, corpus=True)
            return engine.generate([Request(where, [1, 2, 3, 4, 5], params, cache_salt=salt)])[0]

        first = answer("a")
        wait_until(lambda: len(corpora(engine)) == 2 and min(corpora(engine)) > 40, "texts on both replicas")
        engine.lose("target#a")
        wait_until(lambda: answer("a")[-1].statistics.accepted_by.get("corpus", 0) > 20, "drafts on the other")
        again, other = answer("a"), answer("b")
    assert tokens([first]) == tokens([again]) == tokens([other])
    assert other[-1].statistics.drafted == 0
