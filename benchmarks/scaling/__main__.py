"""`python -m benchmarks.scaling`: simulates large systems from measured costs. See docs/simulation.md."""

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.report import Curve, Panel, draw, write
from benchmarks.scaling.simulator import Scenario, simulate
from decoding.drafts.length import choose_draft_lengths

_MEASURED = Path("benchmarks/results/2026-11-21-scaling-direct-verdicts.json")
_LOCAL_LINK_S = 0.00006  # one way over TCP on one host: half of a round trip of ZeroMQ with CURVE
_MOST_DRAFTED = 4
_RATIOS = (0.125, 0.25, 0.5, 1.0, 2.0)  # drafters per target
_LINKS_MS = (
    0.05,
    0.2,
    0.5,
    2.0,
    5.0,
    20.0,
    50.0,
)  # one way: a host, a rack, a zone, a region, two near and two far ones
_TARGETS = (1, 2, 4, 10, 100, 1000)
_COORDINATORS = (1, 2, 5, 10, 20, 50)
_STREAMS = (1, 4, 8)  # per target

Point = dict[str, Any]


@dataclass(frozen=True)
class TurnCosts:
    """Seconds of a turn by rows and tokens per row, interpolated linearly."""

    seconds: Mapping[int, Mapping[int, float]]  # by rows, by tokens of each row

    @classmethod
    def from_json(cls, table: Mapping[str, Mapping[str, float]]) -> "TurnCosts":
        """Read a table, whose keys are strings."""
        return cls({int(rows): {int(count): s for count, s in by_tokens.items()} for rows, by_tokens in table.items()})

    def __call__(self, rows: int, tokens: int) -> float:
        """Return the seconds of a turn. tokens: of all rows together."""
        per_row = tokens / rows
        return _interpolate(rows, {count: _interpolate(per_row, table) for count, table in self.seconds.items()})


def _interpolate(x: float, table: Mapping[int, float]) -> float:
    """Interpolate between the two nearest points; extrapolate beyond the last one, but not below the first."""
    known = sorted(table)
    if len(known) == 1:
        return table[known[0]]
    right = min(max(bisect_right(known, x), 1), len(known) - 1)
    low, high = known[right - 1], known[right]
    return table[low] + (table[high] - table[low]) * (max(x, known[0]) - low) / (high - low)


class Study:
    """Simulated results for one pair of a target and a drafter, each on one core."""

    def __init__(self, name: str, measured: Mapping[str, Any]) -> None:
        """measured: as in the results file."""
        pair, coordinator = measured["pairs"][name], measured["coordinator_times"]
        self.name = name
        self._target = TurnCosts.from_json(pair["target_turn_s"])
        self._usual = {
            "acceptance": pair["acceptance"],
            "target_turn_s": self._target,
            "drafter_turn_s": TurnCosts.from_json(pair["drafter_turn_s"]),
            "link_s": _LOCAL_LINK_S,
            "coordinator_batch_s": coordinator["batch_s"],
            "coordinator_verdict_s": coordinator["verdict_s"],
        }
        self._lengths = {0: 0}

    def draft_length(self, rows: int) -> int:
        """Return the best draft length for a number of rows, as the target's planner chooses it."""
        if rows not in self._lengths:
            limits, probabilities = [_MOST_DRAFTED] * rows, [self._usual["acceptance"]] * rows
            lengths = choose_draft_lengths(probabilities, limits, lambda tokens: self._target(rows, tokens), 0.0)
            self._lengths[rows] = lengths[0]
        return self._lengths[rows]

    def points(self) -> dict[str, list[Point]]:
        """Vary drafters per target, the distance, the number of targets with a drafter each, and of coordinators."""

        def sizes(counts: Sequence[int], coordinators: Callable[[int], int]) -> list[Point]:
            return [self._point(targets=n, drafters=n, streams=4, coordinators=coordinators(n)) for n in counts]

        return {
            "ratios": [
                self._point(targets=8, drafters=round(8 * ratio), streams=n)
                for n in _STREAMS
                for ratio in (0, *_RATIOS)
            ],
            "links": [
                *(self._point(drafters=0, streams=n) for n in _STREAMS),
                *(self._point(streams=n, link_s=ms / 1e3) for n in _STREAMS for ms in _LINKS_MS),
            ],
            "sizes": sizes(_TARGETS, lambda targets: max(1, targets // 5)),
            "one_coordinator": sizes(_TARGETS[:5], lambda targets: 1),
            "coordinators": [self._point(targets=100, drafters=100, streams=4, coordinators=n) for n in _COORDINATORS],
        }

    def _point(self, **given: Any) -> Point:
        targets = given.get("targets", 1)
        seconds = 10.0 if targets < 10 else 2.0 if targets <= 100 else 0.5
        seconds *= max(1.0, self._target(1, 1) / 0.02)
        length = self.draft_length if given.get("drafters", 1) else lambda _: 0
        outcome = simulate(Scenario(**{**self._usual, "draft_length": length, **given}), seconds, seconds / 5)
        point = {"pair": self.name, "targets": 1, "drafters": 1, "coordinators": 1, **given, **asdict(outcome)}
        click.echo(str({key: round(value, 4) if isinstance(value, float) else value for key, value in point.items()}))
        return point


@click.command()
@click.option("--pair", "pairs", multiple=True, default=("small", "large"), show_default=True)
@click.option("--given", type=click.Path(path_type=Path), default=_MEASURED, show_default=True, help="Measured costs.")
@click.option("--output", type=click.Path(path_type=Path), default=Path(".bench/scaling.json"), show_default=True)
def main(pairs: Sequence[str], given: Path, output: Path) -> None:
    """Simulate, write JSON, and draw."""
    measured = json.loads(given.read_text(encoding="utf-8"))["measured"]
    answers = {pair: Study(pair, measured).points() for pair in pairs}
    write(output, "benchmarks.scaling", {"given": str(given)}, measured=measured, answers=answers)
    draw([_panels(pair, points) for pair, points in answers.items()], output.with_suffix(".png"))


def _panels(pair: str, points: Mapping[str, Sequence[Point]]) -> list[Panel]:
    def speed_ups(name: str, abscissa: Callable[[Point], float]) -> list[Curve]:
        curves = [Curve("plain", [], [1.0], colour="#7f7f7f", style="--")]
        for streams in _STREAMS:
            chosen = [point for point in points[name] if point["streams"] == streams]
            plain = next(point["tokens_per_s"] for point in chosen if not point["drafters"])
            drafted = [point for point in chosen if point["drafters"]]
            rates = [point["tokens_per_s"] / plain for point in drafted]
            curves.append(Curve(f"{streams} stream(s) per target", list(map(abscissa, drafted)), rates))
        return curves

    def curve(name: str, label: str, abscissa: str, ordinate: Callable[[Point], float]) -> Curve:
        return Curve(label, [point[abscissa] for point in points[name]], list(map(ordinate, points[name])))

    def of_one(point: Point) -> float:
        return float(point["tokens_per_s"] / point["targets"] / points["sizes"][0]["tokens_per_s"])

    most = max(point["tokens_per_s"] for point in points["coordinators"])
    ratios = speed_ups("ratios", lambda point: point["drafters"] / point["targets"])
    sizes = [
        curve("sizes", "a coordinator per 5 targets", "targets", of_one),
        curve("one_coordinator", "one coordinator", "targets", of_one),
    ]
    coordinators = [
        curve("coordinators", "tokens/s, of the most", "coordinators", lambda point: point["tokens_per_s"] / most),
        curve("coordinators", "share of a core, each", "coordinators", lambda point: point["coordinator_use"]),
    ]
    return [
        Panel(f"{pair} pair, 8 targets: speed-up over plain", "drafters per target", ratios, log=True),
        Panel("speed-up by distance", "one way, ms", speed_ups("links", lambda p: 1e3 * p["link_s"]), log=True),
        Panel("tokens/s per target, of one alone", "targets, 4 streams and a drafter each", sizes, log=True),
        Panel("100 targets", "coordinators", coordinators, log=True),
    ]


if __name__ == "__main__":
    main()
