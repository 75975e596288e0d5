"""Plausible mistakes in a configuration file: all of them get a line that names the key and what to do."""

import shutil
from pathlib import Path

import pytest

from decoding.errors import ConfigError
from deployments.configuration.config import load_config
from deployments.configuration.paths import ROOT

TARGET, DRAFTER = ROOT / "models" / "target", ROOT / "models" / "drafter"
MODEL = f"path: {TARGET}"
ENDPOINT = "target: big, drafter: small"
VALID = f"""models:
  big: {{{MODEL}}}
  small: {{path: {DRAFTER}}}
endpoints:
  pair: {{{ENDPOINT}}}
"""


def with_model(text: str) -> str:
    """VALID with other keys of the target."""
    return VALID.replace(MODEL, text)


def with_endpoint(text: str) -> str:
    """VALID with other keys of the endpoint."""
    return VALID.replace(ENDPOINT, text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with checkpoints that lack something."""
    for name, missing in (("headless", "config.json"), ("weightless", "model.safetensors"), ("mute", "tokenizer.json")):
        (tmp_path / name).mkdir()
        for file in ("config.json", "model.safetensors", "tokenizer.json"):
            if file != missing:
                shutil.copy(TARGET / file, tmp_path / name)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}", encoding="utf-8")
    shutil.copytree(tmp_path / "weightless", tmp_path / "torn")
    index = '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'
    (tmp_path / "torn" / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def problem_of(text: str, folder: Path) -> str:
    """What loading the file says, without the file's name."""
    file = folder / "c.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    return str(caught.value).removeprefix("can't read ").removeprefix(f"{file}: ")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the file is empty; it should have `models` and `endpoints`"),
        ("# later\n", "the file is empty; it should have"),
        ("- big\n", "the configuration: should be a dictionary with 'models' and 'endpoints', not ['big']"),
        ("models:\n\tbig: {}\n", "line 2, column 1: found character '\\t' that cannot start any token; indent with"),
        ("models: {big: {path: a: b}}", "but got ':'; put values with special characters in quotes"),
        ("models: {big: {path: b}}", "endpoints: is required"),
        (VALID + "  pair: {target: small}\n", "endpoints.pair: is there twice, again in line 6; keep one of them"),
        (with_model(f"{MODEL}, slots: 1, slots: 2"), "models.big.slots: is there twice, again in line 2"),
        (VALID + "models: {}\n", "models: is there twice, again in line 6; keep one of them"),
        (VALID.replace(f"{{{MODEL}}}", str(TARGET)), "models.big: should be a dictionary with 'path', not '/"),
        (VALID.replace(f"{{{ENDPOINT}}}", "big"), "endpoints.pair: should be a dictionary with keys and values, not"),
        (VALID.replace("pair", "my pair"), "endpoints.my pair: should have only letters, digits and . _ / : -"),
        (VALID.replace("pair", "7"), "endpoints.7: is no text; put the name in quotes"),
        (VALID.replace("pair", "v1"), "endpoints.v1: /v1 is a route of the server"),
        (with_model("path: $HOME/nowhere"), "models.big.path: there is no folder or .gguf file '{home}/nowhere'"),
        (with_model("path: ~/nowhere"), "models.big.path: there is no folder or .gguf file '{home}/nowhere'"),
        (with_model("path: $NOT_SET/m"), "models.big.path: '$NOT_SET/m': the environment has no NOT_SET; set it"),
        (with_model("path: models/mine/big"), "models.big.path: there is no folder or .gguf file 'models/mine/big'"),
        (with_model("path: big.gguf"), "models.big.path: there is no folder or .gguf file 'big.gguf'"),
        (
            with_model("path: https://huggingface.co/a/b"),
            "models.big.path: 'https://huggingface.co/a/b' is a URL; give",
        ),
        (with_model(f"path: {TARGET}/config.json"), f"config.json' is a file; give its folder, '{TARGET}'"),
        (with_model("path: headless"), "models.big.path: '{home}/headless' has no config.json; give the folder of"),
        (with_model("path: adapter"), "adapter' has no config.json: it holds a LoRA adapter; name it as `adapter`"),
        (with_model("path: ."), "has no config.json; did you mean '{home}/mute'?"),
        (with_model("path: weightless"), "models.big.path: '{home}/weightless' has no weights (*.safetensors); copy"),
        (with_model("path: torn"), "'{home}/torn' lacks the weights model-00001-of-00002.safetensors; copy or"),
        (with_model("path: mute"), "models.big.path: '{home}/mute' has no tokenizer (tokenizer.json); copy it"),
        (with_model(f"{MODEL}, adapter: ./lora"), "models.big.adapter: there is no folder or .gguf file './lora'"),
        (with_model(f"{MODEL}, adapters: {{a: ./lora}}"), "models.big.adapters.a: there is no folder or .gguf file"),
        (with_model(f"{MODEL}, adapters: {{pair: lora}}"), "models.big.adapters.pair: an endpoint has this name, too;"),
        (with_model(f"{MODEL}, adapters: {{v1: adapter}}"), "models.big.adapters.v1: /v1 is a route of the server"),
        (
            with_model(f"{MODEL}, adapters_at_run_time: 1, tensor_parallel: 2, num_cpus: 1"),
            "models.big.adapters_at_run_time: a tensor-parallel model can't have any; set tensor_parallel to 1",
        ),
        (
            VALID.replace(f"path: {DRAFTER}", f"path: {DRAFTER}, adapters: {{a: adapter}}"),
            "models.small.adapters.a: no adapter of big has this name; known: none",
        ),
        (
            VALID.replace(f"path: {DRAFTER}", f"path: {DRAFTER}, adapters_at_run_time: 1"),
            "models.small.adapters_at_run_time: none of its targets has this key; set it there, too",
        ),
        (
            with_model(f"{MODEL}, adapters: {{a: adapter}}").replace(
                f"path: {DRAFTER}", f"path: {DRAFTER}, adapters: {{a: adapter}}, adaptation: {{}}"
            ),
            "models.small.adapters: a drafter that learns while it serves can't have any; remove one of the keys",
        ),
        (
            VALID.replace(f"path: {DRAFTER}", f"path: {DRAFTER}, weights_at_run_time: true, adaptation: {{}}"),
            "models.small.weights_at_run_time: a drafter that adapts replaces its weights by itself",
        ),
        (
            VALID.replace(f"path: {DRAFTER}", f"path: {DRAFTER}, weights_at_run_time: true, colocated_with: big"),
            "models.small.weights_at_run_time: 'small' runs in the replicas of 'big'; give it its own",
        ),
        (
            with_model(f"{MODEL}, max_model_len: 9"),
            "models.big.max_model_len: is not known; did you mean 'max_length'?",
        ),
        (with_model(f"{MODEL}, max_length: 9000"), "models.big.max_length: is 9000, but the model has 1024 positions;"),
        (with_model(f"{MODEL}, dtype: bf16"), "models.big.dtype: should be 'auto', 'float32', 'bfloat16' or 'float16'"),
        (with_model(f"{MODEL}, num_gpus: all"), "models.big.num_gpus: should be a valid number, not 'all'"),
        (with_endpoint("target: big"), "models.small: no endpoint uses it; remove it or name it in an endpoint"),
        (with_endpoint("target: bag, drafter: small"), "endpoints.pair.target: there is no model 'bag'; did you mean"),
        (with_endpoint("target: big, drafter: big"), "endpoints.pair.drafter: 'big' is also the target; name another"),
        (
            with_endpoint(f"{ENDPOINT}, defaults: {{top_p: 1.5}}"),
            "endpoints.pair.defaults.top_p must be a number above",
        ),
        (
            with_endpoint(f"{ENDPOINT}, draft_length: -1"),
            "endpoints.pair.draft_length: should be greater than or equal",
        ),
        (VALID + "http: {port: '8000'}", "http.port: should be a valid integer, not '8000'"),
        (VALID + "http: {host: 'http://0.0.0.0'}", "http.host: should be an address alone, such as 0.0.0.0"),
        (VALID + "http: {api_keys: {me: secret}}", "http.api_keys.me: should be a dictionary with keys and values"),
        (VALID + "http: {api_keys: {me: {env: NOT_SET}}}", "http.api_keys.me.env: the environment has no NOT_SET"),
    ],
)
def test_a_mistake_gets_a_line(text: str, problem: str, folder: Path) -> None:
    message = problem_of(text, folder)
    assert any(problem.replace("{home}", str(folder)) in line for line in message.splitlines())
    assert "secret" not in message


def test_all_mistakes_are_in_one_answer(folder: Path) -> None:
    text = f"""models:
  big: {{{MODEL}, slotz: 3, dtype: int3, replicas: 0}}
  small: {{path: ./nowhere, adapter: ./lora}}
  long: {{path: {DRAFTER}, max_length: 9000}}
endpoints:
  pair: {{target: big, drafter: small, draft_length: 99}}
  other: {{target: bag, heads: {{path: ./heads, kind: medusa}}}}
  health: {{target: long, defaults: {{top_p: 1.5}}}}
http: {{port: 0, api_keys: {{me: {{env: NOT_SET}}}}}}
"""
    first, *lines = problem_of(text, folder).splitlines()
    keys = [line.strip().split(": ")[0].split(" must ")[0] for line in lines]
    assert sorted(keys) == [
        "endpoints.health",
        "endpoints.health.defaults.top_p",
        "endpoints.other.heads.path",
        "endpoints.other.target",
        "endpoints.pair.draft_length",
        "http.port",
        "models.big.dtype",
        "models.big.replicas",
        "models.big.slotz",
        "models.long.max_length",
        "models.small.adapter",
        "models.small.path",
    ]
    assert first.endswith("12 mistakes")


def test_what_does_not_fit_together_is_in_one_answer_too(folder: Path) -> None:
    text = VALID.replace("small: {", "unused: {path: ./nowhere}\n  small: {adaptation: {}, quantization: nf4, ")
    text += "  third: {target: small}\n"
    _, *lines = problem_of(text, folder).splitlines()
    assert [line.strip().split(": ")[0] for line in lines] == [
        "models.unused",
        "models.small.adaptation",
        "models.unused.path",
    ]


def test_what_is_no_mistake(folder: Path) -> None:
    shutil.copytree(TARGET, folder / "models" / "big")
    file = folder / "c.yaml"
    for path in ("$HOME/models/big", "'${HOME}/models/big'", "~/models/big", "models/big", "Qwen/Qwen3-8B", "gpt2"):
        file.write_text(with_model(f"path: {path}"), encoding="utf-8")
        expected = path if path in ("Qwen/Qwen3-8B", "gpt2") else str(folder / "models" / "big")
        assert load_config(file).models["big"].path == expected
