"""Worker for vLLM's own Python environment: JSON lines in, JSON lines out. Must not import other modules from here.

First line in: {"model", "dtype", "streams"}; first line out: {"version"}. Then, for each
{"prompts": [[id, …], …], "max_tokens", "temperature"}, one {"answers": [[id, …], …]}.
"""

import json
import os
import sys
from typing import Any, TextIO


def main(questions: TextIO, answers: TextIO) -> None:
    """Load the model, then answer until the input ends."""
    import vllm  # type: ignore[import-not-found]  # in the other environment only

    def write(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    setup = json.loads(questions.readline())
    model = vllm.LLM(
        model=setup["model"],
        dtype=setup["dtype"],
        max_model_len=1024,
        max_num_seqs=setup["streams"],
        enable_prefix_caching=False,  # prompts are repeated at other temperatures
        disable_log_stats=True,
        seed=0,
    )
    write({"version": vllm.__version__})
    for line in questions:
        question = json.loads(line)
        params = vllm.SamplingParams(
            max_tokens=question["max_tokens"],
            temperature=question["temperature"],
            ignore_eos=True,
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": tokens} for tokens in question["prompts"]]
        outputs = model.generate(prompts, params, use_tqdm=False)
        write({"answers": [list(output.outputs[0].token_ids) for output in outputs]})


if __name__ == "__main__":
    private = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what vLLM prints goes to the log
    main(sys.stdin, private)
