"""Hugging Face `generate`, plain and with an assistant model. The same models also judge texts."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from benchmarks.peers.contestant import Contestant, Text, Workload
from benchmarks.processes import Host
from decoding.sampling.history import History
from decoding.sampling.noise import gumbel
from decoding.sampling.noise_keys import noise_key
from decoding.sampling.params import SamplingParams
from engine.loading.checkpoint import ModelSpec, load_model
from evaluation.speculation import agreement

_PAD = 0


class HuggingFace:
    """A target and its drafter on one device. Their generation configs are replaced: no answer stops at EOS."""

    def __init__(self, target: PreTrainedModel, drafter: PreTrainedModel) -> None:
        self._target, self._drafter = target, drafter
        target.generation_config = GenerationConfig(pad_token_id=_PAD)

    @torch.inference_mode()
    def generate(self, workload: Workload, *, assisted: bool, draft_length: int | None = None) -> list[list[int]]:
        """Return the answers. draft_length: constant γ without a confidence threshold; None: `generate`'s defaults."""
        config = GenerationConfig(
            max_new_tokens=workload.new_tokens,
            do_sample=workload.temperature > 0,
            temperature=workload.temperature or None,
            top_k=0 if workload.temperature else None,
            pad_token_id=_PAD,
            eos_token_id=None,
        )
        self._drafter.generation_config = GenerationConfig(pad_token_id=_PAD, **_constant(draft_length))
        answers = []
        for prompts, _ in workload.batches():
            tokens, mask = _pad_left(prompts)
            output = self._target.generate(  # type: ignore[operator]  # PreTrainedModel hides its mixin
                tokens.to(self._target.device),
                attention_mask=mask.to(self._target.device),
                generation_config=config,
                assistant_model=self._drafter if assisted else None,
            )
            answers += output[:, tokens.shape[1] :].tolist()
        return answers

    @torch.inference_mode()
    def agreement(self, text: Text) -> Tensor:
        """Return for each token of the target's answer whether the drafter samples the same, [N] bool."""
        logits = self._logits(self._drafter, text.prompt, text.answer)
        return agreement(logits, History(text.params, text.prompt, len(text.prompt)), text.answer)

    @torch.inference_mode()
    def gap(self, prompt: list[int], answer: list[int], other: int, params: SamplingParams) -> float:
        """Return the target's score of the answer's last token less its score of `other` at that position.

        Scores are logits; for sampled answers, logits divided by the temperature, plus the seed's noise.
        """
        scores = self._logits(self._target, prompt, answer)[-1].float()
        if not params.greedy:
            key = noise_key(params.seed, len(prompt) + len(answer) - 1)
            noise = gumbel(torch.tensor([key], dtype=torch.int32, device=scores.device), len(scores))[0]
            scores = scores / params.temperature + noise
        return float(scores[answer[-1]] - scores[other])

    @staticmethod
    def _logits(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> Tensor:
        """Return the logits after the text before each of the answer's tokens, [N, V]."""
        tokens = torch.tensor([prompt + answer[:-1]], device=model.device)
        logits: Tensor = model(tokens).logits[0, len(prompt) - 1 :]
        return logits


class HuggingFaceContestant(Contestant):
    """`generate`, plain or assisted. With an assistant it can't batch, so it answers one prompt at a time."""

    def __init__(self, models: Host[HuggingFace], *, assisted: bool = False, draft_length: int | None = None) -> None:
        if assisted:
            how = f"γ = {draft_length}" if draft_length else "defaults"
            super().__init__("HF assisted", how, "hf-assisted", [models], draft_length=draft_length)
        else:
            super().__init__("HF", "plain", "hf", [models])
        self._models, self._assisted = models, assisted

    def takes_part(self, workload: Workload) -> bool:
        return not self._assisted or workload.streams == 1

    def run(self, workload: Workload) -> list[list[int]]:
        return self._models.call(
            HuggingFace.generate, workload, assisted=self._assisted, draft_length=self.draft_length
        )


def load(target: ModelSpec, drafter: ModelSpec) -> HuggingFace:
    """Load both models from their folders."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return HuggingFace(load_model(target), load_model(drafter))


def _constant(draft_length: int | None) -> dict[str, Any]:
    if draft_length is None:
        return {}
    return {
        "num_assistant_tokens": draft_length,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


def _pad_left(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return padded prompts and their attention mask, both [B, P] int64."""
    width = max(map(len, prompts))
    tokens = [[_PAD] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(tokens), torch.tensor(mask)
