"""`consort serve MODEL` up to the point where anything starts, and the script for completion."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from ray.exceptions import RayActorError
from rich.console import Console

from cli import shell
from cli.serving import server
from cli.serving.source import Source, plan_lines
from decoding.errors import UnavailableError
from deployments.configuration.config import load_config
from deployments.configuration.paths import ROOT
from deployments.planning import devices
from deployments.planning.devices import Gpu, Machine, this_machine
from deployments.planning.plan import GIB

TARGET, DRAFTER = str(ROOT / "models" / "target"), str(ROOT / "models" / "drafter")
LAPTOP = Machine((), 2, 8 * GIB)
WORKSTATION = Machine((Gpu(0, 24 * GIB, 23 * GIB), Gpu(1, 24 * GIB, 23 * GIB)), 16, 64 * GIB)


@pytest.fixture(autouse=True)
def computer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "this_machine", lambda: LAPTOP)
    monkeypatch.setattr(server, "_console", Console(highlight=False))


def invoke(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(shell.main, arguments, **options)


def printed(*arguments: str) -> dict[str, Any]:
    result = invoke("serve", *arguments, "--print-config")
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = yaml.safe_load(result.output)
    return document


def test_a_model_and_its_drafter_become_a_configuration() -> None:
    document = printed(TARGET, "--drafter", DRAFTER, "--max-model-len", "512", "--port", "9")
    assert document["models"]["target"] == {
        "path": TARGET,
        "slots": "auto",
        "max_length": 512,
        "threads": 2,
        "num_gpus": 0,
    }
    assert document["models"]["drafter"] == {"path": DRAFTER, "colocated_with": "target", "max_length": 512}
    assert document["endpoints"]["target"]["drafter"] == "drafter"
    assert document["http"] == {"port": 9}
    assert printed(TARGET, "--max-queue-wait", "0")["http"] == {"max_queue_wait_s": 0}


def test_the_default_model_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed("smollm2") == printed("SmolLM2") == printed()
    assert printed("smollm2", "--draft-length", "2") == printed("--draft-length", "2")
    monkeypatch.chdir(tmp_path)
    Path("smollm2").symlink_to(TARGET)
    assert printed("smollm2")["models"]["target"]["path"] == TARGET  # a folder of that name here


def test_what_this_machine_lacks_is_said_before_anything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise AssertionError("this takes long")

    for slow in ("fetch_all", "_check"):
        monkeypatch.setattr(server, slow, fails)
    file = tmp_path / "c.yaml"
    model = f"{{path: {TARGET}, num_gpus: 1, num_cpus: 100000}}"
    file.write_text(f"models: {{m: {model}}}\nendpoints: {{e: {{target: m}}}}\n", encoding="utf-8")
    result = invoke("serve", str(file), "--dry-run")
    assert result.exit_code == 1
    assert result.output.startswith("Error: 2 mistakes\n  models: num_gpus of all replicas is 1 together, but this ")
    assert "\n  models: num_cpus of all replicas is 100000 together" in result.output
    monkeypatch.setattr(server, "this_machine", lambda: replace(LAPTOP, unusable_gpus="2 stay idle"))
    assert "but this machine has 0: 2 stay idle\n" in invoke("serve", str(file), "--dry-run").output


def test_gpus_that_nvidia_smi_does_not_tell_are_left_to_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "this_machine", this_machine)
    monkeypatch.setattr(devices, "_visible_gpus", tuple)
    monkeypatch.setattr(devices, "_DEVICES", tmp_path)
    file = tmp_path / "c.yaml"
    file.write_text(
        f"models: {{m: {{path: {TARGET}, num_gpus: 1}}}}\nendpoints: {{e: {{target: m}}}}\n", encoding="utf-8"
    )
    assert "this machine has 0" in invoke("serve", str(file), "--print-config").output
    (tmp_path / "kfd").touch()
    assert printed(str(file))["models"]["m"]["num_gpus"] == 1


@pytest.mark.parametrize("error", [UnavailableError("busy"), RayActorError()])
def test_a_server_whose_standby_does_not_start_goes_on(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise error

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "start_standby", fails)
    monkeypatch.setattr("time.sleep", interrupt)
    server._wait_for_interrupt(standby=True)
    assert capsys.readouterr().out.startswith("No coordinator stands by: ")


def test_a_draft_length_of_0_is_plain_decoding() -> None:
    assert printed(TARGET, "--draft-length", "0")["endpoints"]["target"]["draft_length"] == 0


def test_vllms_names_are_taken() -> None:
    options = "--served-model-name a --served-model-name b --dtype half --max-num-seqs 8 --kv-cache-dtype fp8 -q nf4"
    document = printed(TARGET, *options.split(), "--draft-length", "2", "--revision", "main")
    assert list(document["endpoints"]) == ["a", "b"]
    assert document["endpoints"]["b"]["draft_length"] == 2
    target = document["models"]["target"]
    assert (target["dtype"], target["slots"], target["revision"]) == ("float16", 8, "main")
    assert (target["kv_dtype"], target["quantization"]) == ("float8_e4m3fn", "nf4")


def test_gpus_are_used_and_their_memory_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "this_machine", lambda: WORKSTATION)
    document = printed(TARGET, "--drafter", DRAFTER, "--gpu-memory-utilization", "0.5")
    assert {model["num_gpus"] for model in document["models"].values()} == {1}
    assert {model["memory_gib"] for model in document["models"].values()} == {12}
    assert printed(TARGET, "--device", "cpu")["models"]["target"]["num_gpus"] == 0
    document = printed(TARGET, "--tensor-parallel-size", "2")
    assert (document["models"]["target"]["tensor_parallel"], document["models"]["target"]["num_gpus"]) == (2, 1)


def test_a_printed_configuration_is_served_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONSORT_API_KEY", "secret-of-the-environment")
    result = invoke("serve", TARGET, "--drafter", DRAFTER, "--api-key", "another", "--print-config")
    assert "another" not in result.output
    file = tmp_path / "config.yaml"
    file.write_text(result.output, encoding="utf-8")
    assert set(load_config(file).http.api_keys) == {"command-line", "environment"}
    assert invoke("serve", str(file), "--print-config").output == result.output
    assert invoke("serve", "-", "--print-config", input=result.output).output == result.output


def test_a_key_of_the_file_is_printed_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret-of-a-file-0123456789")
    file = tmp_path / "config.yaml"
    keys = "http: {api_keys: {environment: {env: MY_KEY}}}"
    file.write_text(f"models: {{m: {{path: {TARGET}}}}}\nendpoints: {{e: {{target: m}}}}\n{keys}\n", encoding="utf-8")
    assert "environment" in yaml.safe_load(invoke("serve", str(file), "--print-config").output)["http"]["api_keys"]


def test_a_printed_ensemble_is_served_unchanged() -> None:
    output = invoke("serve", str(ROOT / "deployments" / "ensemble.yaml"), "--print-config").output
    assert {"ensemble", "contrastive"} <= yaml.safe_load(output)["endpoints"].keys()
    assert invoke("serve", "-", "--print-config", input=output).output == output


def test_without_an_argument_the_default_model_takes_options() -> None:
    document = printed("--max-length", "1024")
    assert list(document["models"]) == ["smollm2"]
    assert document["models"]["smollm2"]["max_length"] == 1024


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["models/tiny.yaml", "--dtype", "float32"], "--dtype is for a MODEL; in a configuration, set the key"),
        (["./nowhere"], "MODEL: there is no folder or .gguf file './nowhere'"),
        ([TARGET, "--drafter", "./nowhere"], "--drafter: there is no folder or .gguf file './nowhere'"),
        ([TARGET, "--served-model-name", "v1"], "/v1 is a route of the server"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], problem: str) -> None:
    result = invoke("serve", *arguments)
    assert result.exit_code != 0
    assert problem in result.output
    assert "Traceback" not in result.output


def test_a_dry_run_shows_the_plan() -> None:
    result = invoke("serve", TARGET, "--dry-run")
    assert result.exit_code == 0, result.output
    assert "target target: on 2 CPU threads, 9.4 MiB of weights, about " in result.output
    assert "tokens of KV; a token reads 9.4 MiB, and 3.0 KiB for each before it" in result.output
    assert "drafts for target: n-grams; `consort train drafter` makes a drafter" in result.output


def test_a_plan_shows_rounded_activations() -> None:
    result = invoke("serve", TARGET, "--dry-run", "--quantization", "int8", "--activations", "int8")
    assert result.exit_code == 0, result.output
    assert "tokens of KV, activations in int8; a token reads" in result.output


def test_a_plan_takes_six_lines_at_most() -> None:
    config, plan = Source(load_config()).planned(LAPTOP, {})
    lines = plan_lines(replace(plan, notes=("memory is short",) * 8), config)
    assert lines[-2:] == ["memory is short", "… 5 lines more: --print-config shows all"]
    assert len(lines) == 6


def test_every_command_has_short_help() -> None:
    for command in ([], *([name] for name in shell.main.commands)):
        assert "Usage: " in invoke(*command, "-h").output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed(shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", f"/bin/{shell}")
    for arguments in (["--install-completion"], ["--install-completion", shell]):
        result = invoke(*arguments)
        assert result.exit_code == 0, result.output
        (file,) = (path for path in tmp_path.rglob("*consort*") if path.is_file())
        assert "_CONSORT_COMPLETE" in file.read_text(encoding="utf-8")
    assert "should be bash, zsh, fish, not 'tcsh'" in invoke("--install-completion", "tcsh").output
