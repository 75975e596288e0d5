"""The trie of proposed continuations of one request. Drafts are hints: nothing offered here can change the text."""

from collections.abc import Sequence

MAX_DRAFT_LENGTH = 64  # tokens of one offer; more are cut off
_NEW_NODES = 1024  # tokens that may be added between two commits, so that no proposer can fill the memory
_Node = dict[int, "_Node"]  # what may follow, by token, in the order offered


class DraftTrie:
    """Draft tokens below the last committed token.

    The root stands for the committed text, `base` tokens long. Any proposer may offer any path at any time; offers
    that contradict the committed text, or that start beyond it, are dropped.
    """

    def __init__(self, committed: list[int]) -> None:
        """committed: the request's tokens, prompt included; shared with the owner, who appends through `commit`."""
        self._committed = committed
        self._root: _Node = {}
        self._room = _NEW_NODES

    def offer(self, base: int, tokens: Sequence[int]) -> bool:
        """Add the path `tokens`, of which the first stands at absolute position `base`. True if any of it fits."""
        behind = len(self._committed) - base  # tokens of the path that are committed already
        if base < 0 or behind < 0 or behind >= len(tokens):
            return False
        if list(tokens[:behind]) != self._committed[base:]:
            return False
        node = self._root
        for token in tokens[behind : behind + MAX_DRAFT_LENGTH]:
            if token not in node and self._room == 0:
                break
            if token not in node:
                self._room -= 1
            node = node.setdefault(token, {})
        return True

    def commit(self, tokens: Sequence[int]) -> None:
        """Append committed tokens; keep the subtree below them and drop all else."""
        self._committed.extend(tokens)
        for token in tokens:
            self._root = self._root.get(token, {})
        self._room = _NEW_NODES

    def longest_path(self, limit: int) -> list[int]:
        """The deepest offered path, at most `limit` tokens; the earliest offered among equals."""
        return _deepest(self._root, limit)


def _deepest(node: _Node, limit: int) -> list[int]:
    best: list[int] = []
    if limit > 0:
        for token, child in node.items():
            path = [token, *_deepest(child, limit - 1)]
            if len(path) > len(best):
                best = path
    return best
