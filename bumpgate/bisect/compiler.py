"""torch's own CompilerBisector on a failure: which backend, and which part of it, the failure needs.

It repeats the failing command in the environment of the bad version, with compiler backends from eager to inductor and
with parts of the first failing one turned off (torch/_inductor/compiler_bisector.py). Its answer is information only.
"""

from __future__ import annotations

import re
from pathlib import Path

from bumpgate.bisect.probe import fresh_caches
from bumpgate.core.errors import one_line
from bumpgate.env.build import Environment
from bumpgate.process.child import last_line, run_child
from bumpgate.process.runner import child_environment

MODULE = "torch._inductor.compiler_bisector"
DONE = re.compile(r"^Bisection complete: (?:BisectionResult\((.*)\)|(no issue found))$", re.MULTILINE)
FIELD = re.compile(r"(\w+)=(?:'([^']*)'|\"([^\"]*)\"|(\d+))")
LOG = "compiler.log"


def compiler_part(
    environment: Environment, command: str, root: Path | None, out: Path, minutes: float
) -> str:
    """Return the answer of CompilerBisector in one line, or why there is none.

    command: fails in the environment; for /bin/sh. root: the source tree it runs in; None for the current folder.
    """
    log = out / LOG
    line = [str(environment.python), "-m", MODULE, "run", "/bin/sh", "-c", command]
    with fresh_caches(out) as caches:
        # A result of a run with another backend must not be loaded.
        extra = {**caches, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        variables = child_environment(environment.python, root, extra)
        code, seconds = run_child(line, root or Path.cwd(), variables, 60 * minutes, log)
    if seconds >= 60 * minutes:
        return f"no answer within {minutes:g} minutes (log: {log})"
    found = DONE.search(log.read_text(encoding="utf-8", errors="replace"))
    if code or not found:
        return f"no answer: {MODULE} ended with {code} ({last_line(log)}; log: {log})"
    return _described({m[1]: m[2] or m[3] or m[4] for m in FIELD.finditer(found[1] or "")})


def _described(fields: dict[str, str]) -> str:
    backend, subsystem = fields.get("backend", ""), fields.get("subsystem", "")
    if not backend:
        return "the command passes with every backend: torch.compile alone does not show the failure"
    if not subsystem:
        other = ": Dynamo, or nothing that is compiled" if backend == "eager" else ", in none of its parts"
        return f"backend {backend}{other}"
    number = f", application {fields['bisect_number']}" if fields.get("bisect_number", "0") != "0" else ""
    info = (
        f": {one_line(fields['debug_info'], 120)}" if fields.get("debug_info", subsystem) != subsystem else ""
    )
    return f"backend {backend}, subsystem {subsystem}{number}{info}"
