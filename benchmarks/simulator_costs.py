"""What a loop's turn costs, by its rows and tokens: measured on real loops over ZeroMQ, one turn at a time.

Nothing else runs meanwhile. A turn includes what serving adds to a model's step: messages, drafts, sampling, verdicts.
"""

import contextlib
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from actors.drafter import Drafter
from actors.messages import Admit, Cancel, Commit, Message, Offer
from actors.runner import Runner
from actors.target import Target
from actors.zmq_link import ConnectingZmqLink, ReplicaZmqLink
from decoding.params import SamplingParams

_DELIVERY_S = 0.003  # until a message is surely there
_PROMPT_TOKENS = 64
_DRAFT_LENGTH = 4
_PARAMS = SamplingParams(max_tokens=400, temperature=0)


@dataclass(frozen=True)
class TurnCosts:
    """Seconds of a turn, by rows and tokens per row; between what was measured, straight lines."""

    seconds: Mapping[int, Mapping[int, float]]  # by rows, by tokens of each row; medians
    jitter: Sequence[float] = (1.0,)  # single turns, as shares of their median

    @classmethod
    def of(cls, turns_s: Mapping[int, Mapping[int, Sequence[float]]]) -> "TurnCosts":
        """From single turns."""
        medians = {rows: {count: median(turns) for count, turns in table.items()} for rows, table in turns_s.items()}
        jitter = [
            one / medians[rows][count]
            for rows, table in turns_s.items()
            for count, turns in table.items()
            for one in turns
        ]
        return cls(medians, jitter)

    def __call__(self, rows: int, tokens: int) -> float:
        """Of so many rows with so many tokens in all."""
        per_row = tokens / rows
        return _between(rows, {count: _between(per_row, table) for count, table in self.seconds.items()})


def _between(at: float, table: Mapping[int, float]) -> float:
    """On the line through the two nearest points; beyond the last, on the line through the last two."""
    known = sorted(table)
    if len(known) == 1:
        return table[known[0]]
    right = min(max(bisect_right(known, at), 1), len(known) - 1)
    low, high = known[right - 1], known[right]
    return table[low] + (table[high] - table[low]) * (max(at, known[0]) - low) / (high - low)


class _Peer:
    """The coordinator's end of a replica's link, driven by hand."""

    def __init__(self, replica: ReplicaZmqLink) -> None:
        self._link = ConnectingZmqLink("bench")
        self._link.connect(replica.address)
        self._name = replica.address.name

    def say(self, messages: Sequence[Message]) -> None:
        self._link.send(self._name, messages)
        time.sleep(_DELIVERY_S)

    def commits(self, rows: int) -> list[Commit]:
        """What has been committed; waits until that is so many."""
        time.sleep(_DELIVERY_S)
        commits: list[Commit] = []
        while not commits or len(commits) < rows:
            commits += [message for _, message in self._link.receive(0.1) if isinstance(message, Commit)]
            if not rows:
                break
        return commits

    def close(self) -> None:
        self._link.close()


@contextlib.contextmanager
def _linked(name: str) -> Iterator[tuple[ReplicaZmqLink, _Peer]]:
    link = ReplicaZmqLink(name, name, "127.0.0.1")
    peer = _Peer(link)
    try:
        yield link, peer
    finally:
        peer.close()
        link.close()


def _admits(rows: int, draft_length: int) -> list[Message]:
    prompts = [[(31 * row + 7 * at) % 500 + 10 for at in range(_PROMPT_TOKENS)] for row in range(rows)]
    return [
        Admit(row, prompt, _PROMPT_TOKENS, _PARAMS, draft_length, drafter=draft_length > 0)
        for row, prompt in enumerate(prompts)
    ]


def target_costs(runner: Runner, rows: Sequence[int], draft_lengths: Sequence[int], *, rounds: int) -> TurnCosts:
    """Of a target that verifies drafts of each length in turn, all of them present when the turn begins."""
    with _linked("target") as (link, peer):
        target = Target(runner, link, adaptive=False)
        seconds = {
            count: {1 + length: _target_turns_s(target, peer, count, length, rounds) for length in draft_lengths}
            for count in rows
        }
        return TurnCosts.of(seconds)


def _target_turns_s(target: Target, peer: _Peer, rows: int, draft_length: int, rounds: int) -> list[float]:
    peer.say(_admits(rows, draft_length))
    ends: dict[int, int] = {}
    while len(ends) < rows:
        target.turn()
        ends |= {one.request_id: one.base + len(one.tokens) for one in peer.commits(0)}
    seconds = []
    for _ in range(rounds + 1):
        if draft_length:  # a target that waited for drafts, slept; one that decodes plainly does not
            peer.say([Offer(row, end, [11] * draft_length) for row, end in ends.items()])
        began_s = time.perf_counter()
        target.turn()
        seconds.append(time.perf_counter() - began_s)
        if draft_length:
            ends |= {one.request_id: one.base + len(one.tokens) for one in peer.commits(rows)}
    peer.say([Cancel(row) for row in range(rows)])
    target.turn()
    peer.commits(0)
    return seconds[1:]


def drafter_costs(runner: Runner, rows: Sequence[int], *, rounds: int) -> TurnCosts:
    """Of a drafter that extends each row's chain by one token."""
    with _linked("drafter") as (link, peer):
        drafter = Drafter(runner, link, alternatives=0)
        seconds = {count: {1: _drafter_turns_s(drafter, link, peer, count, rounds)} for count in rows}
        return TurnCosts.of(seconds)


def _drafter_turns_s(drafter: Drafter, link: ReplicaZmqLink, peer: _Peer, rows: int, rounds: int) -> list[float]:
    peer.say(_admits(rows, _DRAFT_LENGTH))
    seconds: list[float] = []
    for end in range(_PROMPT_TOKENS, _PROMPT_TOKENS + rounds):
        while (took_s := _step_s(drafter, link)) is not None:
            seconds.append(took_s)
        peer.say([Commit(row, end, [12], 1, 0, None, _DRAFT_LENGTH, rejected=True) for row in range(rows)])
    peer.say([Cancel(row) for row in range(rows)])
    _step_s(drafter, link)
    return seconds[1:]  # the first is the prompt's


def _step_s(drafter: Drafter, link: ReplicaZmqLink) -> float | None:
    """Of one turn; None: there is nothing left to draft."""
    steps, prefill_s, began_s = drafter.times.steps, drafter.times.prefill_s, time.perf_counter()
    link.wake()  # or a turn without work waits for messages
    drafter.turn()
    took_s = time.perf_counter() - began_s
    return took_s if drafter.times.steps > steps or drafter.times.prefill_s > prefill_s else None
