"""The ledger of API keys' limits as an actor of its own, and how coordinators reach it."""

from typing import TYPE_CHECKING

from ray.serve.handle import DeploymentHandle

if TYPE_CHECKING:
    from deployments.admission.key_ledger import Account, Settlement
    from deployments.configuration.api_keys import ApiKey


class Ledger:
    """What all coordinators together use of the limits of API keys, in a process of its own."""

    def __init__(self, keys: "list[ApiKey]") -> None:
        from deployments.admission.key_ledger import KeyLedger

        self._ledger = KeyLedger(keys)

    async def settle(self, account: "Account") -> "Settlement":
        """Answer a coordinator; see `KeyLedger.settle`."""
        return self._ledger.settle(account)


async def settle(ledger: DeploymentHandle[Ledger], account: "Account") -> "Settlement":
    """Settle a coordinator's account with the ledger."""
    settlement: Settlement = await ledger.settle.remote(account)
    return settlement
