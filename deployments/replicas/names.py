"""Names of the application and its deployments in Serve."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actors.replica.roles import Role

APP_NAME = "consort"
COORDINATOR = "Coordinator"
LOCAL_COORDINATOR = (
    "LocalCoordinator"  # of `consort serve`; a proxy keeps its router for a name, and these need another
)
LEDGER = "KeyLedger"


def deployment_name(model: str, role: "Role") -> str:
    """Return the name of a model's deployment in Serve."""
    return f"{role.capitalize()}-{model}"
