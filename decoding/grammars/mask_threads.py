"""Threads that compute the token masks of structured answers. Knows nothing of models or logits."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from decoding.drafts.draft import Draft
from decoding.grammars.structure import StructureState


class MaskThreads:
    """Computes the masks of a step while the model runs."""

    def __init__(self, threads: int = 1) -> None:
        """threads: one is fastest for masks that take microseconds, because several contend for the GIL."""
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="masks")

    def start(
        self, states: Sequence[StructureState | None], drafts: Sequence[Draft]
    ) -> Callable[[], list[Tensor | None]]:
        """Start computing `StructureState.masks` of each row. The function that is returned waits for them.

        Until it has returned, neither the states nor their texts may change.
        """
        rows = [row for row, state in enumerate(states) if state is not None]
        shares = [rows[start :: self._threads] for start in range(min(self._threads, len(rows)))]

        def compute(share: Sequence[int]) -> list[tuple[int, Tensor]]:
            return [(row, state.masks(drafts[row])) for row in share if (state := states[row]) is not None]

        futures = [self._pool.submit(compute, share) for share in shares]

        def wait() -> list[Tensor | None]:
            masks = dict(pair for future in futures for pair in future.result())
            return [masks.get(row) for row in range(len(states))]

        return wait

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
