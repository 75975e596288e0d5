"""Hugging Face `generate`, plain and with an assistant model."""

import torch
from transformers import GenerationConfig, PreTrainedModel

from benchmarks.workload import Workload


class HuggingFace:
    """`generate` on one device, with the drafter as assistant if there is one."""

    def __init__(self, target: PreTrainedModel, drafter: PreTrainedModel | None, draft_length: int | None) -> None:
        """draft_length: γ, constant and without a confidence threshold; None: the defaults of `generate`."""
        self._target, self._drafter = target, drafter
        target.generation_config = GenerationConfig(pad_token_id=0)  # no EOS: every answer has the same length
        if drafter is None:
            self.name = "HF generate"
        else:
            self.name = f"HF assisted, γ = {draft_length}" if draft_length else "HF assisted, defaults"
        self._assistant_config = GenerationConfig(pad_token_id=0)
        if draft_length is not None:
            self._assistant_config = GenerationConfig(
                pad_token_id=0,
                num_assistant_tokens=draft_length,
                num_assistant_tokens_schedule="constant",
                assistant_confidence_threshold=0.0,
            )

    @torch.inference_mode()
    def run(self, workload: Workload) -> list[list[int]]:
        config = GenerationConfig(
            max_new_tokens=workload.new_tokens,
            do_sample=workload.temperature > 0,
            temperature=workload.temperature or None,
            top_k=0 if workload.temperature else None,
            pad_token_id=0,
            eos_token_id=None,
        )
        if self._drafter is not None:
            self._drafter.generation_config = self._assistant_config
        answers = []
        for prompt in workload.prompts:
            output = self._target.generate(  # type: ignore[operator]  # PreTrainedModel hides its mixin
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                generation_config=config,
                assistant_model=self._drafter,
            )
            answers.append(output[0, len(prompt) :].tolist())
        return answers
