"""How many replicas each model should have: targets by demand, drafters by what more drafting would gain.

Arithmetic on what replicas report. Serve's controller runs a pickled copy of this module, on nodes that may not have
the others, so it imports nothing but the standard library, and keeps what it remembers where Serve keeps it for it.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, TypeVar

_GAIN = 0.8  # one more drafter is worth it if it brings the lag below this share of what it was
_LEAST_DRAFTING = 0.2  # the share of the time that targets must want drafts: trials of plain decoding don't end them


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What one replica reports, as `record_autoscaling_stats` has it; the policy sees means over the last seconds."""

    rows: float  # that hold a KV slot
    waiting: float  # that wait for one
    slots: float
    drafting: float = 1.0  # of a target: whether drafts are wanted; 0 while plain decoding is faster
    lag: float = 0.0  # of a target: the share of its busy time that it waited for drafts
    busy: float = 0.0  # the share of the time that it computed
    queued: float = 0.0  # of a target: requests that coordinators hold back; each of its replicas tells of all of them

    def stats(self) -> dict[str, float]:
        """By the names that Serve keeps them under."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """Of one model. Bounds and delays are Serve's own options."""

    role: Literal["target", "drafter"]
    target_utilization: float  # rows per slot to aim at, waiting rows included
    scale_down_below: float  # a replica goes only if the others would have fewer rows per slot
    max_draft_lag: float  # above it, a drafter is added
    min_draft_lag: float  # below it, a drafter is removed
    probe_period_s: float  # how often a drafter is tried where none pays; how long what was learnt is trusted
    targets: Sequence[str] = ()  # of a drafter: the deployments that it drafts for


@dataclass(frozen=True, slots=True)
class DrafterMemory:
    """What is known from before, in types that JSON has."""

    present_at_s: float  # when there was a drafter last
    lags: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # by count: the lag, and when that was seen

    def lag(self, count: int, since_s: float) -> float | None:
        """Of so many drafters; None: not known, or from before `since_s`."""
        lag, at_s = self.lags.get(str(count), (0.0, -math.inf))
        return lag if at_s >= since_s else None


def count_targets(rules: ScalingRules, current: int, loads: Sequence[ReplicaLoad], *, running: int) -> int:
    """As many as bring rows per slot to what is aimed at; fewer than there are only with room to spare.

    Args:
        current: how many are wanted so far.
        running: how many are up. Those that start have no rows yet.
    """
    if not loads:
        return current
    unheard = max(running, len(loads)) / len(loads)  # replicas that don't report are taken to be like the others
    demand = unheard * sum(load.rows + load.waiting for load in loads)
    demand += sum(load.queued for load in loads) / len(loads)
    slots = sum(load.slots for load in loads) / len(loads)
    wanted = math.ceil(demand / (rules.target_utilization * slots))
    if wanted < current:
        wanted = min(current, math.ceil(demand / (rules.scale_down_below * slots)))
    return max(1, wanted)


def count_drafters(
    rules: ScalingRules,
    current: int,
    targets: Sequence[ReplicaLoad],
    drafters: Sequence[ReplicaLoad],
    memory: DrafterMemory,
    now_s: float,
) -> tuple[int, DrafterMemory]:
    """None where nothing is drafted or plain decoding wins; else one more or one less, as the targets' lag says.

    current: how many are wanted so far. drafters: what those report that are up.
    """
    rows = sum(load.rows for load in targets)
    lag = sum(load.rows * load.lag for load in targets) / rows if rows else 0.0
    lags = dict(memory.lags)
    if current and len(drafters) == current:
        lags[str(current)] = (lag, now_s)
    memory = DrafterMemory(now_s if current else memory.present_at_s, lags)
    if sum(load.rows * load.drafting for load in targets) < max(_LEAST_DRAFTING * rows, 1e-9):
        probe = rows > 0 and not current and now_s - memory.present_at_s >= rules.probe_period_s
        return int(probe), memory
    if len(drafters) < current or not current:
        return max(1, current), memory  # wait for those that are coming up
    step = _worthwhile_step(rules, current, lag, memory, now_s - rules.probe_period_s)
    return max(1, current + max(step, _needed_step(drafters))), memory


def _needed_step(drafters: Sequence[ReplicaLoad]) -> int:
    """The least that lets rows find slots: 1 if some wait for one, 0 if fewer drafters could not hold them."""
    if sum(load.waiting for load in drafters) > 0:
        return 1
    fewer_slots = sum(load.slots for load in drafters) * (1 - 1 / len(drafters))
    return 0 if sum(load.rows for load in drafters) > fewer_slots else -1


def _worthwhile_step(rules: ScalingRules, current: int, lag: float, memory: DrafterMemory, since_s: float) -> int:
    """1, 0 or -1. What one drafter more or less was worth is known if it was tried since then."""
    fewer, more = memory.lag(current - 1, since_s), memory.lag(current + 1, since_s)
    if fewer is not None and lag > _GAIN * fewer and fewer > rules.min_draft_lag:
        return -1  # the last one gained nothing: what is slow is not the number of drafters
    if lag > rules.max_draft_lag and (more is None or more < _GAIN * lag):
        return 1
    return -1 if lag < rules.min_draft_lag and (fewer is None or fewer < rules.max_draft_lag) else 0


class _Policy(Protocol):
    @property
    def policy_kwargs(self) -> dict[str, Any]: ...


class _Config(Protocol):
    @property
    def policy(self) -> _Policy: ...


class Deployment(Protocol):
    """What Serve tells about a deployment: the parts of its `AutoscalingContext` that are used here."""

    deployment_name: str
    target_num_replicas: int
    current_num_replicas: int  # that run
    policy_state: dict[str, Any]
    current_time: float | None

    @property
    def config(self) -> _Config | None: ...
    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...


_Id = TypeVar("_Id", bound=Hashable)


def scale(deployments: Mapping[_Id, Deployment]) -> tuple[dict[_Id, int], dict[_Id, dict[str, Any]]]:
    """Serve's application-level policy: for each of our deployments, how many replicas, and what to remember."""
    counts: dict[_Id, int] = {}
    states: dict[_Id, dict[str, Any]] = {}
    loads = {one.deployment_name: _loads(one) for one in deployments.values()}
    for key, one in deployments.items():
        rules = _rules(one)
        if rules is None:
            continue
        if rules.role == "target":
            told, running = loads[one.deployment_name], one.current_num_replicas
            counts[key] = count_targets(rules, one.target_num_replicas, told, running=running)
            continue
        if not set(rules.targets) & set(loads):  # they were scaled by hand, and so their loads are not told
            counts[key] = max(1, one.target_num_replicas)
            continue
        now_s = one.current_time or 0.0
        memory = DrafterMemory(**one.policy_state.get("memory", {"present_at_s": now_s}))
        counts[key], memory = count_drafters(
            rules,
            one.target_num_replicas,
            [load for name in rules.targets for load in loads.get(name, [])],
            loads[one.deployment_name],
            memory,
            now_s,
        )
        states[key] = {"memory": asdict(memory)}
    return counts, states


def _rules(deployment: Deployment) -> ScalingRules | None:
    """What `autoscaling_options` attached; None: the deployment is not ours."""
    options = deployment.config.policy.policy_kwargs if deployment.config is not None else {}
    return ScalingRules(**options) if options else None


def _loads(deployment: Deployment) -> list[ReplicaLoad]:
    """Of the replicas that have reported all of it."""
    metrics = deployment.aggregated_metrics or {}
    names = list(ReplicaLoad.__dataclass_fields__)
    replicas = set.intersection(*(set(metrics.get(name, {})) for name in names))
    return [ReplicaLoad(**{name: metrics[name][replica] for name in names}) for replica in replicas]
