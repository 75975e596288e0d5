"""20 updates of a served pair under load: no request is lost, and each text is that of the version that it names."""

import os
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from deployments.configuration.paths import ROOT
from tests.support.commands import running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]
UPDATES, CLIENTS, CHECKPOINTS = 20, 6, 3
PROMPTS = ["def add(a, b):", "class Stack:\n", "import os\n\n", "for i in range("]
PARAMS = {"model": "pair", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
VERSION = "X-Consort-Weights"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, list[str]]:
    """Checkpoints, with the texts of transformers."""
    folder, texts = tmp_path_factory.mktemp("weights"), dict[Path, list[str]]()
    tokenizer: Any = AutoTokenizer.from_pretrained(ROOT / "models" / "target")
    for seed in range(CHECKPOINTS):
        model: Any = AutoModelForCausalLM.from_pretrained(ROOT / "models" / "target", dtype=torch.float32).eval()
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.data += 0.02 * seed * torch.randn(parameter.shape, generator=generator)
        path = folder / str(seed)
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        texts[path] = []
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            options = {"max_new_tokens": PARAMS["max_tokens"], "min_new_tokens": PARAMS["max_tokens"]}
            answer = model.generate(ids, do_sample=False, eos_token_id=-1, **options)[0, ids.shape[1] :]
            texts[path].append(tokenizer.decode(answer, skip_special_tokens=True))
    return texts


@pytest.fixture(scope="module")
def url(texts: dict[Path, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    usual = {"dtype": "float32", "threads": 1}
    target = {"path": str(next(iter(texts))), "replicas": 2, "weights_at_run_time": True, **usual}
    config = {
        "models": {"target": target, "drafter": {"path": str(ROOT / "models" / "drafter"), **usual}},
        "endpoints": {"pair": {"target": "target", "drafter": "drafter", "draft_length": 4}},
        "http": {"port": port, "cached_tokens": 0, "api_keys": {"t": {"key": "trainer", "weights": True}}},
    }
    file = tmp_path_factory.mktemp("config") / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "cli", "serve", str(file)]
    with running(command, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        assert process.stdout is not None
        assert any("Ctrl-C stops the server" in line for line in process.stdout)
        yield url


@pytest.mark.parametrize("policy", ["finish", "recompute"])
def test_updates_under_load(url: str, texts: dict[Path, list[str]], policy: str) -> None:
    headers, folders, paths = {"Authorization": "Bearer trainer"}, list(texts), dict[str, Path]()
    order, is_over = list[str](), False

    def ask(index: int) -> list[tuple[int, int, str, str]]:
        """Return prompts, how many versions were announced when each was sent, versions and texts."""
        answers = []
        with httpx.Client(base_url=url, headers=headers, timeout=120) as client:
            while not is_over:
                index, known = index + 1, len(order)
                prompt = PROMPTS[index % len(PROMPTS)]
                answer = client.post("/v1/completions", json={**PARAMS, "prompt": prompt})
                assert answer.status_code == 200, answer.text
                assert answer.json()["system_fingerprint"] == answer.headers[VERSION]
                text = answer.json()["choices"][0]["text"]
                answers.append((index % len(PROMPTS), known, answer.headers[VERSION], text))
        return answers

    with ThreadPoolExecutor(CLIENTS) as pool, httpx.Client(base_url=url, headers=headers, timeout=300) as client:
        before = client.post("/v1/completions", json={**PARAMS, "prompt": PROMPTS[0]}).headers[VERSION]
        asked = [pool.submit(ask, index) for index in range(CLIENTS)]
        try:
            for number in range(1, UPDATES + 1):
                path = folders[number % CHECKPOINTS]
                body = {"model": "target", "path": str(path), "policy": policy}
                answer = client.post("/v1/weights", json=body)
                assert answer.status_code == 200, answer.text
                paths[answer.json()["version"]] = path
                order.append(answer.json()["version"])
        finally:
            is_over = True
        answers = [each for future in asked for each in future.result()]
    print(f"{policy}: {len(answers)} answers, {len({version for *_, version, _ in answers})} versions")
    paths.setdefault(before, folders[0] if before == "0" else folders[UPDATES % CHECKPOINTS])
    versions = [before, *order]
    for prompt, known, version, text in answers:
        assert text == texts[paths[version]][prompt]
        assert versions.index(version) >= known
