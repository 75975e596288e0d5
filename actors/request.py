"""One request as its coordinator sees it: what was asked, what is committed, and the text that goes to the client."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field

from actors.messages import Admit, Commit
from decoding.detokenizer import Detokenizer
from decoding.errors import ConsortError
from decoding.params import SamplingParams
from decoding.stopping import FinishReason, StopStrings

_MAX_DRAFTERS_LOST = 3  # before the request goes on without


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A name that clients ask for, and the models behind it."""

    name: str
    target: str
    drafter: str | None
    draft_length: int  # γ, the most draft tokens that one target step verifies
    decode: Callable[[list[int]], str]  # the target tokenizer's, special tokens skipped


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked for, with the prompt as token ids."""

    endpoint: Endpoint
    prompt: Sequence[int]
    params: SamplingParams
    speculate: bool = True
    request_id: int = field(default_factory=lambda: secrets.randbits(63))


@dataclass(frozen=True, slots=True)
class Statistics:
    """How speculation went for a request, so far or in all."""

    steps: int = 0  # target steps, the prefill's included
    drafted: int = 0
    accepted: int = 0
    committed: int = 0
    missed: int = 0  # target steps that rejected a draft token and went another way
    hits: int = 0  # of these, those after which a draft of that other way was there already

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def acceptance_rate(self) -> float:
        """α: accepted / drafted, 0 if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def hit_rate(self) -> float:
        """hits / missed, 0 if nothing was rejected."""
        return self.hits / self.missed if self.missed else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per target step, the recovered or bonus token included."""
        return self.committed / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class Delta:
    """What one target step added to the answer. The last one has `finish` or `error`; statistics so far are in each."""

    text: str
    tokens: Sequence[int]
    statistics: Statistics
    finish: FinishReason | None = None
    error: ConsortError | None = None


class ActiveRequest:
    """The truth about a request that is being served: committed tokens, where it is placed, what was shown."""

    def __init__(self, request: Request, sink: Callable[[Delta], None], now_s: float) -> None:
        self.request = request
        self.sink = sink
        self.tokens = list(request.prompt)
        self.statistics = Statistics()
        self.target: str | None = None  # names of the replicas that work on it
        self.drafter: str | None = None
        self.targets_lost = self.drafters_lost = 0
        self.unplaced_since_s = now_s
        self._detokenizer = Detokenizer(request.endpoint.decode, prompt=request.prompt)
        self._stop_strings = StopStrings(request.params.stop)

    @property
    def wants_drafter(self) -> bool:
        endpoint = self.request.endpoint
        drafts = self.request.speculate and endpoint.drafter is not None and endpoint.draft_length > 0
        return drafts and self.drafters_lost <= _MAX_DRAFTERS_LOST

    def admit(self) -> Admit:
        """The message that lets a replica take the request up where it is."""
        draft_length = self.request.endpoint.draft_length if self.drafter else 0
        return Admit(self.request.request_id, self.tokens, len(self.request.prompt), self.request.params, draft_length)

    def commit(self, message: Commit) -> Delta:
        """Append what a target step committed. A stop string ends the text in the midst of the step's tokens."""
        text, used, finish = self._read(message.tokens, message.finish)
        tokens = message.tokens[:used]
        self.tokens.extend(tokens)
        self.statistics += Statistics(
            steps=1,
            drafted=message.drafted,
            accepted=min(message.accepted, used),
            committed=used,
            missed=message.hit is not None,
            hits=message.hit is True,
        )
        return Delta(text, tokens, self.statistics, finish)

    def _read(self, tokens: list[int], finish: FinishReason | None) -> tuple[str, int, FinishReason | None]:
        """The text to show, how many of the tokens belong to the answer, and why it ends here, if it does."""
        text = ""
        for used, token in enumerate(tokens, 1):
            if token in self.request.params.eos_token_ids:
                continue  # it ends the text and is not part of it
            shown, stopped = self._stop_strings.add(self._detokenizer.add([token]))
            text += shown
            if stopped:
                return text, used, "stop"
        if finish is not None:
            shown, stopped = self._stop_strings.add(self._detokenizer.flush())
            text += shown + self._stop_strings.flush()
            finish = "stop" if stopped else finish
        return text, len(tokens), finish
