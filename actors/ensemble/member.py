"""A request of an ensemble on one of its members, which tells what it thinks of the text and of drafts."""

from torch import Tensor

from actors.loops.row_table import Row
from actors.model.forward_input import RowInput, draft_input
from actors.model.runner import Runner
from actors.wire.logits_codec import pack
from actors.wire.logits_memory import accept
from actors.wire.messages import Admit, Join, LogitsReply, LogitsRequest
from decoding.drafts.trie import Draft
from decoding.sampling.params import SamplingParams


class MemberRow(Row):
    """`tokens` are the text as the leader last told it; the draft that was asked about is in the columns behind it."""

    def __init__(self, peer: str, join: Join, runner: Runner) -> None:
        params = SamplingParams(max_tokens=1)  # a member samples nothing
        admit = Admit(
            join.request_id, join.tokens, len(join.tokens), params, 0, drafter=False, admission=join.admission
        )
        super().__init__(peer, admit)
        self.join = join
        self.memory = None if join.shared is None else accept(join.shared)  # for its answers
        self._runner = runner
        self._draft = Draft([], [])  # in the cache
        self._best_count = join.best_count
        self.joined = False
        self.ask: LogitsRequest | None = None  # yet to be answered

    @property
    def length(self) -> int:
        """Of the text, in the leader's tokens."""
        return len(self.tokens)

    @property
    def prefilling(self) -> bool:
        return self.pending > 1

    def follow(self, ask: LogitsRequest) -> str | None:
        """Take in the question and what is new of the text. Returns what is wrong with it, if it is."""
        if ask.base > self.length:
            return "a question was lost on the way to a member"
        if len(ask.parents) != len(ask.tokens) or not all(-1 <= at < place for place, at in enumerate(ask.parents)):
            return "a member was asked about a draft that is no tree"
        if not self._hear(ask.text[self.length - ask.base :], Draft(ask.tokens, ask.parents)):
            return "a member has no room for the text, or not its tokens"
        self.ask = ask
        return None

    def _hear(self, new: list[int], draft: Draft) -> bool:
        """Go on with the text, and be ready to run it with a draft. False: no room, or no such tokens."""
        known = self._runner.can_run([*new, *draft.tokens, self.tokens[0]])
        if not known or len(self.tokens) + len(new) >= self._runner.max_length:
            return False
        self._keep(new)
        self.tokens += new
        self._draft = draft
        return True

    def step_input(self) -> RowInput:
        """The text's last token and the draft."""
        return draft_input(self.slot, self.cached, self.tokens[-1], self._draft)

    def answer(self, logits: Tensor) -> LogitsReply | None:
        """The step was taken, so that the cache holds all of the text. None: more steps are needed.

        logits: [n, V] of the step's tokens.
        """
        self.cached += 1
        best = logits.topk(max(0, min(self._best_count, logits.shape[-1])), dim=-1).indices.tolist()
        return self._answer(logits, best)

    def _answer(self, logits: Tensor, best: list[list[int]]) -> LogitsReply:
        """What was asked is answered. logits: [K + 1, V of the leader]; best: [K + 1] its most probable tokens."""
        assert self.ask is not None
        ask, self.ask = self.ask, None
        return LogitsReply(self.key[1], ask.step, pack(logits, ask.transport, self.memory), best, self.admission)

    def next_input(self, limit: int) -> RowInput:
        """The last token is run with the draft."""
        return super().next_input(min(limit, self.pending - 1))

    def _keep(self, new: list[int]) -> None:
        """What of the draft has become text need not be computed again, but for its last token."""
        path: list[int] = []
        for token in new:
            at = path[-1] if path else -1
            children = zip(self._draft.tokens, self._draft.parents, strict=True)
            place = next((place for place, child in enumerate(children) if child == (token, at)), None)
            if place is None:
                break
            path.append(place)
        if self.cached == len(self.tokens):  # else the draft was of an earlier text
            self._runner.compact(self.slot, self.cached, [self.cached + place for place in path])
            self.cached += len(path)
        self.cached = min(self.cached, len(self.tokens) + len(new) - 1)
