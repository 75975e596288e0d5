"""Applies messages to a target's rows. It trusts none: whatever a peer sends, the other requests go on."""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from actors.ensemble.cross_tokenizer_member import CrossTokenizerMember
from actors.ensemble.member import MemberRow
from actors.loops.adapters import AdapterTable
from actors.loops.mailbox import Mailbox
from actors.loops.row import GrammarJobs, ServedRow
from actors.verifier.beams import BeamRow
from actors.verifier.leader import EnsembleLeader
from actors.verifier.policy import SpeculationPolicy
from actors.verifier.proposers import AttachedDrafters, TextLookup
from actors.verifier.rows import TargetRow, TargetRows
from actors.wire.messages import (
    Admit,
    AttachDrafter,
    Commit,
    Failed,
    Join,
    Joined,
    LeaderLost,
    LogitsReply,
    LogitsRequest,
    MemberLost,
    Message,
    Offer,
    Remember,
    Report,
    ResendRequest,
    SetWeights,
    Token,
    Weights,
)
from decoding.beams.options import BeamOptions
from decoding.errors import InvalidRequestError, UnavailableError
from decoding.tokenizers.logits_mapping import LogitsMapping
from engine.model.runner import Runner

_log = logging.getLogger(__name__)


class TargetInbox:
    """The inbox of one target."""

    def __init__(  # noqa: PLR0913  (what messages are for)
        self,
        rows: TargetRows,
        mailbox: Mailbox[ServedRow],
        runner: Runner,
        policy: SpeculationPolicy,
        drafters: AttachedDrafters,
        lookup: TextLookup,
        structures: GrammarJobs,
        adapters: AdapterTable[ServedRow],
        leader: EnsembleLeader,
        logits_mappings: Mapping[str, LogitsMapping],
        want_weights: Callable[[Weights, int], None],
    ) -> None:
        """logits_mappings: for each leader with another tokenizer, by its name."""
        self._rows, self._mailbox, self._runner = rows, mailbox, runner
        self._policy, self._drafters, self._lookup = policy, drafters, lookup
        self._structures, self._adapters, self._leader = structures, adapters, leader
        self._logits_mappings, self._want_weights = logits_mappings, want_weights

    def receive(self, timeout_s: float) -> None:
        """Handle the messages that have arrived; waits up to `timeout_s` for the first. Replies are sent at once."""
        for peer, message in self._mailbox.receive(timeout_s):
            self._handle(peer, message)
        self._mailbox.flush()

    def fail(self, row: ServedRow, error: BaseException) -> None:
        """Give the request back to its peer, unless the row has been removed or replaced."""
        row = row.owner
        if self._rows.get(row.key) is row:
            self._mailbox.fail(row.key, row.admission, error, row.invitation)

    def _handle(self, peer: str, message: Message) -> None:
        match message:
            case Offer():
                self._offer(peer, message)
            case Admit() | Join() | LogitsRequest():
                self._handle_request(peer, message)
            case ResendRequest():
                self._resend(peer, message)
            case AttachDrafter(request_id, drafter):
                row = self._rows.writer((peer, request_id))
                if row is not None:
                    row.attached_drafter = drafter
                    row.drafts.attach(drafter)
                    self._drafters.rest(row)
            case Remember():
                self._lookup.remember(message)
            case SetWeights(weights, rest):
                self._want_weights(weights, rest)
            case LeaderLost():
                self._leave_leader(message)
            case Joined() | LogitsReply() | MemberLost() | Failed():
                failed = self._leader.receive(peer, message, time.perf_counter())
                if failed is not None:
                    self.fail(*failed)
            case Report():
                self._leader.reconcile(peer, message)
            case _:
                _log.warning("%s sent a %s, which is not for targets", peer, type(message).__name__)

    def _resend(self, peer: str, message: ResendRequest) -> None:
        row = self._rows.writer((message.coordinator, message.request_id))
        if row is not None and row.attached_drafter == peer:
            row.drafts.acknowledge(min(max(0, message.base), len(row.tokens)))
            self._drafters.propose([row])

    def _leave_leader(self, message: LeaderLost) -> None:
        row = self._rows.get((message.leader, message.request_id))
        if row is not None and row.admission <= message.admission:
            self._rows.remove(row.key)

    def _offer(self, peer: str, message: Offer) -> None:
        """Add a draft that the model can read to its row's trie, once the row is there."""
        if not (0 < len(message.tokens) < self._runner.max_length and self._runner.has_tokens(message.all_tokens())):
            return
        key = message.coordinator, message.request_id
        row = self._rows.writer(key)
        if row is not None:
            # A late draft never fits if it was drawn at random, so there a misfit tells nothing.
            fits = row.drafts.offer(message) or row.rejects
            self._policy.note_offer(row, time.perf_counter(), fits=fits)
            if row.attached_drafter == peer:
                self._drafters.rest(row)  # one that goes on
        elif message.distributions is None:  # what was drawn for an earlier admission could bias this one
            self._mailbox.keep(key, peer, message)

    def _handle_request(self, peer: str, message: Admit | Join | LogitsRequest) -> None:
        """Begin or continue a request; give it back where that is impossible."""
        try:
            match message:
                case Admit():
                    self._admit(peer, message)
                    for drafter, early in self._mailbox.take_early((peer, message.request_id)):
                        self._handle(drafter, early)
                case Join():
                    self._join(peer, message)
                case LogitsRequest():
                    self._request_logits(peer, message)
        except Exception as error:  # a fault, such as one of a tokenizer, must not end the other requests
            invitation = 0 if isinstance(message, Admit) else message.invitation
            self._mailbox.fail((peer, message.request_id), message.admission, error, invitation)

    def _admit(self, peer: str, message: Admit) -> None:
        """Raises UnavailableError or InvalidRequestError if the request can't be served here."""
        limit = self._runner.max_length
        if message.prompt_length + message.params.max_tokens > limit:
            reason = (
                f"max_tokens is {message.params.max_tokens} after a prompt of {message.prompt_length} tokens, but the "
                f"target has room for {limit} together; lower it to {max(limit - message.prompt_length, 0)} or less"
            )
            raise InvalidRequestError(reason, field="max_tokens")
        if not self._runner.can_run(message.tokens):
            size = self._runner.vocab_size
            raise UnavailableError(f"the prompt is empty, or has tokens outside the target's vocabulary of {size}")
        if message.params.prompt_attention and (not self._runner.single_device or self._runner.has_states):
            reason = "attention can't be read from a model in parts, or from one that carries a state"
            raise InvalidRequestError(reason, field="prompt_compression.method")
        if message.beams is not None:
            self._admit_beams(peer, message, message.beams)
            return
        message = self._take_over(peer, message)
        if not self._runner.has_tokens(message.prediction):  # a tokenizer may have more than its model
            message = replace(message, prediction=[])
        most = self._runner.max_draft
        if max(message.draft_length, message.longest_draft) > most:
            lengths = min(message.draft_length, most), min(message.longest_draft, most)
            message = replace(message, draft_length=lengths[0], longest_draft=lengths[1])
        row = TargetRow(peer, message, acceptance=self._policy.acceptance, lookups=self._lookup.make(message))
        self._check_texts(row)
        self._structures.begin(row)
        for text in row.texts:
            self._adapters.begin(text)
        self._rows.add_writer(row)  # first: this removes an earlier row of the request, and its members' rows
        if row.ensemble is not None:
            self._leader.lead(row, row.ensemble)
        self._drafters.rest(row)  # its coordinator may not know yet that drafts are not wanted

    def _check_texts(self, row: TargetRow) -> None:
        """Raise InvalidRequestError if there is no room for the prompts of a formula, beside the request's own."""
        slots, limit = self._runner.cache.slots, self._runner.max_length - row.params.max_tokens
        early = [] if row.ensemble is None else [layer for each in row.ensemble.early for layer in each.term.layers]
        kept = self._runner.kept_layers if self._runner.early_exit is not None else ()
        if not set(early) <= set(kept):
            known = ", ".join(map(str, kept)) or "none: name them in the formula of its endpoint"
            raise InvalidRequestError(
                f"the formula reads layers {early}, but the target keeps {known}", field="formula"
            )
        if row.slots_needed > slots:
            reason = f"the formula reads {row.slots_needed} prompts at once, but the target has {slots} slots"
            raise InvalidRequestError(reason, field="formula")
        for text in row.texts[1:]:
            if text.prompt_length > limit or not self._runner.can_run(text.tokens):
                reason = (
                    f"a prompt of the formula has {text.prompt_length} tokens, but should have 1 to {limit} of the "
                    f"target's, with max_tokens: {row.params.max_tokens}"
                )
                raise InvalidRequestError(reason, field="formula")
        self._check_pages(row)

    def _check_pages(self, row: ServedRow) -> None:
        """Raise InvalidRequestError if there are too few pages for the texts of a formula."""
        wanted = row.params.max_tokens
        if self._rows.could_hold(row, wanted):
            return
        most = bisect_left(range(1, wanted), True, key=lambda tokens: not self._rows.could_hold(row, tokens))
        way = f"lower max_tokens to {most} or less" if most else "their prompts alone don't fit"
        held = self._runner.cache.allocator.pages * self._runner.cache.page_size
        reason = f"formula: {row.slots_needed} texts at once don't fit into the {held} tokens of the KV cache; {way}"
        raise InvalidRequestError(reason, field="max_tokens" if most else "formula")

    def _take_over(self, peer: str, message: Admit) -> Admit:
        """Replace the row of a dead coordinator whose client asks again at another one, and commit what it has written.

        Returns the admission that continues it.
        """
        for row in self._rows.writers:
            if not self._mailbox.reaches(row.key[0]) and row.writes_text_of(message):
                self._rows.remove(row.key)
                written = row.tokens[row.prompt_length :]
                if written:
                    tokens = [*map(Token, written)]
                    commit = Commit(message.request_id, row.prompt_length, tokens, admission=message.admission)
                    self._mailbox.put(peer, commit)
                return replace(message, tokens=row.tokens)
        return message

    def _admit_beams(self, peer: str, message: Admit, options: BeamOptions) -> None:
        slots = self._runner.cache.slots
        if options.num_beams > slots:
            reason = f"num_beams is {options.num_beams}, but the target has {slots} slots"
            raise InvalidRequestError(reason, field="num_beams")
        row = BeamRow(peer, message, options, self._runner.cache)
        self._structures.begin(row)
        self._adapters.begin(row)
        self._rows.add(row)

    def _join(self, peer: str, message: Join) -> None:
        row = self._rows.get((peer, message.request_id))
        if row is not None and row.rejoins(message):
            return
        if self._runner.has_states:  # drafts of a leader may be trees
            raise UnavailableError(
                "a model that carries a state from token to token can lead an ensemble, but not join"
            )
        logits_mapping = self._logits_mappings.get(message.leader)
        member_row: MemberRow | None = None
        if logits_mapping is not None:
            member_row = CrossTokenizerMember.make(peer, message, self._runner, logits_mapping)
        elif self._runner.can_run(message.tokens):
            member_row = MemberRow(peer, message, self._runner)
        if member_row is None:
            raise UnavailableError("a member has no room for the text, or not its tokens")
        self._rows.add(member_row)

    def _request_logits(self, peer: str, message: LogitsRequest) -> None:
        row = self._rows.get((peer, message.request_id))
        error = "the request is not here" if row is None else row.take_request(message)
        if error is not None:
            raise UnavailableError(error)
