"""Checks on a GPU before measurements: replayed graphs compute the same as the recorded calls.

Must not know about contestants.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from actors.drafter.chain import ChainStart, DraftChain
from decoding.sampling.params import SamplingParams
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner

_TOKENS = 48  # of each text
_CHAIN = 4
_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class GraphChecks:
    """Results of the checks, and the cost of a draft token in milliseconds."""

    recorded: bool  # whether all calls could be recorded
    same_text: bool  # greedy texts of the target, token by token
    same_drafts: bool  # chains of the drafter, every other row sampled
    single_ms: float  # a draft token of all rows, if the host reads every token
    chain_ms: float  # if it reads chains of four tokens

    @property
    def passed(self) -> bool:
        return self.recorded and self.same_text and self.same_drafts


def check_graphs(target: Runner, drafter: Runner, prompts: Sequence[list[int]]) -> GraphChecks:
    """Compare replays with calls. Overwrites a slot of both runners for each prompt."""
    replayed = _text(target, prompts), _drafts(drafter, prompts)
    single_ms, chain_ms = (_token_ms(drafter, prompts, length) for length in (1, _CHAIN))
    recorders = [runner.recorder for runner in (target, drafter)]
    recorded = all(recorder is not None and recorder.error is None for recorder in recorders)
    for runner in (target, drafter):
        runner.use_graphs(capture=lambda run: run)
    called = _text(target, prompts), _drafts(drafter, prompts)
    return GraphChecks(recorded, replayed[0] == called[0], replayed[1] == called[1], single_ms, chain_ms)


def _text(runner: Runner, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Return the prompts with their greedy continuations."""
    texts = [list(prompt) for prompt in prompts]
    runs = [RowInput(slot, 0, prompt, wanted=1) for slot, prompt in enumerate(prompts)]
    for _ in range(_TOKENS):
        tokens = runner.logits(runs).argmax(dim=-1).tolist()
        runs = [
            RowInput(slot, len(text), [token]) for slot, (text, token) in enumerate(zip(texts, tokens, strict=True))
        ]
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
    return texts


def _starts(runner: Runner, prompts: Sequence[list[int]]) -> list[ChainStart]:
    """Run the prompts, and return the starts of chains after them. Every other row is sampled."""
    runner.logits([RowInput(slot, 0, prompt, wanted=1) for slot, prompt in enumerate(prompts)])
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
