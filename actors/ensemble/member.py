"""A member's row: computes logits for the text and drafts that the leader of an ensemble sends. Samples nothing."""

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
    """`tokens` are the text as last received from the leader; the draft lies in the cache columns behind it."""

    def __init__(self, peer: str, join: Join, runner: Runner) -> None:
        params = SamplingParams(max_tokens=1)  # unused: a member samples nothing
        admit = Admit(
            join.request_id, join.tokens, len(join.tokens), params, 0, drafter=False, admission=join.admission
        )
        super().__init__(peer, admit)
        self.join = join
        self.memory = None if join.shared is None else accept(join.shared)  # for the logits of its replies
        self._runner = runner
        self._draft = Draft([], [])  # of the last request
        self._best_count = join.best_count
        self.joined = False
        self.request: LogitsRequest | None = None  # without a reply yet

    @property
    def length(self) -> int:
        """Length of the text, in the leader's tokens."""
        return len(self.tokens)

    @property
    def prefilling(self) -> bool:
        return self.pending > 1

    def take_request(self, request: LogitsRequest) -> str | None:
        """Append the new text, and keep the draft for the next step. Returns an error text if that is impossible."""
        if request.base > self.length:
            return "a request was lost on the way to a member"
        parents_come_first = all(-1 <= parent < index for index, parent in enumerate(request.parents))
        if len(request.parents) != len(request.tokens) or not parents_come_first:
            return "a member was asked about a draft that is no tree"
        if not self._extend(request.text[self.length - request.base :], Draft(request.tokens, request.parents)):
            return "a member has no room for the text, or not its tokens"
        self.request = request
        return None

    def _extend(self, new_tokens: list[int], draft: Draft) -> bool:
        """Append tokens to the text, and prepare to run a draft. Returns False without room or for unknown tokens."""
        known = self._runner.can_run([*new_tokens, *draft.tokens, self.tokens[0]])
        if not known or len(self.tokens) + len(new_tokens) >= self._runner.max_length:
            return False
        self._keep_accepted(new_tokens)
        self.tokens += new_tokens
        self._draft = draft
        return True

    def step_input(self) -> RowInput:
        """Return the text's last token and the draft."""
        return draft_input(self.slot, self.cached, self.tokens[-1], self._draft)

    def reply(self, logits: Tensor) -> LogitsReply | None:
        """Return the reply after a step, or None if more steps are needed.

        logits: [n, V] of the step's tokens.
        """
        self.cached += 1
        best = logits.topk(max(0, min(self._best_count, logits.shape[-1])), dim=-1).indices.tolist()
        return self._make_reply(logits, best)

    def _make_reply(self, logits: Tensor, best: list[list[int]]) -> LogitsReply:
        """Close the request. logits: [K + 1, V of the leader]; best: [K + 1] most probable tokens."""
        assert self.request is not None
        request, self.request = self.request, None
        packed = pack(logits, request.transport, self.memory)
        return LogitsReply(self.key[1], request.step, packed, best, self.admission)

    def next_input(self, limit: int) -> RowInput:
        """Return a prefill chunk without the last token, which runs together with the draft."""
        return super().next_input(min(limit, self.pending - 1))

    def _keep_accepted(self, new_tokens: list[int]) -> None:
        """Keep the cache columns of accepted draft tokens. The text's last token is computed again in any case."""
        path: list[int] = []  # draft indices
        nodes = list(zip(self._draft.tokens, self._draft.parents, strict=True))
        for token in new_tokens:
            node = token, path[-1] if path else -1
            if node not in nodes:
                break
            path.append(nodes.index(node))
        if self.cached == len(self.tokens):  # else the draft continued an earlier text
            self._runner.compact(self.slot, self.cached, [self.cached + index for index in path])
            self.cached += len(path)
        self.cached = min(self.cached, len(self.tokens) + len(new_tokens) - 1)
