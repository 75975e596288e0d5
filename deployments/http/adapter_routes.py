"""The routes that load and unload adapters, by vLLM's names. Knows Serve only as a function to call."""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import PlainTextResponse
from pydantic import Field

from deployments.apis.errors import ErrorBody
from deployments.configuration.values import Name
from deployments.endpoints.adapters import RunTimeAdapters
from deployments.fields.strict import StrictModel
from deployments.http.middleware.gate import admins_only

_ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorBody} for status in (400, 401, 403, 404, 503)}
Share = Callable[[], Awaitable[None]]


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


async def share_with_nobody() -> None:
    """Do nothing: there is no other coordinator."""


def add_adapter_routes(api: FastAPI, adapters: RunTimeAdapters, share: Share) -> None:
    """Add POST /v1/load_lora_adapter and /v1/unload_lora_adapter. share: tells other coordinators of a change."""

    def permitted(request: Request) -> None:
        admins_only(request)
        if not adapters.are_allowed:
            reason = "no adapters may be loaded or unloaded here; set models.NAME.adapters_at_run_time"
            raise HTTPException(HTTPStatus.FORBIDDEN, reason)

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
        await share()
        return f"Success: LoRA adapter '{body.lora_name}' added successfully."

    @api.post("/v1/unload_lora_adapter", **options)
    async def unload(body: UnloadAdapterRequest) -> str:
        """Unload LoRA weights. Requests in progress end with them; new ones get 404."""
        await adapters.unload(body.lora_name)
        await share()
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."
