"""A coordinator and fake replicas, run turn by turn with a clock that the test sets."""

from collections.abc import Callable, Collection

from actors.coordinator.loop import Coordinator
from actors.coordinator.request import Delta, Endpoint, Request
from actors.wire.link import LocalExchange
from actors.wire.messages import Admit, Commit, Heartbeat, Message, Report, Token
from decoding.sampling.params import SamplingParams
from tests.support.replicas import FakeReplica

PROMPT = [10, 11, 12]


def decode(tokens: list[int]) -> str:
    return "".join(chr(ord("a") + token % 26) for token in tokens)


ENDPOINT = Endpoint("e", "big", "small", 4, decode)


class Stage:
    """A coordinator and its replicas. Names with "t" run the target's model, names with "d" the drafter's."""

    def __init__(
        self,
        *,
        on_step: Callable[[str, int], None] | None = None,
        replaceable: Collection[str] = (),
        **limits: float,
    ) -> None:
        self.now_s = 1000.0
        self.exchange = LocalExchange()
        self.link = self.exchange.join("coordinator")
        self.coordinator = Coordinator(
            self.link,
            clock=lambda: self.now_s,
            on_step=on_step,
            replaceable=replaceable,
            **limits,  # type: ignore[arg-type]
        )
        self.replicas: dict[str, FakeReplica] = {}

    def set_replicas(self, *names: str) -> None:
        for name in names:
            if name not in self.replicas:
                self.replicas[name] = FakeReplica(self.exchange, name, "big" if name[0] == "t" else "small")
        self.coordinator.set_replicas(self.replicas[name].address for name in names)
        self.turn()

    def turn(self, *, later_s: float = 0.0) -> None:
        self.now_s += later_s
        self.link.wake()
        self.coordinator.turn()

    def submit(
        self,
        request_id: int = 1,
        *,
        max_tokens: int = 50,
        speculate: bool = True,
        prompt: list[int] = PROMPT,
        streamed: bool = True,
    ) -> list[Delta]:
        """Begin a request. Return the list to which its deltas are appended."""
        deltas: list[Delta] = []
        params = SamplingParams(max_tokens=max_tokens)
        request = Request(
            ENDPOINT, prompt, params, speculate, request_id=request_id, arrived_at_s=0.0, streamed=streamed
        )
        self.coordinator.submit(request, deltas.append)
        self.turn()
        return deltas

    def say(self, name: str, *messages: Message) -> None:
        self.replicas[name].say(*messages)
        self.turn()

    def received(self, name: str) -> list[Message]:
        """Return what the replica received since the last call, without heartbeats."""
        return [message for message in self.replicas[name].received() if not isinstance(message, Heartbeat)]


def commit(base: int, *tokens: int, request_id: int = 1, finish: str | None = None, admission: int = 0) -> Commit:
    records = [*(Token(token, "accepted", "drafter") for token in tokens[:-1]), Token(tokens[-1], "bonus")]
    return Commit(request_id, base, records, finish, 4, admission=admission)  # type: ignore[arg-type]


def admitted(messages: list[Message]) -> list[list[int]]:
    return [message.tokens for message in messages if isinstance(message, Admit)]


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def reports(*request_ids: int, drafter: str | None = "d1") -> Report:
    attached_drafters = {} if drafter is None else dict.fromkeys(request_ids, drafter)
    return Report(
        len(request_ids), waiting=0, slots=4, request_ids=list(request_ids), attached_drafters=attached_drafters
    )
