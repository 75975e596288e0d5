"""The route that scales a model by hand. Knows Serve only as a function to call."""

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, FastAPI
from pydantic import BaseModel, Field

from decoding.errors import InvalidRequestError
from deployments.http.gate import admins_only
from deployments.validation.errors import ErrorBody
from deployments.validation.strict import StrictModel, nearest

if TYPE_CHECKING:
    from actors.replica.replica import Role

_ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorBody} for status in (400, 401, 403, 503)}
SetReplicas = Callable[[str, int], Awaitable[None]]  # of a model


class ScaleRequest(StrictModel):
    """How many replicas a model is to have."""

    model: str = Field(description="A model of the configuration, not an endpoint.")
    replicas: Annotated[int, Field(ge=0, le=10_000)] = Field(description="How many; drafters can do with 0.")


class Scaled(BaseModel):
    """What was asked for, and is being done."""

    model: str
    replicas: int


def add_scaling_route(api: FastAPI, roles: Mapping[str, "Role"], set_replicas: SetReplicas) -> None:
    """POST /scale. roles: of all models."""

    @api.post("/scale", responses=_ERRORS, dependencies=[Depends(admins_only)])
    async def scale(body: ScaleRequest) -> Scaled:
        """Let a model have so many replicas from now on. Replicas come and go without a lost request."""
        if body.model not in roles:
            raise InvalidRequestError(
                f"model: there is no model {body.model!r}; {nearest(body.model, roles)}", field="model"
            )
        if body.replicas == 0 and roles[body.model] != "drafter":
            raise InvalidRequestError("replicas: is 0, but a target needs 1 or more", field="replicas")
        await set_replicas(body.model, body.replicas)
        return Scaled(model=body.model, replicas=body.replicas)
