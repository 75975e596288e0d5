"""A tensor-parallel group holds its share of quantised weights, and computes what one process does with all of them."""

import multiprocessing
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Phi3Config, PretrainedConfig, PreTrainedModel

from decoding.errors import ConfigError
from engine.kernels.native import library
from engine.layers.faster_layers import use_faster_layers
from engine.layers.sharded import plan_parts
from engine.loading import tensor_parallel
from engine.loading.checkpoint import ModelSpec, load_model
from engine.loading.quantizer import rounded_weights
from engine.loading.tensor_parallel import Rank, TensorParallelGroup, follow, load_sharded_runner
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.support.gguf_files import interleave, write_gguf
from tests.support.models import tiny_model
from tests.support.quantized_files import Kind, gptq, integers, save_quantized

SHAPE: dict[str, Any] = {
    "vocab_size": 67,  # which ranks can't share evenly
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "pad_token_id": 0,
}
PROMPT, OTHER = [3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8]
LENGTH = 16
GGUF = LlamaConfig(**SHAPE | {"vocab_size": 64}, tie_word_embeddings=True)
MIXTRAL = MixtralConfig(**SHAPE, num_local_experts=4, sliding_window=None)
BIASED = LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)


def spec(path: Path, **options: Any) -> ModelSpec:
    size = {"slots": 3, "max_length": 64, "prefill_chunk": 64}
    return ModelSpec(**{"name": "m", "path": str(path), "device": "cpu", "dtype": "float32", **size, **options})


def random_model(config: PretrainedConfig) -> Any:
    torch.manual_seed(0)
    loader: Any = AutoModelForCausalLM
    model = loader.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model


def checkpoints(folder: Path) -> dict[str, ModelSpec]:
    """Save a model of each kind, and return how to load it."""
    (folder / "tokenizer.json").write_text("{}")
    types = dict.fromkeys(("attn_output.weight", "ffn_down.weight", "ffn_gate.weight"), GGMLQuantizationType.Q4_0)
    types |= dict.fromkeys(("attn_q.weight", "attn_k.weight", "attn_v.weight"), GGMLQuantizationType.Q5_1)
    types |= dict.fromkeys(("ffn_up.weight", "token_embd.weight"), GGMLQuantizationType.Q8_0)
    write_gguf(folder / "m.gguf", random_model(GGUF), "llama", interleave, {}, quantized=types)
    stored = {"order": gptq(4, symmetric=False, ordered=False), "one scale": integers(per_output=False)}
    for name, kind in stored.items():
        (folder / name).mkdir()
        save_quantized(LlamaConfig(**SHAPE), kind, folder / name)
    (folder / "experts").mkdir()
    save_quantized(MIXTRAL, gptq(4, symmetric=False), folder / "experts")
    random_model(BIASED).save_pretrained(folder / "biased")
    random_model(Phi3Config(**SHAPE)).save_pretrained(folder / "joined")
    return {
        "gguf": spec(folder / "m.gguf"),
        **{name: spec(folder / name) for name in stored},
        "biased": spec(folder / "biased", quantization="int4"),
        "joined": spec(folder / "joined", quantization="int8"),
        "normal floats": spec(folder / "biased", quantization="nf4"),
        "experts": spec(folder / "experts"),
        "rounded experts": spec(folder / "experts" / "plain", quantization="int4"),
        "plain experts": spec(folder / "experts" / "plain"),
        "plain": spec(folder / "joined"),
        "half": spec(folder / "biased", quantization="int4", dtype="bfloat16"),
    }


def held_bytes(model: nn.Module) -> int:
    tensors = (*model.parameters(), *model.buffers())
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def write(runner: Runner) -> tuple[list[int], Tensor]:
    """Return a greedy text, and the logits after its tokens, one by one."""
    tokens, logits = list(PROMPT), list[Tensor]()
    while len(logits) < LENGTH:
        logits.append(runner.logits([RowInput(0, len(logits), [tokens[len(logits)]])]).clone())
        if len(logits) == len(tokens):
            tokens.append(int(logits[-1].argmax()))
    return tokens[:LENGTH], torch.cat(logits)


def read(runner: Runner, tokens: Sequence[int], *, width: int, others: Sequence[RowInput] = ()) -> Tensor:
    """Return the logits after all tokens. width: of a call. others: what runs beside them."""
    rows = [RowInput(0, start, list(tokens[start : start + width])) for start in range(0, len(tokens), width)]
    return torch.cat([runner.logits([row, *others])[: len(row.tokens)].clone() for row in rows])


def take_part(rank: int, port: int, own: ModelSpec, result: Connection) -> None:
    """Run a rank; it sends how many bytes it holds, and rank 0 then its text and logits."""
    group = TensorParallelGroup(Rank(rank, 2, "127.0.0.1", port))

    def weigh_and_pack(model: PreTrainedModel, **options: Any) -> None:
        result.send(held_bytes(model))  # packed layers hide their weights
        use_faster_layers(model, **options)

    with mock.patch.object(tensor_parallel, "use_faster_layers", weigh_and_pack):
        runner = load_sharded_runner(own, group)
    if rank == 0:
        text, logits = write(runner)
        drafted = read(runner, text, width=5, others=[RowInput(1, 0, OTHER)])
        result.send((text, *(each.numpy() for each in (logits, read(runner, text, width=LENGTH), drafted))))
    else:
        follow(runner, group)
    group.close()


def take_parts(rank: int, ports: Sequence[int], specs: Sequence[ModelSpec], cache: Path, result: Connection) -> None:
    """Run a rank of one group per model, in turn. cache: of GGUF files; that of kernels stays."""
    library()
    os.environ["XDG_CACHE_HOME"] = str(cache)
    for port, own in zip(ports, specs, strict=True):
        take_part(rank, port, own, result)


@pytest.mark.timeout(240)
@torch.no_grad()
def test_each_rank_holds_its_share_and_the_text_is_that_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library()
    cache = tmp_path / "cache"
    specs = checkpoints(tmp_path)
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in specs]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    sharded = [replace(own, tensor_parallel=2) for own in specs.values()]
    processes = [
        context.Process(target=take_parts, args=(rank, ports, sharded, cache, pipes[rank][1])) for rank in range(2)
    ]
    for process in processes:
        process.start()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    whole: dict[str, Any] = {name: load_model(own) for name, own in specs.items()}  # they unpack weights as they run
    for name, model in whole.items():
        for receiver, _ in pipes:
            assert receiver.recv() < 0.55 * held_bytes(model), name
        text, *read_in_turn = pipes[0][0].recv()
        logits, *others = map(torch.from_numpy, read_in_turn)
        expected = model(torch.tensor([text])).logits[0]
        tolerance = 0.1 if specs[name].dtype == "bfloat16" else 1e-4
        torch.testing.assert_close(logits, expected.float(), rtol=tolerance, atol=tolerance)
        greedy, written = expected[len(PROMPT) - 1 : -1], torch.tensor(text[len(PROMPT) :])
        assert (
            greedy.amax(dim=-1) - greedy.gather(1, written[:, None])[:, 0]
        ).max() < tolerance  # near-ties may differ
        for same in others:
            if "experts" in name:  # their routers are torch's
                torch.testing.assert_close(same, logits, rtol=tolerance, atol=tolerance)
            else:
                assert torch.equal(same, logits), name
    for process in processes:
        process.join()
        assert process.exitcode == 0


def refusal(own: ModelSpec) -> str:
    """Return why a group refuses a model, which it must before it reads a weight."""
    group: Any = mock.Mock(rank=Rank(0, own.tensor_parallel, "127.0.0.1", 0), least=lambda value: value)
    model = "transformers.modeling_utils.PreTrainedModel."
    with (
        mock.patch(f"{model}_load_pretrained_model", side_effect=AssertionError),
        mock.patch(f"{model}prepare_distribute_model", side_effect=lambda settings, **_: (settings, None, None)),
    ):
        try:
            load_sharded_runner(own, group)
        except ConfigError as error:
            return str(error)
    raise AssertionError


@pytest.mark.parametrize("kind", [None, gptq(4, symmetric=True)], ids=lambda kind: kind and kind.name)
def test_groups_that_devices_cannot_share_are_refused_by_name(kind: Kind | None, tmp_path: Path) -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32}
    config = LlamaConfig(**SHAPE | heads | {"hidden_size": 96, "intermediate_size": 128})
    if kind is None:
        random_model(config).save_pretrained(tmp_path)
    else:
        save_quantized(config, kind, tmp_path)
    message = refusal(spec(tmp_path, tensor_parallel=3, quantization=None if kind else "int4"))
    assert message.startswith("models.m.path: can't load")
    assert "model.layers.0.mlp.down_proj has 4 groups of 32 inputs, which 3 devices can't share evenly" in message
    assert "set tensor_parallel to 2" in message


def test_models_that_transformers_alone_can_split_are_not_quantised(tmp_path: Path) -> None:
    tiny_model("deepseek").save_pretrained(tmp_path)
    message = refusal(spec(tmp_path, tensor_parallel=2, quantization="int4"))
    assert message.startswith(
        "models.m.quantization: DeepseekV3ForCausalLM is split over devices with unpacked weights"
    )


def test_experts_that_the_plan_does_not_split_stay_whole() -> None:
    """GPT-OSS has a plan for its output layer alone."""
    model = tiny_model("gpt-oss", intermediate_size=64)
    styles = set(model.tp_plan.values())
    model.config.distributed_config = mock.Mock(tp_size=2)
    weights = rounded_weights(model, "int4")
    assert any("experts" in name for name in weights)
    plan_parts(model, weights)
    assert set(model.tp_plan.values()) <= styles | {"colwise"}  # of the embedding
