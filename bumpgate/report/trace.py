"""Reads TORCH_TRACE output: compiled frames, seconds per phase, graph breaks, recompilations.

There is one file per process. A record is a glog line that ends in a JSON object, the envelope; its payload is in the
lines below, each after a tab. The envelope has the payload's MD5, which detects truncated files. Only the entries
named here are read; others are ignored. Format: torch/_logging/_internal.py,
TorchLogsFormatter and trace_structured (torch 2.13); tlparse reads the same files and shows all of them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bumpgate.core.errors import BumpgateError, one_line
from bumpgate.core.findings import ADDRESS
from bumpgate.core.rows import is_finite

FILES = "dedicated_log_torch_trace_*.log"
REMAKE = "write it again with: TORCH_TRACE=DIR python ..."
RECORD = re.compile(rb"[VIWEC]\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ [^\n]*?:\d+\] (\{.*\})\n?")
CACHE = re.compile(r"(fx_graph|aotautograd)_cache_(hit|miss|bypass)")
STATES = (("hit", "s"), ("miss", "es"), ("bypass", "es"))
CACHES = {"fx_graph": "FX graph", "aotautograd": "AOTAutograd"}
# Phase, its field in microseconds, and the older field in seconds that means the same.
PHASES = (
    ("Dynamo", "dynamo_cumulative_compile_time_us", "entire_frame_compile_time_s"),
    ("AOTAutograd", "aot_autograd_cumulative_compile_time_us", "backend_compile_time_s"),
    ("Inductor", "inductor_cumulative_compile_time_us", "inductor_compile_time_s"),
    ("code generation", "inductor_code_gen_cumulative_compile_time_us", "code_gen_time_s"),
    ("Triton", "triton_compile_time_us", ""),
    ("backward", "backward_cumulative_compile_time_us", ""),
    ("autotuning at run time", "runtime_triton_autotune_time_us", ""),
)
OUTER = ("Dynamo", "backward")
METRICS = ("compilation_metrics", "bwd_compilation_metrics")
# A break's message goes on with the stack, which has the same frames for every break of a file.
STACK = re.compile(r"^User code traceback:|^User stack trace:", re.MULTILINE)
MAX_LINES = 12


class TraceError(BumpgateError):
    """Folder without a trace, or an incomplete trace file."""


@dataclass(frozen=True)
class Cached:
    """One cache lookup. state: hit, miss or bypass. why: reason of a bypass. key: "" if there is none."""

    cache: str
    state: str
    key: str
    why: str


@dataclass
class Compiled:
    """One compile id: FRAME/N is the N-th compilation of a frame; "" for events outside of any.

    frame: file:line and name. attempts: how often the analysis began. guards: of the compiled code.
    seconds: by phase; a phase includes the phases that it calls. total: of the outermost phases.
    breaks: reason -> how often. recompiles: guard that an earlier compilation missed -> how often.
    failure: what ended the compilation, in one line.
    """

    id: str
    frame: str = ""
    attempts: int = 1
    guards: int = 0
    total: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    breaks: Counter[str] = field(default_factory=Counter)
    recompiles: Counter[str] = field(default_factory=Counter)
    caches: list[Cached] = field(default_factory=list)
    failure: str = ""


@dataclass(frozen=True)
class TraceFile:
    """Trace of one process. rank: None if it has none. torch: the version that wrote it; "" if not stated."""

    path: Path
    rank: int | None
    torch: str
    compiled: tuple[Compiled, ...]

    @property
    def label(self) -> str:
        return self.path.name if self.rank is None else f"rank {self.rank}: {self.path.name}"

    @property
    def summary(self) -> str:
        return ", ".join(filter(None, (self.torch and f"torch {self.torch}", summary(self.compiled))))


@dataclass(frozen=True)
class Trace:
    """files: by rank. pages: file name -> address of tlparse's page. note: why there is none, in one line."""

    files: tuple[TraceFile, ...]
    pages: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def summary(self) -> str:
        n = len(self.files)
        return f"{n} file{'s' * (n != 1)}: {summary([c for file in self.files for c in file.compiled])}"


def read(place: Path) -> tuple[TraceFile, ...]:
    """Read a folder that TORCH_TRACE named, or one of its files. Raises TraceError (one line)."""
    paths = [place] if place.is_file() else sorted(place.glob(FILES))
    if not paths:
        raise TraceError(f"{place}: no {FILES} in it; {REMAKE}")
    files = [read_file(path) for path in paths]
    return tuple(sorted(files, key=lambda f: (f.rank is None, f.rank or 0, f.path.name)))


def read_file(path: Path) -> TraceFile:
    """Read a file. Raises TraceError with the line at which it is cut off, changed, or not a trace."""
    names: dict[int, str] = {}
    found: dict[str, Compiled] = {}
    rank: Any = None
    torch = ""
    for line, envelope, payload in records(path):
        try:
            rank = envelope.get("rank", rank)
            if "str" in envelope:
                text, number = envelope["str"]
                names[int(number)] = str(text)
            elif _artifact(envelope) == "torch_version":
                torch = str(json.loads(payload)["pytorch_version"])
            else:
                _take(found, envelope, payload, names)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise TraceError(
                f"{path.name}: line {line}: an entry that torch did not write ({one_line(repr(error), 80)}); {REMAKE}"
            ) from None
    return TraceFile(path, rank if isinstance(rank, int) else None, torch, tuple(found.values()))


def records(path: Path) -> Iterator[tuple[int, dict[str, Any], str]]:
    """Yield (line, envelope, payload) of each record, in order; "" for no payload. Raises TraceError."""
    began, payload = 0, list[bytes]()
    envelope: dict[str, Any] | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if envelope is not None and line.startswith(b"\t"):
                payload.append(line[1:].removesuffix(b"\n"))
                continue
            if envelope is not None:
                yield began, envelope, _whole(path, began, envelope, payload)
            began, envelope, payload = number, _envelope(path, number, line), []
    if envelope is None:
        raise TraceError(f"{path.name}: empty, its process ended before it compiled anything; {REMAKE}")
    yield began, envelope, _whole(path, began, envelope, payload)


def summary(compiled: Sequence[Compiled]) -> str:
    """Format compilations, frames and seconds, then breaks, recompilations, caches and failures, in one line.

    A break in an inlined function has a reason for each frame that it broke.
    """
    own = [c for c in compiled if c.id]
    states = Counter(look.state for c in compiled for look in c.caches)
    counts = (
        (len(own), "compilation", "s"),
        (len({c.frame for c in own}), "frame", "s"),
        (sum(c.breaks.total() for c in compiled), "graph break reason", "s"),
        (sum(bool(c.recompiles) for c in compiled), "recompilation", "s"),
        *((states[state], f"cache {state}", plural) for state, plural in STATES),
        (sum(bool(c.failure) for c in compiled), "failure", "s"),
    )
    texts = [f"{n} {word}{plural * (n != 1)}" for n, word, plural in counts]
    return ", ".join([*texts[:2], f"{sum(c.total for c in compiled):.3g} s", *texts[2:]])


def _envelope(path: Path, number: int, line: bytes) -> dict[str, Any]:
    if not (found := RECORD.fullmatch(line)):
        raise TraceError(f"{path.name}: line {number} is cut off, or not a line of a trace; {REMAKE}")
    try:
        return dict(json.loads(found[1]))
    except (ValueError, RecursionError):
        raise TraceError(f"{path.name}: line {number} has a damaged envelope; {REMAKE}") from None


def _whole(path: Path, number: int, envelope: Mapping[str, Any], lines: Iterable[bytes]) -> str:
    """Return the payload after checking its digest against the envelope. Raises TraceError."""
    text, expected = b"\n".join(lines), envelope.get("has_payload")
    digest = hashlib.md5(text, usedforsecurity=False).hexdigest() if expected or text else None
    if digest != expected:
        raise TraceError(f"{path.name}: line {number}: its payload is cut off or changed; {REMAKE}")
    return text.decode("utf-8", "replace")


def _take(
    found: dict[str, Compiled], envelope: Mapping[str, Any], payload: str, names: Mapping[int, str]
) -> None:
    """Add one entry to its compilation; entries of a kind that is not shown are ignored."""
    name = _artifact(envelope)
    cached = CACHE.fullmatch(name)
    metrics = next(
        ((key, envelope[key]) for key in envelope if key.removesuffix("_runtime") in METRICS), None
    )
    shown = cached or metrics or "dynamo_start" in envelope
    if not (shown or name in ("dynamo_graph_break_reason", "recompile_reasons")):
        return
    id = _compile_id(envelope) or str((metrics and metrics[1].get("compile_id")) or "")
    one = found.setdefault(id, Compiled(id))
    one.attempts = max(one.attempts, 1 + int(envelope.get("attempt") or 0))
    if metrics:
        _measure(one, *metrics)
    elif cached:
        look = json.loads(payload)
        key, why = (str(look.get(f) or "") for f in ("key", "cache_bypass_reason"))
        one.caches.append(Cached(CACHES[cached[1]], cached[2], key, one_line(why)))
    elif name == "dynamo_graph_break_reason":
        one.breaks[_reason(payload)] += 1
    elif name == "recompile_reasons":
        one.recompiles.update(map(_reason, _texts(payload)))
    else:
        code = envelope["dynamo_start"]["stack"][-1]
        one.frame = f"{names.get(code['filename'], '?')}:{code['line']} {code['name']}"


def _measure(one: Compiled, kind: str, metrics: Mapping[str, Any]) -> None:
    """Add the seconds of one compilation's forward, backward or run time, and the other counters of torch."""
    backward = kind.startswith("bwd_")
    seconds = {}
    for phase, micro, plain in PHASES:
        value = metrics.get(micro)
        spent = value / 1e6 if is_finite(value) else metrics.get(plain)
        if is_finite(spent) and spent > 0:
            seconds[phase] = spent
            label = f"backward {phase}" if backward and phase != "backward" else phase
            one.seconds[label] = one.seconds.get(label, 0.0) + spent
    outer = metrics.get("duration_us")
    one.total += outer / 1e6 if is_finite(outer) else sum(seconds.get(phase, 0.0) for phase in OUTER)
    if is_finite(guards := metrics.get("guard_count")):
        one.guards = int(guards)
    if metrics.get("co_filename"):
        one.frame = f"{metrics['co_filename']}:{metrics.get('co_firstlineno')} {metrics.get('co_name')}"
    if metrics.get("fail_type"):
        one.failure = one_line(f"{metrics['fail_type']}: {metrics.get('fail_reason')}")


def _artifact(envelope: Mapping[str, Any]) -> str:
    artifact = envelope.get("artifact")
    return str(artifact.get("name", "")) if isinstance(artifact, dict) else ""


def _compile_id(envelope: Mapping[str, Any]) -> str:
    """Format an id like torch: frame/compilation, !n/frame/compilation under compiled autograd, or only !n."""
    ids = [envelope.get(name) for name in ("frame_id", "frame_compile_id")]
    frame = "/".join(str(id) for id in ids if id is not None)
    graph = envelope.get("compiled_autograd_id")
    return frame if graph is None else "/".join(filter(None, (f"!{graph}", frame)))


def _reason(text: str) -> str:
    """Strip stack and addresses from a message, so that equal reasons have equal texts."""
    lines = [line.rstrip() for line in STACK.split(text)[0].splitlines() if line.strip()]
    return ADDRESS.sub("0x_", "\n".join(lines[:MAX_LINES]))


def _texts(payload: str) -> list[str]:
    """Parse reasons: torch writes a single one as plain text and several as a JSON list."""
    try:
        texts = json.loads(payload)
    except ValueError:
        return [payload]
    return [str(text) for text in texts] if isinstance(texts, list) else [payload]
