"""What must hold on a GPU before any figure counts: replays of graphs compute what the recorded calls compute.

Knows nothing of contestants.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from actors.drafter.chain import ChainStart, DraftChain
from actors.model.forward_input import RowInput
from actors.model.runner import Runner
from decoding.sampling.params import SamplingParams

_TOKENS = 48  # of each text
_CHAIN = 4
_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class GraphChecks:
    """What was compared, and what a draft token costs in milliseconds."""

    same_text: bool  # of the target, greedy, token by token
    same_drafts: bool  # of the drafter, half of them sampled, in chains
    single_ms: float  # a draft token of all rows, when the host looks at each
    chain_ms: float  # when it looks at every fourth

    @property
    def same(self) -> bool:
        return self.same_text and self.same_drafts


def check_graphs(target: Runner, drafter: Runner, prompts: Sequence[list[int]]) -> GraphChecks:
    """Scribbles over the first slots of both, one for each prompt."""
    replayed = _text(target, prompts), _drafts(drafter, prompts)
    single_ms, chain_ms = (_token_ms(drafter, prompts, length) for length in (1, _CHAIN))
    for runner in (target, drafter):
        runner.use_graphs(capture=lambda run: run)
    called = _text(target, prompts), _drafts(drafter, prompts)
    return GraphChecks(replayed[0] == called[0], replayed[1] == called[1], single_ms, chain_ms)


def _text(runner: Runner, prompts: Sequence[list[int]]) -> list[list[int]]:
    """The greedy continuations, one token of all in each step."""
    texts = [list(prompt) for prompt in prompts]
    runs = [RowInput(slot, 0, prompt) for slot, prompt in enumerate(prompts)]
    for _ in range(_TOKENS):
        tokens = runner.logits(runs, last_only=True).argmax(dim=-1).tolist()
        runs = [
            RowInput(slot, len(text), [token]) for slot, (text, token) in enumerate(zip(texts, tokens, strict=True))
        ]
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
    return texts


def _starts(runner: Runner, prompts: Sequence[list[int]]) -> list[ChainStart]:
    """After the prompts, which are read; every other row is sampled."""
    runner.logits([RowInput(slot, 0, prompt) for slot, prompt in enumerate(prompts)], last_only=True)
    return [
        ChainStart(
            RowInput(slot, len(prompt) - 1, prompt[-1:]),
            SamplingParams(max_tokens=1, temperature=float(slot % 2), seed=slot),
            len(prompt),
        )
        for slot, prompt in enumerate(prompts)
    ]


def _drafts(runner: Runner, prompts: Sequence[list[int]]) -> list[list[int]]:
    chain = DraftChain(runner)
    return [[choice.tokens[0] for choice in row] for row in chain.run(_starts(runner, prompts), _CHAIN)]


def _token_ms(runner: Runner, prompts: Sequence[list[int]], length: int) -> float:
    chain, starts, seconds = DraftChain(runner), _starts(runner, prompts), []
    for _ in range(_ROUNDS):
        began_s = time.perf_counter()
        chain.run(starts, length)
        seconds.append(time.perf_counter() - began_s)
    return median(seconds) / length * 1e3
