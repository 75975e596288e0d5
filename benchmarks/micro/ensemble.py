"""Cost of an ensemble relative to its slowest member, with and without speculation. See docs/ensembles.md.

python -m benchmarks.micro.ensemble                       # two inflated members of about 300 M parameters, greedy
python -m benchmarks.micro.ensemble --temperature 1
python -m benchmarks.micro.ensemble --blend contrastive   # the amateur is the bundled drafter, which also drafts

Every model has its own process and core; the process is stopped while others are timed.
"""

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

from transformers.utils import logging

from actors.coordinator.loop import Coordinator
from actors.coordinator.request import Endpoint
from actors.loops.thread import LoopThread
from actors.replica.replica import load_runner
from actors.wire.zmq_link import ConnectingZmqLink, ReplicaZmqLink
from benchmarks.comparison.interleave import Record, interleave
from benchmarks.inflated import inflated_target
from benchmarks.peers.hosts import Child, Host
from benchmarks.peers.ours import Ours
from benchmarks.peers.replica import MeasuredReplica, Role
from benchmarks.peers.workload import Workload
from benchmarks.report import table, write
from decoding.blending.params import BlendParams, EnsembleOptions
from engine.loading.checkpoint import ModelSpec
from engine.loading.settings import load_tokenizer
from training.heldout import read_prompts

_PLAIN, _SPECULATED = "ensemble, plain", "ensemble, speculated"


class EnsembleContestant(Ours):
    """An endpoint whose members run in other processes."""

    def __init__(self, name: str, *args: Any, members: Sequence[Host[MeasuredReplica]], **more: Any) -> None:
        super().__init__(*args, **more)
        self.name = name
        self.hosts = [*self.hosts, *members]
        self._members = members

    def _check_all(self) -> None:
        super()._check_all()
        for member in self._members:
            member.call(MeasuredReplica.check)


def main() -> None:
    """Compare, print, and write JSON."""
    options = _options()
    texts = [load_tokenizer("models/target")(text)["input_ids"] for text in read_prompts(Path("models/heldout.jsonl"))]
    workload = Workload(texts, options.new_tokens, options.temperature, options.streams)
    with _running(options) as contestants:
        records = interleave(contestants, workload, repetitions=options.repetitions, prompts=options.prompts)
    findings = _findings(records)
    print(_as_text(findings))
    write(options.output, "benchmarks.micro.ensemble", vars(options), contestants=findings)


@contextlib.contextmanager
def _running(options: argparse.Namespace) -> Iterator[list[Ours]]:
    """Yield contestants: each member alone, then the ensemble, plain and with speculation."""
    folders = _folders(options.blend, bundled=options.bundled)
    children = {
        name: _child("both" if name == "drafter" else "target", name, folder, options)
        for name, folder in folders.items()
    }
    adaptive = _child("adaptive-target", "adaptive", folders["target"], options)
    drafter = children.get("drafter") or _child("drafter", "drafter", Path("models/drafter"), options)
    with contextlib.ExitStack() as stack:
        addresses = []
        for child in dict.fromkeys((*children.values(), adaptive, drafter)):
            stack.enter_context(child)
            addresses.append(child.call(attrgetter("link.address")))
            child.pause()
        link = ConnectingZmqLink("bench")
        stack.callback(link.close)
        coordinator = Coordinator(link)
        thread = LoopThread("coordinator", coordinator.turn, link.wake)
        thread.start()
        stack.callback(thread.stop)
        coordinator.set_replicas(addresses)
        leader, *others = folders
        hosts = [children[name] for name in others]
        blend = EnsembleOptions(blend=BlendParams(kind=options.blend))

        def endpoint(target: str, drafts: int = 0, members: Sequence[str] = ()) -> Endpoint:
            drafter = "drafter" if drafts else None
            return Endpoint("bench", target, drafter, drafts, lambda _: "", members=members, ensemble=blend)

        make = partial(EnsembleContestant, coordinator=coordinator, check=thread.check)
        most = options.draft_length
        yield [
            *(
                make(f"{name} alone", "plain", endpoint(name), target=child, drafter=None, members=())
                for name, child in children.items()
            ),
            make(_PLAIN, "plain", endpoint(leader, 0, others), target=children[leader], drafter=None, members=hosts),
            make(
                f"{_SPECULATED}, γ = {most}",
                "fixed",
                endpoint(leader, most, others),
                target=children[leader],
                drafter=drafter,
                members=hosts,
            ),
            make(
                f"{_SPECULATED}, adaptive, γ ≤ {2 * most}",
                "adaptive",
                endpoint("adaptive", 2 * most, others),
                target=adaptive,
                drafter=drafter,
                members=hosts,
            ),
        ]


def _folders(blend: str, *, bundled: bool) -> dict[str, Path]:
    """Return the members' checkpoints, the leader's first."""
    if blend == "contrastive":
        return {"target": Path("models/target") if bundled else inflated_target(), "drafter": Path("models/drafter")}
    if bundled:
        return {"target": Path("models/target"), "member": Path("models/member")}
    output = Path(".bench/member-inflated")
    if not (output / "model.safetensors").exists():
        command = [sys.executable, "-m", "training", "inflate", "--source", "models/member", "--output", str(output)]
        subprocess.run([*command, "--force"], check=True)
    return {"target": inflated_target(), "member": output}


def _child(role: Role, name: str, folder: Path, options: argparse.Namespace) -> Child[MeasuredReplica]:
    dtype = "float32" if role in ("drafter", "both") else options.dtype
    spec = ModelSpec(
        name=name, path=str(folder), dtype=dtype, device="cpu", slots=2 * options.streams, max_length=512, threads=1
    )
    return Child(partial(_open, role, spec), threads=1)


def _open(role: Role, spec: ModelSpec) -> MeasuredReplica:
    logging.disable_progress_bar()
    link = ReplicaZmqLink(spec.name, "127.0.0.1")
    return MeasuredReplica(role, link, partial(load_runner, spec))


def _findings(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return for each contestant tokens/s, and ratios to the slowest member and to the plain ensemble."""
    by_name = {record.contestant.name: record for record in records}
    alone = [record for name, record in by_name.items() if name.endswith("alone")]
    slowest = [min(speeds) for speeds in zip(*(record.tokens_per_s for record in alone), strict=True)]
    plain = by_name[_PLAIN]
    return [
        {
            "name": name,
            "tokens_per_s": record.tokens_per_s,
            "cost": _ratio(slowest, record.tokens_per_s),
            "speed_up": _ratio(record.tokens_per_s, plain.tokens_per_s),
            "acceptance_rate": record.activity.statistics.acceptance_rate,
            "tokens_per_step": record.activity.statistics.acceptance_length,
            "same_text": [text.answer for text in record.texts] == [text.answer for text in plain.texts],
        }
        for name, record in by_name.items()
    ]


def _ratio(speeds: Sequence[float], others: Sequence[float]) -> list[float]:
    return [speed / other for speed, other in zip(speeds, others, strict=True)]


def _as_text(findings: Sequence[Mapping[str, Any]]) -> str:
    """Format medians, with the minimum and maximum over the repetitions."""
    head = ("", "tokens/s", "time / slowest alone", "× plain ensemble", "acc. rate", "tokens/step", "same text")
    rows = [
        (
            finding["name"],
            *(_spread(finding[key]) for key in ("tokens_per_s", "cost", "speed_up")),
            f"{finding['acceptance_rate']:.2f}",
            f"{finding['tokens_per_step']:.2f}",
            "–" if finding["name"].endswith("alone") else "yes" if finding["same_text"] else "no",
        )
        for finding in findings
    ]
    return table(head, rows)


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blend", default="mixture", choices=["mixture", "product", "vote", "contrastive"])
    parser.add_argument("--bundled", action="store_true", help="the bundled members of 5 M parameters, not inflated")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=2, help="new ones per repetition")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--output", type=Path, default=Path(".bench/ensemble.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
