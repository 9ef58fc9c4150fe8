"""The code of one side: graphs, kernels, calls, guards, breaks and settings, from its traces and Triton's cache."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from bumpgate.core import kernel_code
from bumpgate.logs.traces import Compilation, elsewhere, read_traces
from bumpgate.report.diffs import Line, aligned

# Kinds of code, in the order of the page: what may explain the others first.
KINDS = {
    "breaks": "graph breaks",
    "recompiles": "recompilations",
    "decisions": "decisions",
    "graphs": "graphs",
    "kernels": "kernels",
    "calls": "calls and buffers",
    "resources": "Triton kernels by resources",
    "triton": "Triton kernels by code",
    "guards": "guards",
    "settings": "settings",
}
GRAPHS = ("graph", "forward graph", "backward graph", "graph after passes")
KERNEL = re.compile(
    r"^(\w+?)(?:_\d+)? = async_compile\.\w+\([^\n]*?r?'''\n(.*?)^'''", re.DOTALL | re.MULTILINE
)
# The wrapper's statements that allocate, call and free, without its imports and its benchmark.
CALLS = re.compile(r"^ *def call\(.*?\n(.*?)(?=^\S)", re.DOTALL | re.MULTILINE)
PASS = re.compile(r"AOT ID: \['\d+_(\w+)'\]")
OPS = re.compile(r"# .*Original ATen: \[(.*)\]")
CALL = re.compile(
    r"^\s*(?:\w+ = )?((?:extern_kernels|torch\.ops|cpp_|triton_|aten)[\w.]*?)(?:_\d+)?(?:\.run)?\("
)
# Of generated code: comments with line numbers, hashes of a build, places of headers.
NOISE = re.compile(
    r"^\s*# (?:.*File: |Topologically|Source node|AOT ID|kernel path).*$|\s+# \w+AOT(?:In|Out)put\(.*$"
    r"|'backend_hash': '\w+', |(?<=#include )\"[^\"]*\"|\s*loc\(.*\)$|^#loc.*$|^\s*\.(?:loc|file)\b.*$|^\s*//.*$",
    re.MULTILINE,
)
Texts = dict[str, list[str]]


@dataclass
class Code:
    """What one side compiled. kinds: kind of code -> name -> lines, in the order in which they were written."""

    kinds: dict[str, Texts] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    compilations: int = 0

    def add(self, kind: str, name: str, text: str | Iterable[str]) -> None:
        """Add a text; a name that exists already is numbered."""
        lines = NOISE.sub("", elsewhere(text)).splitlines() if isinstance(text, str) else text
        same = sum(known.partition(" #")[0] == name for known in self.kinds[kind])
        name = f"{name} #{same + 1}" if same else name
        self.kinds[kind][name] = [line.rstrip() for line in lines if line.strip(" ~^")]


def read_code(traces: Path, triton: Path, python: Path) -> Code:
    """Read what one side compiled.

    traces, triton: the folders that TORCH_TRACE and TRITON_CACHE_DIR named.
    python: of that side, whose cuobjdump reads its kernels.
    """
    code = Code()
    times: dict[str, int] = {}
    settings: dict[str, str] = {}
    for trace in read_traces(traces) if traces.is_dir() else ():
        for one in (c for c in trace.compilations if c.parts):
            code.compilations += 1
            number = times[one.function] = times.get(one.function, 0) + 1
            _add(code, one, one.function + f", compiled {number} times" * (number > 1))
            settings |= _settings(one.metrics)
    for name, value in sorted(settings.items()):
        code.add("settings", name, [value])
    for info in sorted(triton.rglob("*.json")):
        _add_kernel(code, info, python)
    for kind in ("resources", "triton"):  # variants of a kernel, in the order of their code
        found, code.kinds[kind] = code.kinds[kind], {}
        for name, lines in sorted((name.partition(" #")[0], lines) for name, lines in found.items()):
            code.add(kind, name, lines)
    return code


def _add(code: Code, one: Compilation, name: str) -> None:
    codes = one.parts.get("code", [])
    passes = [found[1] if (found := PASS.search(text)) else "" for text in codes]
    for part in GRAPHS:
        texts = one.parts.get(part, [])
        labels = passes if part == GRAPHS[-1] and len(passes) == len(texts) else [""] * len(texts)
        for label, text in zip(labels, texts):
            code.add("graphs", f"{name}, {f'{label} {part}'.strip()}", text)
    for label, text in zip(passes, codes):
        for kernel, body in KERNEL.findall(text):
            code.add("kernels", f"{name}, {label} {kernel}", body)
        calls = "\n".join(CALLS.findall(text))
        code.add("decisions", f"{name}, {label} operators and their calls", _decisions(calls))
        code.add("calls", f"{name}, {label} calls and buffers", calls)
    for part in ("breaks", "recompiles", "guards"):
        if part in one.parts:
            code.add(part, name, one.lines(part))


def _decisions(calls: str) -> Iterator[str]:
    """Yield `aten.mm -> extern_kernels.mm` for each call; a C++ kernel has its operators in its name alone."""
    ops = ""
    for line in calls.splitlines():
        if found := OPS.search(line):
            ops = f"{found[1]} -> "
        elif called := CALL.match(line):
            yield f"{ops}{called[1]}"
            ops = ""


def _settings(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return the compiler's settings by name, except places in this environment."""
    found: dict[str, str] = {}
    for kind in ("dynamo", "inductor", "functorch"):
        with suppress(ValueError):
            values = json.loads(metrics.get(f"{kind}_config") or "{}").items()
            found |= {f"{kind}.{name}": json.dumps(value) for name, value in values if "/" not in str(value)}
    return found


def _add_kernel(code: Code, info: Path, python: Path) -> None:
    """Add a kernel of Triton's cache: registers, spills, shared memory, and the texts of its stages."""
    meta: Any = None
    with suppress(ValueError):
        meta = json.loads(info.read_text(encoding="utf-8"))
    if not isinstance(meta, dict) or not {"name", "shared"} <= meta.keys():
        return
    resources = [f"num_warps {meta.get('num_warps')}", f"shared memory {meta['shared']} bytes"]
    if (cubin := info.with_suffix(".cubin")).is_file():
        own = python.parent.parent.glob("lib/python*/site-packages/triton/backends/nvidia/bin/cuobjdump")
        tool = next(map(str, own), None) or shutil.which("cuobjdump") or "false"
        done = subprocess.run([tool, "-res-usage", "-sass", str(cubin)], capture_output=True, text=True)
        binary = kernel_code.read_sass(done.stdout + done.stderr)
        resources += ["registers and spills: not read, cuobjdump failed"] if binary is None else [
            f"registers {binary.registers}", f"spilled {binary.spilled_bytes} bytes",
            *(f"{name} instructions {count}" for name, count in sorted(binary.classes().items())),
            f"all instructions {binary.instructions.total()}",
        ]  # fmt: skip
    code.add("resources", meta["name"], resources)
    for stage in ("ttir", "ptx"):
        if (text := info.with_suffix(f".{stage}")).is_file():
            code.add("triton", f"{meta['name']}.{stage}", text.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Change:
    """Texts with one difference. names: of the texts. only: the side that alone has them, "" if both have them."""

    kind: str
    names: tuple[str, ...]
    only: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Comparison:
    """What differs between two sides. counts: kind -> texts that differ, and texts in all."""

    changes: tuple[Change, ...]
    counts: Mapping[str, tuple[int, int]]


def compare(adopted: Code, candidate: Code) -> Comparison:
    """Compare two sides text by text. Texts with the same changed lines are one change.

    A setting that only one side knows is no difference: the other build does not read it.
    """
    changes: list[Change] = []
    counts = {}
    for kind in KINDS:
        old, new = adopted.kinds[kind], candidate.kinds[kind]
        pairs = [(a, b) for a, b in _pairs(old, new, kind) if kind != "settings" or (a and b)]
        found: dict[tuple[str, ...], Change] = {}
        for a, b in pairs:
            lines = tuple(aligned(old[a] if a else [], new[b] if b else []))
            only = "" if a and b else "adopted" if a else "candidate"
            if only or lines:
                key = (only, *(str(line) for line in lines if line.kind != " "))
                names = (*found[key].names, a or b or "") if key in found else (a or b or "",)
                found[key] = Change(kind, names, only, found[key].lines if key in found else lines)
        changes += sorted(found.values(), key=lambda change: bool(change.only))
        if pairs:
            counts[kind] = sum(len(change.names) for change in found.values()), len(pairs)
    return Comparison(tuple(changes), counts)


def _pairs(old: Texts, new: Texts, kind: str) -> Iterator[tuple[str | None, str | None]]:
    """Pair names in their order. As many kernels at one place of both sides are the same ones with other operators."""
    a, b = list(old), list(new)
    for tag, i, j, k, m in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag == "equal" or (kind == "kernels" and j - i == m - k):
            yield from zip(a[i:j], b[k:m])
        else:
            yield from ((name, None) for name in a[i:j])
            yield from ((None, name) for name in b[k:m])
