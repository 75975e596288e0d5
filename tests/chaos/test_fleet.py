"""The fault harness: its links, its judgement, and a run in which replicas die and hang in mid-stream."""

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from actors.coordinator.request import Endpoint, Request
from actors.replica import in_process
from decoding.sampling.params import SamplingParams
from engine.loading.checkpoint import ModelSpec
from tests.chaos.cases import KINDS, make_cases
from tests.chaos.faults import draw
from tests.chaos.findings import Fault, Pauses, as_text, judge
from tests.chaos.fleet import Fleet, running_fleet
from tests.chaos.load import Case, Gap, Streams, Transcript
from tests.chaos.proxy import Relays
from tests.support.waiting import wait_until

TARGET = Path("models/target")


@pytest.fixture
def relays() -> Iterator[Relays]:
    with Relays() as relays:
        yield relays


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends back what it gets."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with closing(connection):
                while data := connection.recv(100):
                    connection.sendall(data)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def ends(peer: socket.socket) -> bool:
    """Whether the other side closes or resets the connection."""
    try:
        return peer.recv(100) == b""
    except ConnectionResetError:
        return True


def test_a_link_passes_lags_freezes_and_breaks(relays: Relays, echo: int) -> None:
    relay = relays.open(echo)
    with closing(socket.create_connection(("127.0.0.1", relay.port))) as peer:
        peer.settimeout(5)
        peer.sendall(b"one")
        assert peer.recv(100) == b"one"
        relay.set("open", delay_s=0.1)
        began_s = time.monotonic()
        peer.sendall(b"two")
        assert peer.recv(100) == b"two"
        assert time.monotonic() - began_s > 0.19  # there and back
        relay.set("frozen")
        peer.sendall(b"three")
        peer.settimeout(0.2)
        with pytest.raises(TimeoutError):
            peer.recv(100)
        relay.set("open")
        peer.settimeout(5)
        assert peer.recv(100) == b"three"
        relay.set("cut")
        assert ends(peer)
    with closing(socket.create_connection(("127.0.0.1", relay.port))) as late:
        late.settimeout(5)
        assert ends(late)


def test_cases_are_of_all_kinds_and_the_same_for_a_seed() -> None:
    cases, again = (make_cases(TARGET, 2 * len(KINDS), 16, seed=3) for _ in range(2))
    assert [case.kind for case in cases] == 2 * list(KINDS)
    assert [case.request.params for case in cases] == [case.request.params for case in again]
    assert [case.request.prompt for case in cases] == [case.request.prompt for case in again]


def test_streams_send_every_case_as_often_as_told_and_note_errors() -> None:
    def ask(request: str, answer: Transcript) -> None:
        answer.note_arrival()
        answer.texts[0] += request
        if request == "wrong":
            raise ValueError("refused")

    cases = [Case("some", number, request) for number, request in enumerate(("right", "wrong"))]
    streams = Streams(ask, cases, 3)
    streams.start(rounds=2)
    answers = [(case.request, answer.texts[0], answer.error) for case, answer in streams.finish()]
    assert sorted(answers, key=str) == [("right", "right", None)] * 2 + [("wrong", "wrong", "ValueError: refused")] * 2


def test_faults_are_drawn_by_seed() -> None:
    counts = {"kill target": 5, "hang": 3}
    assert draw(counts, seed=1) == draw(counts, seed=1)  # type: ignore[arg-type]
    assert sorted(draw(counts, seed=1)) == ["hang"] * 3 + ["kill target"] * 5  # type: ignore[arg-type]


def test_the_judge_counts_what_is_lost_and_what_differs_and_times_pauses() -> None:
    case = Case("greedy", 1, "request")
    right = Transcript({0: "ab"}, [1, 2], finish="length", gaps=[Gap(99.9, 101.5), Gap(130.0, 131.0)])
    wrong = Transcript({0: "ac"}, [1, 3], finish="length")
    lost = Transcript({0: "a"}, [1], error="UnavailableError: gone", began_s=101.0)
    faults = [Fault("kill target", "kill of a target", 100.0), Fault("hang", "hang of a target", 103.0, 3.0)]
    expected = {1: Transcript({0: "ab"}, [1, 2], finish="length")}
    findings = judge([(case, right), (case, wrong), (case, lost)], expected, faults, alone_s=8.0)
    assert findings.lost == ["greedy, begun +1.0 s after kill target: UnavailableError: gone"]
    assert (findings.requests, len(findings.differing)) == (3, 1)
    assert findings.pauses == {"kill of a target": Pauses(1, 1.5, 1.5)}  # the hang came too soon after the kill
    assert "lost       1" in as_text(findings)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Two targets and a drafter, in child processes."""
    spec = ModelSpec(name="target", path=str(TARGET), dtype="float32", device="cpu", slots=2, max_length=512, threads=1)
    drafter = ModelSpec(name="drafter", path="models/drafter", dtype="float32", device="cpu", slots=2, threads=1)
    with running_fleet({"target": ("target", spec, 2), "drafter": ("drafter", drafter, 1)}) as fleet:
        yield fleet


def test_replicas_die_and_hang_in_mid_stream_and_the_text_is_the_same(fleet: Fleet) -> None:
    endpoint = Endpoint("e", "target", "drafter", 4, lambda tokens: "")
    request = Request(endpoint, [5, 6, 7], SamplingParams(max_tokens=300, seed=7, temperature=1.2), request_id=1)
    undisturbed = [
        token for delta in in_process.stream(fleet.coordinator, request, fleet.check) for token in delta.token_ids
    ]
    tokens: list[int] = []
    stopped = None
    for count, delta in enumerate(in_process.stream(fleet.coordinator, request, fleet.check)):
        tokens += delta.token_ids
        if count == 10:
            fleet.ready("drafter")[0].signal(signal.SIGKILL)
        if count == 20:
            stopped = fleet.ready("target")[0]
            stopped.signal(signal.SIGSTOP)
        if count == 30 and stopped is not None:
            fleet.ready("target")[1].signal(signal.SIGKILL)
            stopped.signal(signal.SIGCONT)
    assert tokens == undisturbed
    wait_until(lambda: sum(replica.restarts for replica in fleet.replicas) == 2, "the dead are replaced")
