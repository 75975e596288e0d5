"""An inflated model computes the same function as the small model that it was made from."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.tiny.__main__ import main
from benchmarks.tiny.inflate import inflate


def small_model(*, tied: bool, kv_heads: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 2.0, generator=generator)
            else:
                parameter.normal_(std=0.08, generator=generator)
    return model


@pytest.mark.parametrize(("tied", "kv_heads"), [(True, 2), (False, 4), (True, 1)])
@torch.no_grad()
def test_the_logits_stay(tied: bool, kv_heads: int) -> None:
    model = small_model(tied=tied, kv_heads=kv_heads)
    grown = inflate(model, hidden=640, layers=5, intermediate=512)
    tokens = torch.randint(0, 320, (4, 48), generator=torch.Generator().manual_seed(1))
    before, after = model(tokens).logits, grown(tokens).logits
    torch.testing.assert_close(after, before, atol=1e-3, rtol=0.0)
    assert torch.equal(after.argmax(-1), before.argmax(-1))
    assert grown.config.num_key_value_heads is not None
    assert grown.config.num_attention_heads // grown.config.num_key_value_heads == 4 // kv_heads
    assert grown.num_parameters() > 4 * model.num_parameters()


def test_the_same_seed_gives_the_same_weights() -> None:
    model = small_model(tied=True, kv_heads=2)
    first, second = (inflate(model, hidden=320, layers=3, intermediate=384).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"hidden": 128, "layers": 2, "intermediate": 320},
            "hidden_size 128 is smaller than the source's 256",
        ),
        (
            {"hidden": 256, "layers": 1, "intermediate": 320},
            "num_hidden_layers 1 is smaller than the source's 2",
        ),
        (
            {"hidden": 256, "layers": 2, "intermediate": 300},
            "intermediate_size 300 is smaller than the source's 320",
        ),
        ({"hidden": 300, "layers": 2, "intermediate": 320}, "hidden_size 300 is not a multiple of 64"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inflate(small_model(tied=True, kv_heads=2), **sizes)


@torch.no_grad()
def test_the_command_writes_a_checkpoint_and_replaces_one_only_when_forced(tmp_path: Path) -> None:
    output = tmp_path / "grown"
    command = [
        "inflate",
        "--output",
        str(output),
        "--hidden",
        "512",
        "--layers",
        "7",
        "--intermediate",
        "768",
    ]
    runner = CliRunner()
    first = runner.invoke(main, [*command, "--dtype", "float32"])
    assert first.exit_code == 0, first.output
    grown = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    source = AutoModelForCausalLM.from_pretrained("models/target", dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(output)("def main():\n    return", return_tensors="pt").input_ids
    torch.testing.assert_close(grown(tokens).logits, source(tokens).logits, atol=1e-3, rtol=0.0)
    assert grown.generation_config.eos_token_id == source.generation_config.eos_token_id

    refused = runner.invoke(main, command)
    assert refused.exit_code == 1
    assert "--force" in refused.output
    assert runner.invoke(main, [*command, "--force"]).exit_code == 0


def test_the_command_reports_errors_without_a_traceback(tmp_path: Path) -> None:
    runner = CliRunner()
    missing = runner.invoke(main, ["inflate", "--source", str(tmp_path / "no"), "--output", str(tmp_path / "grown")])
    assert missing.exit_code == 1
    assert "is not a model folder" in missing.output
    small = runner.invoke(main, ["inflate", "--hidden", "64", "--output", str(tmp_path / "grown")])
    assert small.exit_code == 1
    assert "hidden_size 64 is smaller than the source's" in small.output
    assert not (tmp_path / "grown").exists()
