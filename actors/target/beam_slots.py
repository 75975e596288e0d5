"""The beams of one request over its KV slots: a beam is forked by a copy of the columns that another slot lacks.

It knows nothing of scores: it is told which beams go on, and says where their columns are.
"""

from collections.abc import Sequence

from actors.model.kv_slots import SlotCache, common_prefix


class BeamSlots:
    """As many slots as the request can have beams. The first holds the prompt, the others nothing yet."""

    def __init__(self, cache: SlotCache, slots: Sequence[int], prompt: Sequence[int], *, beams: int = 1) -> None:
        """beams: how many there are at the start, all with an empty answer."""
        self._cache, self._prompt = cache, prompt
        self._held: dict[int, Sequence[int] | None] = dict.fromkeys(slots)  # answer tokens; None: not even the prompt
        self._held[slots[0]] = ()
        self.of_beams = [slots[0]] * beams  # [B] the slot of each beam

    def wrote(self, answers: Sequence[Sequence[int]]) -> None:
        """The slots of the beams hold the prompt and these answers, [B] of them."""
        self._held.update(zip(self.of_beams, answers, strict=True))

    def fork(self, parents: Sequence[int]) -> None:
        """From now on, beam j is what beam parents[j] was.

        A slot stays with the first of a beam's children; the others get those that share most with it of the rest.
        """
        sources = [self.of_beams[parent] for parent in parents]
        rest = [slot for slot in self._held if slot not in sources]
        for at, source in enumerate(sources):
            if source in sources[:at]:
                target = max(rest, key=lambda slot: self._shared(slot, source))
                rest.remove(target)
                self._copy(source, target)
                sources[at] = target
        self.of_beams = sources

    def texts(self) -> list[tuple[int, list[int]]]:
        """Each slot, and the tokens that its first columns hold."""
        return [(slot, [] if held is None else [*self._prompt, *held]) for slot, held in self._held.items()]

    def _copy(self, source: int, target: int) -> None:
        held = self._held[source]
        assert held is not None
        self._cache.copy(source, target, self._shared(target, source), len(self._prompt) + len(held))
        self._held[target] = held

    def _shared(self, slot: int, source: int) -> int:
        """How many columns of the slot are as in the source."""
        held, wanted = self._held[slot], self._held[source]
        return 0 if held is None or wanted is None else len(self._prompt) + common_prefix(held, wanted)
