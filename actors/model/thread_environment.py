"""The environment of processes that compute with torch on CPUs which they share. To be set before they start."""


def compute_environment(threads: int | None) -> dict[str, str]:
    """Environment variables. threads: of OpenMP and MKL; None: their own choice.

    Threads that wait for work spin for about 0.5 ms and then sleep. Spinning for ever, the default, starves the other
    processes on the machine; sleeping at once makes each operator of a model wait for its threads to wake up: see
    docs/experiments.md.
    """
    variables = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "100000",
        "THP_MEM_ALLOC_ENABLE": "1",  # weights in huge pages
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "512",  # code for shapes of products, 0.5 MiB each and more
        "LRU_CACHE_CAPACITY": "512",  # what torch keeps of the same, in each thread that computes
        "TOKENIZERS_PARALLELISM": "false",
    }
    if threads is not None:
        variables |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return variables
