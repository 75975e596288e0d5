"""Measures the simulator's inputs, and real runs to validate it. Results are kept as JSON."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import linear_regression, mean, median
from typing import Any

from benchmarks.inflated import inflated_target
from benchmarks.scaling import coordinator_cost
from benchmarks.scaling.simulator import Scenario, rate_of_one_round
from benchmarks.scaling.simulator_costs import TurnCosts
from benchmarks.scaling.simulator_validation import MeasuredRun, Stage, running
from engine.loading.checkpoint import ModelSpec
from engine.loading.settings import load_tokenizer
from training.heldout import read_prompts

LOCAL_LINK_S = 0.00006  # one way over TCP on one host: half of a round trip of ZeroMQ with CURVE
_STREAMS, _DRAFT_LENGTHS = (1, 4, 8), (0, 2, 4)
_SEEDS = 100
_PROMPT_TOKENS = 100
_DRAFTER_OVERHEAD_S = 0.00025  # time of a drafter's turn without its step

Run = dict[str, Any]  # a `MeasuredRun`, as JSON has it


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a drafter, each on one core."""

    name: str
    target: TurnCosts
    drafter: TurnCosts
    acceptance: float

    def scenario(self, coordinator: "CoordinatorTimes", **given: Any) -> Scenario:
        """Return a scenario of this pair. given: fields that differ from the usual ones."""
        usual = {
            "acceptance": self.acceptance,
            "target_turn_s": self.target,
            "drafter_turn_s": self.drafter,
            "link_s": LOCAL_LINK_S,
            "coordinator_batch_s": coordinator.batch_s,
            "coordinator_verdict_s": coordinator.verdict_s,
        }
        return Scenario(**{**usual, **given})


@dataclass(frozen=True, slots=True)
class CoordinatorTimes:
    """Seconds of a coordinator's loop per batch and per verdict."""

    batch_s: float
    verdict_s: float


def measure_coordinator() -> tuple[list[coordinator_cost.CoordinatorCost], CoordinatorTimes]:
    """Measure several batch sizes, and fit a straight line."""
    costs = [coordinator_cost.measure(rows=rows, rounds=60) for rows in (1, 4, 8, 16, 32)]
    verdict_s, batch_s = linear_regression([cost.rows for cost in costs], [cost.thread_s_per_round for cost in costs])
    return costs, CoordinatorTimes(batch_s, verdict_s)


def measure_pair(name: str, coordinator: CoordinatorTimes, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure real runs of "small", the bundled pair, or "large", with a target of about 300 M parameters."""
    large = name == "large"
    target = ModelSpec(
        name="target",
        path=str(inflated_target()) if large else "models/target",
        dtype="bfloat16" if large else "float32",
        device="cpu",
        threads=1,
    )
    drafter = ModelSpec(name="drafter", path="models/drafter", dtype="float32", device="cpu", threads=1)
    with running(target, drafter) as stage:
        runs = _runs(stage, new_tokens=64 if large else 160, repetitions=1 if large else 3, report=report)
    as_json = [[asdict(run) for run in repetitions] for repetitions in runs]
    return compare_with_simulation(name, as_json, coordinator, report)


def compare_with_simulation(
    name: str, runs: Sequence[Sequence[Run]], coordinator: CoordinatorTimes, report: Callable[[str], None]
) -> dict[str, Any]:
    """Return the costs of turns in the runs, and the simulated rates. runs: repetitions of each setting."""
    middle = [
        sorted(repetitions, key=lambda run: float(run["tokens_per_s"]))[len(repetitions) // 2] for repetitions in runs
    ]
    pair = Pair(name, _target_costs(middle), _drafter_costs(middle), mean(_acceptances(middle)))
    for run in middle:
        rates = _simulated(pair, coordinator, run)
        run["simulated"], run["simulated_range"] = median(rates), [rates[_SEEDS // 20], rates[-_SEEDS // 20]]
        report(
            f"{name}: {run['streams']} stream(s), γ = {run['draft_length']}: {run['tokens_per_s']:.1f} tokens/s, "
            f"simulated {run['simulated']:.1f}, {run['simulated'] / run['tokens_per_s'] - 1:+.1%}, "
            f"range {rates[_SEEDS // 20]:.1f} to {rates[-_SEEDS // 20]:.1f}"
        )
    return {
        "target_turn_s": pair.target.seconds,
        "drafter_turn_s": pair.drafter.seconds,
        "acceptance": pair.acceptance,
        "runs": middle,
        "tokens_per_s_of_repetitions": [[run["tokens_per_s"] for run in repetitions] for repetitions in runs],
    }


def _target_costs(runs: Sequence[Run]) -> TurnCosts:
    """Return the costs of a target's turn without waits. Handling of offers is included and grows with them."""
    seconds: dict[int, dict[int, float]] = {}
    for run in runs:
        by_tokens = seconds.setdefault(run["streams"], {})
        turn_s = (run["seconds"] - run["target"]["waited_s"]) / run["target"]["steps"]
        by_tokens[1 + run["draft_length"]] = max(turn_s, *by_tokens.values(), 0.0)
    return TurnCosts(seconds)


def _drafter_costs(runs: Sequence[Run]) -> TurnCosts:
    drafting = [run for run in runs if run["draft_length"]]
    by_rows: dict[int, list[float]] = {run["streams"]: [] for run in drafting}
    for run in drafting:
        by_rows[run["streams"]].append(_step_s(run["drafter"]) + _DRAFTER_OVERHEAD_S)
    return TurnCosts({rows: {1: mean(seconds)} for rows, seconds in by_rows.items()})


def _step_s(times: dict[str, float]) -> float:
    return times["step_s"] / times["steps"]


def _acceptances(runs: Sequence[Run]) -> list[float]:
    return [run["acceptance"] for run in runs if run["draft_length"] == max(_DRAFT_LENGTHS)]


def _runs(stage: Stage, *, new_tokens: int, repetitions: int, report: Callable[[str], None]) -> list[list[MeasuredRun]]:
    tokenizer = load_tokenizer("models/target")
    texts = [tokenizer(text)["input_ids"][:_PROMPT_TOKENS] for text in read_prompts(Path("models/heldout.jsonl"))]
    for γ in (0, 4):
        stage.run(texts[:4], draft_length=γ, new_tokens=24)  # warms up
    runs = []
    for streams, γ in product(_STREAMS, _DRAFT_LENGTHS):
        report(f"{streams} stream(s), γ = {γ}")
        chosen = [texts[repetition * streams :][:streams] for repetition in range(repetitions)]
        runs.append([stage.run(prompts, draft_length=γ, new_tokens=new_tokens) for prompts in chosen])
    return runs


def _simulated(pair: Pair, coordinator: CoordinatorTimes, run: Run) -> list[float]:
    """Return the simulated tokens per second for each seed, ascending, with the acceptance of the run."""
    γ = run["draft_length"]
    scenarios = [
        pair.scenario(
            coordinator,
            drafters=1 if γ else 0,
            streams=run["streams"],
            answer_tokens=run["new_tokens"] - 1,  # the first comes with the prompt
            draft_length=lambda _: γ,
            acceptance=run["acceptance"],
            seed=seed,
        )
        for seed in range(_SEEDS)
    ]
    return sorted(map(rate_of_one_round, scenarios))


def read_pair(name: str, measured: dict[str, Any]) -> Pair:
    """Read a measured pair from JSON, whose keys are strings."""
    tables = [
        TurnCosts({int(rows): {int(count): s for count, s in by_tokens.items()} for rows, by_tokens in table.items()})
        for table in (measured["target_turn_s"], measured["drafter_turn_s"])
    ]
    return Pair(name, tables[0], tables[1], measured["acceptance"])
