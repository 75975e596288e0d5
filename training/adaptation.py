"""`python -m training.adaptation`, which a drafter's replica starts: learns from committed texts while that is idle.

After Liu et al. 2023, "Online speculative decoding", arXiv 2310.07177, but from tokens alone: the target's
probabilities stay where they are. B rows, T tokens, N answer tokens in a batch.
"""

import os
import random
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import IO

import torch
from torch import Tensor
from torch.nn.functional import kl_div
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from transformers import PreTrainedModel

from actors.loops.adaptation import (
    Begin,
    Checked,
    CommittedText,
    Failed,
    Pause,
    Texts,
    ToLearner,
    Work,
    read_message,
    to_learner,
    write_message,
)
from decoding.sampling.batch import SamplingBatch, chain_settings, used_processors
from decoding.sampling.noise import gumbel
from decoding.sampling.params import SamplingParams
from decoding.sampling.sampler import process
from engine.loading.checkpoint import ModelSpec
from engine.loading.draft_vocabulary import save_draft_vocabulary
from engine.loading.settings import is_trimmed
from training.distillation.lessons import StudentVocabulary, packed
from training.drafter import counted_logits, load_student

LONGEST = 1024  # tokens of a text, its last ones
_TOKENS = 512  # of a batch: small ones, for recent texts are few
_HELD_OUT = 4  # every fourth text is never learned
_BETAS = (0.9, 0.95)
_START_SHARE = 0.1  # of the divergence from the drafter's files in the loss, so that it does not forget
_CERTAINTY = 2.0  # standard deviations by which a difference counts

Inbox = SimpleQueue[ToLearner | None]


@dataclass(frozen=True, slots=True, eq=False)
class TextBatch:
    """Rows padded on the right. Causal attention keeps the padding from what counts, so there is no mask."""

    tokens: Tensor  # [B, T] int64, rows of the drafter's vocabulary
    counted: Tensor  # [B, T] bool, True where the next token is one of the answer's; N in all
    answers: Tensor  # [N] int64, the target's ids of the answers' tokens
    temperatures: Tensor  # [N] float32, 1 where the text is greedy
    requests: Sequence[tuple[SamplingParams, int, int]]  # parameters, first position, tokens of each answer

    @classmethod
    def gather(cls, texts: Sequence[CommittedText], vocabulary: StudentVocabulary) -> "TextBatch":
        rows, counted, answers, temperatures, requests = [], [], [], [], []
        for text in texts:
            cut = max(0, len(text.tokens) - LONGEST)
            first = max(text.prompt_length - cut, 1)  # of the answer that is left
            tokens = torch.tensor(text.tokens[cut:])
            rows.append(tokens[:-1])
            counted.append(torch.arange(len(tokens) - 1) >= first - 1)
            answers.append(tokens[first:])
            temperature = 1.0 if text.params.greedy else text.params.temperature
            temperatures.append(torch.full((len(tokens) - first,), temperature))
            requests.append((text.params, first + cut, len(tokens) - first))
        return cls(
            tokens=vocabulary.read(pad_sequence(rows, batch_first=True)),
            counted=pad_sequence(counted, batch_first=True),
            answers=torch.cat(answers),
            temperatures=torch.cat(temperatures),
            requests=requests,
        )


class RecentTexts:
    """The most recent texts, in memory only: those to learn, and those that tell what was learned."""

    def __init__(self, most: int) -> None:
        self._held_out: deque[CommittedText] = deque(maxlen=max(most // _HELD_OUT, 1))
        self._training: deque[CommittedText] = deque(maxlen=max(most - most // _HELD_OUT, 1))
        self._seen = 0
        self.new = 0  # since the last `start_round`

    def add(self, texts: Sequence[CommittedText]) -> None:
        for text in texts:
            (self._training if self._seen % _HELD_OUT else self._held_out).append(text)
            self._seen += 1
        self.new += len(texts)

    def start_round(self) -> tuple[list[list[CommittedText]], list[list[CommittedText]]]:
        """Return batches to learn from, in random order, and batches that are held out."""
        self.new = 0
        batches = packed(self._training, _length, _TOKENS)
        random.Random(self._seen).shuffle(batches)
        return batches, packed(self._held_out, _length, _TOKENS)


def _length(text: CommittedText) -> int:
    return min(len(text.tokens), LONGEST)


class AdaptingDrafter:
    """A drafter that learns, float32 on the CPU, with the weights of its files and those that are published."""

    def __init__(
        self,
        model: PreTrainedModel,
        vocabulary: StudentVocabulary,
        *,
        texts: int,
        update_after: int,
        learning_rate: float,
        save: Callable[[PreTrainedModel], str],
    ) -> None:
        """
        texts: how many recent ones are kept.
        update_after: new texts before the next round.
        save: writes a checkpoint; returns its folder.
        """
        self._start = model.eval().requires_grad_(False)
        self._published = self._start
        self._vocabulary = vocabulary
        self._texts = RecentTexts(texts)
        self._update_after, self._learning_rate, self._save = update_after, learning_rate, save
        self._round: Iterator[Checked | None] = iter(())
        self._in_round = False
        self._revert()

    @property
    def due(self) -> bool:
        """Whether there is something to do."""
        return self._in_round or self._texts.new >= self._update_after

    def add(self, texts: Sequence[CommittedText]) -> None:
        self._texts.add(texts)

    def step(self) -> Checked | None:
        """Do a small part of a round: run one batch. Returns the result of a round that ends."""
        if not self._in_round:
            self._round, self._in_round = self._run_round(), True
        result = next(self._round)
        self._in_round = result is None
        return result

    def _run_round(self) -> Iterator[Checked | None]:
        """Learn all recent texts once, compare with the published weights on the others, and publish or go back."""
        training, held_out = self._texts.start_round()
        for texts in training:
            self._learn(TextBatch.gather(texts, self._vocabulary))
            yield None
        drafted: list[tuple[Tensor, Tensor, Tensor]] = []
        for texts in held_out:
            batch = TextBatch.gather(texts, self._vocabulary)
            published = self._drafted(self._published, batch)
            start = published if self._published is self._start else self._drafted(self._start, batch)
            drafted.append((start, published, self._drafted(self._student, batch)))
            yield None
        start, published, learned = map(torch.cat, zip(*drafted, strict=True))
        gain = int((learned & ~published).sum() - (published & ~learned).sum())
        certain = _CERTAINTY * float((learned ^ published).sum()) ** 0.5
        folder = None
        if gain > certain:
            self._published = deepcopy(self._student).eval().requires_grad_(False)
            folder, published = self._save(self._published), learned
        elif gain < -certain:
            self._revert()
        before, after = (hits.float().mean().item() for hits in (start, published))
        yield Checked(sum(map(len, held_out)), before, after, folder)

    def _revert(self) -> None:
        """Go on from the published weights."""
        self._student = deepcopy(self._published).train().requires_grad_(True)
        parameters = [parameter for parameter in self._student.parameters() if parameter.is_floating_point()]
        self._optimizer = AdamW(parameters, lr=self._learning_rate, betas=_BETAS, weight_decay=0.0)

    def _learn(self, batch: TextBatch) -> None:
        """Take a step of cross-entropy on the texts' tokens, and of a divergence from the drafter's files.

        At a text's own temperature: so a text that was drawn at 0.5 teaches the distribution at 1.
        """
        known, rows = self._vocabulary.find(batch.answers)
        log_q = self._logprobs(self._student, batch)
        with torch.no_grad():
            log_start = self._logprobs(self._start, batch)
        own = -log_q.gather(-1, rows[:, None])[:, 0][known].sum() / max(len(rows), 1)
        forgotten = kl_div(log_q, log_start, log_target=True, reduction="batchmean")
        (own + _START_SHARE * forgotten).backward()
        torch.nn.utils.clip_grad_norm_(self._student.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _logprobs(self, model: PreTrainedModel, batch: TextBatch) -> Tensor:
        """Return log-probabilities of the tokens that can be drafted, [N, rows], at the texts' temperatures."""
        logits = counted_logits(model, batch.tokens, batch.counted)[:, : self._vocabulary.drafted].float()
        return (logits / batch.temperatures[:, None]).log_softmax(-1)

    @torch.no_grad()
    def _drafted(self, model: PreTrainedModel, batch: TextBatch) -> Tensor:
        """Return which tokens of the answers the model would have drafted, given the text before, [N] bool.

        With the requests' own noise, but without processors that look at the text.
        """
        logits = counted_logits(model.eval(), batch.tokens, batch.counted)[:, : self._vocabulary.drafted].float()
        tokens = self._vocabulary.tokens
        drafts = []
        for part, (params, first, count) in zip(
            logits.split([count for *_, count in batch.requests]), batch.requests, strict=True
        ):
            settings = chain_settings([(params, first)], count, 1)[:, 0]
            sampling = SamplingBatch(settings, used_processors([params]), params.top_k)
            scores = process(part, sampling)
            if not params.greedy:
                scores = gumbel(sampling.keys, tokens).add_(scores)
            drafts.append(tokens[scores.argmax(-1)])
        model.train(model is self._student)
        return torch.cat(drafts) == batch.answers


def main() -> None:
    """Learn until the pipe ends, in one thread with idle priority. Texts stay in memory, weights cross in a folder."""
    torch.set_num_threads(1)
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        os.nice(19)
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no message
    inbox: Inbox = SimpleQueue()
    Thread(target=_read, args=(sys.stdin.buffer, inbox), daemon=True).start()
    begin = inbox.get()
    assert isinstance(begin, Begin)
    with tempfile.TemporaryDirectory(prefix="consort-adaptation-") as folder:
        try:
            _work(_load(begin, folder), inbox, output)
        except Exception as error:
            with suppress(OSError):  # the replica may have ended
                write_message(output, Failed(f"{type(error).__name__}: {error}"))


def _read(stream: IO[bytes], inbox: Inbox) -> None:
    while (message := read_message(stream, to_learner)) is not None:
        inbox.put(message)
    inbox.put(None)


def _load(begin: Begin, folder: str) -> AdaptingDrafter:
    names = ("path", "revision", "trust_remote_code", "safetensors_only", "adapter")
    given = {name: getattr(begin, name) for name in names}
    spec = ModelSpec(name="drafter", dtype="float32", device="cpu", unpacked=True, **given)
    model, vocabulary = load_student(spec)
    return AdaptingDrafter(
        model,
        vocabulary,
        texts=begin.texts,
        update_after=begin.update_after,
        learning_rate=begin.learning_rate,
        save=partial(_save, vocabulary, folder),
    )


def _save(vocabulary: StudentVocabulary, folder: str, model: PreTrainedModel) -> str:
    """Write a checkpoint, which the replica removes, into a new folder in `folder`. Return its path."""
    path = tempfile.mkdtemp(dir=folder)
    model.save_pretrained(path)
    if is_trimmed(model.config):
        save_draft_vocabulary(vocabulary.tokens.tolist(), Path(path))
    return path


def _work(drafter: AdaptingDrafter, inbox: Inbox, output: IO[bytes]) -> None:
    """Take a step at a time, while the replica is idle and there is something to learn."""
    working = False
    while True:
        while not (working and drafter.due) or not inbox.empty():
            match inbox.get():
                case Texts(texts):
                    drafter.add(texts)
                case Work():
                    working = True
                case Pause():
                    working = False
                case None:
                    return
        result = drafter.step()
        if result is not None:
            write_message(output, result)


if __name__ == "__main__":
    main()
