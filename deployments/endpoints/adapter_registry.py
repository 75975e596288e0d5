"""Which adapters were loaded and unloaded while servers run, as coordinators and replicas tell each other.

The last change of a name counts, so registries that have seen the same changes are equal, in whatever order they came.
Knows no endpoints.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from actors.wire.messages import Adapter


@dataclass(frozen=True, slots=True)
class AdapterChange:
    """The last change of one name."""

    stamp_s: float  # when, since 1970; later than any change of the name before it
    parent: str  # the endpoint as which the adapter's requests are served
    adapter: Adapter | None  # None: it was unloaded


class AdapterRegistry:
    """The changes that are known here, by name."""

    def __init__(self) -> None:
        self.changes: Mapping[str, AdapterChange] = {}

    def change(self, name: str, parent: str, adapter: Adapter | None) -> None:
        """Note a change that happens now."""
        before = self.changes.get(name)
        stamp_s = time.time() if before is None else max(time.time(), before.stamp_s + 1e-3)
        self.merge({name: AdapterChange(stamp_s, parent, adapter)})

    def merge(self, changes: Mapping[str, AdapterChange]) -> None:
        """Take over changes that are newer than those known here."""
        newer = {
            name: change
            for name, change in changes.items()
            if name not in self.changes or change.stamp_s > self.changes[name].stamp_s
        }
        self.changes = {**self.changes, **newer}
