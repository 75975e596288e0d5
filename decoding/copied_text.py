"""A text in the tokens of a vocabulary that has the same strings as the one it was written in, under other ids."""

from collections.abc import Sequence

from decoding.vocabulary import Vocabulary


class CopiedText:
    """Token by token, in whatever pieces it was written. Control tokens that the vocabulary lacks are left out."""

    pending = b""  # what `tokens` lack: nothing
    fresh = False  # what tokens stand for is the same at the beginning of a text

    def __init__(self, leader: Vocabulary, member: Vocabulary, tokens: Sequence[int] = ()) -> None:
        """tokens: the member's, of the text so far."""
        self._leader, self._member = leader, member
        self.tokens = list(tokens)

    def fork(self) -> "CopiedText":
        """The same text, to go on with in another way."""
        return CopiedText(self._leader, self._member, self.tokens)

    def commit(self, tokens: Sequence[int]) -> None:
        """Append tokens of the leader."""
        for token in tokens:
            meaning = self._leader.meanings[token]
            if meaning is not None and meaning in self._member.ids:
                self.tokens.append(self._member.ids[meaning])
