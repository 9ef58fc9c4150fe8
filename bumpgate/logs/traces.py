"""Read torch's structured traces: what each process compiled, and where the ranks of one run compiled different things.

A process writes its trace into the folder that TORCH_TRACE names: one line with a JSON object for each event, and below
it the event's text, indented with a tab. A text belongs to one compilation, such as 0/1: the second one of frame 0.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from bumpgate.logs.families import LogsError

EVENT = re.compile(rb"V\d{4} [\d:.]+ \d+ [^\]]+\] (\{.*\})\s*$")
RANK = re.compile(r"rank[_-]?(\d+)")
# Name of an event or artifact -> the part of a compilation that its text is.
PARTS = {
    "dynamo_output_graph": "graph",
    "aot_forward_graph": "forward graph",
    "aot_backward_graph": "backward graph",
    "aot_inference_graph": "forward graph",
    "inductor_post_grad_graph": "graph after passes",
    "inductor_output_code": "code",
    "dynamo_cpp_guards_str": "guards",
    "dynamo_graph_break_reason": "breaks",
    "recompile_reasons": "recompiles",
}
# Kept when a function is traced again after a break; the other parts are then written anew.
KEPT = ("breaks", "recompiles")
COMPARED = (*KEPT, "guards", "graph")  # of ranks: what may cause the others first
# Texts that differ in any two processes: a device's number, an address or id, a place below a folder.
ELSEWHERE = (
    (re.compile(r"\bcuda:\d+|(?<=device=)\d+|(?<=index=)\d+"), "cuda:#"),
    (re.compile(r"0x[0-9a-f]{6,}|\b\d{10,}\b"), "ID"),
    (re.compile(r"(?:/[\w.+-]+)+/(?=[\w.-]+\.py\b)"), ""),
)


@dataclass
class Compilation:
    """One compilation. id: "0/1". function: "step (train.py:20)". parts: texts by PARTS, in order. metrics: torch's."""

    id: str
    function: str = "?"
    attempt: int = 0
    parts: dict[str, list[str]] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)

    def lines(self, part: str) -> list[str]:
        """The lines of a part as any process has them: a break without its stack, guards sorted, without their tree."""
        found = elsewhere("\n".join(self.parts.get(part, ()))).partition("\nTraceback")[0].splitlines()
        if part == "guards":
            leaves = (line.lstrip("| ")[3:] for line in found if re.match(r"[| ]*\+- [A-Z_]+:", line))
            return sorted(re.sub(r"\s+# \S+:\d+ in \w+$", "", line) for line in leaves)
        return [line.strip() for line in found if line.strip()]


@dataclass(frozen=True)
class Trace:
    """The compilations of one process. rank: None if neither its lines nor its name state one."""

    path: Path
    rank: int | None
    compilations: tuple[Compilation, ...]


def is_trace(path: Path) -> bool:
    """Whether a file begins as a structured trace does. Never raises."""
    try:
        with path.open("rb") as stream:
            return bool(EVENT.match(stream.readline(1 << 16)))
    except OSError:
        return False


def read_traces(folder: Path) -> list[Trace]:
    """Read the traces in a folder, in the order in which their processes began. Raises LogsError."""
    if not folder.is_dir():
        raise LogsError(f"{folder}: no such folder; name what TORCH_TRACE named")
    paths = (p for p in folder.rglob("*") if p.is_file() and is_trace(p))
    return [read_trace(path) for path in sorted(paths, key=lambda p: (p.open("rb").readline(40), p.name))]


def read_trace(path: Path) -> Trace:
    """Read the trace of one process. What a killed process did not finish is left out."""
    named = RANK.search(path.name)
    rank = int(named[1]) if named else None
    files: dict[int, str] = {}
    found: dict[str, Compilation] = {}
    with path.open("rb") as stream:
        for event, text in _events(stream):
            rank = event["rank"] if isinstance(event.get("rank"), int) else rank
            if isinstance(known := event.get("str"), list):
                files[known[1]] = Path(known[0]).name
            elif "frame_id" in event:
                id = f"{event['frame_id']}/{event.get('frame_compile_id')}"
                _add(found.setdefault(id, Compilation(id)), event, text, files)
    return Trace(path, rank, tuple(found.values()))


def _events(stream: IO[bytes]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the events that have a part of a compilation, each with its text."""
    event: dict[str, Any] | None = None
    text: list[str] = []
    for line in stream:
        if event is not None and line.startswith(b"\t"):
            text.append(line[1:].decode(errors="replace"))
            continue
        if event is not None:
            yield event, "".join(text)
        match = None if b'"chromium_event"' in line[:200] else EVENT.match(line)
        event, text = None, []
        with suppress(ValueError):  # the last line of a killed process
            event = json.loads(match[1]) if match else None
    if event is not None:
        yield event, "".join(text)


def _add(to: Compilation, event: dict[str, Any], text: str, files: dict[int, str]) -> None:
    if (attempt := event.get("attempt") or 0) > to.attempt:
        to.attempt = attempt
        to.parts = {name: texts for name, texts in to.parts.items() if name in KEPT}
    if start := event.get("dynamo_start"):
        last = (start.get("stack") or [{}])[-1]
        to.function = f"{last.get('name')} ({files.get(last.get('filename'), '?')}:{last.get('line')})"
    to.metrics |= event.get("compilation_metrics") or {}
    if why := (event.get("compilation_metrics") or {}).get("fail_reason"):
        to.parts.setdefault("breaks", []).append(f"{to.metrics.get('fail_type')}: {why}")
    artifact = event.get("artifact") or {}
    part = next((PARTS[name] for name in (*event, artifact.get("name")) if name in PARTS), None)
    if part and text not in to.parts.setdefault(part, []):
        to.parts[part].append(text)


def elsewhere(text: str) -> str:
    """Return a text without what differs in any two processes."""
    for pattern, to in ELSEWHERE:
        text = pattern.sub(to, text)
    return text


def divergences(traces: Sequence[Trace]) -> list[str]:
    """Name each rank that differs from most, and its first other compilation; of equal groups the first is most.

    `rank 1 compile 0/1: step (train.py:20): only this rank compiles it, because 0/0: flag == True`
    """
    ranks = {t.rank: {c.id: c for c in t.compilations if c.parts} for t in traces if t.rank is not None}
    found: dict[int, str] = {}
    for id in dict.fromkeys(id for compilations in ranks.values() for id in compilations):
        mine = {rank: ranks[rank].get(id) for rank in sorted(ranks)}
        keys = {rank: str(c and [c.function, *map(c.lines, COMPARED)]) for rank, c in mine.items()}
        most = Counter(keys.values()).most_common(1)[0][0]
        usual = next(c for rank, c in mine.items() if keys[rank] == most)
        for rank, c in mine.items():
            if keys[rank] != most:
                found.setdefault(rank, f"rank {rank} compile {id}: {_difference(c, usual)}")
    return [found[rank] for rank in sorted(found)]


def _difference(c: Compilation | None, usual: Compilation | None) -> str:
    """Say in one line how a compilation differs from the usual one: the earliest cause that is known."""
    if c is None or usual is None:
        one = c or usual
        assert one
        why = "".join(f", because {line}" for line in one.lines("recompiles")[:1])
        return f"{one.function}: only {'other ranks compile' if c is None else 'this rank compiles'} it{why}"
    if c.function != usual.function:
        return f"{c.function}, elsewhere {usual.function}"
    for part in COMPARED:
        mine, others = c.lines(part), usual.lines(part)
        only = next((line for line in mine if line not in others), "none")
        other = next((line for line in others if line not in mine), "none")
        if only != other:
            return f"{c.function}: {part} `{only}`, elsewhere `{other}`"
    return f"{c.function}: the same lines in another order"
