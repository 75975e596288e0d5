"""The process of a learner: `python -m training.adaptation`, started by a drafter's replica, which it talks to.

It computes in one thread, only while the replica is idle, and where nobody else wants the processor. Texts stay in its
memory; only weights are written, to a temporary folder.
"""

import os
import sys
import tempfile
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import IO

import torch
from transformers import PreTrainedModel

from actors.loops.adaptation import (
    Begin,
    Failed,
    Pause,
    Texts,
    ToLearner,
    Work,
    read_message,
    to_learner,
    write_message,
)
from engine.loading.checkpoint import ModelSpec
from engine.loading.draft_vocabulary import save_draft_vocabulary
from engine.loading.settings import is_trimmed
from training.adaptation.learner import AdaptingDrafter
from training.distillation.lessons import StudentVocabulary
from training.drafter import load_student

Inbox = SimpleQueue[ToLearner | None]


def main() -> None:
    """Learn until the pipe ends."""
    _stand_back()
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no message
    inbox: Inbox = SimpleQueue()
    Thread(target=_read, args=(sys.stdin.buffer, inbox), daemon=True).start()
    begin = inbox.get()
    assert isinstance(begin, Begin)
    with tempfile.TemporaryDirectory(prefix="consort-adaptation-") as folder:
        try:
            _work(_load(begin, Path(folder)), inbox, output)
        except Exception as error:
            with suppress(OSError):  # the replica may have ended
                write_message(output, Failed(f"{type(error).__name__}: {error}"))


def _stand_back() -> None:
    """Compute in one thread, with idle priority."""
    torch.set_num_threads(1)
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        os.nice(19)


def _read(stream: IO[bytes], inbox: Inbox) -> None:
    while (message := read_message(stream, to_learner)) is not None:
        inbox.put(message)
    inbox.put(None)


def _load(begin: Begin, folder: Path) -> AdaptingDrafter:
    spec = ModelSpec(
        name="drafter",
        path=begin.path,
        revision=begin.revision,
        trust_remote_code=begin.trust_remote_code,
        safetensors_only=begin.safetensors_only,
        adapter=begin.adapter,
        dtype="float32",
        device="cpu",
    )
    model, vocabulary = load_student(spec)
    return AdaptingDrafter(
        model,
        vocabulary,
        texts=begin.texts,
        update_after=begin.update_after,
        learning_rate=begin.learning_rate,
        save=partial(_save, vocabulary, folder, count()),
    )


def _save(vocabulary: StudentVocabulary, folder: Path, numbers: "count[int]", model: PreTrainedModel) -> str:
    """Write a checkpoint, which the replica removes, into a new folder. Returns that."""
    path = folder / str(next(numbers))
    model.save_pretrained(path)
    if is_trimmed(model.config):
        save_draft_vocabulary(vocabulary.tokens.tolist(), path)
    return str(path)


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
