"""Where requests go."""

from actors.addresses import ReplicaAddress
from actors.messages import Report
from actors.placement import Placement


def make_placement(*names: str, model: str = "m") -> Placement:
    placement = Placement()
    for name in names:
        placement.add(ReplicaAddress(name, model), 0.0)
    return placement


def test_requests_spread_and_released_ones_no_longer_count() -> None:
    placement = make_placement("a", "b")
    assert {placement.assign("m", 1), placement.assign("m", 2)} == {"a", "b"}
    third = placement.assign("m", 3)
    for request_id in (1, 2, 3):
        placement.release(third, request_id)
    assert placement.assign("m", 4) == third
    placement.release("gone", 1)
    placement.release(None, 1)


def test_other_coordinators_load_counts() -> None:
    placement = make_placement("a", "b")
    placement.heard("a", 1.0, Report(active=2, waiting=1, slots=4, request_ids=[]))
    placement.heard("gone", 1.0, None)
    assert [placement.assign("m", i) for i in range(3)] == ["b", "b", "b"]


def test_a_model_without_replicas_has_no_place() -> None:
    placement = make_placement("a")
    assert placement.assign("other", 1) is None
    assert placement.models() == {"m"}


def test_removing_a_replica_returns_its_requests() -> None:
    placement = make_placement("a")
    placement.assign("m", 1)
    placement.assign("m", 2)
    assert placement.busy() == ["a"]
    assert placement.remove("a") == {1, 2}
    assert placement.names() == placement.models() == set()


def test_only_a_replica_with_work_can_be_silent() -> None:
    placement = make_placement("busy", "idle")
    placement.assign("m", 1)
    name = placement.busy()[0]
    assert placement.silent(10.0, 20.0) == []
    assert placement.silent(30.0, 20.0) == [name]
    placement.heard(name, 25.0, None)
    assert placement.silent(40.0, 20.0) == []
    assert placement.silent(46.0, 20.0) == [name]
