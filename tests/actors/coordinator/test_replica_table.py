"""The replica table assigns requests by load and by what was read, judges signs of life, and finds requests to move."""

import random
from collections import Counter

import pytest

from actors.coordinator.replica_table import PrefixTable, ReplicaTable, prefixes_of
from actors.wire.messages import ReplicaAddress, Report
from tests.support.coordinator_stage import Stage, commit

NAMES = ["a", "b", "c", "d"]


def make_table(*names: str, model: str = "m") -> ReplicaTable:
    table = ReplicaTable()
    for name in names:
        table.add(ReplicaAddress(name, model), 0.0)
    return table


def test_requests_spread_and_released_ones_no_longer_count() -> None:
    table = make_table("a", "b")
    assert {table.assign("m", 1), table.assign("m", 2)} == {"a", "b"}
    third = table.assign("m", 3)
    for request_id in (1, 2, 3):
        table.release(third, request_id)
    assert table.assign("m", 4) == third
    table.release("gone", 1)
    table.release(None, 1)


def test_other_coordinators_load_counts() -> None:
    table = make_table("a", "b")
    table.record_message("a", 1.0, Report(active=2, waiting=1, slots=4, request_ids=[]))
    table.record_message("gone", 1.0, None)
    assert [table.assign("m", i) for i in range(3)] == ["b", "b", "b"]


def test_a_replica_whose_memory_is_full_gets_nothing_while_another_has_room() -> None:
    table = make_table("a", "b")
    for name, report_ in (("a", Report(2, 1, 16, [1, 2, 3])), ("b", Report(9, 0, 16, []))):
        table.record_message(name, 1.0, report_)
    assert table.assign("m", 10) == "b"


def test_a_model_without_replicas_gets_no_requests() -> None:
    table = make_table("a")
    assert table.assign("other", 1) is None
    assert table.models() == {"m"}


def test_removing_a_replica_returns_its_requests() -> None:
    table = make_table("a")
    table.assign("m", 1)
    table.assign("m", 2)
    assert set(table.requests_on("a")) == {1, 2}
    assert table.remove("a") == {1, 2}
    assert table.names() == table.models() == set()


def test_a_silent_replica_is_suspected_at_once_unless_it_is_healthy() -> None:
    table = make_table("a", "b")
    table.assign("m", 1)
    (name,) = [name for name in ("a", "b") if table.requests_on(name)]
    (other,) = {"a", "b"} - {name}
    for now_s in range(9):
        table.set_listed({"a", "b"}, {name}, float(now_s))
        table.record_message(other, float(now_s), None)
        table.update_suspicions(float(now_s))
        assert table.requests_to_move() == []
    for now_s in range(9, 13):
        table.record_message(other, float(now_s), None)
    table.update_suspicions(12.5)
    assert table.requests_to_move() == [(name, 1)]
    assert [table.assign("m", i) for i in (2, 3)] == [other, other]
    table.record_message(name, 13.0, None)
    table.update_suspicions(13.0)
    assert table.requests_to_move() == []


def test_a_replica_that_leaves_gets_nothing_new_and_is_given_up_when_silent() -> None:
    table = make_table("a", "b")
    table.set_listed({"b"}, {"b"}, 1.0)
    assert [table.assign("m", i) for i in range(3)] == ["b", "b", "b"]
    assert table.drained() == []  # until its reports confirm that it has no requests
    for requests in ([7], [], []):
        table.record_message("a", 0.0, report(len(requests), request_ids=requests))
    assert table.drained() == ["a"]
    assert table.timed_out(3.0, 60.0) == []
    assert table.timed_out(5.0, 60.0) == ["a"]
    table.set_listed({"a", "b"}, {"a", "b"}, 6.0)
    assert table.assign("m", 9) == "a"


def report(active: int, waiting: int = 0, request_ids: list[int] | None = None) -> Report:
    ids = request_ids or []
    return Report(active=active, waiting=waiting, slots=4, request_ids=ids, own_waiting=min(waiting, len(ids)))


def test_loads_are_compared_only_when_they_are_known() -> None:
    table = make_table("a")
    for request_id in range(6):
        table.assign("m", request_id)
    table.add(ReplicaAddress("b", "m"), 0.0)
    assert table.find_imbalance("m") == ("", 0)
    for _ in range(2):
        table.record_message("a", 1.0, report(6))
        table.record_message("b", 1.0, report(0))
    assert table.find_imbalance("m") == ("a", 3)
    table.release("a", 0)
    assert table.find_imbalance("m") == ("", 0)


def test_no_more_waiting_requests_move_than_there_are_free_slots() -> None:
    table = make_table("a")
    ids = list(range(10))
    for request_id in ids:
        table.assign("m", request_id)
    table.add(ReplicaAddress("b", "m"), 0.0)
    for _ in range(2):
        table.record_message("a", 1.0, report(4, 6, ids))
        table.record_message("b", 1.0, report(0))
    assert table.waiting_requests_to_move("m") == [4, 5, 6, 7]


def test_requests_that_run_do_not_move_because_those_of_others_wait() -> None:
    table = make_table("a")
    for request_id in range(4):
        table.assign("m", request_id)
    table.add(ReplicaAddress("b", "m"), 0.0)
    for _ in range(2):
        table.record_message("a", 1.0, Report(active=4, waiting=3, slots=4, request_ids=[0, 1, 2, 3], own_waiting=1))
        table.record_message("b", 1.0, report(0))
    assert table.waiting_requests_to_move("m") == [3]


def prompt(seed: int, length: int = 400) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def assign(table: ReplicaTable, request_id: int, text: list[int]) -> str:
    name = table.assign("m", request_id, prefixes_of(text))
    assert name is not None
    return name


@pytest.mark.parametrize("length", [0, 15, 16, 17, 64, 1000, 100_000])
def test_prefixes_are_few_and_of_whole_pages(length: int) -> None:
    prefixes = prefixes_of(prompt(0, length))
    lengths = [prefix.length for prefix in prefixes]
    assert all(length % 16 == 0 for length in lengths)
    assert lengths == sorted(set(lengths))
    assert len(lengths) <= 45
    if length >= 16:
        assert lengths[0] == 16
        assert length < 1.25 * lengths[-1] + 16


def test_prompts_share_prefixes_up_to_where_they_differ() -> None:
    first, second = prompt(1), prompt(1)
    second[200] += 1
    shared = set(prefixes_of(first)) & set(prefixes_of(second))
    assert max(prefix.length for prefix in shared) in range(150, 201)
    assert not set(prefixes_of(first)) & set(prefixes_of(first, salt="another"))


def test_a_conversation_returns_to_its_replica() -> None:
    table = make_table(*NAMES)
    system = prompt(0, 200)
    chats = {chat: system + prompt(chat, 100) for chat in range(1, 25)}
    homes = {chat: assign(table, chat, text) for chat, text in chats.items()}
    assert len(set(homes.values())) == 4
    for chat, home in homes.items():
        table.release(home, chat)
    order = list(chats)
    random.Random(3).shuffle(order)
    for chat in order:
        later = chats[chat] + prompt(chat + 100, 150)
        assert assign(table, chat, later) == homes[chat]
        table.release(homes[chat], chat)


def test_no_replica_gets_much_more_than_its_share() -> None:
    table = make_table(*NAMES)
    counts = Counter(assign(table, number, prompt(0)) for number in range(100))
    assert sorted(counts.values()) == [25] * 4  # once each has read it, the least loaded one takes the next


def test_two_requests_of_a_long_prefix_stay_together_and_of_a_short_one_do_not() -> None:
    for length, replicas in ((400, 1), (40, 2)):
        table = make_table("a", "b")
        assert len({assign(table, number, prompt(0, length)) for number in range(2)}) == replicas


def test_a_full_or_leaving_replica_is_not_waited_for() -> None:
    table = make_table("a", "b")
    home = assign(table, 1, prompt(0))
    other = "b" if home == "a" else "a"
    table.record_message(home, 1.0, Report(active=1, waiting=0, slots=1, request_ids=[1]))
    assert assign(table, 2, prompt(0)) == other
    table = make_table("a", "b")
    home = assign(table, 1, prompt(0))
    table.set_listed({"a", "b"} - {home}, {"a", "b"}, 1.0)
    assert assign(table, 2, prompt(0)) != home


def test_idle_coordinators_agree_without_knowing_each_other() -> None:
    tables = [make_table(*NAMES), make_table(*reversed(NAMES))]
    homes = [[assign(table, 1, prompt(seed)) for table in tables] for seed in range(20)]
    for table in tables:
        assert len(table.names()) == 4
    first, second = homes[0]
    assert first == second
    spread = {assign(make_table(*NAMES), 1, prompt(seed)) for seed in range(20)}
    assert len(spread) == 4
    assert all(assign(make_table(*NAMES), 1, prompt(s)) == assign(make_table(*NAMES), 1, prompt(s)) for s in range(20))


def test_the_longest_unused_prefixes_are_forgotten() -> None:
    table = PrefixTable(max_prefixes=12)
    old, new = prefixes_of(prompt(1, 160)), prefixes_of(prompt(2, 160))
    table.record(old, "a", {"a"})
    for _ in range(2):
        table.record(new, "b", {"a", "b"})
    assert len(table) <= 12
    assert table.match(new) == {"b": 160}
    assert table.match(old).get("a", 0) < 160
    table.record(new, "c", {"c"})
    assert table.match(new) == {"c": 160}


def test_requests_with_the_same_beginning_go_to_one_target(stage: Stage) -> None:
    stage.set_replicas("t1", "t2", "d1")
    homes = set()
    for request_id, text in ((1, prompt(5)), (2, prompt(5) + prompt(6)), (3, prompt(5))):
        stage.submit(request_id, prompt=text)
        (target,) = (name for name in ("t1", "t2") if stage.received(name))
        stage.say(target, commit(len(text), 1, request_id=request_id, finish="stop"))
        homes.add(target)
    assert len(homes) == 1
