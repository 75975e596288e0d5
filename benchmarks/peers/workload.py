"""What every contestant is given: the same prompts, output length, temperature and number of streams."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from decoding.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Text:
    """One prompt, what it was answered with, and how that was to be sampled."""

    prompt: list[int]
    answer: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts as token ids; each answer has exactly `new_tokens` tokens, as no contestant stops at EOS."""

    prompts: Sequence[list[int]]
    new_tokens: int
    temperature: float = 0.0
    streams: int = 1  # prompts that are answered at the same time

    def part(self, start: int, count: int) -> "Workload":
        """`count` prompts from `start` on, round and round."""
        chosen = [self.prompts[(start + i) % len(self.prompts)] for i in range(count)]
        return Workload(chosen, self.new_tokens, self.temperature, self.streams)

    def batches(self) -> Iterator[tuple[list[list[int]], list[SamplingParams]]]:
        """`streams` prompts at a time, with their parameters; the seed of a prompt is its index."""
        for start in range(0, len(self.prompts), self.streams):
            prompts = list(self.prompts[start : start + self.streams])
            yield prompts, [self.params(start + i) for i in range(len(prompts))]

    def texts(self, answers: Sequence[list[int]]) -> list[Text]:
        """The prompts with their answers."""
        pairs = zip(self.prompts, answers, strict=True)
        return [Text(prompt, answer, self.params(i)) for i, (prompt, answer) in enumerate(pairs)]

    def params(self, index: int) -> SamplingParams:
        """The parameters of prompt `index`."""
        return SamplingParams(max_tokens=self.new_tokens, temperature=self.temperature, seed=index)
