"""The application behind a fake coordinator, as the tests of deployments/ have it."""

from tests.deployments.conftest import coordinator, endpoints, fake

__all__ = ["coordinator", "endpoints", "fake"]
