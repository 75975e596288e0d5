"""A text translated token by token to a vocabulary that has the same strings under other ids."""

from collections.abc import Sequence

from decoding.tokenizers.vocabulary import Vocabulary


class CopiedText:
    """The counterpart of `TextAligner` for such vocabularies. Leaves out tokens that the member lacks."""

    pending = b""  # no bytes wait for the rest of a character
    fresh = False  # no token changes its meaning at the start of a text

    def __init__(self, leader: Vocabulary, member: Vocabulary, tokens: Sequence[int] = ()) -> None:
        """tokens: the text so far, in the member's tokens."""
        self._leader, self._member = leader, member
        self.tokens = list(tokens)

    def fork(self) -> "CopiedText":
        """Return a copy that continues independently."""
        return CopiedText(self._leader, self._member, self.tokens)

    def commit(self, tokens: Sequence[int]) -> None:
        """Append tokens of the leader."""
        for token in tokens:
            meaning = self._leader.meanings[token]
            if meaning is not None and meaning in self._member.ids:
                self.tokens.append(self._member.ids[meaning])
