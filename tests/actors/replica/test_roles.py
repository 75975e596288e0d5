"""One model as target, member and drafter at once: every request is served as if the model did nothing else."""

from msgspec.structs import replace

from actors.coordinator.request import Endpoint, Request
from actors.loops.options import LoopOptions
from actors.replica import roles
from actors.replica.roles import make_loop
from actors.wire.link import LocalExchange
from actors.wire.messages import Admit, Cancel, Commit, Heartbeat, Message, Offer, ReplicaAddress, Report
from decoding.blending.params import BlendParams
from decoding.sampling.params import SamplingParams
from engine.model.runner import Runner
from tests.in_process.test_ensemble import PROMPTS, ensemble, params, reference, running, tokens
from tests.support.models import tiny_model
from tests.support.waiting import wait_until, wait_until_idle

GREEDY = SamplingParams(max_tokens=8, temperature=0)


def test_one_model_answers_alone_leads_is_a_member_and_drafts() -> None:
    mixture = BlendParams()
    endpoints = [
        Endpoint("alone", "second", "drafter", 4, decode=str),
        Endpoint("drafted", "first", "second", 4, decode=str),
        ensemble(mixture, drafter="second"),
        Endpoint("leads", "second", "drafter", 4, decode=str, members=("first",)),
        Endpoint("not by itself", "second", "second", 4, decode=str),
    ]
    members = [("second",), ("first",), ("first", "second"), ("second", "first"), ("second",)]
    some = [(i, PROMPTS[i + 1], params(i)) for i in range(len(endpoints))]
    with running(slots=3, both="second") as engine:
        answers = engine.generate([Request(endpoints[index], prompt, setting) for index, prompt, setting in some])
        wait_until_idle(engine)
        assert engine.loops["second"].load().slots == engine.loops["first"].load().slots
    assert [tokens(answer) for answer in answers] == [
        reference(members[index], mixture, p, setting) for index, p, setting in some
    ]


def test_attached_drafters_are_in_the_report_of_both() -> None:
    target = Report(4, 1, 4, [5, 6, 7], drafting=False, attached_drafters={5: "d"}, own_waiting=1)
    both = roles._combine(target, Report(1, 0, 4, [8]))
    assert both == Report(5, 1, 5, [8, 5, 6, 7], drafting=False, attached_drafters={5: "d"}, own_waiting=1)


def test_peers_see_one_replica() -> None:
    """A request to be answered and one to be drafted for, with later messages for each."""
    exchange = LocalExchange()
    runner = Runner(tiny_model("llama-gqa"), slots=2, max_length=64, max_query=16)
    loop = make_loop("both", runner, exchange.join("both"), LoopOptions(prefill_chunk=16))
    peer = exchange.join("peer")
    received: list[Message] = []

    def turn_until(kind: type[Message], request_id: int | None = None) -> None:
        def has_arrived() -> bool:
            loop.turn()
            received.extend(message for _, message in peer.receive(0.0))
            wanted = [message for message in received if isinstance(message, kind)]
            return any(request_id in (None, getattr(message, "request_id", None)) for message in wanted)

        wait_until(has_arrived, kind.__name__)

    large = ReplicaAddress(peer.name, "large")
    own = Admit(1, PROMPTS[2], len(PROMPTS[2]), GREEDY, 0, drafter=False)
    others = Admit(2, PROMPTS[3], len(PROMPTS[3]), GREEDY, 2, drafter=True, target=large, drafts_only=True)
    peer.send("both", [Heartbeat(), own, others])
    turn_until(Offer, 2)
    turn_until(Commit, 1)
    assert not [message for message in received if isinstance(message, Offer) and message.request_id != 2]
    assert not [message for message in received if isinstance(message, Commit) and message.request_id != 1]
    peer.send("both", [Cancel(1), Cancel(2)])
    received.clear()
    turn_until(Report)
    peer.send("both", [replace(others, request_id=3)])
    received.clear()
    turn_until(Report)
    reports = [message for message in received if isinstance(message, Report)]
    assert len(reports) == 1
    assert reports[0].slots == 3  # those of the target, and the one that drafting takes
    assert reports[0].request_ids == [3]
