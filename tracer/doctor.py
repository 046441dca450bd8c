"""Examine a trace and say what is wrong with it, where, and whether it can be used."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from glob import escape
from io import TextIOWrapper
from pathlib import Path

import numpy as np

from tracer import consistency
from tracer.checks import MAX_PLACES, Finding, Place, lay_out
from tracer.exchange import put_back
from tracer.files import Footer, open_groups, read_footer, tables_in
from tracer.recover import partials_of, recover
from tracer.schema import SCHEMA_VERSION, TraceError, TraceMetadata, counted
from tracer.shipped import find_trace
from tracer.tables import KIND_NAMES, REQUIRED_TABLES, ContentHash, Group
from tracer.values import check_forwards, check_rows


@dataclass
class Report:
    """What a trace holds and what is wrong with it; `findings` holds each kind once, with its count."""

    path: Path
    metadata: TraceMetadata | None = None
    num_bytes: int = 0
    num_routing_bytes: int = 0
    num_passes: int = 0
    num_tokens: int = 0
    num_pairs: int = 0  # recorded (id, gate) pairs
    has_signals: bool = False
    requests: set[int] = field(default_factory=set)
    num_forwards: Counter[str] = field(default_factory=Counter)  # by kind
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """No error was found; there may be warnings."""
        return all(finding.severity != "error" for finding in self.findings)

    @property
    def bytes_per_pair(self) -> float:
        """Bytes of the routing table for each (id, gate) pair, keys included; NaN when there is none."""
        return self.num_routing_bytes / self.num_pairs if self.num_pairs else float("nan")

    def add(self, findings: Iterable[Finding]) -> None:
        """Add findings, one kind to the like."""
        for finding in findings:
            for index, known in enumerate(self.findings):
                if (known.severity, known.what, known.allowed) == (finding.severity, finding.what, finding.allowed):
                    places = (known.places + finding.places)[:MAX_PLACES]
                    count = known.count + finding.count
                    self.findings[index] = Finding(known.severity, known.what, known.allowed, count, places)
                    break
            else:
                self.findings.append(finding)

    def note(self, what: str, found: str, allowed: str, severity: str = "error") -> None:
        """Add a finding that has no place in the rows."""
        self.add([Finding(severity, what, allowed, 1, (Place(found),))])

    def count(self, group: Group) -> None:
        """Count the rows of a group."""
        self.num_passes += np.unique(group.forwards["pass_id"]).size
        self.num_tokens += group.tokens["position"].size
        self.num_pairs += group.routing["expert_ids"].size
        self.requests.update(group.forwards["request"].tolist())
        kinds = np.bincount(group.forwards["kind"], minlength=len(KIND_NAMES))
        self.num_forwards.update(dict(zip(KIND_NAMES, kinds.tolist(), strict=True)))

    def __str__(self) -> str:
        return "\n".join([*self._summary(), *self._listing("error"), *self._listing("warning"), self._verdict()])

    def _summary(self) -> list[str]:
        if self.metadata is None:
            return [f"{self.path}"]
        shape = self.metadata.shape
        kinds = ", ".join(f"{name} {count}" for name, count in self.num_forwards.items() if count) or "none"
        layers = f"{shape.num_layers} MoE layers ({shape.layer_ids[0]} to {shape.layer_ids[-1]})"
        return [
            f"{self.path}: {_size(self.num_bytes)}, trace format {SCHEMA_VERSION}, source {self.metadata.source}",
            f"  {len(self.requests)} requests, {self.num_passes} forward passes, {self.num_tokens} tokens over all of them",
            f"  {layers} of {shape.num_experts} experts, top {shape.top_k}",
            f"  forwards: {kinds}",
            f"  {self._gates()} pair in routing; {'with' if self.has_signals else 'without'} signals",
            *([f"  null throughout: {', '.join(sorted(self.metadata.lacks))}"] if self.metadata.lacks else []),
        ]

    def _gates(self) -> str:
        if self.metadata is None or "gates" in self.metadata.lacks:
            return f"no gates, {self.bytes_per_pair:.2f} bytes per (id, null)"
        return f"gates in {self.metadata.gate_dtype}, {self.bytes_per_pair:.2f} bytes per (id, gate)"

    def _listing(self, severity: str) -> list[str]:
        lines = []
        for finding in self.findings:
            if finding.severity == severity:
                times = f", {finding.count} times" if finding.count > 1 else ""
                allowed = f"; allowed is {finding.allowed}" if finding.allowed else ""
                lines.append(f"{severity}: {finding.what}{times}{allowed}")
                lines += [f"  {place}" for place in finding.places]
                if finding.count > len(finding.places):
                    lines.append(f"  and {finding.count - len(finding.places)} more")
        return lines

    def _verdict(self) -> str:
        severities = Counter(finding.severity for finding in self.findings)
        errors, warnings = (f"{counted(severities[s], 'kind')} of {s}" for s in ("error", "warning"))
        if severities["error"]:
            return f"NOT SOUND: {errors}, {warnings}; do not use this trace"
        return f"SOUND, with {warnings} to look at" if severities["warning"] else "SOUND"


def _size(num_bytes: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} bytes"


def check(path: Path | str) -> Report:
    """Examine a trace in bounded memory; whatever is wrong becomes a finding, and the rest is examined still."""
    report = Report(Path(path))
    directory = report.path
    put_back(directory)
    if not directory.is_dir():
        report.note("no trace", f"no directory {directory}", "a directory of Parquet tables")
        return report
    _check_leftovers(report)
    footers: dict[str, Footer] = {}
    for table in tables_in(directory):
        try:
            footers[table] = read_footer(directory, table)
        except TraceError as error:
            report.note("table that cannot be read", str(error), "whole tables of this format")
    report.num_bytes = sum(file.stat().st_size for file in directory.glob("*.parquet") if file.is_file())
    if footers and _footers_agree(report, footers) and all(table in footers for table in REQUIRED_TABLES):
        _check_groups(report, footers, whole=len(footers) == len(tables_in(directory)))
    return report


def _check_leftovers(report: Report) -> None:
    directory = report.path.absolute()
    for kind, advice in (("partial", "an interrupted writer"), ("replaced", "an interrupted overwrite")):
        for left in sorted(directory.parent.glob(f".{escape(directory.name)}.{kind}-*")):
            what = "leftover beside the trace"
            remedy = (
                f"`oled-doctor --recover {left}` may have requests of it; " if left in partials_of(directory) else ""
            )
            report.note(what, f"{left}, of {advice}", f"none; {remedy}delete it when no writer is at work", "warning")


def _footers_agree(report: Report, footers: dict[str, Footer]) -> bool:
    first = next(iter(footers.values()))
    report.metadata = first.metadata
    recovered = first.metadata.details.get("recovered")
    if isinstance(recovered, dict):
        begun = f"; requests {recovered['lost']} had begun" if recovered.get("lost") else ""
        found = f"{recovered.get('num_requests')} requests that were finished{begun}"
        report.note("recovered from a recording that was stopped", found, "a recording that came to its end", "warning")
    report.has_signals = "signals" in footers
    report.num_routing_bytes = footers["routing"].num_bytes if "routing" in footers else 0
    agree = True
    for table, footer in footers.items():
        same_counts = (footer.num_passes, footer.num_requests) == (first.num_passes, first.num_requests)
        if footer.metadata != first.metadata or not same_counts:
            report.note("metadata differs between tables", f"{table}.parquet", "one metadata in every file")
            agree = False
        elif len(footer.rows) != len(first.rows):
            found = f"{len(footer.rows)} in {table}.parquet, {len(first.rows)} elsewhere"
            report.note("row groups do not match", found, "equally many in every table")
            agree = False
    return agree


def _check_groups(report: Report, footers: dict[str, Footer], whole: bool) -> None:
    first = footers["forwards"]
    metadata = first.metadata
    content = ContentHash()
    order, continuity = consistency.Order(), consistency.Continuity(metadata)
    last_pass = -1
    with open_groups(report.path, metadata, signals="signals" in footers) as read:
        for index in range(len(first.rows)):
            try:
                group = read(index)
            except TraceError as error:
                report.note("row group that cannot be read", str(error), "whole row groups")
                order.forget()
                continuity.forget()
                whole = False
                continue
            for table, columns in group._asdict().items():
                if columns is not None:
                    content.update(table, columns)
            report.count(group)
            layout, findings = lay_out(group, metadata.shape, last_pass)
            report.add(findings)
            report.add(check_rows(group, metadata))
            if layout is None:
                order.forget()
                continuity.forget()
            else:
                report.add(check_forwards(group, layout.token_forward, metadata))
                report.add(consistency.check_repeated_rows(group, layout, metadata.shape))
                report.add(order.check(group))
                report.add(continuity.check(group))
            last_pass = max(last_pass, int(group.forwards["pass_id"].max(initial=-1)))
    if not whole:
        return
    for name, found, said in (
        ("passes", report.num_passes, first.num_passes),
        ("requests", len(report.requests), first.num_requests),
    ):
        if found != said:
            report.note(f"number of {name}", str(found), f"{said}, as the metadata says")
    if content.hexdigest() != metadata.content_hash:
        found = f"{content.hexdigest()[:16]}..., metadata says {metadata.content_hash[:16]}..."
        report.note("content hash does not match: values were changed after writing", found, "the hash of the values")


def main(arguments: Sequence[str] | None = None) -> int:
    """`oled-doctor TRACE...`: print a verdict on each trace.

    `oled-doctor --recover PARTIAL` makes a trace of what a stopped writer finished, and prints a verdict on that.

    Returns:
        2 where one of them is not there or cannot be recovered, else 1 where one has errors, else 0.
    """
    parser = argparse.ArgumentParser(prog="oled-doctor", description="Examine traces and say what is wrong with them.")
    parser.add_argument("trace", nargs="+", help="directory of a trace, or the name of a shipped one")
    parser.add_argument(
        "--recover",
        action="store_true",
        help="make a trace of the requests that a stopped writer finished: give the .NAME.partial-* that it left, or NAME",
    )
    parser.add_argument(
        "--output", type=Path, metavar="NAME", help="beside --recover: directory to be made, default NAME"
    )
    options = parser.parse_args(arguments)
    names = options.trace
    if options.output and not (options.recover and len(names) == 1):
        parser.error("--output stands beside --recover and one trace")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # paths and sources may hold what a terminal cannot show
    status = 0
    for name in names:
        try:
            if options.recover:
                recovered = recover(Path(name), options.output)
                print(recovered)
            report = check(recovered.path if options.recover else find_trace(name))
            print(report)
            status = max(status, 0 if report.ok else 1)
        except TraceError as error:
            left = [] if options.recover else partials_of(Path(name))
            hint = f"; `oled-doctor --recover {left[0]}` may have requests of it" if left else ""
            print(f"oled-doctor: error: {error}{hint}", file=sys.stderr)
            status = 2
        except KeyboardInterrupt:
            print("oled-doctor: interrupted", file=sys.stderr)
            return 130
    return status


if __name__ == "__main__":
    raise SystemExit(main())
