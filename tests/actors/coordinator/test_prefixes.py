"""Requests go where their prompt's beginning has been read, as long as no replica gets much more than its share."""

import random
from collections import Counter

import pytest

from actors.coordinator.prefix_table import PrefixTable, prefixes_of
from actors.coordinator.replica_table import ReplicaTable
from actors.wire.addresses import ReplicaAddress
from actors.wire.messages import Report
from tests.support.coordinator_stage import Stage, commit

NAMES = ["a", "b", "c", "d"]


def make_table(*names: str) -> ReplicaTable:
    table = ReplicaTable()
    for name in names or NAMES:
        table.add(ReplicaAddress(name, "m"), 0.0)
    return table


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
    table = make_table()
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
    table = make_table()
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
    tables = [make_table(), make_table(*reversed(NAMES))]
    homes = [[assign(table, 1, prompt(seed)) for table in tables] for seed in range(20)]
    for table in tables:
        assert len(table.names()) == 4
    first, second = homes[0]
    assert first == second
    spread = {assign(make_table(), 1, prompt(seed)) for seed in range(20)}
    assert len(spread) == 4
    assert all(assign(make_table(), 1, prompt(s)) == assign(make_table(), 1, prompt(s)) for s in range(20))


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
