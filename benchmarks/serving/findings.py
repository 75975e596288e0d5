"""What a load run found: medians and ratios, as text and as plots."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.report import table
from benchmarks.serving.load import Measured
from benchmarks.serving.overhead import Overhead

ON, OFF, VLLM = "Consort", "Consort, speculate: false", "vLLM"
_QUANTITIES = {
    "TTFT p50": "ttft_p50_ms",
    "p99": "ttft_p99_ms",
    "TPOT p50": "tpot_p50_ms",
    "p99 ": "tpot_p99_ms",
    "ITL p50": "itl_p50_ms",
    "p99  ": "itl_p99_ms",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """All repetitions at one temperature and one concurrency, by contestant, in the same order."""

    temperature: float
    concurrency: int
    repetitions: Mapping[str, Sequence[Measured]]

    def median(self, name: str, quantity: str) -> float:
        values: list[float] = [getattr(measured, quantity) for measured in self.repetitions[name]]
        return median(values)

    def ratio(self, name: str, reference: str) -> float:
        """Of tokens per second: the median over the repetitions of one contestant over another."""
        pairs = zip(self.repetitions[name], self.repetitions[reference], strict=True)
        return median(a.tokens_per_s / b.tokens_per_s for a, b in pairs)

    def spread(self, name: str, reference: str) -> tuple[float, float]:
        """The least and the greatest of these ratios."""
        pairs = list(zip(self.repetitions[name], self.repetitions[reference], strict=True))
        ratios = [a.tokens_per_s / b.tokens_per_s for a, b in pairs]
        return min(ratios), max(ratios)


def as_text(comparisons: Sequence[Comparison], overheads: Sequence[Overhead]) -> str:
    """The tables."""
    parts = []
    for temperature in dict.fromkeys(one.temperature for one in comparisons):
        chosen = [one for one in comparisons if one.temperature == temperature]
        parts.append(f"temperature {temperature:g}, tokens per second, medians\n{_rate_table(chosen)}")
        parts.append(f"temperature {temperature:g}, milliseconds, medians\n{_latency_table(chosen)}")
    if overheads:
        parts.append(f"what HTTP costs: one stream, against the same replicas without it\n{_overhead_table(overheads)}")
    return "\n\n".join(parts)


def _rate_table(comparisons: Sequence[Comparison]) -> str:
    names = list(comparisons[0].repetitions)
    head = ["streams", "on", "off", "on / off", "(min – max)", "tokens/event"]
    with_vllm = VLLM in names
    rows = []
    for one in comparisons:
        least, greatest = one.spread(ON, OFF)
        row = [
            str(one.concurrency),
            f"{one.median(ON, 'tokens_per_s'):.1f}",
            f"{one.median(OFF, 'tokens_per_s'):.1f}",
            f"{one.ratio(ON, OFF):.2f}",
            f"({least:.2f} – {greatest:.2f})",
            f"{one.median(ON, 'tokens_per_event'):.2f}",
        ]
        if with_vllm:
            rate = one.median(VLLM, "tokens_per_s")
            row += [f"{rate:.1f}", f"{one.ratio(ON, VLLM):.2f}", f"{one.ratio(OFF, VLLM):.2f}"]
        rows.append(row)
    return table([*head, "vLLM", "on / vLLM", "off / vLLM"] if with_vllm else head, rows)


def _latency_table(comparisons: Sequence[Comparison]) -> str:
    rows = [
        [f"{one.concurrency}, {name}", *(f"{one.median(name, quantity):.1f}" for quantity in _QUANTITIES.values())]
        for one in comparisons
        for name in one.repetitions
    ]
    return table(["streams", *(name.strip() for name in _QUANTITIES)], rows)


def _overhead_table(overheads: Sequence[Overhead]) -> str:
    head = ["speculation", "TTFT HTTP", "direct", "added", "tokens/s HTTP", "direct", "lost"]
    rows = [
        [
            "on" if one.speculate else "off",
            *(f"{ms:.1f} ms" for ms in (one.http_first_ms, one.direct_first_ms, one.added_first_ms)),
            f"{one.http_rate:.1f}",
            f"{one.direct_rate:.1f}",
            f"{one.lost_rate:.1%}",
        ]
        for one in overheads
    ]
    return table(head, rows)
