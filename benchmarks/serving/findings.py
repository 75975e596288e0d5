"""Medians and ratios of a load run, as text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.report import table
from benchmarks.serving.load import LoadResult
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
class LoadComparison:
    """Repetitions at comparison temperature and concurrency, by server, in the same order."""

    temperature: float
    concurrency: int
    repetitions: Mapping[str, Sequence[LoadResult]]

    def median(self, name: str, quantity: str) -> float:
        values: list[float] = [getattr(measured, quantity) for measured in self.repetitions[name]]
        return median(values)

    def ratio(self, name: str, reference: str) -> float:
        """Return the median over the repetitions of the ratio of tokens per second."""
        pairs = zip(self.repetitions[name], self.repetitions[reference], strict=True)
        return median(a.tokens_per_s / b.tokens_per_s for a, b in pairs)

    def spread(self, name: str, reference: str) -> tuple[float, float]:
        """Return the least and the greatest of these ratios."""
        pairs = list(zip(self.repetitions[name], self.repetitions[reference], strict=True))
        ratios = [a.tokens_per_s / b.tokens_per_s for a, b in pairs]
        return min(ratios), max(ratios)


def as_text(comparisons: Sequence[LoadComparison], overheads: Sequence[Overhead]) -> str:
    """Format all tables."""
    parts = []
    for temperature in dict.fromkeys(comparison.temperature for comparison in comparisons):
        chosen = [comparison for comparison in comparisons if comparison.temperature == temperature]
        parts.append(f"temperature {temperature:g}, tokens per second, medians\n{_rate_table(chosen)}")
        parts.append(f"temperature {temperature:g}, milliseconds, medians\n{_latency_table(chosen)}")
    if overheads:
        parts.append(
            f"what HTTP costs: comparison stream, against the same replicas without it\n{_overhead_table(overheads)}"
        )
    return "\n\n".join(parts)


def _rate_table(comparisons: Sequence[LoadComparison]) -> str:
    names = list(comparisons[0].repetitions)
    head = ["streams", "on", "off", "on / off", "(min – max)", "tokens/event"]
    with_vllm = VLLM in names
    rows = []
    for comparison in comparisons:
        least, greatest = comparison.spread(ON, OFF)
        row = [
            str(comparison.concurrency),
            f"{comparison.median(ON, 'tokens_per_s'):.1f}",
            f"{comparison.median(OFF, 'tokens_per_s'):.1f}",
            f"{comparison.ratio(ON, OFF):.2f}",
            f"({least:.2f} – {greatest:.2f})",
            f"{comparison.median(ON, 'tokens_per_event'):.2f}",
        ]
        if with_vllm:
            rate = comparison.median(VLLM, "tokens_per_s")
            row += [f"{rate:.1f}", f"{comparison.ratio(ON, VLLM):.2f}", f"{comparison.ratio(OFF, VLLM):.2f}"]
        rows.append(row)
    return table([*head, "vLLM", "on / vLLM", "off / vLLM"] if with_vllm else head, rows)


def _latency_table(comparisons: Sequence[LoadComparison]) -> str:
    rows = [
        [
            f"{comparison.concurrency}, {name}",
            *(f"{comparison.median(name, quantity):.1f}" for quantity in _QUANTITIES.values()),
        ]
        for comparison in comparisons
        for name in comparison.repetitions
    ]
    return table(["streams", *(name.strip() for name in _QUANTITIES)], rows)


def _overhead_table(overheads: Sequence[Overhead]) -> str:
    head = ["speculation", "TTFT HTTP", "direct", "added", "tokens/s HTTP", "direct", "lost"]
    rows = [
        [
            "on" if overhead.speculate else "off",
            *(f"{ms:.1f} ms" for ms in (overhead.http_first_ms, overhead.direct_first_ms, overhead.added_first_ms)),
            f"{overhead.http_rate:.1f}",
            f"{overhead.direct_rate:.1f}",
            f"{overhead.lost_rate:.1%}",
        ]
        for overhead in overheads
    ]
    return table(head, rows)
