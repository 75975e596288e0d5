"""Loads and unloads adapters while the server runs. Coordinators and replicas tell each other what changed.

The last change of a name counts, so registries that have seen the same changes are equal, in whatever order they came.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from actors.wire.messages import Adapter
from decoding.errors import ConfigError, InvalidRequestError, UnknownModelError
from deployments.configuration.paths import check_local, is_local, nested_adapter
from deployments.configuration.values import check_name
from deployments.fields.strict import nearest

if TYPE_CHECKING:  # replicas keep a registry, and need none of it
    from deployments.endpoints.endpoint import ServedEndpoint

TryOut = Callable[["ServedEndpoint"], Awaitable[None]]


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


class RunTimeAdapters(AdapterRegistry):
    """The adapters among a server's endpoints, as far as they come and go. For use in one event loop."""

    def __init__(self, endpoints: MutableMapping[str, "ServedEndpoint"], try_out: TryOut) -> None:
        """
        endpoints: all that clients may ask for, by name; kept up to date here.
        try_out: asks a replica for a token of an adapter's endpoint, and raises what goes wrong.
        """
        super().__init__()
        self._endpoints, self._try_out = endpoints, try_out
        self._changing = asyncio.Lock()

    @property
    def are_allowed(self) -> bool:
        """Whether the configuration lets adapters be loaded at run time."""
        return any(served.max_adapters for served in self._endpoints.values())

    async def load(self, name: str, path: str, *, parent: str | None, replace: bool = False) -> None:
        """Let requests ask for an adapter, once a replica has answered with it.

        Raises InvalidRequestError if the name is taken, there is no room, or the adapter can't be loaded.

        parent: the endpoint that it belongs to; None: the only one whose target takes more adapters.
        replace: whether an adapter of this name may be there already.
        """
        async with self._changing:
            base = self._parent(parent)
            self._check_name(name, base, replace=replace)
            adapter = await asyncio.get_running_loop().run_in_executor(None, read_adapter, name, path)
            try:
                await self._try_out(base.with_adapter(adapter))
            except InvalidRequestError as error:
                raise InvalidRequestError(f"lora_path: {error}", field="lora_path") from error
            self.change(name, base.name, adapter)

    async def unload(self, name: str) -> None:
        """Refuse requests for an adapter from now on, but finish those in progress.

        Raises UnknownModelError if there is no adapter of that name.
        """
        async with self._changing:
            served = self._endpoints.get(name)
            if served is None or served.parent is None:
                adapters = [known for known, other in self._endpoints.items() if other.parent is not None]
                raise UnknownModelError(
                    f"lora_name: there is no adapter {name!r}; {nearest(name, adapters)}", field="lora_name"
                )
            self.change(name, served.parent, None)

    def merge(self, changes: Mapping[str, AdapterChange]) -> None:
        super().merge(changes)
        for name, change in self.changes.items():
            present, base = self._endpoints.get(name), self._endpoints.get(change.parent)
            if change.adapter is None or base is None:
                if present is not None and present.parent is not None:
                    del self._endpoints[name]
            elif present is None or (present.parent is not None and present.endpoint.adapter != change.adapter):
                self._endpoints[name] = base.with_adapter(change.adapter)

    def _parent(self, name: str | None) -> "ServedEndpoint":
        parents = {name: served for name, served in self._endpoints.items() if served.max_adapters}
        if name is None and len(parents) == 1:
            return next(iter(parents.values()))
        if name is None or name not in parents:
            given = "is required" if name is None else f"{name!r} takes no adapters at run time"
            raise InvalidRequestError(
                f"base_model_name: {given}; {nearest(name or '', parents)}", field="base_model_name"
            )
        return parents[name]

    def _check_name(self, name: str, base: "ServedEndpoint", *, replace: bool) -> None:
        present = self._endpoints.get(name)
        is_adapter = present is not None and present.parent == base.name
        if present is not None and not (replace and is_adapter):
            what = "the adapter" if is_adapter else "a model"
            advice = "unload it first, or set load_inplace: true" if is_adapter else "take another name"
            raise InvalidRequestError(f"lora_name: {what} {name!r} is there already; {advice}", field="lora_name")
        try:
            check_name("lora_name", name)
        except ConfigError as error:
            raise InvalidRequestError(str(error), field="lora_name") from error
        count = sum(served.parent == base.name for served in self._endpoints.values())
        if present is None and count >= base.max_adapters:
            raise InvalidRequestError(
                f"lora_name: {base.name!r} has {count} adapters, as many as it may; unload one, or raise "
                f"models.{base.endpoint.target}.adapters_at_run_time",
                field="lora_name",
            )


def read_adapter(name: str, path: str) -> Adapter:
    """Return an adapter, and those of its drafter and heads in its folder.

    Raises InvalidRequestError if one can't be read.
    """
    from engine.loading.lora import read_lora  # loads torch

    try:
        if is_local(path):
            check_local(path)
            if not Path(path).is_absolute():
                raise ConfigError(f"{path!r} is relative; give an absolute path, or an id on the Hub")
        parts = {part: nested_adapter(path, part) for part in ("drafter", "heads")}
        nested = {part: Adapter(name, own, read_lora(own).version) for part, own in parts.items() if own is not None}
        return Adapter(name, path, read_lora(path).version, **nested)
    except ConfigError as error:
        raise InvalidRequestError(f"lora_path: {error}", field="lora_path") from error
