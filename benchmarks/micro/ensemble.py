"""Cost of an ensemble relative to its slowest member, with and without speculation. See docs/ensembles.md.

python -m benchmarks.micro.ensemble                       # two inflated members of about 300 M parameters, greedy
python -m benchmarks.micro.ensemble --temperature 1
python -m benchmarks.micro.ensemble --blend contrastive   # the amateur is the bundled drafter, which also drafts

Every model has its own process and core; the process is stopped while others are timed.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from actors.coordinator.request import Endpoint
from benchmarks.models import held_out_tokens, inflated
from benchmarks.peers.consort import Consort, coordinating_processes
from benchmarks.peers.contestant import Record, Workload, interleave
from benchmarks.peers.replica import MeasuredReplica, Role, replica_process
from benchmarks.processes import Child
from benchmarks.report import ratios, write
from decoding.blending.params import BlendParams, EnsembleOptions
from engine.loading.checkpoint import ModelSpec
from evaluation.metrics import table

_PLAIN, _SPECULATED = "ensemble, plain", "ensemble, speculated"


def main() -> None:
    """Compare, print, and write JSON."""
    options = _options()
    texts = held_out_tokens(Path("models/target"))
    workload = Workload(texts, options.new_tokens, options.temperature, options.streams)
    with _running(options) as contestants:
        records = interleave(contestants, workload, repetitions=options.repetitions, prompts=options.prompts)
    findings = find(records)
    print(as_text(findings))
    write(options.output, "benchmarks.micro.ensemble", vars(options), contestants=findings)


@contextmanager
def _running(options: argparse.Namespace) -> Iterator[list[Consort]]:
    """Yield contestants: each member alone, then the ensemble, plain and with speculation."""
    folders = _folders(options.blend, bundled=options.bundled)
    children = {
        name: _child("both" if name == "drafter" else "target", name, folder, options)
        for name, folder in folders.items()
    }
    adaptive = _child("adaptive-target", "adaptive", folders["target"], options)
    drafter = children.get("drafter") or _child("drafter", "drafter", Path("models/drafter"), options)
    leader, *others = folders
    members = [children[name] for name in others]
    blend, most = EnsembleOptions(blend=BlendParams(kind=options.blend)), options.draft_length

    def endpoint(target: str, drafts: int = 0, members: Sequence[str] = ()) -> Endpoint:
        drafter = "drafter" if drafts else None
        return Endpoint("bench", target, drafter, drafts, lambda _: "", members=members, ensemble=blend)

    with coordinating_processes([*dict.fromkeys((*children.values(), adaptive, drafter))]) as service:
        contestants = {
            f"{name} alone": Consort("plain", endpoint(name), service, [child]) for name, child in children.items()
        }
        hosts = [children[leader], *members]
        contestants[_PLAIN] = Consort("plain", endpoint(leader, 0, others), service, hosts)
        hosts = [children[leader], drafter, *members]
        contestants[f"{_SPECULATED}, γ = {most}"] = Consort("fixed", endpoint(leader, most, others), service, hosts)
        hosts = [adaptive, drafter, *members]
        contestants[f"{_SPECULATED}, adaptive, γ ≤ {2 * most}"] = Consort(
            "adaptive", endpoint("adaptive", 2 * most, others), service, hosts
        )
        for name, contestant in contestants.items():
            contestant.name = name
        yield list(contestants.values())


def _folders(blend: str, *, bundled: bool) -> dict[str, Path]:
    """Return the members' checkpoints, the leader's first."""
    target = Path("models/target") if bundled else inflated()
    if blend == "contrastive":
        return {"target": target, "drafter": Path("models/drafter")}
    return {"target": target, "member": Path("models/member") if bundled else inflated("member")}


def _child(role: Role, name: str, folder: Path, options: argparse.Namespace) -> Child[MeasuredReplica]:
    dtype = "float32" if role in ("drafter", "both") else options.dtype
    slots = 2 * options.streams
    spec = ModelSpec(name=name, path=str(folder), dtype=dtype, device="cpu", slots=slots, max_length=512, threads=1)
    return replica_process(role, spec)


def find(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return for each contestant tokens/s, and ratios to the slowest member and to the plain ensemble."""
    by_name = {record.contestant.name: record for record in records}
    alone = [record.tokens_per_s for name, record in by_name.items() if name.endswith("alone")]
    slowest, plain = list(map(min, zip(*alone, strict=True))), by_name[_PLAIN]
    return [
        {
            "name": name,
            "tokens_per_s": record.tokens_per_s,
            "cost": ratios(slowest, record.tokens_per_s),
            "speed_up": ratios(record.tokens_per_s, plain.tokens_per_s),
            "acceptance_rate": record.activity.statistics.acceptance_rate,
            "tokens_per_step": record.activity.statistics.acceptance_length,
            "same_text": [text.answer for text in record.texts] == [text.answer for text in plain.texts],
        }
        for name, record in by_name.items()
    ]


def as_text(findings: Sequence[Mapping[str, Any]]) -> str:
    """Format medians, with the minimum and maximum over the repetitions."""
    head = ("", "tokens/s", "time / slowest alone", "× plain ensemble", "acc. rate", "tokens/step", "same text")
    rows = []
    for finding in findings:
        spreads = (finding[key] for key in ("tokens_per_s", "cost", "speed_up"))
        same = "–" if finding["name"].endswith("alone") else "yes" if finding["same_text"] else "no"
        rows.append(
            (
                finding["name"],
                *(f"{median(values):.2f} ({min(values):.2f}–{max(values):.2f})" for values in spreads),
                *(f"{finding['acceptance_rate']:.2f}", f"{finding['tokens_per_step']:.2f}", same),
            )
        )
    return table(head, rows)


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
