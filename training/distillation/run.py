"""What all students of a target have in common: options, texts, distillation, and a report.

Each stage leaves whole files in the work folder and is skipped where they are, so a run that was killed at any moment
goes on.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from decoding.errors import ConfigError
from training.distillation.lessons import FeatureSlice, Lessons, Student
from training.distillation.loop import DistillationOptions, distil
from training.distillation.rates import Rates, held_out_rates
from training.distillation.report import StepTimes, StudentReport
from training.files import whole_folder
from training.texts import Chat, Report, TargetOptions, TextOptions, fitted, load_target_tokenizer, write_missing


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """A target, and how a student of it is made."""

    target: TargetOptions
    output: Path
    work: Path
    texts: TextOptions
    distillation: DistillationOptions
    tokens_per_step: int
    seed: int = 0

    def settings(self) -> dict[str, object]:
        """Return the settings that the weights depend on, by name."""
        distillation = asdict(self.distillation)
        for name in ("save_every_s", "report_every_s", "device"):
            del distillation[name]
        named = {"target": self.target.path, "longest": self.target.longest}
        return named | distillation | {"tokens_per_step": self.tokens_per_step, "seed": self.seed}


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A trained student, and what its report says of it."""

    student: Student
    name: str  # such as "Drafter"
    command: str
    start: str  # what it was made from
    parameters: int
    before: Sequence[Rates]
    save: Callable[[Path], None]
    time_steps: Callable[[Path], StepTimes]  # of the saved student


class StudentRun:
    """The target's texts, and the stages that follow from them."""

    def __init__(self, options: RunOptions, *, report: Report) -> None:
        """Let the target write what the work folder lacks.

        Raises:
            ConfigError: the target or its tokenizer can't be loaded, the output is not an empty folder, the work folder
                belongs to another target, there are no texts, or the disk is full.
        """
        check_output(options.output)
        if options.target.threads is not None:
            torch.set_num_threads(options.target.threads)
        self.tokenizer: PreTrainedTokenizerBase = load_target_tokenizer(options.target.path)
        self.options = replace(options, target=fitted(options.target))
        self.training: list[Chat]
        self._held_out: list[Chat]
        self.training, self._held_out = write_missing(
            self.options.target, options.texts, options.work, self.tokenizer, report=report
        )
        self._report = report

    def folder(self, own_settings: Mapping[str, object], *contents: bytes) -> Path:
        """Return a folder that differs where the weights of the start or of a step would. contents: of the start."""
        options = self.options
        fixed = replace(options, distillation=replace(options.distillation, epochs=0, minutes=None))
        name = hashlib.sha256(repr((fixed.settings(), own_settings, len(self.training))).encode())
        for content in contents:
            name.update(content)
        return options.work / "runs" / name.hexdigest()[:12]

    def distil(self, student: Student, folder: Path, features: Sequence[FeatureSlice] | None = None) -> None:
        """Train a student. features: of each chat to train on, if it reads any."""
        options = self.options
        lessons = Lessons(
            self.training,
            student.vocabulary,
            tokens=options.tokens_per_step,
            longest=options.target.longest,
            seed=options.seed,
            features=features,
        )
        distil(student, lessons, options.distillation, folder / "checkpoints", report=self._report)

    def rates(self, student: Student, features: Sequence[FeatureSlice] | None = None) -> list[Rates]:
        """Measure a student on the texts that are held out. features: of each, if it reads any."""
        measure = partial(held_out_rates, tokens=self.options.tokens_per_step, longest=self.options.target.longest)
        if features is None:
            return measure(student, self._held_out)
        return measure(student, self._held_out, features=features, bfloat16=self.options.distillation.bfloat16)

    def finish(
        self, made: Made, own_settings: Mapping[str, object], features: Sequence[FeatureSlice] | None = None
    ) -> None:
        """Write the output folder, with the report. features: as in `rates`."""
        options = self.options
        with whole_folder(options.output) as unfinished:
            made.save(unfinished)
            self._report("measuring what was made")
            StudentReport(
                made=made.name,
                command=made.command,
                target=options.target.path,
                start=made.start,
                parameters=made.parameters,
                settings={**options.settings(), **own_settings},
                texts=len(self.training),
                tokens=sum(len(chat.tokens) for chat in self.training),
                held_out_texts=len(self._held_out),
                before=made.before,
                after=self.rates(made.student, features),
                steps=made.time_steps(unfinished),
            ).write(unfinished)
        self._report(f"{options.output}: {made.parameters:,} parameters; see report.md there")


def check_output(output: Path) -> None:
    """Raise ConfigError unless a folder can be written there."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output} is there already: give another, or remove it")
