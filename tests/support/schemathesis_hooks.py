"""For `make fuzz-http`: generated requests ask for what exists, with few other fields, so that many are answered."""

import json
from typing import Any

import schemathesis  # type: ignore[import-not-found]

_KEPT = {"model", "prompt", "messages", "input", "tokens", "replicas"}
_MOST_OTHERS = 4


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """The endpoint's name, or a model's; of the fields that may be left out none to four, as the body has it."""
    if not isinstance(body, dict) or "model" not in body:
        return body
    count = len(json.dumps(body, default=str)) % (_MOST_OTHERS + 1)
    others = [name for name in body if name not in _KEPT][count:]
    model = "target" if "replicas" in body else "consort"
    return {name: model if name == "model" else value for name, value in body.items() if name not in others}
