"""The mailbox handles Cancel and Heartbeat, measures waits, reports, and drops rows of silent coordinators."""

from actors.loops import mailbox
from actors.loops.mailbox import Mailbox
from actors.loops.row import Row
from actors.loops.row_table import RowTable
from actors.loops.thread import LoopTimes
from actors.wire.link import LocalExchange, LocalLink
from actors.wire.messages import Admit, Cancel, Heartbeat, Offer, Report
from decoding.sampling.params import SamplingParams
from engine.model.page_tables import PageTables


class Desk:
    """A mailbox whose loop has one slot, and a coordinator."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.exchange = exchange = LocalExchange()
        self.coordinator: LocalLink = exchange.join("coordinator")
        self.times = LoopTimes()
        self.rows: RowTable[Row] = RowTable(PageTables(slots=1, capacity=8))
        self.mailbox = Mailbox(exchange.join("target"), self.rows, self.times, clock=lambda: self.now_s)

    def admit(self) -> None:
        self.coordinator.send("target", [Admit(7, [1], 1, SamplingParams(max_tokens=4), 0, drafter=False)])
        for peer, message in self.mailbox.receive(0.0):
            assert isinstance(message, Admit)
            self.rows.add(Row(peer, message))


def test_cancel_and_heartbeat_are_not_passed_to_the_loop() -> None:
    desk = Desk()
    desk.coordinator.send("target", [Heartbeat(), Offer(7, 1, [2]), Cancel(7)])
    assert list(desk.mailbox.receive(0.0)) == [("coordinator", Offer(7, 1, [2]))]


def test_a_cancellation_does_not_overtake_the_admission_before_it() -> None:
    desk = Desk()
    desk.coordinator.send("target", [Admit(7, [1], 1, SamplingParams(max_tokens=4), 0, drafter=False), Cancel(7)])
    for peer, message in desk.mailbox.receive(0.0):
        assert isinstance(message, Admit)
        desk.rows.add(Row(peer, message))
    assert desk.rows.report() == Report(active=0, waiting=0, slots=1, request_ids=[], pages=1)


def test_what_is_early_is_kept_in_order_and_no_more_than_some_of_it() -> None:
    desk = Desk()
    early = [Offer(index % 2, index, [2]) for index in range(2 * mailbox._MAX_EARLY)]
    for offer in early:
        desk.mailbox.keep(("coordinator", offer.request_id), "drafter", offer)
    expected = [("drafter", offer) for offer in early[mailbox._MAX_EARLY :] if offer.request_id == 1]
    assert desk.mailbox.take_early(("coordinator", 1)) == expected
    assert desk.mailbox.take_early(("coordinator", 1)) == []
    assert len(desk.mailbox.take_early(("coordinator", 0))) == mailbox._MAX_EARLY // 2


def test_cancel_frees_the_slot() -> None:
    desk = Desk()
    desk.admit()
    assert desk.rows.report() == Report(active=1, waiting=0, slots=1, request_ids=[], pages=1)
    desk.coordinator.send("target", [Cancel(7)])
    list(desk.mailbox.receive(0.0))
    assert desk.rows.report() == Report(active=0, waiting=0, slots=1, request_ids=[], pages=1)


def test_a_wait_without_requests_counts_as_idle() -> None:
    desk = Desk()
    list(desk.mailbox.receive(0.01))
    assert desk.times.idle_s >= 0.01
    assert desk.times.waited_s == 0
    desk.admit()
    list(desk.mailbox.receive(0.01))
    assert desk.times.waited_s >= 0.01


def test_coordinators_get_reports_and_are_forgotten_when_silent() -> None:
    desk = Desk()
    desk.admit()
    desk.mailbox.close_turn()
    assert desk.coordinator.receive(0.0) == [("target", Report(active=1, waiting=0, slots=1, request_ids=[7], pages=1))]
    for _ in range(4):
        assert len(desk.rows) == 1
        desk.now_s += mailbox._MAX_SILENCE_S / 4 + 1
        desk.mailbox.close_turn()
    assert len(desk.rows) == 0


def test_the_rows_of_a_coordinator_without_a_connection_are_gone_after_seconds() -> None:
    """Its process has ended, or it would have connected again."""
    desk = Desk()
    desk.admit()
    desk.coordinator.close()
    steps = 0
    while len(desk.rows):
        desk.now_s += mailbox.REPORT_PERIOD_S
        desk.mailbox.close_turn()
        steps += 1
    assert steps * mailbox.REPORT_PERIOD_S <= mailbox._MAX_UNREACHABLE_S + 2 * mailbox.REPORT_PERIOD_S


def test_a_coordinator_that_connects_again_keeps_its_rows() -> None:
    desk = Desk()
    desk.admit()
    for _ in range(10):
        inbox = desk.exchange.inboxes.pop("coordinator")
        for _ in range(2):
            desk.now_s += mailbox.REPORT_PERIOD_S
            desk.mailbox.close_turn()
        desk.exchange.inboxes["coordinator"] = inbox
        desk.now_s += mailbox.REPORT_PERIOD_S
        desk.mailbox.close_turn()
    assert len(desk.rows) == 1


def test_a_loop_that_was_stopped_does_not_count_that_time_as_silence() -> None:
    desk = Desk()
    desk.admit()
    desk.mailbox.close_turn()
    desk.now_s += mailbox._MAX_SILENCE_S + 1
    desk.mailbox.close_turn()
    assert len(desk.rows) == 1


def test_heartbeats_keep_rows() -> None:
    desk = Desk()
    desk.admit()
    for _ in range(8):
        desk.now_s += mailbox._MAX_SILENCE_S / 4 + 1
        desk.coordinator.send("target", [Heartbeat()])
        list(desk.mailbox.receive(0.0))
        desk.mailbox.close_turn()
    assert len(desk.rows) == 1
