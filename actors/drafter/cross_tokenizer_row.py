"""A request on a drafter whose target has another tokenizer: both follow the same text, each in its own tokens.

The tree of drafts is in the drafter's tokens, offers are in the target's, translated through text.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence

from msgspec.structs import replace

from actors.drafter.row import DrafterRow
from actors.drafter.tree import DraftNode
from actors.wire.messages import Admit, Advance, Offer
from decoding.drafts.choices import RankCalibration
from decoding.sampling.history import History
from decoding.tokenizers.draft_mapping import DraftMapping
from decoding.tokenizers.text_aligner import TextAligner, Translation
from engine.model.runner import Runner

_PRIOR_SHARE, _PRIOR_COUNT = 0.7, 4.0  # the share of right uncertain tokens; the observations that this prior counts as
_DECAY = 0.98  # the weight of an observation after the next one
_MIN_PROBABILITY = 0.002  # a less probable token is not offered
_MIN_CHANGE = 0.01  # a smaller change of a probability is not sent
_MAX_RATIO = 4.0  # the most drafter tokens per target token for which the lookahead is scaled
_log = logging.getLogger(__name__)


class CrossTokenizerRow(DrafterRow):
    """A request whose `tokens`, positions and lengths are in the drafter's tokens.

    The text may end within a drafter's token. The root's children are then the tokens that begin with that part.
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
        """aligner: has the admitted text. prompt_length: in the drafter's tokens."""
        self.draft_mapping = draft_mapping
        self._aligner = aligner
        self._length = len(admit.tokens)  # the text's length in the target's tokens
        self._last_length = admit.prompt_length + admit.params.max_tokens
        self._rejects = admit.params.rejects
        self._partial = b""  # the text after `tokens`
        self._uncertain, self._right = _PRIOR_COUNT, _PRIOR_COUNT * _PRIOR_SHARE  # tokens, and the right ones
        self._translations: dict[DraftNode, Translation] = {}
        self._offered: dict[tuple[int, ...], float] = {}  # paths of the target's tokens to the probability of the last
        params = draft_mapping.params(admit.params, runner.max_length)
        super().__init__(
            peer, replace(admit, tokens=aligner.tokens, prompt_length=prompt_length, params=params), runner, ahead=ahead
        )

    @classmethod
    def make(
        cls, peer: str, admit: Admit, runner: Runner, draft_mapping: DraftMapping, *, ahead: bool = True
    ) -> "CrossTokenizerRow | None":
        """Return a row; None if the target has no such tokens, or the drafter has no room for the text."""
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
        self.tokens += self._aligner.tokens[len(self.tokens) :]  # the text can't end within a draft that is dropped
        self._partial = b""
        super().undo()

    def look_ahead(self, draft_length: int) -> None:
        super().look_ahead(draft_length)
        self._lookahead = self._scale(self._lookahead)

    def position_below(self, node: DraftNode) -> int:
        return self._length + len(self._translation(node).tokens)

    def offer(self, leaves: Sequence[DraftNode]) -> Offer | None:
        """Offer the paths whose probabilities are new or have changed."""
        weights = self._weights()
        probabilities = {
            path: min(1.0, weight / weights.get(path[:-1], 1.0))
            for path, weight in weights.items()
            if weight >= _MIN_PROBABILITY
        }
        withdrawn = dict.fromkeys(self._offered.keys() - probabilities.keys(), 0.0)
        current = probabilities | withdrawn
        changed = {
            path: probability
            for path, probability in current.items()
            if abs(probability - self._offered.get(path, -1.0)) > _MIN_CHANGE
        }
        self._offered = {path: changed.get(path, self._offered.get(path, 0.0)) for path in probabilities}
        needed = {path[:count] for path in changed for count in range(1, len(path) + 1)}
        paths = sorted(needed, key=lambda path: (len(path), -current[path]))
        if not paths:
            return None
        indices = {path: index for index, path in enumerate(paths)} | {(): -1}
        parents = [indices[path[:-1]] for path in paths]
        tokens = [path[-1] for path in paths]
        offered = [current[path] for path in paths]
        return Offer(self.key[1], self._length, tokens, parents, offered, coordinator=self.key[0])

    def _weights(self) -> dict[tuple[int, ...], float]:
        weights: defaultdict[tuple[int, ...], float] = defaultdict(float)
        right = self._right / self._uncertain
        for node in self.tree.root.descendants():
            open_ended = node.probability - sum(child.probability for child in node.children.values())
            if open_ended > 0:
                draft = self._translation(node)
                for count in range(1, len(draft.tokens) + 1):
                    weights[tuple(draft.tokens[:count])] += open_ended * (1.0 if count <= draft.certain else right)
        return weights

    def commit(self, advance: Advance, calibration: RankCalibration) -> None:
        """Follow the text down the tree. Start a new tree where the text leaves it, or its last tokens change."""
        committed = advance.tokens[self._length - advance.base :]
        dropped = advance.rejected_at > self._length and self._rejects  # the target has dropped all offers
        kept = self._aligner.commit(committed)
        self._length += len(committed)
        self._partial = b""
        node: DraftNode | None = self.tree.root
        if kept < len(self.tokens):
            self._roll_back(kept)
            node = None
        node = self._descend(node, self._aligner.tokens[len(self.tokens) :], calibration)
        if node is not None:
            self._note_uncertain(node.path(), committed)
        if node is None and not self.pending:  # run the last token as text, so that others can follow it
            self._forget(len(self.tokens) - 1)
        self._end = min(self._runner.max_length, len(self.tokens) + self._scale(self._last_length - self._length))
        self._plant(node)
        self._cut_drafts(committed)
        if dropped:
            self._offered = {}

    def _cut_drafts(self, committed: list[int]) -> None:
        """Keep the rest of each translation and of each offered path that begins with the committed tokens."""
        count, path = len(committed), tuple(committed)
        drafts = [(node, self._translations.get(node)) for node in self.tree.root.descendants()]
        self._translations = {
            node: Translation(draft.tokens[count:], max(0, draft.certain - count))
            for node, draft in drafts
            if draft is not None and draft.tokens[:count] == committed
        }
        self._offered = {
            offered[count:]: probability
            for offered, probability in self._offered.items()
            if offered[:count] == path != offered
        }

    def _descend(self, node: DraftNode | None, tokens: Sequence[int], calibration: RankCalibration) -> DraftNode | None:
        """Return the node that the text reaches with these tokens; None if it leaves the tree."""
        for index, token in enumerate(tokens):
            if node is not None and self._stop_within(node, tokens[index:]):
                return node
            node = self._append(token, node, calibration)
        return node

    def _note_uncertain(self, nodes: Sequence[DraftNode], committed: Sequence[int]) -> None:
        """Count whether drafts that ended at these committed nodes had their uncertain token right."""
        for draft in filter(None, map(self._translations.get, nodes)):
            if draft.certain < min(len(draft.tokens), len(committed)):
                self._uncertain = _DECAY * self._uncertain + 1
                self._right = _DECAY * self._right + (draft.tokens[draft.certain] == committed[draft.certain])

    def _stop_within(self, node: DraftNode, tokens: Sequence[int]) -> bool:
        """Whether the text, continued by these tokens, more likely ends within a child of a node.

        If so, the other children are dropped.
        """
        speller = self.draft_mapping.drafter
        partial = self._spell(tokens)
        within = {
            token: child
            for token, child in node.children.items()
            if partial is not None
            and (data := self._spell([token]) or b"").startswith(partial)
            and len(data) > len(partial)
            and speller.spell_bytes(data[len(partial) :]) is not None
        }
        rival = node.children.get(tokens[0])
        if partial is None or not within or (rival is not None and rival < next(iter(within.values()))):
            return False
        self._partial = partial
        _drop_others(node, within)
        return True

    def _spell(self, tokens: Sequence[int]) -> bytes | None:
        vocabulary = self.draft_mapping.drafter.vocabulary
        is_text = all(isinstance(vocabulary.meanings[token], bytes) for token in tokens)
        return vocabulary.decode_bytes(tokens) if is_text else None

    def _translation(self, node: DraftNode) -> Translation:
        """Return the target's tokens for the draft that ends at a node."""
        translation = self._translations.get(node)
        if translation is None:
            draft = [ancestor.token for ancestor in node.path()]
            if draft and self._partial:
                spelled = self.draft_mapping.drafter.vocabulary.decode_bytes(draft[:1])
                draft[:1] = self.draft_mapping.drafter.spell_bytes(spelled[len(self._partial) :]) or []
            try:
                translation = self._aligner.translate(draft)
            except Exception:  # its tokenizer fails: drafts are hints
                _log.warning("request %d has a draft that can't be written", self.key[1], exc_info=True)
                translation = Translation([], 0)
            self._translations[node] = translation
        return translation

    def _scale(self, length: int) -> int:
        """Estimate how many drafter tokens correspond to so many target tokens."""
        return math.ceil(length * min(len(self._aligner.tokens) / self._length, _MAX_RATIO))

    def _roll_back(self, count: int) -> None:
        self._forget(count)
        del self.tokens[count:]
        del self.page_keys[count // self._runner.cache.page_size :]
        self.history = History(self.params, self.tokens, self.prompt_length)

    def _forget(self, count: int) -> None:
        """Let all but the first `count` tokens be run again. The caller replaces the tree."""
        if count <= self._trunk:
            self._trunk = self._used = self.cached = count
            self._spine = []
        elif count < self.cached:
            del self._spine[count - self._trunk :]
            self.cached = count


def _drop_others(node: DraftNode, kept: dict[int, DraftNode]) -> None:
    """Remove a node's other children, and raise the probabilities below those that stay."""
    dropped = sum(child.probability for token, child in node.children.items() if token not in kept)
    factor = node.probability / max(node.probability - dropped, sum(child.probability for child in kept.values()))
    node.children = kept
    for below in node.descendants():
        below.probability *= factor
