"""Loads heads for a model that is loaded already, and says what its runner has to keep for them.

Heads are tested on text that the target writes itself, so that wrong ones are refused instead of being slow.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoding.drafts.choices import RANKS
from decoding.errors import ConfigError
from decoding.sampling.params import SamplingParams
from engine.heads.chain_proposer import ChainProposer, graph_count
from engine.heads.checkpoint import HeadsCheckpoint, is_same, read_checkpoint
from engine.heads.dflash import DFlashHead
from engine.heads.dflash_layout import layer_ids, read_dflash
from engine.heads.dflash_proposer import DFlashProposer
from engine.heads.eagle3 import Eagle3Head, read_eagle3, stated_layers
from engine.heads.medusa import MedusaProposer, read_medusa
from engine.heads.mtp import MtpHead, read_mtp
from engine.heads.pard import PardProposer, read_pard
from engine.heads.proposer import ChainHead, DraftStart, HeadProposer, Reading
from engine.heads.self_drafting import SelfProposer
from engine.heads.spec import HeadsSpec
from engine.layers.faster_layers import round_inputs, use_faster_parts
from engine.layers.lora import LoraLayers
from engine.layers.quantized_linear import QuantizedModule, round_linears
from engine.model.attention import Rows, running_over
from engine.model.kv_pages import KVPages
from engine.model.ragged_batch import RowInput, pack_inputs
from engine.model.runner import Runner

_log = logging.getLogger(__name__)
_ROWS, _TOKENS = 8, 32  # texts, and tokens of each
_UNTESTED = 4  # first tokens of each, before which there is too little text
_CLEARLY = 0.1  # more accepted tokens that make other layers better


def check_acceptance(spec: HeadsSpec, heads: HeadProposer, runner: Runner, layers: Sequence[int]) -> None:
    """Count how often the first draft token is the target's choice. The runner's cache is empty before and after.

    If the target drafts for itself, the first is its choice in any case, and the second counts.

    Raises ConfigError if it is less often than `min_acceptance`. The text names other layers if these do better.
    """
    if spec.min_acceptance == 0 and spec.kind != "mtp":  # one that was found by itself is measured, too
        return
    texts = _write(runner)
    rate = _rate(heads, runner, texts, layers)
    counted = "second" if spec.kind == "self" else "first"
    _log.info("%s: %.0f %% of the %s draft tokens are the target's own", spec.name, 100 * rate, counted)
    if rate >= spec.min_acceptance:
        return
    count = runner.model.config.get_text_config().num_hidden_layers
    shifted = (
        [tuple(layer + shift for layer in layers) for shift in (-1, 1)] if spec.kind in ("eagle3", "dflash") else []
    )
    rates = {other: _rate(heads, runner, texts, other) for other in shifted if min(other) >= 0 and max(other) <= count}
    better = max(rates, key=rates.__getitem__, default=None)
    advice = "they may be for another model, or poorly trained; lower `min_acceptance` to use them"
    if better is not None and rates[better] >= max(spec.min_acceptance, rate + _CLEARLY):
        advice = f"with `layers: {list(better)}` they are {rates[better]:.0%}; set that"
    read = f" read after {list(layers)} layers" if layers else ""
    raise ConfigError(
        f"{spec.name}: {rate:.0%} of the {counted} draft tokens of {spec.path!r}{read} are the target's own, and "
        f"`min_acceptance` is {spec.min_acceptance:.0%}: {advice}"
    )


def _write(runner: Runner) -> list[list[int]]:
    """Let the target write texts, its best token each time, from different first tokens."""
    count = min(_ROWS, runner.cache.slots)
    texts = [[(7 + 131 * index) % runner.vocab_size] for index in range(count)]
    for position in range(min(_TOKENS, runner.max_length) - 1):
        logits = runner.logits([RowInput(slot, position, text[-1:]) for slot, text in enumerate(texts)])
        for text, token in zip(texts, logits.argmax(dim=-1).tolist(), strict=True):
            text.append(token)
    runner.cache.clear_all()
    return texts


def _rate(heads: HeadProposer, runner: Runner, texts: list[list[int]], layers: Sequence[int]) -> float:
    """Return the share of positions whose token the heads expect, given the text up to the token before the last."""
    right: list[Tensor] = []
    ahead = int(heads.kind == "self")
    params = SamplingParams(max_tokens=1, temperature=0)
    for slot, text in enumerate(texts):
        hidden = runner.hidden_states([RowInput(slot, 0, text[:-1])], layers)
        # Row after row: what heads keep of a text is that of its last token.
        for length in range(_UNTESTED, len(text) - 1):
            first = 0 if length == _UNTESTED else length - 2
            rows = list(range(first, length - 1))
            heads.read([Reading(slot, first, text[first + 1 : length], rows, length - 2, text[first])], hidden)
            (choices,) = heads.propose([DraftStart(slot, length, params)], 1 + ahead, RANKS)
            right.append(torch.tensor(choices[ahead].tokens[0] == text[length + ahead]))
    runner.cache.clear_all()
    return float(torch.stack(right).float().mean()) if right else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class LoadedHeads:
    """Heads beside their target, before there is a runner."""

    spec: HeadsSpec
    module: torch.nn.Module
    layers: tuple[int, ...]  # after how many layers the runner keeps hidden states
    column_numbers: int  # that they keep for each token in the target's pages
    _make: Callable[[Runner], HeadProposer]
    # number of their CUDA graphs, given a runner's slots and max_query
    graph_count: Callable[[int, int], int] = lambda slots, max_query: 0
    lora: LoraLayers | None = None  # the adapters of its layers

    def prepare(self, runner: Runner) -> None:
        """Let a runner keep what they read. Call it before the runner's first call."""
        try:
            runner.keep_hidden_states(self.layers)
        except ConfigError as error:
            raise ConfigError(f"{self.spec.name}: {error}") from error

    def proposer(self, runner: Runner) -> HeadProposer:
        """Return the heads over a runner with an empty cache, after a test on the target's own text.

        Raises ConfigError if too few of their first draft tokens are the target's.
        """
        use_faster_parts(self.module, lora=self.lora)
        proposer = self._make(runner)
        proposer.warm_up()
        check_acceptance(self.spec, proposer, runner, self.layers)
        return proposer


def load_heads(spec: HeadsSpec, model: PreTrainedModel, mask_token_id: int | None = None) -> LoadedHeads:
    """Load heads to the device of a target's output layer, in the target's type.

    mask_token_id: as in `SelfProposer`, whose weights are loaded with the target's adapters.

    Raises ConfigError if they can't be read, or are not for this target.
    """
    if spec.adapters and spec.kind not in ("eagle3", "mtp"):
        raise ConfigError(f"{spec.name}.adapters: {spec.kind} heads take none; remove the key")
    if spec.kind == "self":
        return _load_self(spec, mask_token_id)
    if spec.kind in ("mtp", "pard"):
        return (_load_mtp if spec.kind == "mtp" else _load_pard)(spec, model)
    checkpoint = read_checkpoint(spec)
    loads = {"medusa": _load_medusa, "eagle3": _load_eagle3, "dflash": _load_dflash}
    return loads[spec.kind](checkpoint, model)


def _refuse(spec: HeadsSpec, reason: str, *keys: str) -> None:
    for key in keys:
        if getattr(spec, key) is not None:
            raise ConfigError(f"{spec.name}.{key}: {reason}; remove the key")


def _load_mtp(spec: HeadsSpec, model: PreTrainedModel) -> LoadedHeads:
    _refuse(spec, "an MTP layer drafts a chain from the last state", "layers", "tree")
    head = read_mtp(spec, model)
    _place(head, model)
    layers = (int(model.config.get_text_config().num_hidden_layers),)
    hidden = head.projection.weight.new_zeros(1, 1, head.hidden_size)
    numbers = _count_numbers(lambda _, positions: head(hidden, hidden, positions), hidden.device)
    return _chain(spec, head, model, layers, numbers)


def _load_pard(spec: HeadsSpec, model: PreTrainedModel) -> LoadedHeads:
    _refuse(spec, "a PARD model reads tokens and drafts a block", "layers", "tree")
    drafter = read_pard(spec, model)
    _place(drafter, model)
    numbers = _count_numbers(drafter.read, drafter.no_mask.device)
    return LoadedHeads(spec, drafter, (), numbers, partial(PardProposer, drafter))


def _load_self(spec: HeadsSpec, mask_token_id: int | None) -> LoadedHeads:
    _refuse(spec, "a target that drafts for itself reads its pages", "layers", "tree")
    return LoadedHeads(spec, torch.nn.Module(), (), 0, partial(SelfProposer, spec, mask_token_id))


def _load_medusa(checkpoint: HeadsCheckpoint, model: PreTrainedModel) -> LoadedHeads:
    spec, config = checkpoint.spec, model.config.get_text_config()
    _refuse(spec, "medusa heads read the last hidden state only", "layers")
    heads = read_medusa(checkpoint, hidden_size=config.hidden_size, vocab_size=config.vocab_size)
    _place(heads, model)
    return LoadedHeads(spec, heads, (), 0, partial(MedusaProposer, heads, tree=spec.tree))


def _load_eagle3(checkpoint: HeadsCheckpoint, model: PreTrainedModel) -> LoadedHeads:
    spec, config = checkpoint.spec, model.config.get_text_config()
    _refuse(spec, "static trees are for medusa heads", "tree")
    head = read_eagle3(checkpoint, hidden_size=config.hidden_size, vocab_size=config.vocab_size)
    layers = _read_layers(spec, stated_layers(checkpoint.config, config.num_hidden_layers))
    _share_embedding(head, model)
    _place(head, model)
    return _chain(spec, head, model, layers, head.column_numbers)


def _load_dflash(checkpoint: HeadsCheckpoint, model: PreTrainedModel) -> LoadedHeads:
    spec, config = checkpoint.spec, model.config.get_text_config()
    _refuse(spec, "static trees are for medusa heads", "tree")
    layers = _read_layers(spec, layer_ids(checkpoint))
    head = read_dflash(checkpoint, hidden_size=config.hidden_size, vocab_size=config.vocab_size)
    if head.has_two_sided_windows:
        raise checkpoint.error("has sliding layers whose blocks see both ways, which can't run over pages")
    if head.lm_head is not None and is_same(head.lm_head.weight, model.get_output_embeddings()):
        head.lm_head = None
    _share_embedding(head, model)
    _place(head, model)
    head.join_context()
    return LoadedHeads(spec, head, layers, head.column_numbers, partial(DFlashProposer, head))


def _share_embedding(head: Eagle3Head | DFlashHead, model: PreTrainedModel) -> None:
    """Drop a head's embedding if it is a copy of the target's, as many files have."""
    if head.embed_tokens is not None and is_same(head.embed_tokens.weight, model.get_input_embeddings()):
        head.embed_tokens = None


def _read_layers(spec: HeadsSpec, stated: Sequence[int]) -> tuple[int, ...]:
    """Return after how many layers the target's states are read: as configured, or as the checkpoint says."""
    layers = tuple(spec.layers or stated)
    if len(layers) != len(stated):
        raise ConfigError(f"{spec.name}.layers: has {len(layers)} numbers, but the head reads {len(stated)} states")
    return layers


def _chain(
    spec: HeadsSpec, head: ChainHead, model: PreTrainedModel, layers: tuple[int, ...], column_numbers: int
) -> LoadedHeads:
    lora = None
    if spec.adapter_slots:
        lora = LoraLayers(model, slots=spec.adapter_slots, rank=spec.max_adapter_rank, deterministic=False, part=head)
    make = partial(_make_chain, head, lora)
    return LoadedHeads(spec, head, layers, column_numbers, make, graph_count, lora)


def _make_chain(head: ChainHead, lora: LoraLayers | None, runner: Runner) -> ChainProposer:
    if isinstance(head, MtpHead):
        head.share(runner.model)
    return ChainProposer(head, runner, lora)


@torch.inference_mode()
def _count_numbers(run: Callable[[Tensor, Tensor], object], device: torch.device) -> int:
    """Return how many numbers pages keep for a token of a model. run: over tokens and positions, [1, 1] each."""
    cache = KVPages(slots=1, capacity=1)
    cache.prepare_writes([(0, 0, 1)])
    tokens, positions, batch = pack_inputs([RowInput(0, 0, [0])]).copy_to(device).unpack()
    with running_over(Rows(batch, cache)):
        run(tokens, positions)
    return sum(store[0].numel() // cache.page_size for stores in cache.layers.values() for store in stores)


def _place(module: torch.nn.Module, model: PreTrainedModel) -> None:
    """Move heads to the target's last device. Only their weights get its type, not the rotary frequencies."""
    output_layer = model.get_output_embeddings()
    parameters = [] if output_layer is None else [*output_layer.parameters(), *output_layer.buffers()]
    module.to(parameters[0].device if parameters else model.device)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(model.dtype)
    if any(isinstance(layer, QuantizedModule) for layer in model.modules()):
        round_linears(module, 4)  # else a draft token would cost a larger part of a step
        round_inputs(module)  # no text depends on what is drafted
    module.eval().requires_grad_(False)
