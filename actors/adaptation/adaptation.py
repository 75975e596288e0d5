"""A drafter's side of its online adaptation: what its learner gets, when it may work, and what is published.

After Liu et al. 2023, "Online speculative decoding", arXiv 2310.07177. Drafts are hints, so no weights can change a
text. Knows nothing of models or of how they learn.
"""

import logging
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from actors.adaptation.messages import Checked, CommittedText, Failed, FromLearner, Pause, Texts, ToLearner, Work
from actors.wire.messages import AdaptationState
from decoding.errors import ConsortError
from decoding.sampling.params import SamplingParams

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptationOptions:
    """How a drafter adapts."""

    module: str  # that the learner's process runs
    texts: int = 256  # the most recent ones that are learned
    update_after: int = 32  # new texts before the next round
    learning_rate: float = 5e-4


class Learner(Protocol):
    """Learns when told to, elsewhere."""

    def send(self, message: ToLearner) -> None:
        """Send a message. Raises OSError if the learner has ended."""

    def receive(self) -> list[FromLearner]:
        """Return what has come, without waiting."""

    def close(self) -> None:
        """End the learner."""


class Adaptation:
    """The adaptation of one replica. The learner starts with the first round, and is not started twice."""

    def __init__(
        self, options: AdaptationOptions, start: Callable[[], Learner], publish: Callable[[str], None]
    ) -> None:
        """
        start: starts the learner; raises OSError if it can't.
        publish: puts the weights in a folder, which is removed then, into the model; raises a ConsortError, ValueError
            or RuntimeError if it can't, and leaves the model as it was.
        """
        self.state = AdaptationState()
        self._update_after = options.update_after
        self._start, self._publish = start, publish
        self._texts: deque[CommittedText] = deque(maxlen=options.texts)
        self._learner: Learner | None = None
        self._working = self._ended = False

    def note(self, tokens: Sequence[int], prompt_length: int, params: SamplingParams) -> None:
        """Keep a text that has ended, in memory, until the learner gets it."""
        if not self._ended and len(tokens) > prompt_length:
            self._texts.append(CommittedText(list(tokens), prompt_length, params))

    def turn(self, *, idle: bool) -> None:
        """Let the learner work or pause, and publish what it has learned. Call it in the loop's thread.

        idle: whether the drafter has no requests. Only then anything but a pause is sent or published.
        """
        try:
            if self._learner is None:
                if self._ended or not idle or len(self._texts) < self._update_after:
                    return
                self._learner = self._start()
            if idle:
                for message in self._learner.receive():
                    self._handle(message)
            if not self._ended:
                self._tell(self._learner, idle)
        except OSError as error:
            self._end(f"there is no learner: {error}")

    def close(self) -> None:
        """End the learner."""
        self._ended = True
        self._texts.clear()
        if self._learner is not None:
            self._learner.close()
            self._learner = None

    def _tell(self, learner: Learner, idle: bool) -> None:
        if idle and self._texts:
            learner.send(Texts(list(self._texts)))
            self._texts.clear()
        if idle != self._working:
            learner.send(Work() if idle else Pause())
            self._working = idle

    def _handle(self, message: FromLearner) -> None:
        match message:
            case Checked():
                self._check(message)
            case Failed(reason):
                self._end(reason)

    def _check(self, checked: Checked) -> None:
        updates = self.state.updates
        if checked.folder is not None:
            try:
                self._publish(checked.folder)
            except (ConsortError, ValueError, RuntimeError) as error:
                self._end(f"new weights can't be published: {error}")
                return
            shutil.rmtree(checked.folder, ignore_errors=True)
            updates += 1
        self.state = AdaptationState(updates, checked.texts, checked.acceptance_before, checked.acceptance_after)

    def _end(self, reason: str) -> None:
        _log.warning("the drafter adapts no further: %s", reason)
        self.close()
