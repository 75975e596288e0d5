"""The workload that every contestant gets: prompts, output length, temperature and number of streams."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from decoding.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, its answer and the sampling parameters."""

    prompt: list[int]
    answer: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts as token ids. Each answer has exactly `new_tokens` tokens, because no contestant stops at EOS."""

    prompts: Sequence[list[int]]
    new_tokens: int
    temperature: float = 0.0
    streams: int = 1  # concurrent prompts

    def part(self, start: int, count: int) -> "Workload":
        """Return a workload of `count` prompts from `start` on, wrapping around."""
        chosen = [self.prompts[(start + i) % len(self.prompts)] for i in range(count)]
        return Workload(chosen, self.new_tokens, self.temperature, self.streams)

    def batches(self) -> Iterator[tuple[list[list[int]], list[SamplingParams]]]:
        """Yield `streams` prompts at a time, with their parameters. The seed of a prompt is its index."""
        for start in range(0, len(self.prompts), self.streams):
            prompts = list(self.prompts[start : start + self.streams])
            yield prompts, [self.params(start + i) for i in range(len(prompts))]

    def texts(self, answers: Sequence[list[int]]) -> list[Text]:
        """Return the prompts with their answers."""
        pairs = zip(self.prompts, answers, strict=True)
        return [Text(prompt, answer, self.params(i)) for i, (prompt, answer) in enumerate(pairs)]

    def params(self, index: int) -> SamplingParams:
        """Return the parameters of a prompt."""
        return SamplingParams(max_tokens=self.new_tokens, temperature=self.temperature, seed=index)
