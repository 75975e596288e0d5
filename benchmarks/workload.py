"""What every contestant is given: the same prompts, output length and temperature."""

from collections.abc import Sequence
from dataclasses import dataclass

from decoding.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts as token ids; each answer has exactly `new_tokens` tokens, as no contestant stops at EOS."""

    prompts: Sequence[list[int]]
    new_tokens: int
    temperature: float

    def part(self, start: int, count: int) -> "Workload":
        """`count` prompts from `start` on, round and round."""
        chosen = [self.prompts[(start + i) % len(self.prompts)] for i in range(count)]
        return Workload(chosen, self.new_tokens, self.temperature)

    def params(self, index: int) -> SamplingParams:
        """The parameters of the part's prompt `index`; its seed is its index."""
        return SamplingParams(max_tokens=self.new_tokens, temperature=self.temperature, seed=index)
