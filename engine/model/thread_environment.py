"""Environment variables for processes that share CPUs and compute with torch. Set them before the processes start."""


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
