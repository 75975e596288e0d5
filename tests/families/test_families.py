"""A sample of the families, and the page with the results of all: `make test-families` tries all."""

from pathlib import Path

import pytest

from tests.families import page

SAMPLE = {
    "gemma3n": ("greedy", "drafts"),  # windows, shared keys, in a multimodal checkpoint
    "qwen3_5_text": ("greedy", "drafts", "moved"),
    "lfm2": ("greedy", "drafts"),
    "granitemoehybrid": ("greedy", "drafts"),
    "nemotron": ("greedy",),  # its layers hand no arguments to their attention
    "stablelm": ("greedy",),  # neither do these
    "doge": ("greedy",),
    "diffllama": ("greedy",),  # attends twice in a layer
    "deepseek_v3": ("greedy",),
    "minicpm3": ("greedy",),
    "llama4_text": ("greedy",),
    "longcat_flash": ("greedy",),
}
REFUSED = ("bert", "bloom", "gptj", "mpt", "reformer", "rwkv", "whisper")


@pytest.mark.parametrize("name", SAMPLE)
def test_what_holds(name: str, tmp_path: Path) -> None:
    result = page.try_family(name, tmp_path, SAMPLE[name])
    seen = page.read()[name]
    assert (result.refused, result.fails) == (seen.refused, {k: v for k, v in seen.fails.items() if k in SAMPLE[name]})


@pytest.mark.parametrize("name", REFUSED)
def test_the_reason_why_it_is_refused(name: str, tmp_path: Path) -> None:
    assert page.try_family(name, tmp_path).refused == page.read()[name].refused is not None


def test_the_page_shows_the_results() -> None:
    results, text = page.read(), page.PAGE.read_text(encoding="utf-8")
    assert page.with_tables(text, results) == text, "run make test-families"
