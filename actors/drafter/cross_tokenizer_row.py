"""A request on a drafter whose target has another tokenizer: both go by the same text, each in tokens of its own.

The drafter's tree of drafts is in its own tokens. What the target is offered is what it would have to write to follow
them; where that depends on how a word goes on, it is offered with a lower probability.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

from msgspec.structs import replace

from actors.drafter.row import DrafterRow
from actors.drafter.tree import DraftNode
from actors.model.runner import Runner
from actors.tokenizers.draft_mapping import DraftMapping
from actors.wire.messages import Admit, Advance, Offer
from decoding.drafts.calibration import RankCalibration
from decoding.sampling.history import History
from decoding.tokenizers.text_aligner import TextAligner, Translation

_PRIOR_SHARE, _PRIOR_COUNT = 0.7, 4.0  # of uncertain tokens that are right; how many observations that is worth
_FORGETTING = 0.98  # what an observation still counts, one observation later
_MIN_PROBABILITY = 0.002  # a token that is less probable is not worth a place in a message
_MIN_CHANGE = 0.01  # what a probability changes by without being told anew
_MAX_RATIO = 4.0  # of the drafter's tokens of a text to the target's; beyond, the lookahead is not stretched
_log = logging.getLogger(__name__)


class CrossTokenizerRow(DrafterRow):
    """`tokens` are the drafter's, up to the root of the tree; all positions and lengths of `DrafterRow` are in these.

    The text may go on within a token of the drafter's: then the root's children are those that begin so.
    """

    draft_mapping: DraftMapping

    def __init__(
        self,
        peer: str,
        admit: Admit,
        runner: Runner,
        draft_mapping: DraftMapping,
        aligner: TextAligner,
        prompt_length: int,
        *,
        ahead: bool,
    ) -> None:
        """aligner: of the admitted text. prompt_length: in the drafter's tokens."""
        self.draft_mapping = draft_mapping
        self._aligner = aligner
        self._length = len(admit.tokens)  # of the text, in the target's tokens
        self._last_length = admit.prompt_length + admit.params.max_tokens
        self._rejects = admit.params.rejects
        self._ahead = b""  # what of the text comes after `tokens`
        self._uncertain, self._right = _PRIOR_COUNT, _PRIOR_COUNT * _PRIOR_SHARE  # tokens, and those of them that came
        self._translations: dict[DraftNode, Translation] = {}
        self._offered: dict[tuple[int, ...], float] = {}  # paths of the target's tokens, and their ends' probabilities
        params = draft_mapping.params(admit.params, runner.max_length)
        super().__init__(
            peer, replace(admit, tokens=aligner.tokens, prompt_length=prompt_length, params=params), runner, ahead=ahead
        )

    @classmethod
    def make(
        cls, peer: str, admit: Admit, runner: Runner, draft_mapping: DraftMapping, *, ahead: bool = True
    ) -> "CrossTokenizerRow | None":
        """None: the target has no such tokens, or the drafter has no room for the text."""
        if not draft_mapping.can_map(admit.tokens):
            return None
        aligner = draft_mapping.aligner(admit.tokens)
        aligner.commit(admit.tokens[: admit.prompt_length])
        prompt_length = len(aligner.tokens)
        aligner.commit(admit.tokens[admit.prompt_length :])
        if not runner.can_run(aligner.tokens):
            return None
        return cls(peer, admit, runner, draft_mapping, aligner, prompt_length, ahead=ahead)

    @property
    def calibration_key(self) -> Hashable:
        return (self.draft_mapping, self.params.greedy, self._rejects)

    @property
    def acknowledged_length(self) -> int:
        return self._length

    def can_read(self, tokens: Sequence[int]) -> bool:
        return self.draft_mapping.can_map(tokens)

    def undo(self) -> None:
        self.tokens += self._aligner.tokens[len(self.tokens) :]  # to end within a draft it needs that draft
        self._ahead = b""
        super().undo()

    def look_ahead(self, draft_length: int) -> None:
        super().look_ahead(draft_length)
        self._lookahead = self._stretched(self._lookahead)

    def position_below(self, node: DraftNode) -> int:
        """Where, in the target's text, the token after a node would stand."""
        return self._length + len(self._translation(node).tokens)

    def offer(self, leaves: Sequence[DraftNode]) -> Offer | None:
        """Offer the paths whose probabilities are new or have changed."""
        weights = self._weights()
        probabilities = {
            path: min(1.0, weight / weights.get(path[:-1], 1.0))
            for path, weight in weights.items()
            if weight >= _MIN_PROBABILITY
        }
        given_up = dict.fromkeys(self._offered.keys() - probabilities.keys(), 0.0)
        known = probabilities | given_up
        changed = {
            path: probability
            for path, probability in known.items()
            if abs(probability - self._offered.get(path, -1.0)) > _MIN_CHANGE
        }
        self._offered = {path: changed.get(path, self._offered.get(path, 0.0)) for path in probabilities}
        needed = {path[:count] for path in changed for count in range(1, len(path) + 1)}
        paths = sorted(needed, key=lambda path: (len(path), -known[path]))
        if not paths:
            return None
        places = {path: place for place, path in enumerate(paths)} | {(): -1}
        parents = [places[path[:-1]] for path in paths]
        tokens = [path[-1] for path in paths]
        given = [known[path] for path in paths]
        return Offer(self.key[1], self._length, tokens, parents, given, coordinator=self.key[0])

    def _weights(self) -> dict[tuple[int, ...], float]:
        """The probability that the text goes on with a path of the target's tokens, of each that is drafted."""
        weights: defaultdict[tuple[int, ...], float] = defaultdict(float)
        likely = self._right / self._uncertain
        for node in self.tree.root.descendants():
            open_ended = node.probability - sum(child.probability for child in node.children.values())
            if open_ended > 0:
                found = self._translation(node)
                for count in range(1, len(found.tokens) + 1):
                    weights[tuple(found.tokens[:count])] += open_ended * (1.0 if count <= found.certain else likely)
        return weights

    def commit(self, advance: Advance, calibration: RankCalibration) -> None:
        """Go down the tree with the text; where that leaves the tree, or writes its last word anew, begin anew."""
        committed = advance.tokens[self._length - advance.base :]
        dropped = advance.rejected_at > self._length and self._rejects  # by the target: all that it was offered
        kept = self._aligner.commit(committed)
        self._length += len(committed)
        self._ahead = b""
        node: DraftNode | None = self.tree.root
        if kept < len(self.tokens):
            self._roll_back(kept)
            node = None
        node = self._descend(node, self._aligner.tokens[len(self.tokens) :], calibration)
        if node is not None:
            self._note_uncertain(node.path(), committed)
        if node is None and not self.pending:  # the last token is to be run as text, so that others can follow it
            self._forget(len(self.tokens) - 1)
        self._end = min(self._runner.max_length, len(self.tokens) + self._stretched(self._last_length - self._length))
        self._plant(node)
        self._translations = dict(self._still_right(committed))
        self._offered = {} if dropped else dict(self._still_offered(tuple(committed)))

    def _descend(self, node: DraftNode | None, tokens: Sequence[int], calibration: RankCalibration) -> DraftNode | None:
        """Where the text, which goes on with these tokens, is below a node; None if nowhere."""
        for at, token in enumerate(tokens):
            if node is not None and self._stop_within(node, tokens[at:]):
                return node
            node = self._append(token, node, calibration)
        return node

    def _note_uncertain(self, nodes: Sequence[DraftNode], committed: Sequence[int]) -> None:
        """See whether a draft that ended at one of these nodes, which the text has passed, would have been right."""
        for found in filter(None, map(self._translations.get, nodes)):
            if found.certain < min(len(found.tokens), len(committed)):
                self._uncertain = _FORGETTING * self._uncertain + 1
                self._right = _FORGETTING * self._right + (found.tokens[found.certain] == committed[found.certain])

    def _stop_within(self, node: DraftNode, tokens: Sequence[int]) -> bool:
        """Whether the text, which goes on with these tokens, is more likely to end within a child of a node.

        The other children are dropped then.
        """
        speller = self.draft_mapping.drafter
        ahead = self._spelled(tokens)
        within = {
            token: child
            for token, child in node.children.items()
            if ahead is not None
            and (data := self._spelled([token]) or b"").startswith(ahead)
            and len(data) > len(ahead)
            and speller.spell_bytes(data[len(ahead) :]) is not None
        }
        rival = node.children.get(tokens[0])
        if ahead is None or not within or (rival is not None and rival < next(iter(within.values()))):
            return False
        self._ahead = ahead
        _drop_others(node, within)
        return True

    def _spelled(self, tokens: Sequence[int]) -> bytes | None:
        """The bytes of the drafter's tokens; None if one is not text."""
        vocabulary = self.draft_mapping.drafter.vocabulary
        is_text = all(isinstance(vocabulary.meanings[token], bytes) for token in tokens)
        return vocabulary.decode_bytes(tokens) if is_text else None

    def _translation(self, node: DraftNode) -> Translation:
        """What the target would write to come by a node, after the text."""
        found = self._translations.get(node)
        if found is None:
            draft = [above.token for above in node.path()]
            if draft and self._ahead:
                spelled = self.draft_mapping.drafter.vocabulary.decode_bytes(draft[:1])
                draft[:1] = self.draft_mapping.drafter.spell_bytes(spelled[len(self._ahead) :]) or []
            found = self._translations[node] = self._written(draft)
        return found

    def _written(self, draft: list[int]) -> Translation:
        """The draft in the target's tokens; none where its tokenizer can't write it: drafts are hints."""
        try:
            return self._aligner.translate(draft)
        except Exception:
            _log.warning("request %d has a draft that can't be written", self.key[1], exc_info=True)
            return Translation([], 0)

    def _still_right(self, committed: list[int]) -> Iterator[tuple[DraftNode, Translation]]:
        """What is left of the translations that the text, which went on with these tokens, has followed."""
        count = len(committed)
        for node in self.tree.root.descendants():
            found = self._translations.get(node)
            if found is not None and found.tokens[:count] == committed:
                yield node, Translation(found.tokens[count:], max(0, found.certain - count))

    def _still_offered(self, committed: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], float]]:
        """What the target has of the paths that begin with these tokens."""
        count = len(committed)
        for path, probability in self._offered.items():
            if path[:count] == committed != path:
                yield path[count:], probability

    def _stretched(self, length: int) -> int:
        """About as many of the drafter's tokens as so many of the target's."""
        return math.ceil(length * min(len(self._aligner.tokens) / self._length, _MAX_RATIO))

    def _roll_back(self, count: int) -> None:
        """Keep the first `count` tokens of the text, and nothing that is drafted."""
        self._forget(count)
        del self.tokens[count:]
        self.history = History(self.params, self.tokens, self.prompt_length)

    def _forget(self, count: int) -> None:
        """All but the first `count` tokens of the text are to be run again. The tree is about to be dropped."""
        if count <= self._trunk:
            self._trunk = self._used = self.cached = count
            self._spine = []
        elif count < self.cached:
            del self._spine[count - self._trunk :]
            self.cached = count


def _drop_others(node: DraftNode, kept: dict[int, DraftNode]) -> None:
    """Leave a node these children, which are the more likely for it."""
    dropped = sum(child.probability for token, child in node.children.items() if token not in kept)
    factor = node.probability / max(node.probability - dropped, sum(child.probability for child in kept.values()))
    node.children = kept
    for below in node.descendants():
        below.probability *= factor
