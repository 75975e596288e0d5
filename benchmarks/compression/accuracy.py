"""What is left of answers: retrieval, and the likelihood of the whole prompt's answer given the shortened one.

The target runs without a server, so that a prompt is read once for both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from benchmarks.compression.shortener import Prompt, Shortener
from benchmarks.compression.task import Task
from engine.model.forward_input import RowInput
from engine.model.runner import Runner

_ANSWER_TOKENS = 6  # of a number, and the full stop
_CHUNK = 512  # tokens of a forward


@dataclass(frozen=True, slots=True)
class Outcome:
    """One task, shortened by one method at one rate; rate 1: not shortened."""

    prompt_tokens: int  # about, of the whole prompt
    seed: int
    method: str
    rate: float
    kept: float  # share of the whole prompt's tokens
    log_likelihood: float  # of the whole prompt's answer, nats per token
    retrieved: bool  # whether the answer has the number


class Reader:
    """A target that answers greedily."""

    def __init__(self, runner: Runner, tokenizer: PreTrainedTokenizerBase) -> None:
        self._runner, self._tokenizer = runner, tokenizer

    def answer(self, prompt: Prompt, expected: Sequence[int] = ()) -> tuple[list[int], float]:
        """Return the answer, and the log-likelihood of the expected one, nats per token; of its own if there is none.

        prompt: its pages are overwritten by the next.
        """
        for start in range(0, len(prompt.tokens), _CHUNK):
            chunk = prompt.tokens[start : start + _CHUNK]
            logits = self._runner.logits([RowInput(0, start, chunk, wanted=1, prompt_positions=prompt.positions)])
        first, end = logits[-1].log_softmax(dim=-1), len(prompt.tokens)
        likelihood = None
        if expected:
            logits = self._runner.logits([RowInput(0, end, expected, prompt_positions=prompt.positions)])
            likelihood = self._mean([first, *logits[:-1].log_softmax(dim=-1)], expected)
        answer, seen = [int(first.argmax())], [first]
        while len(answer) < _ANSWER_TOKENS:
            row = RowInput(0, end + len(answer) - 1, answer[-1:], prompt_positions=prompt.positions)
            seen.append(self._runner.logits([row])[0].log_softmax(dim=-1))
            answer.append(int(seen[-1].argmax()))
        return answer, self._mean(seen, answer) if likelihood is None else likelihood

    def retrieves(self, task: Task, answer: Sequence[int]) -> bool:
        """Whether the answer has the number."""
        return task.answer in str(self._tokenizer.decode(list(answer)))

    def _mean(self, log_probs: Sequence[Tensor], tokens: Sequence[int]) -> float:
        """Return the mean log-probability of the tokens. log_probs: [V] before each of them."""
        return fmean(float(line[token]) for line, token in zip(log_probs, tokens, strict=True))


def outcomes(
    reader: Reader,
    shortener: Shortener,
    task: Task,
    *,
    tokens: int,
    seed: int,
    methods: Sequence[str],
    rates: Sequence[float],
) -> list[Outcome]:
    """Answer one task with the whole prompt, then with shorter ones."""
    whole = shortener.whole(task)
    answer, likelihood = reader.answer(whole)
    results = [Outcome(tokens, seed, "none", 1.0, 1.0, round(likelihood, 4), reader.retrieves(task, answer))]
    for method in methods:
        reading = shortener.read(task, method)
        for rate in rates:
            prompt = shortener.shorten(task, method, rate, reading)
            own, likelihood = reader.answer(prompt, answer)
            kept = len(prompt.tokens) / len(whole.tokens)
            hit = reader.retrieves(task, own)
            results.append(Outcome(tokens, seed, method, rate, round(kept, 4), round(likelihood, 4), hit))
    return results
