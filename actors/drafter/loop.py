"""The drafter loop: draft ahead of the verdicts, up to a bounded lookahead, and offer new drafts.

It samples from its own distribution with the target's noise and parameters. With spare capacity it also drafts
alternatives, so that the draft after a disagreement is there before the disagreement is known (Kumar, Dao, May, arXiv
2603.03251).
"""

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from actors.drafter.chain import ChainStart, DraftChain
from actors.drafter.cross_tokenizer_row import CrossTokenizerRow
from actors.drafter.row import WIDTH, DrafterRow
from actors.drafter.tree import DraftNode
from actors.loops.adapters import AdapterTable
from actors.loops.mailbox import REPORT_PERIOD_S, Mailbox
from actors.loops.options import LoopOptions
from actors.loops.row import GrammarJobs, RowKey
from actors.loops.row_table import PREPARING_S, RowTable
from actors.loops.scheduler import Scheduler, Share
from actors.loops.thread import LoopTimes
from actors.loops.weights import WeightsSwitch
from actors.wire.link import Link
from actors.wire.messages import (
    Adapter,
    Admit,
    Advance,
    Message,
    Offer,
    ReplicaAddress,
    Report,
    ResendRequest,
    SetWeights,
)
from decoding.drafts.choices import RANKS, DraftChoice, RankCalibration
from decoding.drafts.verification import distributions, draw
from decoding.errors import ConfigError, UnavailableError
from decoding.sampling.batch import SamplingBatch
from decoding.sampling.history import Position
from decoding.sampling.noise import gumbel
from decoding.sampling.noise_keys import draft_stream, noise_key
from decoding.sampling.penalties import TextTables
from decoding.sampling.sampler import process, rank
from decoding.sampling.transfer import tensor_on
from decoding.tokenizers.draft_mapping import DraftMapping
from engine.model.ragged_batch import with_adapter
from engine.model.runner import Runner

Shares = Sequence[Share[DrafterRow]]

_log = logging.getLogger(__name__)


class Drafter:
    """One replica of a drafter model."""

    def __init__(
        self,
        runner: Runner,
        link: Link,
        options: LoopOptions = LoopOptions(),
        *,
        alternatives: int = WIDTH,
        ahead: bool = True,
    ) -> None:
        """
        alternatives: the most nodes per row and step when there is spare capacity; 0: the chain alone.
        ahead: draft ahead of the verdicts and offer at once; else one draft, offered when `offers` is called.

        Raises ConfigError if the model carries a state, and is to draft in other tokens or to learn while it serves.
        """
        if runner.has_states and (options.draft_mappings or options.adaptation):
            use = "learn while it serves" if options.adaptation else f"draft for {' and '.join(options.draft_mappings)}"
            raise ConfigError(f"{type(runner.model).__name__} carries a state from token to token, so it can't {use}")
        self.times = LoopTimes()
        self._runner = runner
        self._alternatives = 0 if runner.has_states else min(alternatives, WIDTH)
        self._ahead = ahead
        self._adaptation = options.adaptation
        self._link = link
        self._targets: Counter[str] = Counter()  # rows by connected target
        self._rows: RowTable[DrafterRow] = RowTable(runner.cache, removed=self._forget)
        self._adapters: AdapterTable[DrafterRow] = AdapterTable(runner.lora)
        self._unfit_adapters: set[Adapter | None] = set()
        self._chain = DraftChain(runner)
        self._chain.warm_up()
        self._mailbox = Mailbox(link, self._rows, self.times)
        chunk = min(options.prefill_chunk, runner.max_query)
        self._scheduler = Scheduler(self._rows, self.times, self._give_back, prefill_chunk=chunk)
        own = options.weights if options.weights is not None and options.weights.runner is runner else None
        self._weights = WeightsSwitch(self._rows, own, self._mailbox.report_soon, at_once=True)
        self._texts = TextTables()
        self._structures = GrammarJobs(options.load_tokenizer, runner.vocab_size)
        self._calibrations: defaultdict[Hashable, RankCalibration] = defaultdict(RankCalibration)
        self._draft_mappings = {name: mapping.to(runner.device) for name, mapping in options.draft_mappings.items()}

    def load(self, peer: str | None = None) -> Report:
        """Return the current load and the requests of `peer`. Any thread may call this."""
        return self._rows.report(peer)

    @property
    def drafting(self) -> bool:
        """Whether a row with all its text in the cache wants drafts."""
        return any(not row.prefilling for row in self._due())

    def offers(self, keys: Iterable[RowKey]) -> list[Offer]:
        """Return all drafts of some rows. For drafters that are not ahead of the verdicts."""
        rows = [row for row in map(self._rows.get, keys) if row is not None]
        drafted = [(row, list(row.tree.root.descendants())) for row in rows]
        offers = [row.offer(nodes) for row, nodes in drafted if nodes]
        return [offer for offer in offers if offer is not None]

    @property
    def reading(self) -> bool:
        """Whether a row has more text to read than its last token."""
        return any(row.pending > 1 for row in self._due())

    def turn(self, *, steps: bool = True, reads: bool = True) -> None:
        """Receive, schedule, run, take and offer, flush: one forward over whatever the rows have to run, or a chain.

        steps: whether to run rows that can draft, with at most WIDTH tokens to read. reads: those with more than one.
        """
        for peer, message in self._mailbox.receive(self.timeout_s()):
            self._handle(peer, message)
        self._weights.turn()
        for row, error in self._rows.make_ready():
            self._give_back(row, error)
        for row, error in self._adapters.make_ready():
            _log.warning("%s; its requests get drafts of the base", error)
            self._unfit_adapters.add(row.adapter)
            row.drop_adapter()
        due = [row for row in self._due() if (steps and not row.prefilling) or (reads and row.pending > 1)]
        for part in self._parts(self._scheduler.schedule(due)):
            self._scheduler.run(self._step, [share for share in part if share.row.slot >= 0])  # others were preempted
        if self._adaptation is not None:
            self._adaptation.turn(idle=len(self._rows) == 0)
            self._rows.adaptation = self._adaptation.state
        self._mailbox.close_turn()

    def timeout_s(self) -> float:
        """Return how long to wait for messages, in seconds; 0 while there is something to compute."""
        if self._due():
            return 0.0
        return PREPARING_S if self._rows.is_preparing else REPORT_PERIOD_S

    def forget_texts(self) -> None:
        """Compute all texts anew, because the weights have changed."""
        for row in list(self._rows):
            self._rows.preempt(row)
        self._runner.cache.forget_texts()

    def _due(self) -> list[DrafterRow]:
        """Return the rows that have something to run. There are alternatives only while no row is late."""
        late = any(row.ready and row.is_late() for row in self._rows)
        alternatives = self._alternatives if self._scheduler.speculates and not late else 0
        for row in self._rows:
            row.alternatives = alternatives
        return [row for row in self._rows if row.due]

    def _parts(self, shares: Shares) -> list[Shares]:
        """Divide the shares into forwards. Only a chain needs one without chunks of prompts."""
        steps = [share for share in shares if not share.is_chunk]
        if not self._chain_length([share.row for share in steps]):
            return [shares]
        return [[share for share in shares if share.is_chunk], steps]

    def _step(self, shares: Shares) -> None:
        began_s = time.perf_counter()
        prompt_tokens = sum(share.tokens for share in shares if share.is_chunk)
        rows = [share.row for share in shares]
        length = self._chain_length(rows)
        tokens = self._run_chains(rows, length) if length else self._run(shares)
        seconds = time.perf_counter() - began_s
        prompt_s = seconds * prompt_tokens / tokens
        self.times.prefill_s += prompt_s
        self.times.step_s += seconds - prompt_s
        self.times.steps += max(length, tokens > prompt_tokens)

    def _give_back(self, row: DrafterRow, error: BaseException) -> None:
        if self._rows.get(row.key) is row:
            self._mailbox.fail(row.key, row.admission, error)

    def _run(self, shares: Shares) -> int:
        """Run one forward, and offer the children of every node that was run. Returns the number of tokens."""
        rows = [share.row for share in shares]
        inputs = [run for row, limit, _ in shares for run in with_adapter(row.inputs(limit), row.adapter_slot or 0)]
        choices = iter(choose(rows, [row.nodes for row in rows], self._runner.logits(inputs), self._texts))
        for row in rows:
            self._offer(row, row.take(choices, self._calibrations[row.calibration_key]))
        return sum(len(run.tokens) for run in inputs)

    def _chain_length(self, rows: list[DrafterRow]) -> int:
        """Return how many tokens of each row to draft as one chain; 0: run a single step."""
        if not rows or any(row.alternatives for row in rows):
            return 0
        late = [row for row in rows if row.is_late()]
        wanted = max(row.missing_tokens() for row in late or rows)
        allowed = min(row.chain_length(wanted) for row in rows)
        return self._chain.length(allowed, max(row.tree.tip().position for row in rows) + allowed, len(rows))

    def _run_chains(self, rows: list[DrafterRow], length: int) -> int:
        """Run chains of `length` tokens, and offer every token. Returns the number of tokens."""
        own = [(row.inputs(WIDTH, following=length - 1), row.adapter_slot or 0) for row in rows]
        inputs = [run for runs, slot in own for run in with_adapter(runs, slot)]
        starts = [
            ChainStart(run, row.params, row.position_below(row.nodes[0])) for row, run in zip(rows, inputs, strict=True)
        ]
        for row, choices in zip(rows, self._chain.run(starts, length), strict=True):
            self._offer(row, row.extend(row.nodes[0], choices, self._calibrations[row.calibration_key]))
        return length * len(rows)

    def _offer(self, row: DrafterRow, children: list[DraftNode]) -> None:
        offer = row.offer(children) if children and self._ahead else None
        if offer is not None:
            self._mailbox.put(row.target, offer)

    def _handle(self, peer: str, message: Message) -> None:
        match message:
            case Advance():
                self._advance(peer, message)
            case Admit():
                try:
                    self._admit(peer, message)
                    for target, early in self._mailbox.take_early((peer, message.request_id)):
                        self._handle(target, early)
                except Exception as error:  # a tokenizer's fault, for example, must not end other requests
                    self._mailbox.fail((peer, message.request_id), message.admission, error)
            case SetWeights(weights, rest):
                self._weights.want(weights, rest)
            case Report():
                pass  # from a target
            case _:
                _log.warning("%s sent a %s, which is not for drafters", peer, type(message).__name__)

    def _admit(self, peer: str, message: Admit) -> None:
        row: DrafterRow | None
        draft_mapping = None if message.target is None else self._draft_mappings.get(message.target.model)
        if draft_mapping is not None:
            row = CrossTokenizerRow.make(peer, message, self._runner, draft_mapping, ahead=self._ahead)
        elif self._runner.can_run(message.tokens):
            row = DrafterRow(peer, message, self._runner, ahead=self._ahead)
        else:
            row = None
        if row is None:
            raise UnavailableError("the drafter has no room for the text, or not its tokens")
        if message.target is not None:
            self._connect(message.target)
        self._structures.begin(row)
        if self._runner.lora is None or row.adapter in self._unfit_adapters:
            row.drop_adapter()
        self._adapters.begin(row)
        self._rows.add(row)

    def _connect(self, target: ReplicaAddress) -> None:
        """Connect to a row's target. Disconnect from targets without rows, which may be gone."""
        if target.name not in self._targets:
            for name in [name for name, rows in self._targets.items() if rows == 0]:
                self._link.disconnect(name)
                del self._targets[name]
            self._link.connect(target)
        self._targets[target.name] += 1

    def _forget(self, row: DrafterRow) -> None:
        self._targets[row.target] -= 1
        self._adapters.release(row)
        if not len(self._rows):
            self._texts.clear()
        # Requests with a salt share nothing; the texts of other tokenizers would be learned as the target's.
        if self._adaptation is not None and not row.cache_salt and row.draft_mapping is None:
            self._adaptation.note(row.tokens, row.prompt_length, row.params)

    def _advance(self, peer: str, message: Advance) -> None:
        """Apply newly committed text; give the request back if that is impossible.

        An admission ends earlier ones. If its `Admit` was not overtaken but lost, the next reports lack the request.
        """
        key = message.coordinator, message.request_id
        row = self._rows.get(key)
        if row is None or message.admission > row.admission:
            self._rows.remove(key)
            self._mailbox.keep(key, peer, message)
        elif row.target == peer and message.admission == row.admission:
            try:
                self._commit(row, message)
            except Exception as error:  # as above
                self._mailbox.fail(key, message.admission, error)

    def _commit(self, row: DrafterRow, message: Advance) -> None:
        """Commit an update's tokens, or ask for those before it. Raises UnavailableError if the row can't follow."""
        if message.tokens and not row.can_read(message.tokens):
            raise UnavailableError("the text has tokens beyond the drafter's")
        known = row.acknowledged_length
        if message.base > known:  # an earlier update was lost, or sent before this drafter was connected
            self._mailbox.put(row.target, ResendRequest(message.request_id, message.coordinator, known))
        elif not message.tokens or message.base + len(message.tokens) > known:
            row.look_ahead(message.draft_length)
            row.commit(message, self._calibrations[row.calibration_key])


def choose(
    rows: Sequence[DrafterRow], nodes: Sequence[Sequence[DraftNode]], logits: Tensor, tables: TextTables
) -> list[DraftChoice]:
    """Return the tokens that may follow each node.

    nodes: each row's.
    logits: [N, V] after each node, row after row.
    tables: of the rows' texts.
    """
    owners = [row for row, row_nodes in zip(rows, nodes, strict=True) for _ in row_nodes]
    flat = [node for row_nodes in nodes for node in row_nodes]
    groups: dict[tuple[bool, DraftMapping | None], list[int]] = {}
    for index, row in enumerate(owners):
        groups.setdefault((row.params.rejects, row.draft_mapping), []).append(index)
    choices: dict[int, DraftChoice] = {}
    for (draws, draft_mapping), indices in groups.items():
        part = logits if len(indices) == len(flat) else logits[tensor_on(logits.device, indices, torch.int64)]
        group = [owners[index] for index in indices], [flat[index] for index in indices], part
        batch = _batch(*group, tables)
        group_choices = _draw(*group, batch) if draws else _rank(*group, batch, draft_mapping)
        choices.update(zip(indices, group_choices, strict=True))
    return [choices[index] for index in range(len(flat))]


def _rank(
    rows: Sequence[DrafterRow],
    nodes: Sequence[DraftNode],
    logits: Tensor,
    batch: SamplingBatch,
    draft_mapping: DraftMapping | None,
) -> list[DraftChoice]:
    """Rank tokens with the noise of the target's tokens with the same strings."""
    if draft_mapping is None:
        tokens, scores = rank(logits, batch, RANKS)  # [N, RANKS]
    else:
        plain = process(logits.float().masked_fill(draft_mapping.impossible, -math.inf), batch)  # [N, V]
        keys = [noise_key(row.params.seed, row.position_below(node)) for row, node in zip(rows, nodes, strict=True)]
        noisy = gumbel(tensor_on(logits.device, keys, torch.int32), draft_mapping.noise_ids).add_(plain)
        scores, tokens = torch.where((batch.temperature == 0)[:, None], plain, noisy).topk(RANKS, dim=-1)
    return [DraftChoice.ranked(*best) for best in zip(tokens.tolist(), scores.tolist(), strict=True)]


def _draw(
    rows: Sequence[DrafterRow], nodes: Sequence[DraftNode], logits: Tensor, batch: SamplingBatch
) -> list[DraftChoice]:
    processed = process(logits, batch)
    keys = [
        noise_key(row.params.seed, row.position_below(node), draft_stream(row.restarted_at))
        for row, node in zip(rows, nodes, strict=True)
    ]
    _, *drawn = draw(processed, tensor_on(logits.device, keys, torch.int32))
    return [DraftChoice(drawn_from.tokens[:1], 0.0, drawn_from) for drawn_from in distributions(*drawn)]


def _batch(rows: Sequence[DrafterRow], nodes: Sequence[DraftNode], logits: Tensor, tables: TextTables) -> SamplingBatch:
    paths = [[above.token for above in node.path()] for node in nodes]
    masks: list[Tensor | None] = []
    for row, pairs in groupby(zip(rows, paths, strict=True), key=itemgetter(0)):  # a row's nodes come one after another
        row_paths = [path for _, path in pairs]
        masks += [None] * len(row_paths) if row.structure is None else row.structure.masks_after(row_paths)
    positions = [Position(row.history, path, mask) for row, path, mask in zip(rows, paths, masks, strict=True)]
    return SamplingBatch.build(positions, logits.shape[-1], logits.device, tables)
