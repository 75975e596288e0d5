"""What `consort serve` tells a local Ray: its environment, and which of its processes to leave out."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

# Intervals of a local Ray, a tenth of a second by default or thereabouts: an idle server should cost next to nothing.
_INTERVALS = {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",  # a dead proxy is replaced after three failed checks
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_raylet_check_gc_period_milliseconds": "1000",
    "RAY_kill_idle_workers_interval_ms": "1000",
    "RAY_object_manager_timer_freq_ms": "1000",
    "RAY_memory_monitor_refresh_ms": "1000",
    "RAY_task_events_report_interval_ms": "0",  # no record of tasks, which only Ray's dashboard shows
    "RAY_event_stats": "0",
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",  # look for new log files at the interval below, not all the time
    "LOG_NAME_UPDATE_INTERVAL_S": "10",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
}
# Beside programs that use all cores, Ray lets replicas crawl and ends a proxy that is not up in 5 s, unless told so.
_BUSY_MACHINE = {"RAY_worker_niceness": "0", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120"}


def local_environment(*, has_metrics: bool) -> dict[str, str]:
    """Return the variables of a local Ray, which must be set before it is imported. has_metrics: to be collected."""
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        # With clusters "disabled", Ray's default on macOS, its processes listen on loopback only.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # A local cluster gets its own token. Otherwise Ray writes one to ~/.ray, where later `ray start` commands
        # find it.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_AUTO_CONNECT": "0",  # a remote call that comes after the shutdown would start another cluster
        "RAY_enable_metrics_collection": "1" if has_metrics else "0",
        **_INTERVALS,
        **_BUSY_MACHINE,
    }


@contextmanager
def fewer_processes(*, shows_logs: bool) -> Iterator[None]:
    """Let Ray start in the block without its autoscaler, the dashboard and, if nobody reads it, the log monitor.

    Only clusters of several machines need them. Ray waits for the dashboard, `include_dashboard=False` or not, and has
    no options for this.
    """
    from ray._private.node import Node

    names = ["start_monitor", "start_api_server", *([] if shows_logs else ["start_log_monitor"])]
    starts = {name: getattr(Node, name) for name in names}
    for name in names:
        setattr(Node, name, lambda node, **options: None)
    try:
        yield
    finally:
        for name, start in starts.items():
            setattr(Node, name, start)
