"""Distillation of a drafter from its target, on the corpus and on the target's own texts.

Kim & Rush 2016, "Sequence-Level Knowledge Distillation" (the target's own texts); Zhou et al. 2023,
"DistillSpec" (forward divergence for drafters). Must not know how a drafter is used.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from training.optimizer import TimedOptimizer, autocast
from training.sampling import continue_prompts, gumbel
from training.stream import Stream

CORPUS_LENGTHS = (256, 512, 1024)
OWN_ROWS = 12
OWN_LENGTH = 256
OWN_BATCH = 96
FIRST_BATCHES = 12
STEPS_PER_BATCH = 24
GREEDY_SHARE = 0.5
ARGMAX_WEIGHT = 0.5
SAVE_EVERY_STEPS = 400


class OwnTexts:
    """A growing store of texts that the target wrote itself after training prompts."""

    def __init__(self, target: LlamaForCausalLM, stream: Stream, *, seed: int) -> None:
        self._target = target
        self._stream = stream
        self._generator = torch.Generator().manual_seed(seed)
        self._rows = torch.empty(0, OWN_LENGTH, dtype=torch.int64)

    def grow(self) -> None:
        """Write one more batch: half of it greedy, half at temperatures from 0.4 to 1."""
        prompt_length = int(torch.randint(16, 128, (), generator=self._generator))
        prompts = self._stream.prompts(OWN_BATCH, prompt_length)
        draws = torch.rand(OWN_BATCH, generator=self._generator)
        temperatures = torch.where(
            draws < GREEDY_SHARE, 0.0, 0.4 + 0.6 * (draws - GREEDY_SHARE) / (1 - GREEDY_SHARE)
        )
        vocabulary = self._target.config.vocab_size
        noise = gumbel(OWN_BATCH, OWN_LENGTH - prompt_length, vocabulary, generator=self._generator)
        with autocast():
            rows = continue_prompts(self._target, prompts, noise, temperatures)
        self._rows = torch.cat((self._rows, rows))

    def rows(self, count: int) -> Tensor:
        """Random rows of the store.

        Returns:
            int64, (count, OWN_LENGTH)
        """
        return self._rows[torch.randint(len(self._rows), (count,), generator=self._generator)]


def distill(
    drafter: LlamaForCausalLM,
    target: LlamaForCausalLM,
    stream: Stream,
    *,
    minutes: float,
    seed: int,
    save: Callable[[], None],
    report: Callable[[str], None],
) -> None:
    """Train the drafter on the target's distribution until the time is over, writing texts included."""
    optimizer = TimedOptimizer(drafter, minutes=minutes, muon_rate=0.006, adam_rate=0.002)
    own = OwnTexts(target.eval(), stream, seed=seed)
    for _ in range(FIRST_BATCHES):
        own.grow()
    report(f"first texts written, elapsed {optimizer.elapsed:.3f}")
    drafter.train()
    step = 0
    while optimizer.elapsed < 1.0:
        length = CORPUS_LENGTHS[step % len(CORPUS_LENGTHS)]
        corpus_loss, _ = divergence(drafter, target, stream.rows(1024 // length, length))
        own_loss, agreement = divergence(drafter, target, own.rows(OWN_ROWS))
        (0.25 * corpus_loss + 0.75 * own_loss).backward()
        optimizer.step()
        step += 1
        if step % 20 == 0:
            losses = f"corpus {corpus_loss.item():.4f} own {own_loss.item():.4f}"
            report(f"step {step} elapsed {optimizer.elapsed:.3f} {losses} agreement {agreement:.3f}")
        if step % STEPS_PER_BATCH == 0:
            own.grow()
        if step % SAVE_EVERY_STEPS == 0:
            save()
    save()


def divergence(drafter: LlamaForCausalLM, target: LlamaForCausalLM, rows: Tensor) -> tuple[Tensor, float]:
    """KL(target || drafter) plus the weighted cross-entropy of the target's argmax; share of equal argmaxes.

    Args:
        rows: int64, (B, T); positions that hold padding do not count
    """
    wanted = rows != target.config.pad_token_id
    with autocast():
        with torch.no_grad():
            teacher = target(rows, use_cache=False).logits[wanted].float()
        student = drafter(rows, use_cache=False).logits[wanted].float()
    choice = teacher.argmax(-1)
    log_student = student.log_softmax(-1)
    kl = functional.kl_div(log_student, teacher.log_softmax(-1), log_target=True, reduction="batchmean")
    argmax_loss = functional.nll_loss(log_student, choice)
    agreement = (student.argmax(-1) == choice).float().mean().item()
    return kl + ARGMAX_WEIGHT * argmax_loss, agreement
