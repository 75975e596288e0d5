"""Models on their devices with KV caches: how memory is divided between weights and pages."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel

from decoding.errors import ConfigError
from decoding.sampling import sampler
from engine.heads.loader import LoadedHeads, load_heads
from engine.heads.proposer import HeadProposer
from engine.heads.spec import HeadsSpec
from engine.layers.faster_layers import use_faster_layers
from engine.layers.lora import LoraLayers
from engine.loading.checkpoint import ModelSpec, errors_of, load_model
from engine.loading.host import stages
from engine.loading.lora import LoraWeights, read_lora
from engine.loading.memory_budget import (
    Bytes,
    choose_slots,
    column_bytes,
    fit_pages,
    fitting_slots,
    room_beside_states,
    room_for_pages,
    state_bytes,
    tied_output_bytes,
    weights_on_devices,
)
from engine.loading.new_weights import named_tensors
from engine.loading.settings import context_length
from engine.loading.skeletons import QuickSkeletons
from engine.loading.supported import try_out
from engine.loading.tensor_parallel import Rank, TensorParallelGroup, load_sharded_runner
from engine.model.cuda_graphs import graph_bytes
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from engine.model.thread_choice import few_threads

_SMALL_BYTES = 2**20  # of norms and biases


def load_runner(
    spec: ModelSpec,
    rank: Rank | None = None,
    *,
    caches: int = 1,
    hidden_layers: Sequence[int] = (),
    practises_later: bool = False,
) -> Runner:
    """Load a model, allocate its KV cache, and take the first step, which is slow.

    Args:
        rank: this process's rank, if a tensor-parallel group runs the model.
        caches: that the model will have: two if a shared-weight copy of it drafts.
        hidden_layers: after how many layers it keeps hidden states, if after any.
        practises_later: the caller runs `Runner.practice`, unless the runner says that it has.

    Raises:
        ConfigError: the model can't be loaded or served, or it or its cache does not fit into memory.
    """
    if rank is not None:
        return load_sharded_runner(spec, TensorParallelGroup(rank))
    loaded = _load(spec)._replace(hidden_layers=hidden_layers)
    return _allocate([loaded], caches=caches, practises_later=practises_later)[0]


def load_with_heads(
    spec: ModelSpec,
    heads: HeadsSpec,
    drafter: ModelSpec | None = None,
    *,
    caches: int = 1,
    practises_later: bool = False,
) -> tuple[Runner, Runner | None, HeadProposer]:
    """Load a target, heads on its hidden states, and the drafter on its device, if any. All else as in `load_runner`.

    In addition, raises ConfigError if the heads can't be loaded, or don't know what the target writes.
    """
    loaded = _load(spec, heads)
    assert loaded.heads is not None
    drafters = [] if drafter is None else [_load(drafter)]
    runner, *others = _allocate([loaded, *drafters], caches=caches, practises_later=practises_later)
    with few_threads(runner.model):
        proposer = loaded.heads.proposer(runner)
    if proposer.lora is not None:
        _load_adapters(proposer.lora, {(slot, f"{heads.name}.adapters"): path for slot, path in heads.adapters.items()})
    return runner, others[0] if others else None, proposer


def load_pair(spec: ModelSpec, drafter: ModelSpec, *, practises_later: bool = False) -> tuple[Runner, Runner]:
    """Load a target and the drafter on its device, with as many slots and pages each. All else as in `load_runner`."""
    target_runner, drafter_runner = _allocate([_load(spec), _load(drafter)], practises_later=practises_later)
    return target_runner, drafter_runner


class _Loaded(NamedTuple):
    """A model without its KV cache."""

    spec: ModelSpec
    model: PreTrainedModel
    weights: Bytes
    column: Bytes  # of one token's keys and values
    state: Bytes  # of one slot's state
    heads: LoadedHeads | None = None
    hidden_layers: Sequence[int] = ()
    lora: LoraLayers | None = None

    def other_graph_count(self, slots: int, max_query: int) -> int:
        """Return the number of CUDA graphs beside the runner's own."""
        return 0 if self.heads is None else self.heads.graph_count(slots, max_query)


def _load(spec: ModelSpec, heads_spec: HeadsSpec | None = None) -> _Loaded:
    stages.info("reading the weights of %s", spec.name)
    with QuickSkeletons():
        drafting = None if heads_spec is None else _read_self_drafting(heads_spec)
        model = load_model(spec)
        mask = None if drafting is None else drafting.mask_token_id
        heads = None if heads_spec is None else load_heads(heads_spec, model, mask)
    _copy_small_weights(model)
    weights: Bytes = weights_on_devices(model)
    tied = tied_output_bytes(model)
    if heads is not None:
        _copy_small_weights(heads.module)
    lora = None
    if spec.adapter_slots or drafting is not None:
        ranks = [spec.max_adapter_rank] if spec.adapter_slots else []
        lora = LoraLayers(
            model,
            slots=spec.adapter_slots,
            rank=max([*ranks, *([] if drafting is None else [drafting.rank])]),
            deterministic=spec.deterministic,
            drafts=drafting is not None,
        )
    stages.info("packing the layers of %s", spec.name)
    with few_threads(model):
        use_faster_layers(model, deterministic=spec.deterministic, lora=lora)
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        weights = _sum([weights, tied])
    if lora is not None:
        names = enumerate(spec.adapters.items(), 1)
        _load_adapters(lora, {(slot, f"models.{spec.name}.adapters.{name}"): path for slot, (name, path) in names})
        if heads_spec is not None and drafting is not None:
            _load_adapters(lora, {(lora.slots, f"{heads_spec.name}.path"): drafting})
        weights = _sum([weights, lora.nbytes])
    with errors_of(spec), few_threads(model):
        tried = try_out(model)
    column: Bytes = column_bytes(tried, spec.kv_torch_dtype)
    state: Bytes = state_bytes(tried)
    if heads is None:
        return _Loaded(spec, model, weights, column, state, lora=lora)
    numbers = dict.fromkeys(column, heads.column_numbers * (spec.kv_torch_dtype or model.dtype).itemsize)
    weights, column = _sum([weights, weights_on_devices(heads.module)]), _sum([column, numbers])
    return _Loaded(spec, model, weights, column, state, heads, lora=lora)


def _copy_small_weights(model: nn.Module) -> None:
    """Copy them from a mapped file. One alone would keep all of it in memory, large weights that are packed, too."""
    for _, tensor in named_tensors(model):
        if tensor.device.type == "cpu" and tensor.nbytes <= _SMALL_BYTES:
            tensor.data = tensor.data.clone()


def _read_self_drafting(spec: HeadsSpec) -> LoraWeights | None:
    """Return the LoRA weights by which the target drafts for itself, if it is to; raises ConfigError if it can't."""
    if spec.kind != "self":
        return None
    try:
        return read_lora(spec.path, spec.revision)
    except ConfigError as error:
        raise ConfigError(f"{spec.name}.path: {error}") from error


def _load_adapters(lora: LoraLayers, given: Mapping[tuple[int, str], str | LoraWeights]) -> None:
    """Put adapters into slots. given: paths or weights, by slot and the configuration's key.

    Raises ConfigError if it can't.
    """
    for (slot, key), source in given.items():
        try:
            weights = read_lora(source) if isinstance(source, str) else source
            lora.check(weights.pairs)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from error
        lora.write(slot, weights.version, weights.pairs)


def _allocate(loaded: Sequence[_Loaded], *, caches: int = 1, practises_later: bool = False) -> list[Runner]:
    """Return runners with caches of the same number of pages. The first model's settings count for all.

    Where a drafter's `max_length` is not configured, its texts are no longer than its target's.

    caches: that each model will have. practises_later: of the first model's.
    """
    spec = loaded[0].spec
    lengths = [context_length(each.model.config, each.spec.max_length) for each in loaded]
    lengths = [
        length if each.spec.max_length is not None else min(length, lengths[0])
        for length, each in zip(lengths, loaded, strict=True)
    ]
    max_queries = [max(each.spec.prefill_chunk, 64) for each in loaded]
    column = _sum([each.column for each in loaded] * caches)
    weights = _sum([each.weights for each in loaded])
    state = _sum([each.state for each in loaded] * caches)
    devices = {*column, *state}
    fitting = fitting_slots(state, room_for_pages(devices, weights, spec.memory_bytes))
    slots = choose_slots(spec.slots, loaded[0].model.device, fitting)
    graphs = [
        graph_bytes(
            each.model, slots, query, adapted=each.lora is not None, other_graphs=each.other_graph_count(slots, query)
        )
        for each, query in zip(loaded, max_queries, strict=True)
    ]
    room = room_for_pages(devices, weights, spec.memory_bytes, reserved=_sum(graphs * caches))
    pages = fit_pages(
        spec.name,
        spec.kv_tokens,
        column=column,
        room=room_beside_states(spec.name, slots, state, room),
        slots=slots,
        max_length=max(lengths),
        max_query=max(max_queries),
    )
    runners: list[Runner] = []
    for each, max_length, max_query in zip(loaded, lengths, max_queries, strict=True):
        stages.info("warming up %s", each.spec.name)
        size = {"slots": slots, "max_length": max_length, "max_query": max_query, "pages": pages}
        runner = Runner(each.model, **size, lora=each.lora)
        runner.cache.dtype = each.spec.kv_torch_dtype
        if each.heads is not None:
            each.heads.prepare(runner)
        elif each.spec.early_exits:
            runner.use_early_exits(each.spec.early_exits)
        elif each.hidden_layers:
            runner.keep_hidden_states(each.hidden_layers)
        with few_threads(each.model):
            for adapter in (0,) if each.lora is None else (0, 1):
                runner.logits([RowInput(slot=0, start=0, tokens=[0], adapter=adapter)])
        runner.cache.clear_all()
        runner.warm_up(later=practises_later and not runners)
        sampler.warm_up(runner.device, runner.vocab_size)
        runners.append(runner)
    return runners


def _sum(sizes: Sequence[Bytes]) -> Bytes:
    devices = {device for size in sizes for device in size}
    return {device: sum(size.get(device, 0) for size in sizes) for device in devices}
