"""Changes of weights that two coordinators are asked for at once."""

import asyncio
from collections.abc import Awaitable

import pytest
from msgspec.structs import replace

from actors.wire.messages import Weights, WeightsState
from decoding.errors import UnavailableError
from deployments.endpoints.weights import RunTimeWeights
from tests.support.coordinator_stage import Stage, reports


@pytest.mark.parametrize("other", [WeightsState(rest=2), WeightsState(Weights("7-aa", "/seven"))])
def test_what_another_coordinator_overtakes_ends_with_an_error(other: WeightsState) -> None:
    stage = Stage(replaceable={"big"})
    stage.set_replicas("t1")
    weights = RunTimeWeights(stage.coordinator, {"big": lambda: pytest.fail("nothing is loaded")})

    async def change() -> None:
        asked: Awaitable[None] = asyncio.ensure_future(weights.set_asleep("big", True))
        await asyncio.sleep(0)
        stage.turn()
        await asyncio.sleep(0)
        stage.say("t1", replace(reports(drafter=None), weights=other))
        await asked

    with pytest.raises(UnavailableError, match="'big' was changed by another request"):
        asyncio.run(change())
