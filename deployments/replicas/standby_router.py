"""How Serve's proxy chooses among coordinators of which one serves and the others stand by. Pickled by value."""

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

STANDBY_ROUTER = f"{__name__}:StandbyRouter"


class StandbyRouter(FIFOMixin, RequestRouter):
    """Sends every request to one replica for as long as it is there. Then the next one serves, which has loaded all.

    Proxies and handles that know the same replicas choose the same one, in whatever order Serve lists them.
    """

    _serving: ReplicaID | None = None

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replica that serves. Called by Serve for every request."""
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        if self._serving not in by_id:
            self._serving = min(by_id, key=str)
        return [[by_id[self._serving]]]
