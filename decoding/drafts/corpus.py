"""Drafts copied from what was written before: the prompts and answers of other requests."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from decoding.drafts.corpus_file import CorpusFile
from decoding.drafts.draft import ProposerName
from decoding.drafts.lookup import Copy, Lookup, MatchCalibration
from decoding.drafts.options import CorpusOptions
from decoding.kernels.matches import NODE_BYTES, Match, MatchIndex

_log = logging.getLogger(__name__)
_TOKEN_BYTES = 4  # on disk
_DEPTH = 32  # tokens that are compared
_LEAST = 3  # tokens of a match; shorter ones are chance among so many texts
_SLICE = 64  # tokens that are indexed at once, in a tenth of a millisecond
_KNOWN = 256  # tokens that are compared at once to find out where a text is new
_MOST_SALTS = 65_536  # that are told apart; more begin anew


class Corpus:
    """Texts of one model's tokens. Those with different salts never see each other. A thread of its own adds them."""

    def __init__(
        self, options: CorpusOptions, has_tokens: Callable[[Sequence[int]], bool] = lambda tokens: True
    ) -> None:
        """has_tokens: whether the model has all of some tokens; other texts are left out."""
        self._has_tokens = has_tokens
        self._file: CorpusFile | None = None
        self._index = MatchIndex(options.tokens, _DEPTH)
        self._owners: dict[str, int] = {}
        self._next_owner = 1
        self._lock = Lock()  # held for a slice or a look-up
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="corpus")
        if options.path is not None:
            self._worker.submit(self._open, Path(options.path), _TOKEN_BYTES * options.tokens)

    @property
    def tokens(self) -> int:
        return len(self._index)

    @property
    def size_bytes(self) -> int:
        return NODE_BYTES * self.tokens

    def add(self, tokens: Sequence[int], salt: str) -> None:
        """Add a text, soon. How it begins is left out where another text began so."""
        if self._has_tokens(tokens):
            self._worker.submit(self._add, tokens, salt)

    def find(self, tokens: Sequence[int], salt: str, count: int) -> Match:
        """Find the end of a text of that salt, and at most so many tokens that followed."""
        with self._lock:
            owner = self._owners.get(salt)
            return Match(0, 0, []) if owner is None else self._index.find(tokens, count, owner)

    def wait(self) -> None:
        """Return once all texts are in the index."""
        self._worker.submit(int).result()

    def _open(self, folder: Path, most_bytes: int) -> None:
        """Read the texts of an earlier replica, and keep the next ones."""
        try:
            file = CorpusFile(folder, most_bytes)
            for salt, text in file.read():
                if self._has_tokens(text):
                    self._add(text, salt)
            self._file = file
        except OSError as error:
            _log.warning("the texts of the corpus can't be kept in %s: %s", folder, error)

    def _add(self, tokens: Sequence[int], salt: str) -> None:
        owner = self._owner(salt)
        new = max(self._known(tokens, salt) - _DEPTH, 0)
        for start in range(new, len(tokens), _SLICE):
            with self._lock:
                self._index.add(tokens[start : start + _SLICE], owner)
        with self._lock:
            self._index.end_text(owner)
        if self._file is not None and new < len(tokens) - _DEPTH:
            try:
                self._file.append(salt, tokens[new:])
            except OSError as error:
                _log.warning("a text of the corpus can't be kept: %s", error)
                self._file = None

    def _owner(self, salt: str) -> int:
        with self._lock:
            if len(self._owners) == _MOST_SALTS:
                self._owners.clear()
            if salt not in self._owners:
                self._owners[salt] = self._next_owner
                self._next_owner = (self._next_owner + 1) % 2**32
            return self._owners[salt]

    def _known(self, tokens: Sequence[int], salt: str) -> int:
        """Return how many of the first tokens are in the corpus, one after the other."""
        known = _DEPTH
        while known <= len(tokens):
            length, _, following = self.find(tokens[known - _DEPTH : known], salt, _KNOWN)
            new = tokens[known : known + len(following)]
            same = next((n for n, token in enumerate(new) if token != following[n]), len(new))
            if length < _DEPTH or not same:
                break
            known += same
        return known if known > _DEPTH else 0


class CorpusLookup(Lookup):
    """Drafts what followed the newest of the longest matches in a corpus."""

    name: ProposerName = "corpus"

    def __init__(self, corpus: Corpus, salt: str, *, draft_length: int, calibration: MatchCalibration) -> None:
        super().__init__(calibration)
        self._corpus, self._salt, self._draft_length = corpus, salt, draft_length

    def read(self, tokens: Sequence[int], most: int) -> int:
        return 0

    def find(self, tokens: Sequence[int]) -> list[Copy]:
        length, _, following = self._corpus.find(tokens, self._salt, self._draft_length)
        return [Copy(following, length)] if length >= _LEAST else []
