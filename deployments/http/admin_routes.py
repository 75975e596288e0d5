"""The routes for administrators: adapters, by vLLM's names, new weights, and the number of replicas."""

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, Field

from decoding.errors import InvalidRequestError
from deployments.apis.errors import ErrorBody
from deployments.configuration.api_keys import ApiKey
from deployments.configuration.roles import Role
from deployments.configuration.values import Name
from deployments.endpoints.adapters import RunTimeAdapters
from deployments.endpoints.weights import RunTimeWeights
from deployments.fields.strict import StrictModel, nearest

_ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorBody} for status in (400, 401, 403, 404, 503)}
Share = Callable[[], Awaitable[None]]
SetReplicas = Callable[[str, int], Awaitable[None]]  # model, replicas


class LoadAdapterRequest(StrictModel):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: Name = Field(description="The name that requests give as `model`.")
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="An absolute folder that every node has, or an id on the Hub; in peft's format."
    )
    base_model_name: str | None = Field(
        None, description="The endpoint that it belongs to; null: the only one that takes more."
    )
    load_inplace: bool = Field(False, description="Whether it may replace an adapter of the same name.")


class UnloadAdapterRequest(StrictModel):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: Name = Field(description="As it was loaded or configured.")
    lora_int_id: int | None = Field(None, description="Ignored: vLLM's number.")


class LoadWeightsRequest(StrictModel):
    """Body of POST /v1/weights."""

    model: str = Field(description="A model of the configuration, not an endpoint.")
    path: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="An absolute folder, or a .gguf file, that every node has: a checkpoint of the same architecture."
    )
    policy: Literal["finish", "recompute"] = Field(
        "finish",
        description="Whether answers that have begun end with the weights that they have, or those that are not "
        "streamed are computed anew.",
    )


class LoadedWeights(BaseModel):
    """Response of POST /v1/weights: what all replicas of the model have now."""

    model: str
    version: str  # as answers name it


class SleepRequest(StrictModel):
    """Body of POST /v1/sleep and /v1/wake."""

    model: str = Field(description="A model of the configuration, not an endpoint.")


class Asleep(BaseModel):
    """Response of POST /v1/sleep and /v1/wake."""

    model: str
    asleep: bool


class ScaleRequest(StrictModel):
    """Body of POST /scale."""

    model: str = Field(description="A model of the configuration, not an endpoint.")
    replicas: Annotated[int, Field(ge=0, le=10_000)] = Field(description="How many; drafters can do with 0.")


class Scaled(BaseModel):
    """Response of POST /scale: what will be done."""

    model: str
    replicas: int


def admins_only(request: Request) -> None:
    """FastAPI dependency that raises HTTPException if the API key is not an admin's."""
    key: ApiKey = request.state.key
    if not key.admin:
        reason = f"the API key {key.name!r} may not; use an admin's, or set http.api_keys.{key.name}.admin: true"
        raise HTTPException(HTTPStatus.FORBIDDEN, reason)


def add_adapter_routes(api: FastAPI, adapters: RunTimeAdapters, share: Share | None) -> None:
    """Add POST /v1/load_lora_adapter and /v1/unload_lora_adapter. share: tells other coordinators of a change."""

    def permitted(request: Request) -> None:
        admins_only(request)
        if not adapters.are_allowed:
            reason = "no adapters may be loaded or unloaded here; set models.NAME.adapters_at_run_time"
            raise HTTPException(HTTPStatus.FORBIDDEN, reason)

    async def tell_others() -> None:
        if share is not None:
            await share()

    options: dict[str, Any] = {
        "responses": _ERRORS,
        "dependencies": [Depends(permitted)],
        "response_class": PlainTextResponse,
    }

    @api.post("/v1/load_lora_adapter", **options)
    async def load(body: LoadAdapterRequest, request: Request) -> str:
        """Load LoRA weights that requests may then name as `model`."""
        parent = body.base_model_name or getattr(request.state, "endpoint", None)
        await adapters.load(body.lora_name, body.lora_path, parent=parent, replace=body.load_inplace)
        await tell_others()
        return f"Success: LoRA adapter '{body.lora_name}' added successfully."

    @api.post("/v1/unload_lora_adapter", **options)
    async def unload(body: UnloadAdapterRequest) -> str:
        """Unload LoRA weights. Requests in progress end with them; new ones get 404."""
        await adapters.unload(body.lora_name)
        await tell_others()
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."


def add_weights_routes(api: FastAPI, weights: RunTimeWeights) -> None:
    """Add POST /v1/weights, /v1/sleep and /v1/wake."""

    def permitted(request: Request) -> None:
        key: ApiKey = request.state.key
        if not weights.models:
            reason = "no model may get other weights here; set models.NAME.weights_at_run_time"
            raise HTTPException(HTTPStatus.FORBIDDEN, reason)
        if not key.weights:
            reason = f"the API key {key.name!r} may not; use one with http.api_keys.NAME.weights: true"
            raise HTTPException(HTTPStatus.FORBIDDEN, reason)

    options: dict[str, Any] = {"responses": _ERRORS, "dependencies": [Depends(permitted)]}

    @api.post("/v1/weights", **options)
    async def load(body: LoadWeightsRequest) -> LoadedWeights:
        """Replace the weights of a running model. No request is lost, and no text is written by two versions."""
        version = await weights.load(body.model, body.path, recompute=body.policy == "recompute")
        return LoadedWeights(model=body.model, version=version)

    @api.post("/v1/sleep", **options)
    async def sleep(body: SleepRequest) -> Asleep:
        """Give the memory of a model back once its requests have ended. New ones get 503 until it wakes."""
        await weights.set_asleep(body.model, True)
        return Asleep(model=body.model, asleep=True)

    @api.post("/v1/wake", **options)
    async def wake(body: SleepRequest) -> Asleep:
        """Load a model that sleeps again."""
        await weights.set_asleep(body.model, False)
        return Asleep(model=body.model, asleep=False)


def add_scaling_route(api: FastAPI, roles: Mapping[str, Role], set_replicas: SetReplicas) -> None:
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
