"""Replaces the weights of models while the server runs. Other coordinators learn of it from the replicas' reports."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from actors.coordinator.loop import Coordinator
from actors.wire.messages import Weights
from decoding.errors import ConfigError, InvalidRequestError, UnavailableError
from deployments.configuration.paths import check_local
from deployments.fields.strict import nearest

if TYPE_CHECKING:
    from engine.loading.checkpoint import ModelSpec

MakeSpec = Callable[[], "ModelSpec"]

_POLL_S = 0.02


class RunTimeWeights:
    """The weights of the models that may get others. For use in one event loop."""

    def __init__(
        self,
        coordinator: Coordinator,
        models: Mapping[str, MakeSpec],
        alone: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """
        models: by name; says how it was loaded.
        alone: while which no model runs in this process.
        """
        self._coordinator, self.models, self._alone = coordinator, models, alone
        self._changing = asyncio.Lock()

    async def load(self, model: str, path: str, *, recompute: bool = False) -> str:
        """Let requests to a model run with a checkpoint's weights. Return their version once all its replicas do.

        A model that sleeps loads them when it wakes.
        An error leaves the present weights in place. Options: see `Coordinator.set_weights`.

        Raises InvalidRequestError if the checkpoint does not fit the model, or a replica can't load it;
        UnavailableError if another coordinator changed the model meanwhile.
        """
        self._check_model(model)
        async with self._changing:
            digest = await asyncio.get_running_loop().run_in_executor(None, self._digest, model, path)
            before = self._coordinator.weights(model) or Weights()
            weights = Weights.numbered(before.order[0] + 1, digest, path)
            rest = self._coordinator.rest(model)
            self._coordinator.set_weights(model, weights, recompute=recompute)
            if rest % 2:
                return weights.version
            error = await self._until(model, weights, rest)
            if error is not None:
                again = Weights.numbered(before.order[0] + 2, before.order[1], before.path)
                self._coordinator.set_weights(model, again)
                await self._until(model, again, rest)
                raise InvalidRequestError(f"path: {error}", field="path")
            return weights.version

    async def set_asleep(self, model: str, asleep: bool) -> None:
        """Let all replicas of a model drop their weights and pages, once their requests have ended; or load them.

        Raises InvalidRequestError if they can't; UnavailableError if another coordinator changed the model meanwhile.
        """
        self._check_model(model)
        async with self._changing:
            rest = self._coordinator.rest(model)
            rest += (rest % 2 == 1) != asleep
            self._coordinator.set_rest(model, rest)
            error = await self._until(model, self._coordinator.weights(model) or Weights(), rest)
            if error is not None:
                self._coordinator.set_rest(model, rest + 1)
                raise InvalidRequestError(f"model: {error}", field="model")

    def _digest(self, model: str, path: str) -> str:
        with self._alone():
            return _checked(self.models[model], path)

    def _check_model(self, model: str) -> None:
        if model not in self.models:
            reason = f"model: {model!r} has no weights_at_run_time; {nearest(model, self.models)}"
            raise InvalidRequestError(reason, field="model")

    async def _until(self, model: str, weights: Weights, rest: int) -> str | None:
        """Wait until all replicas have the weights, or sleep. Return why one can't, if so."""
        version, asleep = weights.version, rest % 2 == 1
        while True:
            present = self._coordinator.weights(model) or weights
            if present.order > weights.order or self._coordinator.rest(model) > rest:
                raise UnavailableError(
                    f"the model {model!r} was changed by another request at the same time; ask again"
                )
            reports = [report for address, report in self._coordinator.reports() if address.model == model]
            states = [report.weights for report in reports if report is not None and report.weights.rest == rest]
            errors = [state.error for state in states if state.error and state.unfit == ("" if asleep else version)]
            if errors:
                return errors[0]
            there = [
                state.asleep if asleep else state.present.version == version and not state.asleep for state in states
            ]
            if len(there) == len(reports) and all(there):
                return None
            await asyncio.sleep(_POLL_S)


def _checked(make_spec: MakeSpec, path: str) -> str:
    """Return the digest of a checkpoint; raises InvalidRequestError if it does not fit."""
    from engine.loading.new_weights import check_weights, digest_of  # imports torch, which coordinators seldom need

    try:
        check_local(path)
        if not Path(path).is_absolute():
            raise ConfigError(f"{path!r} is relative; give an absolute path")
        digest = digest_of(path)
        check_weights(make_spec(), path)
    except (ConfigError, OSError) as error:
        raise InvalidRequestError(f"path: {error}", field="path") from error
    return digest
