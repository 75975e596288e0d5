"""What all students of a target have in common: options, texts, distillation, and a report of what a student is worth.

Each stage leaves whole files in the work folder and is skipped where they are, so a run that was killed at any moment
goes on.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from decoding.errors import ConfigError
from decoding.sampling.params import SamplingParams
from engine.heads.spec import HeadsKind, HeadsSpec
from engine.loading.checkpoint import ModelSpec
from engine.loading.runners import load_runner, load_with_heads
from engine.model.runner import Runner
from evaluation.speculation import SpeculationLimits, time_heads, time_steps
from training.distillation.lessons import FeatureSlice, Lessons, Student
from training.distillation.loop import DistillationOptions, distil
from training.distillation.rates import LONGEST_DRAFT, Rates, held_out_rates
from training.files import whole_folder
from training.text_stage import write_missing
from training.texts import Report, TargetOptions, TextOptions, fitted, load_target_tokenizer

_DRAFT_LENGTHS = range(1, LONGEST_DRAFT + 1)
_GAMMAS = [f"γ = {length}" for length in _DRAFT_LENGTHS]
_TIMED_LENGTH = 256  # tokens of the cache while steps are timed
_PARAMS = SamplingParams(max_tokens=1)
_MEASURED_TEXTS = 64  # in the course of a training
_KINDS = {"shared_noise": "shared noise", "rejection": "rejection"}


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
        for name in ("save_every_s", "report_every_s", "measure_every_s", "device"):
            del distillation[name]
        named = {"target": self.target.path, "longest": self.target.longest}
        return named | distillation | {"tokens_per_step": self.tokens_per_step, "seed": self.seed}


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step of one stream on this machine, each model alone."""

    target_s: list[float]  # of a target that reads 1, 2, … tokens; the first is plain decoding
    drafter_s: float  # for one token of a draft


def time_drafter(target: TargetOptions, drafter: Path) -> StepTimes:
    """Time the steps of a target, then those of its drafter. Raises ConfigError if one can't be loaded or served."""
    spec = _timed_spec(target)
    target_s = _time_target(load_runner(spec))
    runner = load_runner(replace(spec, name="drafter", path=str(drafter)))
    return StepTimes(target_s, time_steps(runner, [(1, 1)], _PARAMS).seconds[1, 1])


def time_heads_of(target: TargetOptions, folder: Path, kind: HeadsKind) -> StepTimes:
    """Time the target's steps, and the heads' part for each token of the longest draft. Raises as `time_drafter`."""
    heads_spec = HeadsSpec(name="heads", path=str(folder), kind=kind, min_acceptance=0.0)
    runner, _, heads = load_with_heads(_timed_spec(target), heads_spec)
    target_s = _time_target(runner)
    length = min(LONGEST_DRAFT, heads.length)
    call_s, token_s = time_heads(heads, runner, 1, length)
    return StepTimes(target_s, token_s + call_s / length)


def _timed_spec(target: TargetOptions) -> ModelSpec:
    return replace(target.spec(), slots=1, max_length=_TIMED_LENGTH)


def _time_target(runner: Runner) -> list[float]:
    steps = [(1, width) for width in range(1, LONGEST_DRAFT + 2)]
    times = time_steps(runner, steps, _PARAMS).seconds
    return [times[step] for step in steps]


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A trained student, and what its report says of it."""

    student: Student
    name: str  # such as "Drafter"
    command: str
    start: str  # what it was made from
    parameters: int
    settings: Mapping[str, object]  # its own that the weights depend on
    before: Sequence[Rates]
    save: Callable[[Path], None]
    time_steps: Callable[[Path], StepTimes]  # of the saved student


class StudentRun:
    """The target's texts, and the stages that follow from them."""

    def __init__(self, options: RunOptions, *, layers: Sequence[int] = (), report: Report) -> None:
        """Let the target write what the work folder lacks. layers: as in `write_missing`.

        Raises ConfigError if the target or its tokenizer can't be loaded, the output is not an empty folder, the work
        folder belongs to another target, there are no texts, or the disk is full.
        """
        check_output(options.output)
        if options.target.threads is not None:
            torch.set_num_threads(options.target.threads)
        self.tokenizer = load_target_tokenizer(options.target.path)
        self.options = replace(options, target=fitted(options.target))
        self.texts = write_missing(
            self.options.target, options.texts, options.work, self.tokenizer, layers=layers, report=report
        )
        self._report = report

    def folder(self, own_settings: Mapping[str, object], *contents: bytes) -> Path:
        """Return a folder that differs where the weights of the start or of a step would. contents: of the start."""
        options = self.options
        fixed = replace(options, distillation=replace(options.distillation, epochs=0, minutes=None))
        name = hashlib.sha256(repr((fixed.settings(), own_settings, len(self.texts.training))).encode())
        for content in contents:
            name.update(content)
        return options.work / "runs" / name.hexdigest()[:12]

    def distil(
        self,
        student: Student,
        folder: Path,
        features: Sequence[FeatureSlice] | None = None,
        held_out_features: Sequence[FeatureSlice] | None = None,
    ) -> None:
        """Train a student. features, held_out_features: of each chat, if it reads any."""
        options = self.options
        lessons = Lessons(
            self.texts.training,
            student.vocabulary,
            tokens=options.tokens_per_step,
            longest=options.target.longest,
            seed=options.seed,
            features=features,
        )
        distil(
            student,
            lessons,
            options.distillation,
            folder / "checkpoints",
            report=self._report,
            measure=lambda: _line(self.rates(student, held_out_features, most=_MEASURED_TEXTS)),
        )

    def rates(
        self, student: Student, features: Sequence[FeatureSlice] | None = None, *, most: int | None = None
    ) -> list[Rates]:
        """Measure a student on the texts that are held out. features: of each, if it reads any. most: of the texts."""
        return held_out_rates(
            student,
            self.texts.held_out[:most],
            tokens=self.options.tokens_per_step,
            longest=self.options.target.longest,
            features=None if features is None else features[:most],
            bfloat16=features is not None and self.options.distillation.bfloat16,
        )

    def finish(self, made: Made, features: Sequence[FeatureSlice] | None = None) -> None:
        """Write the output folder, with the report. features: as in `rates`."""
        options = self.options
        with whole_folder(options.output) as unfinished:
            made.save(unfinished)
            self._report("measuring what was made")
            report = StudentReport(
                made=made.name,
                command=made.command,
                target=options.target.path,
                start=made.start,
                parameters=made.parameters,
                settings={**options.settings(), **made.settings},
                texts=len(self.texts.training),
                tokens=sum(len(chat.tokens) for chat in self.texts.training),
                held_out_texts=len(self.texts.held_out),
                before=made.before,
                after=self.rates(made.student, features),
                steps=made.time_steps(unfinished),
            )
            document = json.dumps(report.document(), indent=1) + "\n"
            (unfinished / "report.json").write_text(document, encoding="utf-8")
            (unfinished / "report.md").write_text(report.text(), encoding="utf-8")
        self._report(f"{options.output}: {made.parameters:,} parameters; see report.md there")


def check_output(output: Path) -> None:
    """Raise ConfigError unless a folder can be written there."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output} is there already: give another, or remove it")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentReport:
    """What was made of what: acceptance before and after, step times, and the speed-up to expect of them."""

    made: str
    command: str
    target: str
    start: str
    parameters: int
    settings: Mapping[str, object]
    texts: int
    tokens: int
    held_out_texts: int
    before: Sequence[Rates]
    after: Sequence[Rates]
    steps: StepTimes

    def document(self) -> dict[str, object]:
        speed_up = [
            {
                "temperature": rates.temperature,
                "verification": kind,
                "alternating": [limits.alternating for limits in self._limits(rates, kind)],
                "hidden": [limits.hidden for limits in self._limits(rates, kind)],
            }
            for rates in self.after
            for kind in _KINDS
        ]
        measured = {
            name: [asdict(rates) | {"lengths": rates.lengths} for rates in each]
            for name, each in (("before", self.before), ("after", self.after))
        }
        return asdict(self) | measured | {"speed_up": speed_up}

    def text(self) -> str:
        lengths, positions, speed_ups = [], [], []
        for kind, name in _KINDS.items():
            for when, rates in [("before", each) for each in self.before] + [("after", each) for each in self.after]:
                agreement = f"{rates.agreement:.3f}"
                lengths.append([rates.temperature, name, when, agreement, *_numbers(rates.lengths[kind])])
            for rates in self.after:
                positions.append([rates.temperature, name, *_numbers(getattr(rates, kind), 3)])
                alternating = [limits.alternating for limits in self._limits(rates, kind)]
                speed_ups.append([rates.temperature, name, *_numbers(alternating)])
        plain_ms, *verify_ms = (1e3 * seconds for seconds in self.steps.target_s)
        return (
            f"# {self.made} for {self.target}\n\n"
            f"Made by `{self.command}` from {self.start}: {self.parameters:,} parameters, trained on\n"
            f"{self.texts:,} texts of the target ({self.tokens:,} tokens), measured on {self.held_out_texts} others.\n"
            "\n## Acceptance\n"
            "Tokens that a step of the target commits, its own included, for drafts of γ tokens.\n\n"
            + _table(["temperature", "verification", "training", "agreement", *_GAMMAS], lengths)
            + "\nProbability that at least so many tokens of a draft are accepted, after training:\n\n"
            + _table(["temperature", "verification", *_DRAFT_LENGTHS], positions)
            + "\n## Speed\n"
            f"One stream on this machine: a draft token takes {1e3 * self.steps.drafter_s:.2f} ms and "
            f"a token of the target {plain_ms:.2f} ms.\nTo verify γ tokens takes the target, in ms:\n\n"
            + _table([*_GAMMAS], [_numbers(verify_ms)])
            + "\nSo the most to expect over plain decoding, both on one device, is:\n\n"
            + _table(["temperature", "verification", *_GAMMAS], speed_ups)
        )

    def _limits(self, rates: Rates, kind: str) -> list[SpeculationLimits]:
        times = self.steps
        return [
            SpeculationLimits(length, times.target_s[0], times.target_s[length], times.drafter_s, tokens)
            for length, tokens in enumerate(rates.lengths[kind], start=1)
        ]


def _line(rates: Sequence[Rates]) -> str:
    """Say how many tokens a step of the target commits, and the rates of a draft's first, second, … token."""
    parts = (
        f"T = {each.temperature:g}: {each.lengths['shared_noise'][-1]:.3f} ({' '.join(_numbers(each.shared_noise, 3))})"
        for each in rates
    )
    return f"held out, tokens a step  {'  '.join(parts)}"


def _numbers(values: Sequence[float], digits: int = 2) -> list[str]:
    return [f"{value:.{digits}f}" for value in values]


def _table(header: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in (header, ["---"] * len(header), *rows))
