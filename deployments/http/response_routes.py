"""The routes of responses that are kept: one of them, its deletion, and what it was made from."""

from http import HTTPStatus
from typing import Annotated, Any, Literal

import msgspec
from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel

from decoding.errors import InvalidRequestError
from deployments.apis.errors import ErrorBody
from deployments.endpoints.conversations import Conversations
from deployments.storage.store import Turn

_ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorBody} for status in (400, 401, 404, 503)}
_OBJECT: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {"schema": {"type": "object"}}}},
    **_ERRORS,
}


class Deleted(BaseModel):
    """Response of DELETE /v1/responses/ID."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


def add_response_routes(api: FastAPI, conversations: Conversations) -> None:
    """Add GET and DELETE /v1/responses/ID, and GET /v1/responses/ID/input_items."""
    store = conversations.store

    async def chain(response_id: str, request: Request) -> list[Turn]:
        turns = [] if store is None else await store.chain(response_id, owner=request.state.key.name)
        if not turns:
            raise _missing(response_id)
        return turns

    @api.get("/v1/responses/{response_id}", responses=_OBJECT)
    async def retrieve(response_id: str, request: Request, stream: bool = False) -> Response:
        """Return a response that is kept."""
        if stream:
            raise InvalidRequestError("stream: should be false; the answer is there already", field="stream")
        turns = await chain(response_id, request)
        return _json(turns[-1].response)

    @api.delete("/v1/responses/{response_id}", responses=_ERRORS)
    async def delete(response_id: str, request: Request) -> Deleted:
        """Delete a response. Those that continue it can't be continued any more."""
        if store is None or not await store.delete(response_id, owner=request.state.key.name):
            raise _missing(response_id)
        return Deleted(id=response_id)

    @api.get("/v1/responses/{response_id}/input_items", responses=_OBJECT)
    async def input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """Return the items that a response was made from, those of the conversation before it included."""
        *earlier, last = await chain(response_id, request)
        items = [item for turn in earlier for item in (*turn.input, *turn.output)] + last.input
        return _json(_page(items if order == "asc" else items[::-1], limit, after))


def _page(items: list[dict[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise InvalidRequestError(f"after: the response was made from no item {after!r}", field="after")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(items),
    }


def _missing(response_id: str) -> HTTPException:
    return HTTPException(HTTPStatus.NOT_FOUND, f"no response {response_id!r} is kept")


def _json(document: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(document), media_type="application/json")
