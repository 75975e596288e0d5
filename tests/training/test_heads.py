"""`consort train heads`: mistakes are one line; the whole command, killed on its way, makes the same heads."""

import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from engine.heads.spec import HeadsKind, HeadsSpec
from engine.loading.checkpoint import ModelSpec
from engine.loading.runners import load_with_heads
from tests.training.commands import TARGET, failure, kill_when, run, write_target

OPTIONS = (
    "--tokens 1200 --answer-tokens 24 --streams 8 --vocabulary 64 --epochs 2 --tokens-per-step 1024 --save-every 0 "
    "--threads 1 --device cpu --dtype float32"
)


def command(target: Path, kind: str, output: Path, *, work: Path) -> list[str]:
    paths = ["--output", str(output), "--work", str(work)]
    program = [sys.executable, "-m", "cli", "train", "heads", str(target), "--kind", kind]
    options = OPTIONS.replace("--vocabulary 64 ", "") if kind == "self" else OPTIONS
    return [*program, *paths, *options.split()]


def test_a_target_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "/nowhere/model is not there" in failure(
        "heads", "/nowhere/model", "--kind", "eagle3", "--output", str(tmp_path / "heads")
    )


def test_an_output_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is there already" in failure("heads", TARGET, "--kind", "medusa", "--output", str(tmp_path))


def test_only_a_head_can_be_trained_further(tmp_path: Path) -> None:
    options = ["--output", str(tmp_path / "heads"), "--from", str(tmp_path)]
    assert "can't load '/nowhere'" in failure("heads", TARGET, "--kind", "eagle3", *options[:3], "/nowhere")
    assert "Medusa heads can't be trained further" in failure("heads", TARGET, "--kind", "medusa", *options)
    assert "--layers" in failure("heads", TARGET, "--kind", "eagle3", "--layers", "1,2,4", *options)
    assert "--vocabulary" in failure("heads", TARGET, "--kind", "eagle3", "--vocabulary", "64", *options)
    assert "--steps" in failure("heads", TARGET, "--kind", "dflash", "--steps", "4", *options)
    assert "--from: --kind self has no use for it" in failure("heads", TARGET, "--kind", "self", *options)
    assert "--rank: --kind dflash" in failure("heads", TARGET, "--kind", "dflash", "--rank", "4", *options[:2])
    assert "--head-layers" in failure("heads", TARGET, "--kind", "dflash", "--head-layers", "1", *options)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_kinds_are_made_from_the_same_texts_and_can_be_served(tmp_path: Path) -> None:
    target, work = tmp_path / "target", tmp_path / "work"
    write_target(target)
    kinds: tuple[HeadsKind, ...] = ("eagle3", "medusa", "dflash", "self")
    for kind in kinds:
        output = tmp_path / kind
        run(command(target, kind, output, work=work))
        report = json.loads((output / "report.json").read_text())
        assert report["texts"] > report["held_out_texts"] > 0
        assert {rates["temperature"] for rates in report["after"]} <= {0.0, 0.7, 1.0}
        assert (output / "report.md").read_text().splitlines()[0].endswith(f" for {target}")
        spec = ModelSpec(name="target", path=str(target), device="cpu", threads=1, slots=2, max_length=64)
        _, _, heads = load_with_heads(spec, HeadsSpec(name="heads", path=str(output), kind=kind, min_acceptance=0.0))
        assert (heads.kind, heads.length) == (kind, {"eagle3": 8, "medusa": 3, "dflash": 5, "self": 8}[kind])
    assert len(list((work / "features").iterdir())) == 2
    for kind in ("eagle3", "dflash"):
        again = tmp_path / f"{kind}-again"
        arguments = command(target, kind, again, work=work)
        vocabulary = arguments.index("--vocabulary")
        run([*arguments[:vocabulary], *arguments[vocabulary + 2 :], "--from", str(tmp_path / kind)])
        before, after = (json.loads((folder / "report.json").read_text()) for folder in (tmp_path / kind, again))
        assert before["after"][0]["agreement"] == pytest.approx(after["before"][0]["agreement"], abs=0.02)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_killed_run_makes_the_heads_of_one_that_was_not(tmp_path: Path) -> None:
    target = tmp_path / "target"
    write_target(target)
    whole, parts = (
        command(target, "eagle3", tmp_path / name, work=tmp_path / f"{name}-work") for name in ("whole", "parts")
    )
    run(whole)
    work = tmp_path / "parts-work"
    kill_when(parts, lambda: any(work.glob("features/*/00000.safetensors")))
    kill_when(parts, lambda: any(work.glob("runs/*/checkpoints/step-[1-9]*")))
    assert not (tmp_path / "parts").exists()
    run(parts)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)
