"""One request of a loop: its text, its KV slots, its grammar, and what it runs in a forward."""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TypeVar

from llguidance import LLTokenizer
from torch import Tensor

from actors.wire.messages import Admit, Join, LogitsRequest, Message
from decoding.errors import ConfigError
from decoding.grammars.grammar import GrammarCompiler
from decoding.grammars.structure import StructureState
from engine.model.ragged_batch import RowInput

RowKey = tuple[str, int]  # (peer that admitted the request, request_id)


class Row:
    """What rows of all loops share: tokens, KV slot, and how many tokens the slot holds."""

    def __init__(self, peer: str, admit: Admit) -> None:
        self.key: RowKey = (peer, admit.request_id)
        self.admission = admit.admission
        self.params = admit.params
        self.prompt_length = admit.prompt_length
        self.draft_length = max(admit.draft_length, admit.longest_draft)
        self.tokens = list(admit.tokens)
        self.cached = 0
        self.slot = -1
        self.slots_needed = 1
        self.more_slots: list[int] = []  # beside those of `texts`, if more are needed
        self.arrived_at_s = admit.arrived_at_s
        self.weights = admit.weights
        self.has_lent = False  # whether it gave its slots to a row that returns them
        self.entered = False  # whether it has had its slots by right, not only because those before it could not enter
        self.cache_salt = admit.cache_salt  # pages are shared only with rows of the same salt
        self.adapter = admit.adapter
        self.adapter_slot: int | None = 0  # of the LoRA weights it runs with; 0: none; None: they are not there yet
        if admit.adapter is not None:
            self.cache_salt = f"adapter {admit.adapter.version} {admit.cache_salt}"
            self.adapter_slot = None
        self.page_keys: list[bytes] = []  # of the text's first full pages, as far as they were needed
        self.reused: int | None = None  # tokens whose pages it took over from others; None before it has a slot
        self.preemptions = 0  # since it last told the coordinator
        self.waits_for_pages = False  # whether another row is computing this row's next page
        self.shortest_waiting = sys.maxsize  # the fewest tokens that a row which waits for this row's pages has to read
        self.preparing: Future[StructureState] | None = None
        self.structure: StructureState | None = None  # the grammar's state after the answer so far
        self.attached_drafter: str | None = None  # the drafter that gets Advance, unless colocated
        self.last_step = 0  # number of the last step it took part in, as Scheduler counts
        self._chunk = RowInput(-1, 0, [])  # that the last `inputs` began

    def drop_adapter(self) -> None:
        """Go on without an adapter, before the first forward."""
        if self.adapter is not None:
            self.cache_salt = self.cache_salt.removeprefix(f"adapter {self.adapter.version} ")
            self.adapter, self.adapter_slot, self.page_keys = None, 0, []

    def inputs(self, limit: int) -> list[RowInput]:
        """Return what the row runs in the next forward. limit: the most tokens of a chunk, at least 1."""
        end = min(self.cached + limit, len(self.tokens) - self.withheld)
        wanted = 1 if end == len(self.tokens) else 0
        self._chunk = RowInput(self.slot, self.cached, self.tokens[self.cached : end], wanted=wanted)
        return [self._chunk]

    def undo(self) -> None:
        """Discard what `inputs` and `take` began, because the forward or what followed it failed."""

    @property
    def due(self) -> bool:
        return self.ready and self.pending > 0

    @property
    def prefilling(self) -> bool:
        """Whether it runs a chunk of text next, which may end anywhere. A step can't be divided."""
        return len(self.tokens) - self.cached > 1

    @property
    def step_tokens(self) -> int:
        """About how many tokens its next step runs."""
        return 1

    @property
    def withheld(self) -> int:
        """How many of the text's last tokens no chunk contains, because they run in a step."""
        return 0

    @property
    def done(self) -> bool:
        """Whether the row can be removed, once what `take` returned has been sent."""
        return False

    @property
    def pending(self) -> int:
        """Number of tokens that are not yet in the cache."""
        return len(self.tokens) - self.cached

    @property
    def urgency(self) -> int:
        """Number of tokens that it or a row which waits for it has to read: texts with the fewest are read first."""
        return min(self.pending, self.shortest_waiting)

    @property
    def prepared(self) -> bool:
        """Whether its grammar and its adapter are there. Before that it takes no slot."""
        return self.preparing is None and self.adapter_slot is not None

    @property
    def ready(self) -> bool:
        """Whether the row can run: it is prepared, and no other row computes its next page."""
        return self.prepared and not self.waits_for_pages

    @property
    def spans_replicas(self) -> bool:
        """Whether its request needs slots on several replicas at once."""
        return False

    @property
    def started(self) -> bool:
        """Whether its request has had all the slots that it needs."""
        return self.entered

    @property
    def lends(self) -> bool:
        """Whether it can't start for long, so that a row of one replica may use its slots until then."""
        return False

    @property
    def precedence(self) -> tuple[bool, float, int]:
        """The order in which rows get slots, the same on all replicas: requests that have started, then the oldest."""
        return not self.started, self.arrived_at_s, self.key[1]

    @property
    def may_yield(self) -> bool:
        """Whether it gives its slots to rows before it that wait for some.

        One that has started needs nothing else to end, unless its request lost a slot on another replica since.
        """
        return self.spans_replicas or not self.started

    @property
    def cached_prefix(self) -> int:
        """Number of leading tokens that the slot's first columns hold, in order."""
        return self.cached

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None

    @property
    def may_share(self) -> bool:
        """Whether keys and values computed for another request may be used."""
        return True

    @property
    def resting(self) -> bool:
        """Whether the row is paused, so its pending tokens are not being computed."""
        return False

    @property
    def texts(self) -> "Sequence[Row]":
        """What the row reads, each text in a slot of its own: the row itself first."""
        return (self,)

    @property
    def owner(self) -> "Row":
        """The row that the table has, of whose texts this is one."""
        return self

    @property
    def slots(self) -> list[int]:
        return [*[text.slot for text in self.texts], *self.more_slots]

    def resume(self, count: int) -> None:
        """Continue after the first `count` tokens, which the slot holds as text. Columns after them mean nothing."""
        self.cached = count


R = TypeVar("R", bound=Row)


class ServedRow(Row):
    """A row of a target, which may verify, answer a leader or search beams. By default it does neither."""

    invitation = 0  # of a leader, as in Join

    @property
    def texts(self) -> "Sequence[ServedRow]":
        return (self,)

    @property
    def owner(self) -> "ServedRow":
        return self

    @property
    def verifies(self) -> bool:
        """Whether its next step verifies a draft. Such steps begin together, once no row waits for its draft."""
        return False

    def wait_s(self, now_s: float) -> float:
        """Return how much longer its step should wait for a draft, in seconds."""
        return 0.0

    def take(self, logits: Tensor, rows: range) -> Message | None:
        """Take the logits after what `inputs` returned. Returns what to tell the peer that admitted the row.

        logits: [N, V] float, a step's. rows: those after this row's tokens, as far as they wanted any.
        """
        raise NotImplementedError

    def announce(self) -> Message | None:
        """Return what to tell the peer once the row has read its text; None if that has been sent, or is not wanted."""
        return None

    def rejoins(self, join: Join) -> bool:
        """Whether the row belongs to this invitation, which was sent again. It is then announced again."""
        return False

    def take_request(self, request: LogitsRequest) -> str | None:
        """Take a leader's request for logits. Returns an error text if that is impossible."""
        return "the request is not here"


LoadTokenizer = Callable[[], LLTokenizer]


class GrammarJobs:
    """Compiles grammars in a thread beside a loop. The tokenizer is loaded when the first request needs it."""

    def __init__(self, load_tokenizer: LoadTokenizer | None, vocab_size: int) -> None:
        """load_tokenizer: None refuses structured answers. vocab_size: of the model's logits."""
        self._load_tokenizer, self._vocab_size = load_tokenizer, vocab_size
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="structures")

    def begin(self, row: Row) -> None:
        """Start to compile the row's grammar, if it has one. The row is not ready until that is done."""
        if row.params.structure is not None:
            row.preparing = self._pool.submit(self._prepare, row)

    def _prepare(self, row: Row) -> StructureState:
        assert row.params.structure is not None
        return StructureState(
            self._compiler.compile(row.params.structure),
            row.tokens,
            row.prompt_length,
            end_token_ids=row.params.eos_token_ids,
            vocab_size=self._vocab_size,
        )

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        if self._load_tokenizer is None:
            raise ConfigError("structured answers need the model's tokenizer, which is not here")
        return GrammarCompiler(self._load_tokenizer())
