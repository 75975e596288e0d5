"""PARD: an ordinary small model that was trained to draft several tokens in one pass, by mask tokens after the text.

An et al., arXiv 2504.18583. Its keys and values are further layers in the target's pages. It reads the target's tokens,
and none of its hidden states.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from decoding.drafts.choices import DraftChoice
from decoding.sampling import sampler
from engine.heads.checkpoint import heads_error, heads_folder
from engine.heads.dflash_proposer import MOST_LOGITS
from engine.heads.proposer import DraftStart, HeadProposer, HeadSampler, Reading
from engine.heads.spec import HeadsKind, HeadsSpec
from engine.kernels.attention import RaggedBatch
from engine.kernels.native_replay import trace_few
from engine.kernels.operator_trace import MAX_TRACED_TOKENS, Example, log_failed_trace
from engine.model.attention import Rows, running_over, use_pages
from engine.model.hidden_states import HiddenStates
from engine.model.ragged_batch import RowInput, pack_inputs
from engine.model.runner import Runner

_LENGTH = 12  # tokens of a draft; the paper trains 16 and drafts 12
_FILES = ("*.safetensors",)
_ATTENTION = {"full_attention", "sliding_attention"}


class PardModel(nn.Module):
    """The model over the current rows' pages."""

    no_mask: Tensor

    def __init__(self, model: PreTrainedModel, mask_token_id: int, outputs: int) -> None:
        """outputs: of its first tokens that are the target's, too, W."""
        super().__init__()
        use_pages(model)
        self.model: Any = model
        self.mask_token_id, self.outputs = mask_token_id, outputs
        self.register_buffer("no_mask", torch.zeros(1, 1, 1, 1), persistent=False)  # models make no mask then

    def read(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Write keys and values of tokens, [1, N], and return the last hidden states, [1, N, H]."""
        states: Tensor = self.model.base_model(
            input_ids=tokens, position_ids=positions, attention_mask=self.no_mask, use_cache=False
        ).last_hidden_state
        return states

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the logits after tokens, [N, W] float. tokens, positions: [1, N]."""
        logits: Tensor = self.model(
            input_ids=tokens, position_ids=positions, attention_mask=self.no_mask, use_cache=False
        ).logits
        return logits[0, :, : self.outputs].float()


def read_pard(spec: HeadsSpec, target: PreTrainedModel) -> PardModel:
    """Return the model, in the target's dtype.

    Raises ConfigError if it can't be loaded, has no mask token, or layers that carry a state.
    """
    try:
        folder = heads_folder(spec, _FILES)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=target.dtype)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise heads_error(spec, f"can't be loaded: {error}") from error
    config = model.config.get_text_config()
    mask = getattr(config, "pard_token", None)
    if mask is None or not 0 <= int(mask) < config.vocab_size:
        raise heads_error(spec, f"is no PARD model: pard_token in config.json is {mask}, not one of its tokens")
    if not _ATTENTION.issuperset(getattr(config, "layer_types", None) or ()):
        raise heads_error(spec, "has layers that carry a state, which can't draft in the target's process")
    shared = min(int(config.vocab_size), int(target.config.get_text_config().vocab_size))
    return PardModel(model, int(mask), shared)


class PardProposer(HeadProposer):
    """All tokens of a draft are chosen at once, so any candidate may follow any."""

    kind: HeadsKind = "pard"
    length: int = _LENGTH

    def __init__(self, model: PardModel, runner: Runner) -> None:
        """runner: the target's."""
        self._model, self._cache = model, runner.cache
        self._device = model.no_mask.device
        whole = model.outputs == runner.vocab_size
        self._token_ids = None if whole else torch.arange(model.outputs, device=self._device)
        self._most = int(model.model.config.get_text_config().vocab_size) - 1
        self._anchors = [0] * runner.cache.slots  # the last token of each slot's text, which is not read yet
        self._read_few: Callable[..., Tensor] | None = None
        self._run_few: Callable[..., Tensor] | None = None

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile kernels, and trace the model on a CPU."""
        sampler.warm_up(self._device, self._model.outputs, self._token_ids)
        self._logits(*self._example(1).inputs)  # the first call adds the layers' pages
        if self._device.type == "cpu":
            with log_failed_trace(f"the {self.kind} model"):
                self._read_few = trace_few(self._states, self._example)
                self._run_few = trace_few(self._logits, self._example)
        self._cache.clear_all()

    @torch.inference_mode()
    def read(self, readings: Sequence[Reading], hidden: HiddenStates) -> None:
        """Run the model over the tokens that the target has run."""
        readings = [reading for reading in readings if reading.following]
        if not readings:
            return
        rows = [
            RowInput(reading.slot, reading.start, self._known([reading.token, *reading.following[:-1]]))
            for reading in readings
        ]
        self._cache.flush()
        self._run(rows, self._states, self._read_few)
        for reading in readings:
            self._anchors[reading.slot] = reading.following[-1]

    @torch.inference_mode()
    def propose(self, starts: Sequence[DraftStart], length: int, ranks: int) -> list[list[DraftChoice]]:
        """Draft a block for each text. It writes to the columns after the text, which the target writes next."""
        ranks = min(ranks, self._model.outputs)
        chooser = HeadSampler(starts, length, ranks, self._device, self._token_ids)
        logits = self.logits(starts, length).transpose(0, 1)  # [length, B, W]
        for part in logits.split(max(MOST_LOGITS // (len(starts) * self._model.outputs), 1)):
            chooser.choose_steps(part)
        return chooser.choices()

    def logits(self, starts: Sequence[DraftStart], length: int) -> Tensor:
        """Return the logits of each text's next `length` tokens, [B, length, W]."""
        masks = [self._model.mask_token_id] * (length - 1)
        rows = [
            RowInput(start.slot, start.length - 1, [*self._known([self._anchors[start.slot]]), *masks])
            for start in starts
        ]
        self._cache.prepare_writes((row.slot, row.start, row.end) for row in rows)
        return self._run(rows, self._logits, self._run_few).view(len(rows), length, -1)

    def _run(
        self, rows: Sequence[RowInput], call: Callable[..., Tensor], traced: Callable[..., Tensor] | None
    ) -> Tensor:
        tokens, positions, batch = pack_inputs(rows).copy_to(self._device).unpack()
        if traced is None or tokens.numel() > MAX_TRACED_TOKENS:
            return call(tokens, positions, batch)
        return traced(tokens.numel(), tokens, positions, batch)

    def _states(self, tokens: Tensor, positions: Tensor, batch: RaggedBatch) -> Tensor:
        with running_over(Rows(batch, self._cache)):
            return self._model.read(tokens, positions)

    def _logits(self, tokens: Tensor, positions: Tensor, batch: RaggedBatch) -> Tensor:
        with running_over(Rows(batch, self._cache)):
            logits: Tensor = self._model(tokens, positions)
            return logits

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Return tokens that the model has: the target's may have more rows than its tokenizer has tokens."""
        return [min(token, self._most) for token in tokens]

    def _example(self, count: int) -> Example:
        row = RowInput(0, 1, range(count))
        self._cache.prepare_writes([(row.slot, row.start, row.end)])
        return Example((count,), pack_inputs([row]).copy_to(self._device).unpack())
