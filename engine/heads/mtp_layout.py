"""Names of the layers for multi-token prediction (MTP) in checkpoints, which transformers leaves out while loading.

DeepSeek-V3, arXiv 2412.19437, section 2.2, calls them MTP modules. Here only the first module is read.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

# The parts of a module, whatever a checkpoint calls them.
EMBEDDING_NORM, HIDDEN_NORM, PROJECTION = "embedding_norm", "hidden_norm", "projection"
LAYER, FINAL_NORM, EMBEDDING, OUTPUT = "layer", "final_norm", "embedding", "output"

BLOCK_SCALES = "_scale_inv"  # ends the names of scales of FP8 weights, which are read
_QUANTIZED = re.compile(r"scale(?!_inv$)|qweight|qzeros|g_idx|packed|absmax|quant_|SCB")  # in names beside weights


class MtpLayout(NamedTuple):
    """How a family names the tensors of its first MTP module."""

    beginning: str  # of all its names, a regular expression; {layers}: the number of the model's own layers
    parts: Mapping[str, str]  # by what follows the beginning, up to a dot; "": all others
    hidden_first: bool = False  # whether the hidden state comes before the embedding in the projection's input

    def part(self, name: str, layers: int) -> tuple[str, str] | None:
        """Return the part that a tensor belongs to, and its name in that part; None: it is not in the module."""
        begins = re.match(self.beginning.format(layers=layers), name)
        if begins is None:
            return None
        rest = name[begins.end() :]
        for own, part in self.parts.items():
            if not own:
                return part, rest
            if rest.startswith(f"{own}."):
                return part, rest[len(own) + 1 :]
        return None


_LAYOUTS = (
    MtpLayout(  # Qwen3-Next, Qwen3.5; multimodal checkpoints have it beside the text model
        r"mtp\.",
        {
            "fc": PROJECTION,
            "pre_fc_norm_embedding": EMBEDDING_NORM,
            "pre_fc_norm_hidden": HIDDEN_NORM,
            "layers.0": LAYER,
            "norm": FINAL_NORM,
        },
    ),
    MtpLayout(  # MiMo
        r"model\.mtp_layers\.0\.",
        {
            "input_proj": PROJECTION,
            "token_layernorm": EMBEDDING_NORM,
            "hidden_layernorm": HIDDEN_NORM,
            "final_layernorm": FINAL_NORM,
            "": LAYER,
        },
        hidden_first=True,
    ),
    MtpLayout(  # ERNIE 4.5
        r"model\.mtp_",
        {
            "linear_proj.0": PROJECTION,
            "emb_norm.0": EMBEDDING_NORM,
            "hidden_norm.0": HIDDEN_NORM,
            "block.0": LAYER,
        },
    ),
    MtpLayout(  # DeepSeek-V3, GLM-4.5 and later
        r"model\.(?:language_model\.)?layers\.{layers}\.",
        {
            "eh_proj": PROJECTION,
            "enorm": EMBEDDING_NORM,
            "hnorm": HIDDEN_NORM,
            "shared_head.norm": FINAL_NORM,
            "shared_head.head": OUTPUT,
            "embed_tokens": EMBEDDING,
            "": LAYER,
        },
    ),
)


def mtp_layout(names: Iterable[str], layers: int) -> MtpLayout | None:
    """Return the layout of a checkpoint's MTP module; None: it has no module under known names.

    names: of all its tensors. layers: the number of the model's own layers.
    """
    known = set(names)
    for layout in _LAYOUTS:
        parts = {part[0] for name in known if (part := layout.part(name, layers)) is not None}
        if parts >= {PROJECTION, EMBEDDING_NORM, HIDDEN_NORM, LAYER}:
            return layout
    return None


def quantized_name(layout: MtpLayout, names: Iterable[str], layers: int) -> str | None:
    """Return the name of a tensor that shows that the module is quantised in a way that can't be read, or None."""
    own = (name for name in names if layout.part(name, layers) is not None)
    return next((name for name in own if _QUANTIZED.search(name.rpartition(".")[2])), None)
