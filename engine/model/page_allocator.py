"""Pages of a KV cache: who holds them, and the keys by which a text's full pages are known again."""

from array import array
from collections.abc import Hashable, Iterable, Sequence
from hashlib import blake2b
from typing import Any

from decoding.errors import OutOfPagesError

PAGE_SIZE = 16  # columns
_MOST_TAKEN = 512  # pages that one call takes over: a long text must not hold up the others


class PageAllocator:
    """Reference counts of the pages 1 … `pages`, and the keys under which full pages are known."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.evictions = 0
        self._counts = [0] * (pages + 1)
        self._shared: set[int] = set()  # pages with more than one holder
        self._free = list(range(pages, 0, -1))  # the last is taken first
        self._evictable: dict[int, None] = {}  # known pages that nobody holds, the least recently used first
        self._keys: dict[int, Hashable] = {}
        self._known: dict[Hashable, int] = {}  # the inverse of `_keys`

    @property
    def shared(self) -> int:
        """Number of pages with more than one holder."""
        return len(self._shared)

    @property
    def available(self) -> int:
        """Number of pages that `allocate` can give out."""
        return len(self._free) + len(self._evictable)

    @property
    def used(self) -> int:
        """Number of pages that somebody holds."""
        return self.pages - self.available

    def allocate(self) -> int:
        """Return a page with one holder and unknown content. Raises OutOfPagesError if none is free or evictable."""
        if self._free:
            page = self._free.pop()
        elif self._evictable:
            page = next(iter(self._evictable))
            del self._evictable[page]
            self.forget(page)
            self.evictions += 1
        else:
            raise OutOfPagesError(f"all {self.pages} pages are in use")
        self._counts[page] = 1
        return page

    def share(self, page: int) -> None:
        """Add a holder to a page that is held or known."""
        if not self._counts[page]:
            del self._evictable[page]
        self._counts[page] += 1
        if self._counts[page] == 2:
            self._shared.add(page)

    def release(self, page: int) -> None:
        """Remove a holder. Without any, the page is evictable if its content is known, else free."""
        self._counts[page] -= 1
        if self._counts[page] == 1:
            self._shared.remove(page)
        if not self._counts[page]:
            if page in self._keys:
                self._evictable[page] = None
            else:
                self._free.append(page)

    def are_private(self, pages: Iterable[int]) -> bool:
        """Return whether each page has one holder and is not known, so that its holder may write to it."""
        return self._keys.keys().isdisjoint(pages) and self._shared.isdisjoint(pages)

    def holders(self, page: int) -> int:
        """Return how many hold the page."""
        return self._counts[page]

    def find(self, key: Hashable) -> int | None:
        """Return the page that is known by the key, if any."""
        return self._known.get(key)

    def register(self, page: int, key: Hashable) -> int:
        """Make a page known by its content. Return the page that is known by it, which may be an earlier one."""
        known = self._known.setdefault(key, page)
        if known == page:
            self._keys[page] = key
        return known

    def forget(self, page: int) -> None:
        """Make a page unknown, because its content will change. Its holders keep it."""
        key = self._keys.pop(page, None)
        if key is not None:
            del self._known[key]

    def forget_unheld(self) -> None:
        """Forget the content of all pages that nobody holds."""
        for page in self._evictable:
            self.forget(page)
        self._free += self._evictable
        self._evictable = {}


class PageKeys(Sequence[bytes]):
    """The keys of a text's first pages, each computed when it is first read.

    A key is a hash of the page's tokens and the key before, so it stands for the whole text up to there. Texts with
    different salts have different keys.
    """

    def __init__(
        self, known: list[bytes], text: Sequence[int], count: int, page_size: int = PAGE_SIZE, salt: str = ""
    ) -> None:
        """known: the first of them, to which others are added."""
        self._known, self._text, self._count, self._page_size, self._salt = known, text, count, page_size, salt

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if index >= self._count:
            raise IndexError(index)
        while len(self._known) <= index:
            self._add()
        return self._known[index]

    def _add(self) -> None:
        start = len(self._known) * self._page_size
        tokens = array("i", self._text[start : start + self._page_size])
        parent = self._known[-1] if self._known else self._first
        self._known.append(blake2b(parent + tokens.tobytes(), digest_size=16).digest())

    @property
    def _first(self) -> bytes:
        return blake2b(self._salt.encode(), digest_size=16).digest() if self._salt else b""
