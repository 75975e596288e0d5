"""A whole Consort in one process, without Ray or HTTP: target, drafter and coordinator threads on local links.

For libraries, tests, benchmarks, and a drafter that shares its target's GPU.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from actors.coordinator import blocking
from actors.coordinator.loop import Coordinator
from actors.coordinator.request import Delta, Request
from actors.loops.grammar_jobs import LoadTokenizer
from actors.loops.thread import LoopThread
from actors.model.cuda_streams import use_own_stream
from actors.model.runner import Runner
from actors.replica.replica import Role, make_loop
from actors.replica.shared_weights import Loop
from actors.tokenizers.draft_mapping import DraftMapping
from actors.tokenizers.logits_mapping import LogitsMapping
from actors.wire.addresses import ReplicaAddress
from actors.wire.link import LocalExchange, LocalLink


class Engine:
    """Start with `with Engine({...}) as engine:`; the threads end with the block."""

    def __init__(
        self,
        replicas: Mapping[str, tuple[Role, Runner]],
        *,
        prefill_chunk: int = 256,
        load_tokenizer: LoadTokenizer | None = None,
        inside: Mapping[str, Runner] | None = None,
        draft_mappings: Mapping[str, DraftMapping] | None = None,
        logits_mappings: Mapping[str, Mapping[str, LogitsMapping]] | None = None,
        wrap_link: Callable[[LocalLink], LocalLink] = lambda link: link,
    ) -> None:
        """
        replicas: by the name of their model.
        load_tokenizer: of all of them, for structured answers.
        inside: drafters that take turns with a target in its thread, by the target's name.
        draft_mappings: for the drafters, by the names of targets that have another tokenizer.
        logits_mappings: by the names of members of ensembles, and of leaders that have another tokenizer.
        wrap_link: lets tests put faulty links under the coordinator and the replicas.
        """
        exchange = LocalExchange()
        link = wrap_link(exchange.join("coordinator"))
        self.coordinator = Coordinator(link)
        self.loops: dict[str, Loop] = {}
        self._threads = [LoopThread("coordinator", self.coordinator.turn, link.wake)]
        for name, (role, runner) in replicas.items():
            replica_link = wrap_link(exchange.join(name))
            special: dict[str, Any] = {"draft_mappings": draft_mappings} if draft_mappings and role != "target" else {}
            if inside and name in inside:
                special = {"draft_mappings": draft_mappings, "inside": inside[name]}
            if logits_mappings and name in logits_mappings:
                special["logits_mappings"] = logits_mappings[name]
            self.loops[name] = make_loop(
                role,
                runner,
                replica_link,
                prefill_chunk=prefill_chunk,
                load_tokenizer=load_tokenizer,
                **special,
            )
            prepare = partial(use_own_stream, runner.device)
            self._threads.append(LoopThread(name, self.loops[name].turn, replica_link.wake, prepare))
        self._alive = set(replicas)
        self._tell()

    def __enter__(self) -> "Engine":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for thread in self._threads:
            thread.stop()

    def lose(self, name: str) -> None:
        """Let the coordinator see a replica die."""
        self._alive.remove(name)
        self._tell()

    def _tell(self) -> None:
        self.coordinator.set_replicas(ReplicaAddress(name, name) for name in self._alive)

    def check(self) -> None:
        """Raises UnavailableError if a loop has ended or is stuck."""
        for thread in self._threads:
            thread.check()

    def stream(self, request: Request) -> Iterator[Delta]:
        """`actors.coordinator.blocking.stream` on this engine's coordinator."""
        return blocking.stream(self.coordinator, request, self.check)

    def generate(self, requests: Sequence[Request]) -> list[list[Delta]]:
        """`actors.coordinator.blocking.generate` on this engine's coordinator."""
        return blocking.generate(self.coordinator, requests, self.check)
