"""What a replica's loop is made with, beside its model and its link."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.loops.adaptation import Adaptation
from actors.loops.row import LoadTokenizer
from decoding.drafts.options import CorpusOptions
from decoding.tokenizers.draft_mapping import DraftMapping
from decoding.tokenizers.logits_mapping import LogitsMapping
from engine.heads.proposer import HeadProposer
from engine.loading.new_weights import ReplaceableWeights
from engine.model.runner import Runner


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoopOptions:
    """Options of one loop; each kind of loop reads those that concern it."""

    prefill_chunk: int = 256  # the most prompt tokens of a turn, beside the steps of the running rows
    load_tokenizer: LoadTokenizer | None = None  # for structured answers; None: they are refused
    adaptive: bool = True  # a target verifies as many draft tokens as pay; else as many as the request allows
    colocated: Runner | None = None  # of a drafter in a target's thread: at least as many slots as the target's
    heads: HeadProposer | None = None  # on a target's hidden states, which its runner keeps
    corpus: CorpusOptions | None = None  # of the texts that a target's requests draft from
    adaptation: Adaptation | None = None  # of a drafter that answers no requests
    weights: ReplaceableWeights | None = None  # of the loop's own model; None: they stay
    draft_mappings: Mapping[str, DraftMapping] = field(default_factory=dict)  # by target with another tokenizer
    logits_mappings: Mapping[str, LogitsMapping] = field(default_factory=dict)  # by leader with another tokenizer
