"""A request on the drafter: the committed text, the tree of drafts below it, and the cache columns of both.

Columns 0 … trunk - 1 contain text. Later columns contain nodes of the tree, in the order in which they were run. Nodes
that were committed since (the spine) are text too; they are moved next to the trunk only when columns run out.
"""

from collections.abc import Hashable, Iterator, Sequence

from msgspec.structs import replace

from actors.drafter.tree import DraftNode, DraftTree
from actors.loops.row import Row
from actors.wire.messages import Admit, Advance, Offer
from decoding.drafts.choices import DraftChoice, RankCalibration
from decoding.drafts.draft import Distribution
from decoding.sampling.batch import can_chain
from decoding.sampling.history import History
from decoding.tokenizers.draft_mapping import DraftMapping
from engine.kernels.attention import MAX_BRANCHES
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner

WIDTH = 8  # the most tokens of a row in one step
_MAX_CACHED_NODES = 48  # per row; beyond, no more alternatives are run

_SAME = Distribution([], [])  # the same as in an earlier offer


class DrafterRow(Row):
    """A request in the target's own tokens. `tokens` are committed; drafts are in the tree below the last of them."""

    draft_mapping: DraftMapping | None = None  # if the target has another tokenizer

    def __init__(self, peer: str, admit: Admit, runner: Runner, *, ahead: bool = True) -> None:
        """ahead: also draft what follows the draft under verification."""
        super().__init__(peer, admit)
        self.target = "" if admit.target is None else admit.target.name  # the replica that gets the offers
        self._ahead_of_verdicts = ahead
        self.history = History(self.params, self.tokens, self.prompt_length)
        self._runner = runner
        self._end = min(self.prompt_length + self.params.max_tokens, runner.max_length)  # the last position to draft
        self._trunk = self._used = 0  # columns of text; columns in use
        self._spine: list[int] = []  # columns of the text that follows the trunk
        self._chains = self.draft_mapping is None and can_chain(self.params)
        self._start = 0  # the first column that the last step wrote
        self.nodes: list[DraftNode] = []  # of the last `inputs`, after which logits are wanted
        self.alternatives = 0  # the most nodes of a step, chain included; 0: the chain alone
        self.look_ahead(self.draft_length)
        self._plant(None)

    @property
    def cached_prefix(self) -> int:
        return self._trunk

    @property
    def calibration_key(self) -> Hashable:
        return self.params.greedy

    @property
    def acknowledged_length(self) -> int:
        """The length of the target's text as received so far, in the target's tokens."""
        return len(self.tokens)

    def can_read(self, tokens: Sequence[int]) -> bool:
        return self._runner.can_run(tokens)

    @property
    def resting(self) -> bool:
        return not self._wants_step()

    def resume(self, count: int) -> None:
        self._spine = []
        self.cached = self._trunk = self._used = self._start = count

    def undo(self) -> None:
        self.resume(min(self._trunk, self._start, len(self.tokens) - 1))
        self._plant(None)

    def look_ahead(self, draft_length: int) -> None:
        """Set the lookahead from the next commit on: the draft under verification, its bonus token, the next draft."""
        lookahead = 2 * draft_length + 1 if draft_length and self._ahead_of_verdicts else draft_length
        self._lookahead = min(lookahead, self._runner.max_draft - 1)

    def is_late(self) -> bool:
        """Whether the target's next draft, or the bonus token before it, may be missing."""
        tip = self.tree.tip()
        return self.tree.can_run(tip) and tip.position <= self.tree.root.position + self._lookahead // 2

    def missing_tokens(self) -> int:
        """Return how many tokens the chain lacks for the target's next draft; if none, for the full lookahead."""
        root, last, tip = self.tree.root.position, self.tree.last_position, self.tree.tip().position
        needed = root + self._lookahead // 2 + 1
        return min(needed if tip < needed and self._ahead_of_verdicts else last, last) - tip

    def chain_length(self, wanted: int) -> int:
        """Return how many of the wanted tokens may be run as one chain; 0 if the next step can't be one."""
        if not self._chains or self.structure is not None or self.pending > 1:
            return 0
        columns = self._runner.cache.capacity - WIDTH - len(self.tokens) - self.tree.ran
        return max(0, min(wanted, columns, self._runner.max_length - self.tree.tip().position))

    @property
    def due(self) -> bool:
        return self.ready and self._wants_step()

    @property
    def prefilling(self) -> bool:
        return self.pending > WIDTH

    @property
    def step_tokens(self) -> int:
        return max(1, self.pending, self.alternatives)

    def _wants_step(self) -> bool:
        if self.tree.can_run(self.tree.tip()):
            return True
        if self.params.rejects:  # alternatives are for shared noise only
            return False
        return not self.pending and self._room(0) > 0 and self.alternatives > 0 and self.tree.has_pending()

    def inputs(self, limit: int, following: int = 0) -> list[RowInput]:
        """Return pending text, at most `limit` tokens; else the chain's tip and the best other nodes.

        following: columns to leave free after it.
        """
        if self.pending:
            return [self._text_input(limit)]
        nodes = self._choose(0 if self.params.rejects else self.alternatives)
        return [self._nodes_input(nodes, following)]

    def _nodes_input(self, nodes: list[DraftNode], following: int) -> RowInput:
        limit = self._runner.cache.capacity - WIDTH - following
        if self._used + len(nodes) > min(self._trunk + MAX_BRANCHES - following, limit):
            self._compact()
        if self._used + len(nodes) > limit:  # the slot is almost full, but has room without alternatives
            self.cached -= 1
            self._plant(None)
            return self._text_input(WIDTH)
        self.nodes = nodes
        return self._assign_columns(nodes)

    def _text_input(self, limit: int) -> RowInput:
        """Return at most `limit` pending tokens. No node is cached then, because the root comes first."""
        self._compact()
        self.history.read_ahead()
        (run,) = super().inputs(limit)
        run = replace(run, settled=min(run.end, len(self.tokens) - 1))
        self._start = run.start
        self._trunk = self._used = self.cached = run.end
        self.nodes = [] if self.pending else [self.tree.root]
        return run

    def take(self, choices: Iterator[DraftChoice], calibration: RankCalibration) -> list[DraftNode]:
        """Give children to the nodes that were run. choices: what may follow each, and those of later rows."""
        return [child for node in self.nodes for child in self.extend(node, [next(choices)], calibration)]

    def extend(self, node: DraftNode, choices: Sequence[DraftChoice], calibration: RankCalibration) -> list[DraftNode]:
        """Give children to a node that was run, and to the chain below it that was run in the columns after it."""
        children: list[DraftNode] = []
        for choice in choices:
            if node.column < 0 and children:
                node.column = self._used
                self._used += 1
            children += self.tree.expand(node, choice, calibration.probabilities(choice.gap))
            node = next(iter(node.children.values()))
            if not self.tree.can_run(node):
                break
        return children

    def position_below(self, node: DraftNode) -> int:
        return node.position + 1

    def offer(self, leaves: Sequence[DraftNode]) -> Offer | None:
        """Offer the paths to some nodes."""
        indices: dict[DraftNode | None, int] = {self.tree.root: -1}
        nodes: list[DraftNode] = []
        for leaf in leaves:
            for node in leaf.path():
                if node not in indices:
                    indices[node] = len(nodes)
                    nodes.append(node)
        parents = [indices[node.parent] for node in nodes]
        tokens = [node.token for node in nodes]
        node_parents = [node.parent for node in nodes if node.parent is not None]
        pairs = list(zip(nodes, node_parents, strict=True))
        probabilities: list[float] | None = None
        drawn_from: list[Distribution | None] | None = None
        if self.params.rejects:  # probabilities that depend on what was drawn would bias which drafts are verified
            drawn_from = [
                _SAME if node not in leaves else parent.choice and parent.choice.drawn_from for node, parent in pairs
            ]
        else:
            probabilities = [node.probability / parent.probability for node, parent in pairs]
        coordinator, request_id = self.key
        return Offer(request_id, len(self.tokens), tokens, parents, probabilities, drawn_from, coordinator)

    def commit(self, advance: Advance, calibration: RankCalibration) -> None:
        """Follow the committed text down the tree; start a new tree where it leaves this one."""
        node: DraftNode | None = self.tree.root
        rejected = advance.rejected_at > len(self.tokens)
        for token in advance.tokens[len(self.tokens) - advance.base :]:
            node = self._append(token, node, calibration)
        self._plant(None if rejected and self.params.rejects else node)

    def _append(self, token: int, node: DraftNode | None, calibration: RankCalibration) -> DraftNode | None:
        """Append a token to the text. node: the text's end in the tree; returns its new end."""
        if node is not None and node.choice is not None and node.choice.drawn_from is None:
            choice = node.choice.tokens
            calibration.note(node.choice.gap, choice.index(token) if token in choice else None)
        node = None if node is None else node.children.get(token)
        self.tokens.append(token)
        if node is not None and node.column >= 0:
            self._spine.append(node.column)
            self.cached += 1
        while self._spine and self._spine[0] == self._trunk:
            self._spine.pop(0)
            self._trunk += 1
        return node

    def _plant(self, root: DraftNode | None) -> None:
        """Start a tree below a node that has become text, or an empty tree."""
        position = len(self.tokens) - 1
        last_position = min(position + self._lookahead, self._end - 1)
        if root is None:
            root = DraftNode(self.tokens[-1], position)
            self.restarted_at = len(self.tokens)
        # Under rejection sampling, the draft's length must not depend on what was drawn (docs/verification.md).
        ends = frozenset[int]() if self.params.rejects else self.history.end_token_ids
        self.tree = DraftTree(root, last_position, ends)

    def _room(self, reserved: int) -> int:
        columns = self._runner.cache.capacity - WIDTH - len(self.tokens)
        return min(_MAX_CACHED_NODES, columns) - self.tree.ran - reserved

    def _choose(self, alternatives: int) -> list[DraftNode]:
        """Return the tip of the chain, unless that is long enough, and the best other nodes."""
        tip = self.tree.tip()
        nodes = [tip] if self.tree.can_run(tip) else []
        count = min(alternatives, self._room(self.tree.last_position - tip.position if nodes else 0))
        while len(nodes) < count and self.tree.has_pending():
            node = self.tree.pop_pending()
            if node is not tip:
                nodes.append(node)
        return nodes

    def _assign_columns(self, nodes: list[DraftNode]) -> RowInput:
        start = self._start = self._used
        for node in nodes:
            node.column = self._used
            self._used += 1
        paths = [[*self._spine, *(ancestor.column for ancestor in node.path())] for node in nodes]
        tokens = [node.token for node in nodes]
        if len(nodes) == 1 and paths[0] == list(range(self._trunk, self._used)):
            return RowInput(self.slot, start, tokens, settled=len(self.tokens) - 1)
        return RowInput(self.slot, start, tokens, trunk=self._trunk, paths=paths)

    def _compact(self) -> None:
        """Move the spine next to the trunk, and cached nodes after it. Other columns become free."""
        nodes = [node for node in self.tree.root.descendants() if node.column >= 0]
        self._runner.compact(self.slot, self._trunk, [*self._spine, *(node.column for node in nodes)])
        self._spine = []
        self._trunk = self._used = self.cached
        for node in nodes:
            node.column = self._used
            self._used += 1
