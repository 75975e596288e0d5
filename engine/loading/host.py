"""Shares of the host's memory, how its threads wait, and the log of what a start does. Without torch, for commands."""

import logging
from pathlib import Path

USABLE = 0.9  # share of free memory; the rest is for activations, CUDA graphs and other processes
CPU_SHARE = 0.25  # of free memory for a KV cache on a CPU, which other programs use, too
AUTO_SLOTS = {"cuda": 256, "cpu": 64}
PREFILL_CHUNK = 256  # the most prompt tokens of one step, which they share with running requests
CGROUP = Path("/sys/fs/cgroup")
stages = logging.getLogger("consort.stages")  # a record as each stage of a start begins


def free_host_bytes() -> int:
    """Return how much a process can still allocate. The container's limit counts, too."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min(available, _container_room())


def _container_room() -> int:
    """Return the bytes left in the control group (version 2). File pages that can be dropped count as free."""
    try:
        limit = (CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((CGROUP / "memory.current").read_text(encoding="ascii"))
        statistics = dict(line.split() for line in (CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
    except OSError:  # no container, or another version
        return 2**63
    return 2**63 if limit == "max" else int(limit) - used + int(statistics.get("inactive_file", 0))


def compute_environment(threads: int | None) -> dict[str, str]:
    """Return the variables. threads: of OpenMP and MKL; None: their own choice.

    Threads that wait for work spin for about 0.5 ms and then sleep. Endless spinning, the default, starves other
    processes. Without spinning, each operator would wait for its threads to wake up (docs/experiments.md).
    """
    variables = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "100000",
        "THP_MEM_ALLOC_ENABLE": "1",  # weights in huge pages
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "512",  # compiled matrix products, 0.5 MiB or more for each shape
        "LRU_CACHE_CAPACITY": "512",  # torch's own cache of these, in each thread that computes
        "TOKENIZERS_PARALLELISM": "false",
    }
    if threads is not None:
        variables |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return variables
