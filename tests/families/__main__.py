"""Try families, and write the results to the page: make test-families ARGS="llama gemma2".

Without names: those that were not tried today.
"""

import sys
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers.utils import logging

from tests.families import page
from tests.families.configurations import FAMILIES


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    results, today = page.read(), date.today().isoformat()
    for name in names or [name for name in FAMILIES if name not in results or results[name].tried < today]:
        with TemporaryDirectory() as folder:
            results[name] = page.try_family(name, Path(folder))
        print(name, results[name].refused or results[name].fails or "all holds", flush=True)
        page.write(results)


if __name__ == "__main__":
    main(sys.argv[1:])
