"""What the simulator is given, and real runs of the same: measured here, kept as JSON."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import linear_regression, mean, median
from typing import Any

from actors.loading import ModelSpec, load_tokenizer
from benchmarks import coordinator_cost
from benchmarks.inflated import inflated_target
from benchmarks.simulator import Scenario, simulate
from benchmarks.simulator_costs import TurnCosts
from benchmarks.simulator_validation import Measured, Stage, measure_costs, running
from training.heldout import read_prompts

LOCAL_LINK_S = 0.00006  # one way over TCP on one host: half of a round trip of ZeroMQ with CURVE
_STREAMS, _DRAFT_LENGTHS = (1, 4, 8), (0, 2, 4)
_SEEDS = 3
_PROMPT_TOKENS = 100


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a drafter, each on one core."""

    name: str
    target: TurnCosts
    drafter: TurnCosts
    acceptance: float

    def scenario(self, coordinator: "CoordinatorTimes", **given: Any) -> Scenario:
        """One of this pair; given: what is not as everywhere."""
        usual = {
            "acceptance": self.acceptance,
            "target_turn_s": self.target,
            "drafter_turn_s": self.drafter,
            "target_jitter": self.target.jitter,
            "drafter_jitter": self.drafter.jitter,
            "link_s": LOCAL_LINK_S,
            "coordinator_batch_s": coordinator.batch_s,
            "coordinator_offer_s": coordinator.offer_s,
            "coordinator_verdict_s": coordinator.verdict_s,
        }
        return Scenario(**{**usual, **given})


@dataclass(frozen=True, slots=True)
class CoordinatorTimes:
    """What a coordinator's loop takes, in seconds."""

    batch_s: float
    offer_s: float
    verdict_s: float


def measure_coordinator() -> tuple[list[coordinator_cost.CoordinatorCost], CoordinatorTimes]:
    """For several sizes of batches; and straight lines through that."""
    costs = [
        coordinator_cost.measure(rows=rows, offers_per_verdict=offers, rounds=60)
        for rows in (1, 4, 8, 16, 32)
        for offers in (0, 5)
    ]
    without = {one.rows: one.thread_s_per_round for one in costs if one.offers_per_verdict == 0}
    batches = {one.rows: (one.thread_s_per_round - without[one.rows]) / 5 for one in costs if one.offers_per_verdict}
    offer_s, batch_s = linear_regression(list(batches), list(batches.values()))
    verdict_s, _ = linear_regression(list(without), list(without.values()))
    return costs, CoordinatorTimes(batch_s, offer_s, verdict_s)


def measure_pair(name: str, coordinator: CoordinatorTimes, report: Callable[[str], None]) -> dict[str, Any]:
    """Costs of "small", the bundled pair, or "large", its target inflated to about 300 M parameters; then real runs."""
    large = name == "large"
    target = ModelSpec(
        name="target",
        path=str(inflated_target()) if large else "models/target",
        dtype="bfloat16" if large else "float32",
        device="cpu",
        threads=1,
    )
    drafter = ModelSpec(name="drafter", path="models/drafter", dtype="float32", device="cpu", threads=1)
    report(f"{name}: timing turns")
    of_target, of_drafter = measure_costs(target, drafter, rounds=2 if large else 8)
    pair = Pair(name, of_target, of_drafter, acceptance=0.0)
    report(f"{name}: real runs")
    with running(target, drafter) as stage:
        runs = _runs(stage, pair, coordinator, new_tokens=64 if large else 160, report=report)
    acceptance = mean(run["measured"]["acceptance"] for run in runs if run["measured"]["draft_length"] == 4)
    return {
        "target_turn_s": of_target.seconds,
        "drafter_turn_s": of_drafter.seconds,
        "jitter": [of_target.jitter, of_drafter.jitter],
        "acceptance": acceptance,
        "runs": runs,
    }


def _runs(
    stage: Stage, pair: Pair, coordinator: CoordinatorTimes, *, new_tokens: int, report: Callable[[str], None]
) -> list[dict[str, Any]]:
    tokenizer = load_tokenizer("models/target")
    texts = [tokenizer(text)["input_ids"][:_PROMPT_TOKENS] for text in read_prompts(Path("models/heldout.jsonl"))]
    for γ in (0, 4):
        stage.run(texts[:4], draft_length=γ, new_tokens=24)  # warms up
    runs = []
    for streams in _STREAMS:
        for γ in _DRAFT_LENGTHS:
            repetitions = 1 if pair.target(1, 1) > 0.02 else 3
            done = [
                stage.run(texts[at * streams :][:streams], draft_length=γ, new_tokens=new_tokens)
                for at in range(repetitions)
            ]
            runs.append(_compared(done, pair, coordinator))
            run = runs[-1]
            report(
                f"{streams} stream(s), γ = {γ}: {run['tokens_per_s']:.1f} tokens/s, "
                f"simulated {run['simulated']:.1f}, {run['simulated'] / run['tokens_per_s'] - 1:+.1%}"
            )
    return runs


def _compared(done: list[Measured], pair: Pair, coordinator: CoordinatorTimes) -> dict[str, Any]:
    """The repetition in the middle, and what the simulator says of it."""
    streams, γ = done[0].streams, done[0].draft_length
    acceptance = mean(one.acceptance for one in done)
    simulated = mean(
        simulate(
            pair.scenario(
                coordinator,
                drafters=1 if γ else 0,
                streams=streams,
                answer_tokens=10**6,
                draft_length=lambda _: γ,
                acceptance=acceptance,
                seed=seed,
            ),
            seconds=20,
            warm_up_s=1,
        ).tokens_per_s
        for seed in range(_SEEDS)
    )
    return {
        "tokens_per_s": median(one.tokens_per_s for one in done),
        "simulated": simulated,
        "all_tokens_per_s": [one.tokens_per_s for one in done],
        "measured": asdict(sorted(done, key=lambda one: one.tokens_per_s)[len(done) // 2]),
    }


def read_pair(name: str, measured: dict[str, Any]) -> Pair:
    """A pair as it was measured, from JSON, whose keys are texts."""
    tables = [
        TurnCosts(
            {int(rows): {int(count): s for count, s in of_rows.items()} for rows, of_rows in table.items()}, jitter
        )
        for table, jitter in zip(
            (measured["target_turn_s"], measured["drafter_turn_s"]), measured["jitter"], strict=True
        )
    ]
    return Pair(name, tables[0], tables[1], measured["acceptance"])
