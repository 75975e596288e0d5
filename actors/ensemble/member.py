"""A member's row: computes logits for the text and drafts that the leader of an ensemble sends. Samples nothing."""

from torch import Tensor

from actors.loops.row import ServedRow
from actors.wire.logits_codec import accept, pack
from actors.wire.messages import Admit, Join, Joined, LogitsReply, LogitsRequest
from decoding.drafts.draft import NO_DRAFT, Draft
from decoding.sampling.params import SamplingParams
from engine.kernels.attention import MAX_BRANCHES
from engine.model.ragged_batch import RowInput, draft_input
from engine.model.runner import Runner


class MemberRow(ServedRow):
    """`tokens` are the text as last received from the leader; the draft lies in the cache columns behind it."""

    def __init__(self, peer: str, join: Join, runner: Runner) -> None:
        params = SamplingParams(max_tokens=1)  # unused: a member samples nothing
        admit = Admit(
            join.request_id,
            join.tokens,
            len(join.tokens),
            params,
            0,
            drafter=False,
            admission=join.admission,
            cache_salt=join.cache_salt,
            arrived_at_s=join.arrived_at_s,
        )
        super().__init__(peer, admit)
        self.join, self.invitation = join, join.invitation
        self.memory = None if join.shared is None else accept(join.shared)  # for the logits of its replies
        self._runner = runner
        self._draft = NO_DRAFT  # of the last request
        self._best_count = join.best_count
        self.joined = False
        self._started = False
        self.request: LogitsRequest | None = None  # without a reply yet

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def max_length(self) -> int:
        return self._runner.max_length

    @property
    def due(self) -> bool:
        return self.ready and (self.prefilling or self.request is not None)

    @property
    def spans_replicas(self) -> bool:
        return True

    @property
    def started(self) -> bool:
        return self._started

    @property
    def step_tokens(self) -> int:
        return 1 + len(self._draft.tokens)

    @property
    def withheld(self) -> int:
        return 1  # the last token runs together with the draft

    def announce(self) -> Joined | None:
        if self.joined or self.prefilling or not self.ready:
            return None
        self.joined = True
        return Joined(self.key[1], self.admission, self.max_length, self.invitation)

    def rejoins(self, join: Join) -> bool:
        if join != self.join:
            return False
        self.joined = False  # Joined may have been lost
        return True

    def take_request(self, request: LogitsRequest) -> str | None:
        if request == self.request:
            return None  # sent again, because the reply takes long
        if request.base > self.length:
            return "a request was lost on the way to a member"
        parents_come_first = all(-1 <= parent < index for index, parent in enumerate(request.parents))
        if len(request.parents) != len(request.tokens) or not parents_come_first:
            return "a member was asked about a draft that is no tree"
        if not self._extend(request.text[self.length - request.base :], Draft(request.tokens, request.parents)):
            return "a member has no room for the text, or not its tokens"
        self.request, self._started = request, True
        return None

    def _extend(self, new_tokens: list[int], draft: Draft) -> bool:
        """Append tokens to the text, and prepare to run a draft. Returns False without room or for unknown tokens."""
        known = self._runner.can_run([*new_tokens, *draft.tokens, self.tokens[0]])
        length = len(self.tokens) + len(new_tokens) + len(draft.tokens)
        if not known or length >= self._runner.max_length or len(draft.tokens) >= MAX_BRANCHES:
            return False
        self._keep_accepted(new_tokens)
        self.tokens += new_tokens
        self._draft = draft
        return True

    def inputs(self, limit: int) -> list[RowInput]:
        return super().inputs(limit) if self.prefilling else [self._step_input()]

    def take(self, logits: Tensor, rows: range) -> LogitsReply | None:
        if not self.prefilling:
            return self._reply(logits[rows.start : rows.stop])
        self.cached = self._chunk.end
        return None

    def _step_input(self) -> RowInput:
        return draft_input(self.slot, self.cached, self.tokens[-1], self._draft)

    def _reply(self, logits: Tensor) -> LogitsReply | None:
        best = logits.topk(max(0, min(self._best_count, logits.shape[-1])), dim=-1).indices.tolist()
        reply = self._make_reply(logits, best)
        self.cached += 1  # memory may have run out until here
        return reply

    def _make_reply(self, logits: Tensor, best: list[list[int]]) -> LogitsReply:
        """Close the request. logits: [K + 1, V of the leader]; best: [K + 1] most probable tokens."""
        assert self.request is not None
        packed = pack(logits, self.request.transport, self.memory)
        step, self.request = self.request.step, None
        return LogitsReply(self.key[1], step, packed, best, self.admission, self.invitation)

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
