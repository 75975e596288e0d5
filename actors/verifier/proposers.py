"""Proposers: their interface, the two that delay no step, and the choice of those that are asked before a step.

A colocated drafter (`colocated_drafter.py`) and heads (`heads_drafter.py`) delay the step.
"""

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from actors.loops.mailbox import Mailbox
from actors.loops.row import Row, RowKey, ServedRow
from actors.verifier.rows import TargetRow, TargetRows, Verification
from actors.wire.messages import Admit, Remember
from decoding.drafts.corpus import Corpus, CorpusLookup
from decoding.drafts.draft import Draft, ProposerName
from decoding.drafts.lookup import Lookup, MatchCalibration
from decoding.drafts.ngram import NgramLookup
from decoding.drafts.prediction import PredictionLookup
from decoding.drafts.verification import Verdict
from decoding.kernels.matches import can_index

_FEW_ROWS = 2  # that a step takes hardly longer to verify drafts for: look-up goes on while other proposers rest
_READ_AHEAD = 8192  # tokens that look-up reads in a turn, all rows together: long texts must not hold up other rows
_HELD_STEPS = 8  # for which an arm is used, once it was chosen
_DOUBT_TOKENS = 1.0  # an arm may bring so many more tokens than it has shown, over the root of the number of verdicts
_MEMORY = 0.9995  # weight of a verdict after the next one
_TIME_SMOOTHING = 0.05  # least weight of the newest time in a running mean
_HICCUP = 3.0  # a time so many times longer than others is no usual one

_Arm = frozenset[ProposerName]


class Delay(NamedTuple):
    """Seconds by which drafts of all rows together delay a step."""

    first_s: float  # by their first tokens
    further_s: float  # by each further token of the longest


class Proposer:
    """Makes drafts for the rows of one target. It does not know when it is asked, or what else drafts."""

    name: ProposerName
    delay: Delay | None = None  # of the last step; None: it delays none
    spent_s = 0.0  # time for which steps waited for it
    rests_alone = False  # whether it may rest when nothing else delays the step; if not, its draft lengths fall to 0

    def drafts_for(self, row: TargetRow) -> bool:
        raise NotImplementedError

    def propose(self, rows: Sequence[TargetRow]) -> set[RowKey]:
        """Make drafts of what follows the rows' texts. Returns the rows whose tries have them already.

        Raises:
            OutOfPagesError: as in `Runner.logits`.
        """
        raise NotImplementedError

    def learn(self, verifications: Sequence[Verification], verdicts: Sequence[Verdict]) -> None:
        """Learn from a step that was committed, whether this proposer was asked or not."""

    def remove(self, row: Row) -> None:
        """Forget a row."""


class AttachedDrafters(Proposer):
    """Drafters in other processes. Their drafts come as `Offer`s."""

    name: ProposerName = "drafter"

    def __init__(self, rows: TargetRows, mailbox: Mailbox[ServedRow]) -> None:
        self._rows, self._mailbox = rows, mailbox

    def drafts_for(self, row: TargetRow) -> bool:
        return row.attached_drafter is not None

    def propose(self, rows: Sequence[TargetRow]) -> set[RowKey]:
        """Send the rows' new text to their drafters. While drafts are not wanted, it tells them to rest."""
        for row in rows:
            if row.attached_drafter is None:
                continue
            # The useful draft length is that of the step before, which is recent enough for the drafter.
            advance = row.drafts.next_advance(row.drafts.useful_length if self._rows.drafting else 0)
            if advance is not None:
                self._mailbox.put(row.attached_drafter, advance)
        return set()

    def rest(self, row: TargetRow) -> None:
        """While drafts are not wanted, let the row's drafter rest, whatever it was told before."""
        if row.attached_drafter is not None and not self._rows.drafting:
            self._mailbox.put(row.attached_drafter, row.drafts.rest())


class TextLookup(Proposer):
    """Drafts copied from the rows' predictions, from their own texts, and from a corpus of earlier texts."""

    name: ProposerName = "ngram"

    def __init__(self, rows: TargetRows, corpus: Corpus | None = None) -> None:
        self._rows, self.corpus = rows, corpus
        self._calibrations: defaultdict[ProposerName, MatchCalibration] = defaultdict(MatchCalibration)

    def make(self, admit: Admit) -> list[Lookup]:
        """Return the look-ups that a request wants. Beside a prediction or a corpus all may draft more.

        Under rejection sampling, requests with the same seed must not influence each other's drafts.
        """
        lookups: list[Lookup] = []
        of, longest = self._calibrations, max(admit.draft_length, admit.longest_draft)
        if not admit.draft_length:
            return lookups
        if admit.prediction:
            start, calibration = admit.prompt_length, of["prediction"]
            lookups.append(PredictionLookup(admit.prediction, start, draft_length=longest, calibration=calibration))
        if admit.ngram is not None and can_index():
            capacity = admit.prompt_length + admit.params.max_tokens
            own = NgramLookup(admit.ngram.longest, capacity=capacity, draft_length=longest, calibration=of["ngram"])
            lookups.append(own)
        if admit.corpus and self.corpus is not None and not admit.params.rejects:
            salt, calibration = admit.cache_salt, of["corpus"]
            lookups.append(CorpusLookup(self.corpus, salt, draft_length=longest, calibration=calibration))
        return lookups

    def remember(self, text: Remember) -> None:
        if self.corpus is not None:
            self.corpus.add(text.tokens, text.cache_salt)

    def drafts_for(self, row: TargetRow) -> bool:
        return bool(row.drafts.lookups)

    def propose(self, rows: Sequence[TargetRow]) -> set[RowKey]:
        if not self._rows.drafting and len(self._rows.writers) > _FEW_ROWS:
            return set()
        for row in rows:
            row.drafts.look_up()
        return {row.key for row in rows if self.drafts_for(row)}

    def read(self) -> None:
        """Index texts, the shortest first, whether the rows compute them or found them in the cache."""
        rows = [row for row in self._rows.writers if row.slot >= 0]
        texts = [(lookup, row.tokens) for row in rows for lookup in row.drafts.lookups]
        left = _READ_AHEAD
        for lookup, tokens in sorted(texts, key=lambda text: len(text[1])):
            left -= lookup.read(tokens, left)


class ProposerChoice:
    """The choice among the proposers of one target that delay its step, for each number of rows.

    Its arms are their sets. The one with the highest upper bound of tokens per second is used. A step with drafts of
    several proposers tells what each smaller set would have brought, so only larger sets need trials (bandits with side
    observations: Mannor and Shamir, arXiv 1106.2436).
    """

    def __init__(self, proposers: Sequence[Proposer], *, adaptive: bool) -> None:
        """adaptive: ask those that pay; otherwise all."""
        self._proposers, self._adaptive = proposers, adaptive
        self._evidence: defaultdict[int, _Evidence] = defaultdict(_Evidence)  # by rows of a step, as a power of two
        self._size = 0  # of this step
        self._asked: _Arm = frozenset()  # before this step
        self.resting: _Arm = frozenset()  # that did not pay in the last step that had drafts
        self._rows: set[RowKey] = set()  # that were to get drafts; none if a proposer had none: it reads a prompt

    @property
    def drafted(self) -> bool:
        """Whether one has drafted for this step."""
        return bool(self._asked and self._rows)

    def skip(self) -> None:
        self._asked, self._rows = frozenset(), set()

    def propose(self, rows: Sequence[TargetRow], step_s: float, *, trying: bool = False) -> Delay | None:
        """Let those that pay put drafts into the rows' tries.

        step_s: the expected seconds of a step without drafts.
        trying: speculation is compared with plain decoding, and nothing else drafts, so one must be asked.

        Returns:
            By how much they delayed the step; None if unknown.

        Raises:
            OutOfPagesError: as in `Runner.logits`.
        """
        useful = [each for each in self._proposers if any(each.drafts_for(row) for row in rows)]
        self._size = len(rows).bit_length()
        evidence = self._evidence[self._size]
        names = frozenset(each.name for each in useful)
        self._asked = names
        if self._adaptive and names:
            may_rest = not trying and any(each.rests_alone for each in useful)
            self._asked = evidence.choose(names, step_s, least=0 if may_rest else 1)
        self.resting = names - self._asked
        delays, known = [], True
        self._rows = {row.key for row in rows}
        for proposer in useful:
            if proposer.name not in self._asked:
                continue
            began_s = time.perf_counter()
            keys = proposer.propose([row for row in rows if proposer.drafts_for(row)])
            seconds = time.perf_counter() - began_s
            proposer.spent_s += seconds
            if keys:  # one that reads a prompt, or drafts nothing at all, says nothing of the usual time
                known &= evidence.calls[proposer.name].note(seconds)
            else:
                self._rows, known = set(), False
            delays += [proposer.delay] if proposer.delay is not None else []
        return Delay(*map(sum, zip(*delays, strict=True))) if delays and known else None

    def learn(self, verifications: Sequence[Verification], verdicts: Sequence[Verdict]) -> None:
        """Learn from a step what the proposers that were asked have brought."""
        pairs = zip(verifications, verdicts, strict=True)
        counted = [(draft, verdict) for (row, draft, *_), verdict in pairs if row.key in self._rows]
        if self._adaptive and counted:
            self._evidence[self._size].note(self._asked, counted)


class _CallTime:
    """The mean time of calls, weighted towards recent ones. The first is left out: it warms up.

    Hiccups of the machine count little, also if the mean is of one.
    """

    def __init__(self) -> None:
        self.mean_s = 0.0
        self._calls = 0

    def note(self, seconds: float) -> bool:
        """Add a call. Returns whether the mean is known."""
        if self._calls == 1 or _HICCUP * seconds < self.mean_s:
            self.mean_s = seconds
        elif self._calls:
            seconds = min(seconds, _HICCUP * self.mean_s)
            self.mean_s += max(1 / self._calls, _TIME_SMOOTHING) * (seconds - self.mean_s)
        self._calls += 1
        return self._calls > 1


class _Evidence:
    """What arms have brought to steps of about one size."""

    def __init__(self) -> None:
        self.calls: defaultdict[ProposerName, _CallTime] = defaultdict(_CallTime)
        self._tokens: defaultdict[_Arm, float] = defaultdict(float)  # committed
        self._verdicts: defaultdict[_Arm, float] = defaultdict(float)  # after which these tokens were counted
        self._chosen: _Arm = frozenset()
        self._useful: _Arm = frozenset()  # of which it was chosen
        self._held_steps = 0  # that are left

    def choose(self, useful: _Arm, step_s: float, *, least: int) -> _Arm:
        """Return the arm for the next step, of at least so many proposers."""
        if not self._held_steps or useful != self._useful or len(self._chosen) < least:
            self._chosen = max(_subsets(useful, least), key=lambda arm: self._bound(arm, step_s))
            self._useful, self._held_steps = useful, _HELD_STEPS
        self._held_steps -= 1
        return self._chosen

    def _bound(self, arm: _Arm, step_s: float) -> float:
        """Return the tokens per second that an arm may bring."""
        verdicts = self._verdicts[arm]
        if not verdicts:
            return math.inf
        tokens = self._tokens[arm] / verdicts + _DOUBT_TOKENS / math.sqrt(verdicts)
        return tokens / (step_s + sum(self.calls[name].mean_s for name in arm))

    def note(self, asked: _Arm, counted: Sequence[tuple[Draft, Verdict]]) -> None:
        """Count the verdicts of a step."""
        memory = _MEMORY ** len(counted)
        for arm in self._tokens:
            self._tokens[arm] *= memory
            self._verdicts[arm] *= memory
        for arm in _subsets(asked):
            missing = asked - arm
            accepted = sum([_accepted_without(missing, *pair) if missing else len(pair[1].path) for pair in counted])
            self._tokens[arm] += accepted + len(counted)
            self._verdicts[arm] += len(counted)


def _accepted_without(missing: _Arm, draft: Draft, verdict: Verdict) -> int:
    """Return how many draft tokens would have been accepted: the path ends where nobody else offered the token."""
    path = verdict.accepted(draft.proposers) if draft.proposers else []
    return next((index for index, names in enumerate(path) if missing.issuperset(names)), len(verdict.path))


def _subsets(names: _Arm, least: int = 0) -> list[_Arm]:
    """Return the sets of at least so many of the proposers, large ones first."""
    sizes = range(len(names), least - 1, -1)
    return [frozenset(subset) for size in sizes for subset in combinations(sorted(names), size)]
