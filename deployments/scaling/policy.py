"""The number of replicas of each model: targets scale by demand, drafters by what another drafter would gain.

Serve's controller runs a pickled copy: it imports the standard library alone and keeps its state in `policy_state`.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

_SCALE_DOWN = 0.8  # a target goes only if the others would be used by at most this share of the target utilization
_MAX_LAG, _MIN_LAG = 0.15, 0.03  # of targets' time spent waiting for drafts; above: one drafter more, below: one fewer
_PROBE_PERIOD_S = 600.0  # between trials of a drafter where none pays, and how long measurements are trusted
_GAIN = 0.8  # another drafter is worth it if it reduces the lag below this share
_TOLERANCE = 1.1  # an aim may be missed by this factor
_ROOM = 0.8  # targets go only if the aim would be held with this factor to spare
_MOST_STEP = 2.0  # by which the number of targets grows at once for an aim
_SETTLING_S = 45.0  # until first-token times, reports of them included, tell of so many targets, or of such a load
_LEAST_EFFECT = 0.3  # load is a reason if the miss falls with at least this power of it
_SIMILAR = 1.25  # requests for each target that differ by less are as many
_LEAST_SPEEDUP = 1.02  # that drafters must bring
_MIN_DRAFTING = 0.2  # below this share of rows that want drafts, drafters go; trials of plain decoding stay above it


class Felt(NamedTuple):
    """How a model's requests fared lately, at one coordinator."""

    ttft_s: float = 0.0  # until the first token, at the 90th percentile; 0: not known
    tokens_per_s: float = 0.0  # of a stream, at the 10th percentile; 0: not known
    drafted: float = 1.0  # share of tokens that drafters in replicas of their own drafted; 1: not known


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The load of one replica, from `record_autoscaling_stats`. The policy sees means over the last seconds."""

    rows: float  # rows that hold a KV slot
    waiting: float  # rows that wait for one
    slots: float
    drafting: float = 1.0  # targets: 1 if drafts are wanted, 0 while plain decoding is faster
    lag: float = 0.0  # targets: the share of busy time spent waiting for drafts
    busy: float = 0.0  # the share of time spent computing
    queued: float = 0.0  # targets: requests that coordinators hold back; every replica reports all of them
    ttft_s: float = (
        0.0  # targets: this and the next as in `Felt`, the worst of all coordinators'; every replica reports it
    )
    tokens_per_s: float = 0.0
    drafted: float = 1.0


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """How one model scales. Bounds and delays are options of Serve itself."""

    role: Literal["target", "drafter"]
    target_utilization: float = 0.75  # targets: rows per slot to aim at, waiting rows included
    targets: Sequence[str] = ()  # drafters: the deployments it drafts for
    ttft_s: float = 0.0  # targets: the aims, as in `Felt`; 0: none
    tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AimMemory:
    """How far the aims were missed, in JSON types."""

    count: int = 0  # of targets
    since_s: float = 0.0  # when so many were up
    # By number of targets: by what factor, with how many requests for each target, and when that was last measured.
    misses: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    # By number of targets: with how many requests for each target they held the aims with room, and have not since
    # missed them with about as many.
    holds: Mapping[str, float] = field(default_factory=dict)
    period: tuple[float, float] | None = None  # since when, and with how many requests for each target at least

    def after(self, miss: float, load: float, latest: float, now_s: float) -> "AimMemory":
        """Return the memory with one more measurement. load, latest: requests for each target, as means and lately.

        A load counts as held once it has lasted for as long as first-token times lag behind it.
        """
        key, holds = str(self.count), dict(self.holds)
        since_s, least = self.period or (now_s, math.inf)
        least = min(least, max(load, latest))
        is_over = now_s - since_s >= _SETTLING_S
        if is_over and miss <= _ROOM:
            holds[key] = max(holds.get(key, 0.0), least)
        memory = replace(self, holds=holds, period=None if is_over else (since_s, least))
        if miss <= _TOLERANCE or now_s - self.since_s < _SETTLING_S:
            return memory
        if load <= _SIMILAR * holds.get(key, 0.0):
            holds.pop(key, None)
        return replace(memory, misses={**self.misses, key: (miss, load, now_s)})


@dataclass(frozen=True, slots=True)
class DrafterMemory:
    """Earlier measurements of a drafter's effect, in JSON types."""

    present_at_s: float  # when a drafter last ran
    # By number of drafters: the lag, and when it was measured.
    lags: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    absent_at_s: float = 0.0  # when none was up
    useless_at_s: float | None = None  # when drafters last brought nothing

    def lag(self, count: int, since_s: float) -> float | None:
        """Return the lag with this number of drafters; None if not measured since `since_s`."""
        lag, measured_s = self.lags.get(str(count), (0.0, -math.inf))
        return lag if measured_s >= since_s else None


def count_targets(
    rules: ScalingRules,
    current: int,
    loads: Sequence[ReplicaLoad],
    latest: Sequence[ReplicaLoad] = (),
    *,
    running: int,
    is_called: bool = False,
) -> int:
    """Return the number of replicas that reach the target utilization; fewer than now only with slots to spare.

    current: replicas wanted so far.
    loads: means over the last seconds.
    latest: the last reports. They count if they are higher, so that a new queue asks at once for what it needs.
    running: replicas that are up. Starting ones have no rows yet.
    is_called: whether a coordinator waits for a first replica.
    """
    if not loads:
        return max(current, int(is_called))
    demand = max(_demand(loads, running), _demand(latest, running))
    slots = sum(load.slots for load in loads) / len(loads)
    wanted = math.ceil(demand / (rules.target_utilization * slots))
    if wanted < current:
        wanted = min(current, math.ceil(demand / (_SCALE_DOWN * rules.target_utilization * slots)))
    return wanted  # Serve keeps it within the bounds


def _demand(loads: Sequence[ReplicaLoad], running: int) -> float:
    """Return the requests that run or wait anywhere. Replicas without a report are taken to have the same load."""
    if not loads:
        return 0.0
    unreported = max(running, len(loads)) / len(loads)
    own = unreported * sum(load.rows + load.waiting for load in loads)
    return own + sum(load.queued for load in loads) / len(loads)


def count_for_aims(
    rules: ScalingRules,
    current: int,
    means: Sequence[ReplicaLoad],
    latest: Sequence[ReplicaLoad],
    memory: AimMemory,
    now_s: float,
    *,
    running: int,
) -> tuple[int, AimMemory]:
    """Return how many targets the aims need, 0 if nothing is known, and the updated memory.

    More while an aim is missed, unless each request has a target to itself already, or fewer requests for each target
    did not help lately. Fewer while the aim would be held with room to spare: it was with so many, or would be if it
    took them as many times longer as there are fewer. Loads as in `count_targets`.
    """
    if not current or not means or not latest or memory.count != current or running != current:
        return current, replace(memory, count=current, since_s=now_s, period=None)
    miss, demand = _miss(rules, latest), _demand(means, running)
    if not miss:
        return 0, replace(memory, period=None)
    load = demand / current
    memory = memory.after(miss, load, _demand(latest, running) / current, now_s)
    if now_s - memory.since_s < _SETTLING_S:
        return current, memory
    missed = [
        (int(count), missed, load)
        for count, (missed, load, at_s) in memory.misses.items()
        if at_s >= now_s - _PROBE_PERIOD_S and count != str(current)
    ]
    if miss <= _TOLERANCE:
        held = [int(count) for count, most in memory.holds.items() if demand <= _SIMILAR * most * int(count)]
        fewest = min([math.ceil(current * miss / _ROOM), *held]) if miss <= _ROOM else current
        bounds = [math.floor(demand / load * _SIMILAR) + 1 for count, _, load in missed if count < current and load]
        return min(current, max([fewest, *bounds])), memory
    as_good = [count for count, other, more in missed if not _helped((other, more), (miss, load))]
    as_bad = [count for count, other, less in missed if not _helped((miss, load), (other, less))]
    if as_good:
        return min(current, *as_good), memory
    if as_bad or load <= 1:
        return current, memory
    return min(math.ceil(current * min(miss, _MOST_STEP)), math.ceil(demand)), memory


def _helped(before: tuple[float, float], after: tuple[float, float]) -> bool:
    """Whether fewer requests for each target helped, or may have. before, after: misses and requests for each."""
    (miss, load), (later_miss, later_load) = before, after
    if load < _SIMILAR * later_load:
        return True
    return math.log(miss / later_miss) >= _LEAST_EFFECT * math.log(load / max(later_load, 1e-9))


def _miss(rules: ScalingRules, loads: Sequence[ReplicaLoad]) -> float:
    """Return the factor by which the aims are missed; below 1: they are held; 0: not known."""
    ttft_s, tokens_per_s = (max(getattr(load, name) for load in loads) for name in ("ttft_s", "tokens_per_s"))
    late = ttft_s / rules.ttft_s if rules.ttft_s else 0.0
    slow = rules.tokens_per_s / tokens_per_s if tokens_per_s else 0.0
    return max(late, slow)


def count_drafters(
    current: int, targets: Sequence[ReplicaLoad], drafters: Sequence[ReplicaLoad], memory: DrafterMemory, now_s: float
) -> tuple[int, DrafterMemory]:
    """Return how many drafters to run, and the updated memory. One step up or down at a time, by the targets' lag.

    There is no drafter if nothing is drafted, plain decoding is faster, or drafters bring no speed. current: wanted so
    far.
    """
    rows = sum(load.rows for load in targets)
    lag = sum(load.rows * load.lag for load in targets) / rows if rows else 0.0
    lags = dict(memory.lags)
    if current and len(drafters) == current:
        lags[str(current)] = (lag, now_s)
    absent_at_s = memory.absent_at_s if drafters else now_s
    has_settled = now_s - absent_at_s >= _SETTLING_S
    is_useless = rows > 0 and current > 0 and has_settled and _speedup(targets, lag) < _LEAST_SPEEDUP
    useless_at_s = now_s if is_useless else memory.useless_at_s
    memory = DrafterMemory(now_s if current else memory.present_at_s, lags, absent_at_s, useless_at_s)
    rests = not current and useless_at_s is not None and now_s - useless_at_s < _PROBE_PERIOD_S
    plain_pays = sum(load.rows * load.drafting for load in targets) < max(_MIN_DRAFTING * rows, 1e-9)
    if is_useless or rests or plain_pays:
        probe = rows > 0 and not current and now_s - memory.present_at_s >= _PROBE_PERIOD_S
        return int(probe), memory
    if len(drafters) < current or not current:
        return max(1, current), memory  # wait until all have started
    step = _worthwhile_step(current, lag, memory, now_s - _PROBE_PERIOD_S)
    return max(1, current + max(step, _needed_step(drafters))), memory


def _speedup(targets: Sequence[ReplicaLoad], lag: float) -> float:
    """Return the speed with drafters over that without: fewer steps for as many tokens, less the time spent waiting."""
    rows = sum(load.rows for load in targets)
    return (1 - lag) / max(1 - sum(load.rows * load.drafted for load in targets) / rows, 0.01)


def _needed_step(drafters: Sequence[ReplicaLoad]) -> int:
    """Return the smallest step that gives rows slots: 1 if rows wait, 0 if one drafter fewer could not hold them."""
    if sum(load.waiting for load in drafters) > 0:
        return 1
    fewer_slots = sum(load.slots for load in drafters) * (1 - 1 / len(drafters))
    return 0 if sum(load.rows for load in drafters) > fewer_slots else -1


def _worthwhile_step(current: int, lag: float, memory: DrafterMemory, since_s: float) -> int:
    """Return 1, 0 or -1, from the lag now and the lags measured since then with one drafter more or fewer."""
    fewer, more = memory.lag(current - 1, since_s), memory.lag(current + 1, since_s)
    if fewer is not None and lag > _GAIN * fewer and fewer > _MIN_LAG:
        return -1  # the last drafter gained nothing: something else is slow
    if lag > _MAX_LAG and (more is None or more < _GAIN * lag):
        return 1
    return -1 if lag < _MIN_LAG and (fewer is None or fewer < _MAX_LAG) else 0


_Id = TypeVar("_Id", bound=Hashable)


def scale(deployments: Mapping[_Id, "AutoscalingContext"]) -> tuple[dict[_Id, int], dict[_Id, dict[str, Any]]]:
    """Serve's application-level policy: return the number of replicas and the new state of each of our deployments."""
    counts: dict[_Id, int] = {}
    states: dict[_Id, dict[str, Any]] = {}
    loads = {each.deployment_name: _by_replica(each.aggregated_metrics or {}) for each in deployments.values()}
    for key, deployment in deployments.items():
        options = deployment.config.policy.policy_kwargs if deployment.config is not None else {}
        if not options:  # none of ours
            continue
        rules = ScalingRules(**options)
        current, own = deployment.target_num_replicas, loads[deployment.deployment_name]
        if rules.role == "target":
            latest = {
                name: {replica: samples[-1].value for replica, samples in series.items() if samples}
                for name, series in (deployment.raw_metrics or {}).items()
            }
            now, running = _by_replica(latest), deployment.current_num_replicas
            is_called = deployment.total_queued_requests > 0
            counts[key] = count_targets(rules, current, own, now, running=running, is_called=is_called)
            if rules.ttft_s or rules.tokens_per_s:
                aims = AimMemory(**deployment.policy_state.get("aims", {}))
                time_s = deployment.current_time or 0.0
                count, aims = count_for_aims(rules, current, own, now, aims, time_s, running=running)
                counts[key], states[key] = max(counts[key], count), {"aims": asdict(aims)}
        elif set(rules.targets) & set(loads):
            now_s = deployment.current_time or 0.0
            memory = DrafterMemory(**deployment.policy_state.get("memory", {"present_at_s": now_s}))
            targets = [load for name in rules.targets for load in loads.get(name, [])]
            counts[key], memory = count_drafters(current, targets, own, memory, now_s)
            states[key] = {"memory": asdict(memory)}
        else:  # its targets are scaled by hand: Serve passes no loads of theirs
            counts[key] = max(1, current)
    return counts, states


def _by_replica(metrics: Mapping[str, Mapping[Any, float]]) -> list[ReplicaLoad]:
    names = list(ReplicaLoad.__dataclass_fields__)
    replicas = set.intersection(*(set(metrics.get(name, {})) for name in names))
    return [ReplicaLoad(**{name: metrics[name][replica] for name in names}) for replica in replicas]
