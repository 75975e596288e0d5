"""For `make fuzz-http`: generated requests ask for an endpoint that exists, mostly with few other fields."""

from typing import Any

import schemathesis  # type: ignore[import-not-found]

_KEPT = {"model", "prompt", "messages", "input", "tokens"}
_MOST_OTHERS = 4


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if isinstance(body, dict) and "model" in body:
        others = [name for name in body if name not in _KEPT][_MOST_OTHERS:]
        return {name: "consort" if name == "model" else value for name, value in body.items() if name not in others}
    return body
