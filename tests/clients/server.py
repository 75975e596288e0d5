"""A server whose model answers by rule, for clients of all kinds. Argument: the port.

It calls the first tool that it is offered, once; follows a JSON schema; thinks if asked to; and else says 42.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import uvicorn

from actors.coordinator.request import Delta, Request, Statistics
from actors.wire.messages import Token
from deployments.configuration.config import TINY_CONFIG, load_config
from deployments.configuration.responses import ResponsesConfig
from deployments.endpoints.loading import load_endpoints
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from deployments.storage.store import make_store
from tests.deployments.fake_coordinator import FakeCoordinator

TEMPLATE = """{# <tool_call> <think> #}{{ (tools or []) | tojson }}{% for message in messages -%}
({{ message.role }}) {{ message.content }}{{ (message.tool_calls or []) | tojson }}
{%- endfor %}{% if enable_thinking %}(thinks){% endif %}"""
ANSWER = "The answer is 42."
_CONTEXT = 16_384  # tokens; some clients describe their tools at length
_STEP = 4  # characters


class Assistant(FakeCoordinator):
    """Answers by rule, some characters per step."""

    def submit(self, request: Request, sink: Callable[[Delta], None]) -> None:
        text = _answer(request)
        steps = [text[start : start + _STEP] for start in range(0, len(text), _STEP)]
        for number, piece in enumerate(steps, 1):
            finish = "stop" if number == len(steps) else "length" if number == request.params.max_tokens else None
            sink(Delta(piece, [Token(9)], Statistics(steps=number, committed=number), finish=finish))  # type: ignore[arg-type]
            if finish:
                return


def _answer(request: Request) -> str:
    prompt = request.endpoint.decode(list(request.prompt))
    structure = request.params.structure
    if structure is not None:
        schema = json.loads(structure.definition)
        return json.dumps(_example(schema, schema))
    tools, _ = json.JSONDecoder().raw_decode(prompt)
    if tools and "(tool) " not in prompt:
        function = tools[0]["function"]
        schema = function.get("parameters", {})
        call = {"name": function["name"], "arguments": _example(schema, schema)}
        return f"I look.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
    thought = "<think>\nLet me see.\n</think>\n\n" if prompt.endswith("(thinks)") else ""
    return thought + ANSWER


def _example(schema: dict[str, Any], root: dict[str, Any]) -> Any:
    """A value that follows the schema."""
    if "$ref" in schema:
        return _example(_resolve(root, schema["$ref"]), root)
    if options := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
        return _example(options[0], root)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    match schema.get("type", "object"):
        case "object":
            return {name: _example(inner, root) for name, inner in schema.get("properties", {}).items()}
        case "array":
            return [_example(schema.get("items", {"type": "string"}), root)] * max(1, schema.get("minItems", 1))
        case "integer" | "number":
            return max(42, schema.get("minimum", 42))
        case "boolean":
            return True
        case "null":
            return None
    return "Bern"


def _resolve(root: dict[str, Any], reference: str) -> dict[str, Any]:
    for key in reference.removeprefix("#/").split("/"):
        root = root[key]
    return root


def main(port: int) -> None:
    """Serve until interrupted."""
    config = load_config(TINY_CONFIG)
    for model in config.models.values():
        model.max_length = _CONTEXT
    endpoints = load_endpoints(config)
    served = endpoints["consort"]
    served.encoder.tokenizer.chat_template = TEMPLATE
    served.token_decoder.tool_format, served.token_decoder.has_think_tags = "hermes", True
    coordinator: Any = Assistant()
    api = make_api(Service(endpoints, coordinator, store=make_store(ResponsesConfig(), 1)))
    uvicorn.run(api, port=port, log_level="warning")


if __name__ == "__main__":
    main(int(sys.argv[1]))
