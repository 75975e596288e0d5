"""The route that sets a model's replicas by hand. Knows Serve only as a function to call."""

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, FastAPI
from pydantic import BaseModel, Field

from decoding.errors import InvalidRequestError
from deployments.apis.errors import ErrorBody
from deployments.fields.strict import StrictModel, nearest
from deployments.http.middleware.gate import admins_only

if TYPE_CHECKING:
    from actors.replica.roles import Role

_ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorBody} for status in (400, 401, 403, 503)}
SetReplicas = Callable[[str, int], Awaitable[None]]  # model, replicas


class ScaleRequest(StrictModel):
    """Body of POST /scale."""

    model: str = Field(description="A model of the configuration, not an endpoint.")
    replicas: Annotated[int, Field(ge=0, le=10_000)] = Field(description="How many; drafters can do with 0.")


class Scaled(BaseModel):
    """Response of POST /scale: what will be done."""

    model: str
    replicas: int


def add_scaling_route(api: FastAPI, roles: Mapping[str, "Role"], set_replicas: SetReplicas) -> None:
    """Add POST /scale. roles: role by model."""

    @api.post("/scale", responses=_ERRORS, dependencies=[Depends(admins_only)])
    async def scale(body: ScaleRequest) -> Scaled:
        """Set how many replicas a model has. No request is lost when replicas come or go."""
        if body.model not in roles:
            raise InvalidRequestError(
                f"model: there is no model {body.model!r}; {nearest(body.model, roles)}", field="model"
            )
        if body.replicas == 0 and roles[body.model] != "drafter":
            raise InvalidRequestError("replicas: is 0, but a target needs 1 or more", field="replicas")
        await set_replicas(body.model, body.replicas)
        return Scaled(model=body.model, replicas=body.replicas)
