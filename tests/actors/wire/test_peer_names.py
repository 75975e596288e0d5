"""What a listener keeps of its peers is bounded, also of those that are gone."""

from functools import partial

import pytest
import zmq

from actors.wire import peer_names
from actors.wire.peer_names import PeerRoutes, name_with_key, new_routing_id


def test_peers_that_are_gone_are_forgotten_with_their_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_names, "_MAX_PEERS", 3)
    routes, names = PeerRoutes(), list[str]()
    for _ in range(10):
        key, _ = zmq.curve_keypair()
        names.append(routes.identify(new_routing_id(name_with_key("drafter", key)), partial(bytes, key)))
        routes.note_reached(names[-1], False)
    assert [name for name in names if routes.get(name) is not None] == names[-3:]
    assert [name for name in names if not routes.reaches(name)] == names[-3:]
    routes.note_reached(names[-1], True)
    assert routes.reaches(names[-1])
