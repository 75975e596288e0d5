"""The KV slots of one request's beams. A fork copies only the columns that the new beam's slot lacks.

Knows nothing of scores or of which beams go on.
"""

from collections.abc import Sequence

from actors.model.kv_pages import KVPages, common_prefix


class BeamSlots:
    """One slot per beam that the request may have. At the start the first holds the prompt, the others nothing."""

    def __init__(self, cache: KVPages, slots: Sequence[int], prompt: Sequence[int], *, beams: int = 1) -> None:
        """beams: their number at the start, all with an empty answer."""
        self._cache, self._prompt = cache, prompt
        self._held: dict[int, Sequence[int] | None] = dict.fromkeys(slots)  # answers; None: without even the prompt
        self._held[slots[0]] = ()
        self.by_beam = [slots[0]] * beams  # [B] the slot of each beam

    def note_written(self, answers: Sequence[Sequence[int]]) -> None:
        """Note that the beams' slots hold the prompt and these answers, [B]."""
        self._held.update(zip(self.by_beam, answers, strict=True))

    def fork(self, parents: Sequence[int]) -> None:
        """Make each beam j a continuation of the former beam parents[j].

        The first child of a beam keeps its slot. Each other child gets the free slot that shares most with it.
        """
        sources = [self.by_beam[parent] for parent in parents]
        free = [slot for slot in self._held if slot not in sources]
        for beam, source in enumerate(sources):
            if source in sources[:beam]:
                target = max(free, key=lambda slot: self._shared_columns(slot, source))
                free.remove(target)
                self._copy(source, target)
                sources[beam] = target
        self.by_beam = sources

    def texts(self) -> list[tuple[int, list[int]]]:
        """Return each slot, and the tokens that its first columns hold."""
        return [(slot, [] if held is None else [*self._prompt, *held]) for slot, held in self._held.items()]

    def _copy(self, source: int, target: int) -> None:
        held = self._held[source]
        assert held is not None
        self._cache.copy(source, target, self._shared_columns(target, source), len(self._prompt) + len(held))
        self._held[target] = held

    def _shared_columns(self, slot: int, source: int) -> int:
        """Return the number of first columns that the slot has in common with the source."""
        held, source_held = self._held[slot], self._held[source]
        return 0 if held is None or source_held is None else len(self._prompt) + common_prefix(held, source_held)
