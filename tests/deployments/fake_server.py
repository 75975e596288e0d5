"""A server over the fake coordinator with every route, for `make fuzz-http`.

Arguments: the port; the secret of an API key, if requests need one.
"""

import gc
import sys
from typing import Any

import uvicorn

from deployments.admission.bounds import Limits
from deployments.configuration.api_keys import ApiKey, KeyRing, digest_of
from deployments.configuration.config import TINY_CONFIG, load_config
from deployments.endpoints.loading import load_endpoints
from deployments.endpoints.service import Service
from deployments.http.admin_routes import add_scaling_route
from deployments.http.middleware import log_requests
from deployments.http.routes import make_api
from deployments.storage.store import make_store
from tests.deployments.fake_coordinator import FakeCoordinator
from tests.deployments.scripted import TEMPLATE


def main(port: int, *secrets: str) -> None:
    """Serve until interrupted. Requests are logged to standard error, one JSON line each."""
    log_requests()
    config, coordinator = load_config(TINY_CONFIG), FakeCoordinator()
    fake: Any = coordinator
    endpoints = load_endpoints(config)
    endpoints["consort"].encoder.tokenizer.chat_template = TEMPLATE
    endpoints["consort"].token_decoder.tool_format = "hermes"
    keys = KeyRing(ApiKey("key", digest_of(secret), admin=True) for secret in secrets)
    store = make_store(config.responses, 1)
    api = make_api(Service(endpoints, fake, limits=Limits(max_requests=8), store=store), keys=keys)

    async def set_replicas(model: str, count: int) -> None:
        """Do nothing."""

    add_scaling_route(api, config.roles(), set_replicas)
    gc.collect()
    gc.freeze()  # as the application does
    uvicorn.run(api, port=port, log_level="warning")


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
