"""Runs `vllm bench serve` repeatedly in one process of vLLM's own environment. Must not know about Consort.

Input: JSON lines, each a list of command-line arguments. Output: JSON lines, an empty object when ready, then results.
"""

import json
import os
import sys
from typing import Any, TextIO


def main(questions: TextIO, answers: TextIO) -> None:
    """Answer until the input ends."""
    from vllm.benchmarks import serve  # type: ignore[import-not-found]  # in the other environment only
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found]

    def write(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    write({})
    for line in questions:
        write(serve.main(parser.parse_args(json.loads(line))))


if __name__ == "__main__":
    private = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM's output goes to the log
    main(sys.stdin, private)
