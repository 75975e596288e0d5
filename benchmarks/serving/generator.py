"""Run by the Python of vLLM's own environment: `vllm bench serve`, again and again, without starting it anew each time.

JSON lines in, each a list of its command-line arguments; JSON lines out, each its result. The first line out is an
empty object: it can begin. Knows nothing of Consort.
"""

import json
import os
import sys
from typing import Any, TextIO


def main(questions: TextIO, answers: TextIO) -> None:
    """Answer until the input ends."""
    from vllm.benchmarks import serve  # type: ignore[import-not-found]  # in the other environment only
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found]

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    say({})
    for line in questions:
        say(serve.main(parser.parse_args(json.loads(line))))


if __name__ == "__main__":
    private = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what it prints goes to the log
    main(sys.stdin, private)
