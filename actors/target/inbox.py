"""What messages do to a target's rows. It trusts none of them: whatever a peer says, the other requests go on."""

import logging
import time
from collections.abc import Mapping

from actors.ensemble.cross_tokenizer_member import CrossTokenizerMember
from actors.ensemble.member import MemberRow
from actors.loops.grammar_jobs import GrammarJobs
from actors.loops.mailbox import Mailbox
from actors.model.runner import Runner
from actors.target.beams import BeamRow
from actors.target.leader import EnsembleLeader
from actors.target.planner import DraftPlanner
from actors.target.row import TargetRow
from actors.target.rows import ServedRow, TargetRows
from actors.tokenizers.logits_mapping import LogitsMapping
from actors.wire.messages import (
    Admit,
    AttachDrafter,
    Failed,
    Join,
    Joined,
    LogitsReply,
    LogitsRequest,
    MemberLost,
    Message,
    Offer,
    Report,
    ResendRequest,
)
from decoding.beams.options import BeamOptions
from decoding.drafts.ngram import NgramProposers
from decoding.errors import InvalidRequestError, UnavailableError

_log = logging.getLogger(__name__)


class TargetInbox:
    """One target's."""

    def __init__(
        self,
        rows: TargetRows,
        mailbox: Mailbox[ServedRow],
        runner: Runner,
        planner: DraftPlanner,
        structures: GrammarJobs,
        ensembles: EnsembleLeader,
        logits_mappings: Mapping[str, LogitsMapping],
    ) -> None:
        """logits_mappings: by the names of the leaders that have another tokenizer."""
        self._rows, self._mailbox, self._runner = rows, mailbox, runner
        self._planner, self._structures, self._ensembles = planner, structures, ensembles
        self._logits_mappings = logits_mappings
        self._ngrams = NgramProposers()

    def receive(self, timeout_s: float) -> None:
        """Act on what has arrived; waits up to `timeout_s` for it."""
        for peer, message in self._mailbox.receive(timeout_s):
            self._handle(peer, message)

    def update_drafter(self, row: TargetRow) -> None:
        """Let the drafter that follows the row, if there is one, know how the text goes on."""
        # What pays is known as of the step before, which is soon enough for the drafter.
        news = row.news(row.useful_draft_length if self._rows.drafting else 0)
        if row.attached_drafter is not None and news is not None:
            self._mailbox.put(row.attached_drafter, news)

    def fail(self, row: ServedRow, error: BaseException) -> None:
        """Give the request back."""
        if self._rows.get(row.key) is row:
            self._mailbox.give_back(row.key, row.admission, error)

    def _handle(self, peer: str, message: Message) -> None:
        match message:
            case Offer(request_id, _, tokens):
                row = self._rows.get((message.coordinator, request_id))
                if isinstance(row, TargetRow) and self._runner.can_run([*tokens, *message.drawn_from()]):
                    # What is drawn at random never fits when it is late.
                    fits = row.offer(message) or row.params.rejects
                    self._planner.note_offer(row, time.perf_counter(), fits=fits)
            case Admit() | Join() | LogitsRequest():
                self._take_up(peer, message)
            case ResendRequest(request_id, coordinator, known):
                row = self._rows.get((coordinator, request_id))
                if isinstance(row, TargetRow) and row.attached_drafter == peer:
                    row.tell_from(min(max(0, known), len(row.tokens)))
                    self.update_drafter(row)
            case AttachDrafter(request_id, drafter):
                row = self._rows.get((peer, request_id))
                if isinstance(row, TargetRow):
                    row.draft_with(drafter)
            case Joined() | LogitsReply() | MemberLost() | Failed():
                failed = self._ensembles.take(peer, message, time.perf_counter())
                if failed is not None:
                    self.fail(*failed)
            case Report():
                self._ensembles.reconcile(peer, message)  # if it is a member
            case _:
                _log.warning("%s sent a %s, which is not for targets", peer, type(message).__name__)

    def _take_up(self, peer: str, message: Admit | Join | LogitsRequest) -> None:
        """Begin a request, or go on with it; give it back where that is impossible."""
        try:
            match message:
                case Admit():
                    self._admit(peer, message)
                case Join():
                    self._join(peer, message)
                case LogitsRequest():
                    self._follow(peer, message)
        except Exception as error:  # a fault of a tokenizer, among others, must not end the other requests
            self._mailbox.give_back((peer, message.request_id), message.admission, error)

    def _admit(self, peer: str, message: Admit) -> None:
        """Raises UnavailableError or InvalidRequestError if it can't be served here."""
        needed = message.prompt_length + message.params.max_tokens
        if needed > self._runner.max_length:
            limit = self._runner.max_length
            raise UnavailableError(f"the request needs {needed} positions, but the target has {limit}")
        if not self._runner.can_run(message.tokens):
            size = self._runner.vocab_size
            raise UnavailableError(f"the prompt is empty, or has tokens outside the target's vocabulary of {size}")
        if message.beams is not None:
            self._search(peer, message, message.beams)
            return
        options = message.ngram
        proposer = (
            None
            if options is None
            else self._ngrams.make(options, message.draft_length, rejects=message.params.rejects)
        )
        row = TargetRow(peer, message, acceptance=self._planner.acceptance, proposer=proposer)
        self._structures.begin(row)
        self._rows.add(row)  # first: a row of the same request goes, and its members with it
        if message.ensemble is not None:
            self._ensembles.begin(row, message.ensemble, time.perf_counter())

    def _search(self, peer: str, message: Admit, options: BeamOptions) -> None:
        slots = self._runner.cache.slots
        if options.num_beams > slots:
            reason = f"num_beams is {options.num_beams}, but the target has {slots} slots"
            raise InvalidRequestError(reason, field="num_beams")
        row = BeamRow(peer, message, options, self._runner.cache)
        self._structures.begin(row)
        self._rows.add(row)

    def _join(self, peer: str, message: Join) -> None:
        known = self._rows.get((peer, message.request_id))
        if isinstance(known, MemberRow) and known.join == message:  # asked again; what was said may be lost
            known.joined = False
            return
        logits_mapping = self._logits_mappings.get(message.leader)
        row: MemberRow | None = None
        if logits_mapping is not None:
            row = CrossTokenizerMember.make(peer, message, self._runner, logits_mapping)
        elif self._runner.can_run(message.tokens):
            row = MemberRow(peer, message, self._runner)
        if row is None:
            raise UnavailableError("a member has no room for the text, or not its tokens")
        self._rows.add(row)

    def _follow(self, peer: str, message: LogitsRequest) -> None:
        row = self._rows.get((peer, message.request_id))
        error = row.follow(message) if isinstance(row, MemberRow) else "the request is not here"
        if error is not None:
            raise UnavailableError(error)
