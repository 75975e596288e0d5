"""`python -m benchmarks.scaling`: measures costs, validates the simulator with real runs, and simulates large systems.

See docs/simulation.md. Measurements need three idle cores for some minutes; `--given FILE` reads them from a result.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from benchmarks.report import write
from benchmarks.scaling.figure import draw
from benchmarks.scaling.measured import CoordinatorTimes, Pair, measure_coordinator, measure_pair, read_pair
from benchmarks.scaling.simulator import simulate
from decoding.drafts.length import choose_draft_lengths

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


class Study:
    """Simulated results for one pair."""

    def __init__(self, pair: Pair, coordinator: CoordinatorTimes, report: Callable[[str], None]) -> None:
        self._pair, self._coordinator, self._report = pair, coordinator, report
        self._lengths: dict[int, int] = {}

    def draft_length(self, rows: int) -> int:
        """Return the best draft length for a number of rows, as the target's planner chooses it."""
        if rows not in self._lengths:
            limits, probabilities = [_MOST_DRAFTED] * rows, [self._pair.acceptance] * rows
            lengths = choose_draft_lengths(probabilities, limits, lambda tokens: self._pair.target(rows, tokens), 0.0)
            self._lengths[rows] = lengths[0]
        return self._lengths[rows]

    def ratios(self) -> list[Point]:
        """Vary the number of drafters per target."""
        return [
            self._point(targets=8, drafters=round(8 * ratio), streams=streams)
            for streams in _STREAMS
            for ratio in (0.0, *_RATIOS)
        ]

    def links(self) -> list[Point]:
        """Vary the latency between target, drafter and coordinator."""
        plain = [self._point(drafters=0, streams=streams) for streams in _STREAMS]
        return plain + [self._point(streams=streams, link_s=ms / 1e3) for streams in _STREAMS for ms in _LINKS_MS]

    def sizes(self, coordinators: Callable[[int], int]) -> list[Point]:
        """Vary the number of targets, each with a drafter. coordinators: their number, by number of targets."""
        return [
            self._point(targets=count, drafters=count, streams=4, coordinators=coordinators(count))
            for count in _TARGETS
        ]

    def coordinators(self) -> list[Point]:
        """Vary the number of coordinators for a hundred targets."""
        return [self._point(targets=100, drafters=100, streams=4, coordinators=count) for count in _COORDINATORS]

    def _point(self, **given: Any) -> Point:
        targets = given.get("targets", 1)
        seconds = 10.0 if targets < 10 else 2.0 if targets <= 100 else 0.5
        seconds *= max(1.0, self._pair.target(1, 1) / 0.02)
        scenario = self._pair.scenario(
            self._coordinator, draft_length=self.draft_length if given.get("drafters", 1) else lambda _: 0, **given
        )
        outcome = simulate(scenario, seconds=seconds, warm_up_s=seconds / 5)
        point = {"pair": self._pair.name, "targets": 1, "drafters": 1, "coordinators": 1, **given, **asdict(outcome)}
        self._report(str({key: round(value, 4) if isinstance(value, float) else value for key, value in point.items()}))
        return point


@click.command()
@click.option("--pair", "pairs", multiple=True, default=("small", "large"), show_default=True)
@click.option("--given", type=click.Path(path_type=Path), help="A result file from which to read the measurements.")
@click.option("--output", type=click.Path(path_type=Path), default=Path(".bench/scaling.json"), show_default=True)
def main(pairs: Sequence[str], given: Path | None, output: Path) -> None:
    """Measure, validate, simulate, write JSON, and draw."""
    measured = _measure(pairs) if given is None else json.loads(given.read_text(encoding="utf-8"))["measured"]
    write(output, "benchmarks.scaling", {}, measured=measured)
    times = CoordinatorTimes(**measured["coordinator_times"])
    results: dict[str, list[Point]] = {
        "ratios": [],
        "links": [],
        "sizes": [],
        "one_coordinator": [],
        "coordinators": [],
    }
    for name in measured["pairs"]:
        study = Study(read_pair(name, measured["pairs"][name]), times, click.echo)
        results["ratios"] += study.ratios()
        results["links"] += study.links()
        results["sizes"] += study.sizes(lambda targets: max(1, targets // 5))
        results["one_coordinator"] += study.sizes(lambda targets: 1)[:5]
        results["coordinators"] += study.coordinators()
    write(output, "benchmarks.scaling", {}, measured=measured, answers=results)
    draw(results, output.with_suffix(".png"))


def _measure(pairs: Sequence[str]) -> dict[str, Any]:
    costs, times = measure_coordinator()
    return {
        "coordinator": [asdict(cost) for cost in costs],
        "coordinator_times": asdict(times),
        "pairs": {name: measure_pair(name, times, click.echo) for name in pairs},
    }


if __name__ == "__main__":
    main()
