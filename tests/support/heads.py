"""Heads that know a little of what a target will write, made in a second."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

from decoding.drafts.choices import RANKS, DraftChoice
from decoding.sampling.params import SamplingParams
from engine.heads.chain_proposer import ChainProposer
from engine.heads.dflash import DFlashConfig, DFlashHead
from engine.heads.eagle3 import Eagle3Head
from engine.heads.medusa import MedusaHeads
from engine.heads.proposer import DraftStart, Reading
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner

_TEXTS = [[5, 9, 14, 3, 27, 8], [7, 1, 2], [11, 4, 9, 30]]
STATES = (1, 2, 3)  # after how many layers of a tiny model EAGLE-3 reads


@torch.no_grad()
def greedy_texts(model: PreTrainedModel, prompts: Sequence[Sequence[int]], new: int = 24) -> list[list[int]]:
    texts = [list(prompt) for prompt in prompts]
    for text in texts:
        for _ in range(new):
            text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return texts


@torch.no_grad()
def states_of(model: PreTrainedModel, text: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The states before the output layer, [T, H], and after each of STATES layers, [T, 3 · H]."""
    seen: list[Tensor] = []
    head = model.get_output_embeddings()
    assert head is not None
    layers = [model.model.layers[count - 1] for count in STATES]
    handles = [head.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))]
    handles += [layer.register_forward_hook(lambda module, args, output: seen.append(output[0])) for layer in layers]
    model(torch.tensor([text]), use_cache=False)
    for handle in handles:
        handle.remove()
    return seen[-1], torch.cat(seen[:-1], dim=-1)


def medusa_tensors(model: PreTrainedModel, texts: Sequence[Sequence[int]], heads: int = 3) -> dict[str, Tensor]:
    """Medusa heads, version 1, whose output layers are fitted by least squares."""
    hidden = [states_of(model, text)[0] for text in texts]
    size, vocab = hidden[0].shape[1], model.config.vocab_size
    tensors: dict[str, Tensor] = {}
    for head in range(heads):
        inputs = torch.cat([states[: len(states) - 2 - head] for states in hidden])
        targets = torch.tensor([token for text in texts for token in text[2 + head :]])
        one_hot = torch.nn.functional.one_hot(targets, vocab).float()
        fitted = torch.linalg.lstsq(inputs.T @ inputs + 0.01 * torch.eye(size), inputs.T @ one_hot).solution
        tensors[f"{head}.0.linear.weight"] = torch.zeros(size, size)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(size)
        tensors[f"{head}.1.weight"] = 8 * fitted.T.contiguous()
    return tensors


def medusa_heads(tensors: dict[str, Tensor], heads: int = 3) -> MedusaHeads:
    vocab, size = tensors["0.1.weight"].shape
    module = MedusaHeads(heads, 1, size, outputs=vocab)
    assert module.output is not None
    module.output.data = torch.stack([tensors[f"{head}.1.weight"] for head in range(heads)])
    return module.requires_grad_(False)


def new_eagle3(model: PreTrainedModel, **options: object) -> Eagle3Head:
    """An EAGLE-3 head with random weights for a tiny model."""
    size, vocab = model.config.hidden_size, model.config.vocab_size
    config = LlamaConfig(
        hidden_size=size, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, vocab_size=vocab
    )
    torch.manual_seed(0)
    return Eagle3Head(config, target_hidden_size=size, outputs=vocab, **options)  # type: ignore[arg-type]


def trained_eagle3(model: PreTrainedModel, texts: Sequence[Sequence[int]], steps: int = 60) -> Eagle3Head:
    """An EAGLE-3 head trained for its first two draft tokens on texts of equal length."""
    head = new_eagle3(model)
    features = torch.stack([states_of(model, text)[1] for text in texts])[:, :-2]  # [B, T, 3 H]
    tokens = torch.tensor([list(text) for text in texts])  # [B, T + 2]
    embedding = model.get_input_embeddings()
    embeddings = embedding(tokens[:, 1:-1]).detach()
    count = features.shape[1]
    mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
    positions = torch.arange(count)[None]
    optimizer = torch.optim.Adam(head.parameters(), lr=5e-3)
    for _ in range(steps):
        hidden = head(head.fc(features), embeddings, positions, attention_mask=mask)
        loss = cross_entropy(head.logits(hidden).flatten(0, 1), tokens[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.eval().requires_grad_(False)


def save(folder: Path, tensors: dict[str, Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name)
    return folder


@torch.inference_mode()
def eagle3_drafts(proposer: ChainProposer, runner: Runner, *, rejecting: bool = False) -> list[list[list[DraftChoice]]]:
    """The choices of each round. Every second round adds a text; each round reads all.

    rejecting: the second text uses rejection sampling.
    """
    choices = []
    for number in range(6):
        texts = _TEXTS[: 1 + number // 2]
        runner.logits([RowInput(slot, 0, text[:-1]) for slot, text in enumerate(texts)])
        assert runner.hidden is not None
        first, readings = 0, []
        for slot, text in enumerate(texts):
            rows = list(range(first, first + len(text) - 1))
            first += len(rows)
            readings.append(Reading(slot, 0, text[1:], rows, rows[-1], text[0]))
        proposer.read(readings, runner.hidden)
        starts = [
            DraftStart(slot, len(text), SamplingParams(max_tokens=9, temperature=slot, seed=slot))
            for slot, text in enumerate(texts)
        ]
        if rejecting and len(starts) > 1:
            starts[1] = starts[1]._replace(params=replace(starts[1].params, verification="rejection"))
        choices.append(proposer.propose(starts, 4, RANKS))
    return choices


def reduced_eagle3(model: PreTrainedModel, stride: int) -> Eagle3Head:
    """An EAGLE-3 head with random weights that can draft every `stride`th token only."""
    head = new_eagle3(model)
    ids = torch.arange(0, model.config.vocab_size, stride)
    head.lm_head = nn.Linear(head.hidden_size, len(ids), bias=False)
    head.d2t, head.outputs = ids - torch.arange(len(ids)), len(ids)
    return head.eval().requires_grad_(False)


def new_dflash(model: PreTrainedModel, *, windowed: bool = False, **options: Any) -> DFlashHead:
    """A DFlash head with random weights, for the states after STATES layers of a tiny model.

    windowed: whether its first layer sees four positions only.
    """
    size, vocab = model.config.hidden_size, model.config.vocab_size
    layers = Qwen3Config(
        hidden_size=size, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=vocab, use_sliding_window=windowed, sliding_window=4,
        layer_types=["sliding_attention" if windowed else "full_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    settings: dict[str, Any] = {"outputs": vocab, "block_size": 5, "mask_token_id": vocab - 1}
    config = DFlashConfig(layers=layers, feature_size=len(STATES) * size, **settings | options)
    head = DFlashHead(config)
    for parameter in head.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    return head


def trained_dflash(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], steps: int = 60, **options: Any
) -> DFlashHead:
    """A DFlash head trained on texts of equal length, from every anchor."""
    head = new_dflash(model, **options)
    features = torch.stack([states_of(model, text)[1] for text in texts])  # [B, T, F]
    tokens = torch.tensor([list(text) for text in texts])
    size, shift = head.config.block_size, head.config.anchor_drafts
    anchors = torch.arange(1, tokens.shape[1] - size)[None].expand(len(tokens), -1)  # [B, A]
    entries = torch.arange(0 if shift else 1, size)
    labels = tokens.gather(1, (anchors[..., None] + entries + shift).flatten(1))
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Module)
    embeddings = embedding(head.blocks(tokens.gather(1, anchors))).detach()
    optimizer = torch.optim.Adam(head.parameters(), lr=5e-3)
    for _ in range(steps):
        logits = head.logits(head(features, embeddings, anchors)[:, :, entries])
        loss = cross_entropy(logits.flatten(0, 2), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.eval().requires_grad_(False)
