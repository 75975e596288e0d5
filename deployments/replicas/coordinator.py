"""The replica that serves HTTP: a coordinator and its service in one process."""

import asyncio
import gc
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from fastapi import FastAPI
from prometheus_client.core import Metric
from ray import serve
from ray._private.state import actors  # the public API asks Ray's dashboard, which need not run
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.loops.thread import return_idle_memory
from deployments.admission.key_ledger import KeyLedger, SharedLimits
from deployments.configuration.config import ServerConfig
from deployments.replicas.discovery import AdapterExchange, AddressQuery, Discovery, answers_of, coordinators
from deployments.replicas.environment import APP_NAME, COORDINATOR, deployment_name, share_interpreter, uncollected
from deployments.replicas.model_replica import ModelReplica
from deployments.replicas.stages import failure_of, published_stages, stage_of
from deployments.scaling.controller import set_replicas
from deployments.scaling.placement import ClusterState, Placements, Restart
from engine.loading.host import stages
from engine.loading.lean_imports import without_torch

if TYPE_CHECKING:
    from deployments.endpoints.adapters import AdapterChange
    from deployments.endpoints.service import Service

    Adapters = Mapping[str, AdapterChange]

_STREAM_INTERVAL_S = 0.2  # the longest time for which a stream holds events back under load
_OPEN_PORTS = (
    "RAY_AUTH_MODE is not `token`: whoever reaches the ports of this cluster, Serve's gRPC too, may run any code. "
    "Start Ray with RAY_AUTH_MODE=token, or keep others away (docs/security.md)"
)
_DETAIL = "Worker exit detail: "  # in Ray's message on a death
_logger = logging.getLogger("ray.serve")


class DisconnectMiddleware:
    """ASGI middleware that takes Ray's errors on the way from the proxy for what they mean: the client has left.

    Ray cancels the call that waits for the client's next message with the one that answers it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_or_disconnect() -> Message:
            try:
                return await receive()
            except RayError:
                return {"type": "http.disconnect"}

        await self._app(scope, receive_or_disconnect, send)


class CoordinatorIngress:
    """The coordinator and the HTTP interface in one process: events are sent where commits arrive."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: ServerConfig,
        handles: dict[str, DeploymentHandle[ModelReplica]],
        on_demand: set[str],
        ledger: DeploymentHandle[KeyLedger] | None = None,
    ) -> None:
        """
        handles: the handle of every model's deployment, by model.
        on_demand: models that may have no replica until requests wait for one.
        ledger: of keys' limits that hold for several coordinators together; None: each counts for itself.
        """
        with uncollected():
            from ray.serve.context import _get_global_client

            from deployments.http.middleware import Drain

        share_interpreter()
        _get_global_client()  # kept by Serve: later, while Ray's head is away, finding it would block the event loop
        if os.environ.get("RAY_AUTH_MODE") != "token":
            _logger.warning(_OPEN_PORTS)
        self._http, self._roles, self._drain = config.http, config.roles(), Drain()
        self._deployments = {model: deployment_name(model, role) for model, role in self._roles.items()}
        self._asks: dict[str, AddressQuery] = {}  # by model
        self._service = self._start_service(config, on_demand, ledger)
        name, stands_by = self._service.metrics.coordinator, lambda: not self._drain.has_served
        for model, handle in handles.items():
            held_back = partial(self._service.admission.count_unserved, model)
            felt = partial(self._service.metrics.felt, model)
            self._asks[model] = AddressQuery(
                handle, name, held_back, wakes=model in on_demand, stands_by=stands_by, felt=felt
            )
        discovery = Discovery(self._asks, self._service.set_replicas)
        await discovery.poll_all()  # Serve sends requests as soon as this returns
        loads_adapters = [handle for model, handle in handles.items() if config.models[model].adapters_at_run_time]
        self._adapters = AdapterExchange(self._service.adapters, loads_adapters)
        await self._adapters.sync()
        gc.collect()
        gc.freeze()  # permanent objects: collecting them again would block the event loop
        return_idle_memory()
        self._tasks += [asyncio.create_task(discovery.run()), asyncio.create_task(self._adapters.run())]

    @published_stages()
    def _start_service(
        self, config: ServerConfig, on_demand: set[str], ledger: DeploymentHandle[KeyLedger] | None
    ) -> "Service":
        stages.info("importing")
        lean = nullcontext if config.loads_code else without_torch
        with uncollected(), lean():
            from actors.coordinator.loop import Coordinator
            from actors.loops.thread import LoopThread
            from actors.wire.zmq_link import ConnectingZmqLink
            from deployments.admission.bounds import limits_of
            from deployments.endpoints.loading import load_endpoints
            from deployments.endpoints.service import Service
            from deployments.monitoring.metrics import Metrics
            from deployments.monitoring.tracing_setup import make_tracer
            from deployments.storage.store import make_store

            stages.info("reading tokenizers")
            endpoints = load_endpoints(config)
        own = serve.get_replica_context()
        coordinators = own.world_size if own.deployment == COORDINATOR else 1  # others only stand by
        store = make_store(config.responses, coordinators)
        link = ConnectingZmqLink("coordinator")
        limits = limits_of(config)
        metrics = Metrics(link.name, context_length=max(served.context_length for served in endpoints.values()))
        replaceable = {
            name: partial(model.spec, name) for name, model in config.models.items() if model.weights_at_run_time
        }
        coordinator = Coordinator(
            link, max_requests=limits.max_requests, on_step=metrics.record_step, replaceable=set(replaceable)
        )
        shared = None if ledger is None else SharedLimits(link.name, ledger.settle.remote)
        service = Service(
            endpoints,
            coordinator,
            limits=limits,
            metrics=metrics,
            cached_tokens=config.http.cached_tokens,
            stream_interval_s=_STREAM_INTERVAL_S,
            templates=config.templates,
            tracer=make_tracer(config.http.tracing),
            on_demand=on_demand,
            shared_limits=shared,
            replaceable=replaceable,
            count_coordinators=lambda: max((ask.coordinators for ask in self._asks.values()), default=1),
            store=store,
        )
        self._thread = LoopThread("coordinator", coordinator.turn, link.wake)
        self._thread.start()
        self._tasks = [asyncio.create_task(tended.run()) for tended in (shared, store) if tended is not None]
        return service

    def __serve_build_asgi_app__(self) -> FastAPI:
        from deployments.http.admin_routes import add_scaling_route
        from deployments.http.announcer import Announcer
        from deployments.http.doorkeeper import AdmissionBoard
        from deployments.http.middleware import log_requests
        from deployments.http.routes import Surroundings, make_api

        if self._http.access_log:
            log_requests()
        keys = self._http.key_ring()
        is_read = bool(os.environ.get("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"))  # by proxies with our middlewares
        board = AdmissionBoard.create(keys.digests) if is_read else None
        api = make_api(
            self._service,
            keys=keys,
            max_body_bytes=self._http.max_body_bytes,
            add_request_id=False,  # Serve does
            cors_origins=self._http.cors_origins,
            allowed_hosts=self._http.host_names,
            surroundings=Surroundings(
                drain=self._drain,
                announcer=None if board is None else Announcer(self._service, keys, self._drain, board),
                ask_others=self._ask_others,
                ask_placements=Placements(APP_NAME, self._deployments, read_cluster),
                share_adapters=self._adapters.share,
            ),
        )
        add_scaling_route(
            api, self._roles, lambda model, count: set_replicas(APP_NAME, self._deployments[model], count)
        )
        api.add_middleware(DisconnectMiddleware)
        return api

    async def metrics(self) -> tuple[str, list[Metric]]:
        """Return this coordinator's name and its metrics, for the one that was asked for /metrics."""
        from deployments.http.live_metrics import own_metrics

        return self._service.metrics.coordinator, own_metrics(self._service)

    async def _ask_others(self) -> list[list[Metric]]:
        answers, _ = await answers_of(coordinators().broadcast("metrics"))
        return [families for name, families in answers if name != self._service.metrics.coordinator]

    async def merge_adapters(self, changes: "Adapters") -> "Adapters":
        """Take over which adapters were loaded at another coordinator. Returns all changes that are known here."""
        self._service.adapters.merge(changes)
        return self._service.adapters.changes

    async def drain(self) -> int:
        """Take no more requests, and let those in progress end. Returns how many have not ended in time."""
        return await self._drain.run(self._http.drain_s)

    def check_health(self) -> None:
        """Serve's health check; raises if the coordinator's loop or a task that should run for ever has ended."""
        self._thread.check()
        for task in self._tasks:
            if task.done():
                task.result()

    def __del__(self) -> None:
        """Send the spans that are left, and leave the store. Serve calls this when the replica ends."""
        service = self.__dict__.get("_service")
        if service is not None and service.tracer is not None:
            service.tracer.shut_down()
        if service is not None and service.conversations.store is not None:
            service.conversations.store.close()


def read_cluster(deployments: Sequence[str]) -> ClusterState:
    """Read the state of the cluster, for deployments by name. The call blocks while Ray's head is away."""
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    nodes = [node.resource_usage for node in (*status.active_nodes, *status.idle_nodes) if node.resource_usage]
    demands = (*status.resource_demands.ray_task_actor_demand, *status.resource_demands.placement_group_demand)
    restarts = {name: Restart(*failure) for name in deployments if (failure := failure_of(name)) is not None}
    for actor in actors(actor_state_name="DEAD").values():
        deployment = actor["Name"].partition("#")[2].partition("#")[0]  # SERVE_REPLICA::application#deployment#id
        death = Restart(actor["EndTime"] / 1000, death_reason(actor["DeathCause"]))
        earlier = restarts.get(deployment)
        if deployment in deployments and death.reason and (earlier is None or earlier.at_s < death.at_s):
            restarts[deployment] = death
    return ClusterState(
        [{usage.resource_name: usage.total - usage.used for usage in node.usage} for node in nodes],
        [(dict(shape.bundle), shape.count) for demand in demands for shape in demand.bundles_by_count],
        {name: stage_of(name) for name in deployments},
        restarts,
    )


def death_reason(cause: Any) -> str:
    """Return why a process died by itself; "" if Serve ended it, or it never came up.

    cause: Ray's `ActorDeathCause`.
    """
    if cause.HasField("oom_context"):
        return "its node ran out of memory"
    context = cause.actor_died_error_context
    if context.reason == context.NODE_DIED:
        return "its node died"
    if context.reason != context.WORKER_DIED:
        return ""
    message = " ".join(context.error_message.partition(_DETAIL)[2].split())
    return f"its process died: {message.partition('. ')[0] or 'Ray does not say why'}"
