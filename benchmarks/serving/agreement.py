"""What clients saw of a load beside what the server's `/metrics` say of it. Sends nothing but GET /metrics."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.serving.http_exchange import Exchange


@dataclass(frozen=True, slots=True)
class Pair:
    """One quantity, as clients saw it and as the metrics have it."""

    seen: float
    told: float

    @property
    def error(self) -> float:
        """Difference as a share of what was seen."""
        return abs(self.told - self.seen) / self.seen if self.seen else float(self.told != 0)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Counts of requests, and means over the answered ones in seconds."""

    requests: Pair
    refused: Pair
    answered: Pair
    queue_s: Pair  # seen: time to the first token, without the server's own time for the prompt
    first_token_s: Pair
    whole_s: Pair

    def pairs(self) -> dict[str, Pair]:
        """Return all of them, by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class MetricsMeter:
    """Compares all requests since it was made, of which none may be in progress then."""

    def __init__(self, read_metrics: Callable[[], str]) -> None:
        """read_metrics: returns the text of /metrics."""
        self._read = read_metrics
        self._before = self._sums()

    def compare(self, exchanges: Sequence[Exchange]) -> Agreement:
        """Return the agreement with what clients saw. All their requests must have ended; each had one choice."""
        now = defaultdict(float, {name: value - self._before[name] for name, value in self._sums().items()})
        answered = [exchange for exchange in exchanges if exchange.is_whole]
        refused = sum(exchange.status == HTTPStatus.TOO_MANY_REQUESTS for exchange in exchanges)
        first_s = _mean(exchange.first_s - exchange.began_s for exchange in answered if exchange.first_s is not None)

        def told_s(name: str) -> float:
            return now[f"vllm:{name}_seconds_sum"] / max(1.0, now[f"vllm:{name}_seconds_count"])

        return Agreement(
            requests=Pair(len(exchanges), now["consort:requests_total"]),
            refused=Pair(refused, now["consort:requests_refused_total"]),
            answered=Pair(len(answered), now["vllm:request_success_total"]),
            queue_s=Pair(first_s - told_s("request_prefill_time"), told_s("request_queue_time")),
            first_token_s=Pair(first_s, told_s("time_to_first_token")),
            whole_s=Pair(_mean(exchange.seconds for exchange in answered), told_s("e2e_request_latency")),
        )

    def _sums(self) -> defaultdict[str, float]:
        """Return the sum of each metric over its labels."""
        sums = defaultdict[str, float](float)
        for family in text_string_to_metric_families(self._read()):
            for sample in family.samples:
                sums[sample.name] += sample.value
        return sums


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0
