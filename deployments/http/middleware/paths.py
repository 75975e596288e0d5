"""Which requests are work, by their paths. A base URL's name may precede the path."""

from starlette.types import Scope

GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
WORKING = (*GENERATING, "/tokenize", "/detokenize", "/compress", "/v1/messages/count_tokens")


def is_generating(scope: Scope) -> bool:
    """Whether a request makes text."""
    return is_work(scope) and scope["path"].endswith(GENERATING)


def is_work(scope: Scope) -> bool:
    """Whether a request makes text or tokens."""
    path: str = scope.get("path", "")
    return scope["type"] == "http" and scope["method"] == "POST" and path.endswith(WORKING)
