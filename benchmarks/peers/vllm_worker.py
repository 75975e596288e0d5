"""Worker for vLLM's own Python environment: a line of JSON in, a line of JSON out. Nothing else of ours is there.

First line in: {"model", "dtype", "streams"}; first line out: {"version"}. Then, for each
{"prompts": [[id, …], …], "max_tokens", "temperature"}, one {"answers": [[id, …], …]}.
"""

import json
import os
import sys
from collections.abc import Iterator
from typing import Any


def decode(questions: Iterator[Any]) -> Iterator[dict[str, Any]]:
    """Load the model, then yield answers."""
    import vllm  # type: ignore[import-not-found]  # in the other environment only

    setup = next(questions)
    model = vllm.LLM(
        model=setup["model"],
        dtype=setup["dtype"],
        max_model_len=1024,
        max_num_seqs=setup["streams"],
        enable_prefix_caching=False,  # prompts are repeated at other temperatures
        disable_log_stats=True,
        seed=0,
    )
    yield {"version": vllm.__version__}
    for question in questions:
        params = vllm.SamplingParams(
            max_tokens=question["max_tokens"], temperature=question["temperature"], ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": tokens} for tokens in question["prompts"]]
        outputs = model.generate(prompts, params, use_tqdm=False)
        yield {"answers": [list(output.outputs[0].token_ids) for output in outputs]}


if __name__ == "__main__":
    private = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what vLLM prints goes to the log
    for answer in decode(map(json.loads, sys.stdin)):
        print(json.dumps(answer), file=private, flush=True)
