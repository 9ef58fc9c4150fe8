"""Measure what compiling a training step costs against the depth of the model: a table and a plot of docs/scale.md.

python -m tools.scale_depth --write    # some minutes, on a quiet machine
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping

from tests.support.tree import ROOT
from tools.simulate_scale import DOCS, replaced

COMMAND = "python -m tools.scale_depth --write"
PLOT = ROOT / "docs" / "scale_depth.png"
MODEL = "nam52"
DEPTHS = (12, 52, 104)

# policy -> depth -> what a process measured.
Measured = dict[str, dict[int, Mapping[str, float]]]


def measure(policy: str, depth: int) -> dict[str, float]:
    """Compile and run one training step at this depth, as the lane's counts do: regions through Inductor.

    Return CPU seconds of this process and its compilers, graphs, guards and peak bytes of resident memory.
    """
    from suites.compile.test_policies import GENERATES
    from suites.support.hybrids import token_batch, watched_hybrid
    from suites.support.instruments import cpu_seconds, peak_rss_bytes

    with watched_hybrid(MODEL, policy, backend=GENERATES.get(policy, "eager"), depth=depth) as hybrid:
        ids = token_batch(hybrid.config, batch=2)
        before, started = cpu_seconds(), time.perf_counter()
        hybrid.compiled.warm_up(ids)
        used, wall = cpu_seconds() - before, time.perf_counter() - started
        report = hybrid.report()
    peak = peak_rss_bytes()
    return {
        "cpu_seconds": used,
        "wall_seconds": wall,
        "graphs": report.unique_graphs,
        "guards": report.guards,
        "peak_rss_bytes": peak,
    }


def in_child(policy: str, depth: int) -> dict[str, float]:
    """Measure in a new process with empty compile caches."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-m", "tools.scale_depth", "--child", policy, str(depth)],
            cwd=ROOT,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise SystemExit(f"{policy}, {depth} layers: exit {done.returncode}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def table(measured: Measured) -> str:
    """Format a row per policy and a column per depth: CPU seconds, graphs, guards, peak memory."""
    lines = [
        f"| policy | {' | '.join(f'{depth} layers' for depth in DEPTHS)} |",
        "|---" * (1 + len(DEPTHS)) + "|",
    ]
    for policy, by_depth in measured.items():
        cells = (
            f"{m['cpu_seconds']:.1f} s, {m['graphs']:.0f} graphs, {m['guards']:,.0f} guards,"
            f" {m['peak_rss_bytes'] / 2**20:,.0f} MiB"
            for m in by_depth.values()
        )
        lines.append(f"| {policy} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(measured: Measured) -> None:
    """Write the plot of CPU seconds against depth, a line per policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for policy, by_depth in measured.items():
        axes.plot([*by_depth], [m["cpu_seconds"] for m in by_depth.values()], marker="o", label=policy)
    axes.set(xlabel="layers", ylabel="CPU seconds of the first training step", xticks=DEPTHS, ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(PLOT, dpi=120)


def main() -> None:
    from launch.policies import POLICIES

    parser = argparse.ArgumentParser()
    parser.add_argument("--child", nargs=2, metavar=("POLICY", "DEPTH"))
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    if chosen.child:
        policy, depth = chosen.child
        print(json.dumps(measure(policy, int(depth))))
        return
    measured: Measured = {}
    for policy in POLICIES:
        measured[policy] = {depth: in_child(policy, depth) for depth in DEPTHS}
        print(table({policy: measured[policy]}).splitlines()[-1], flush=True)
    if chosen.write:
        DOCS.write_text(replaced(DOCS.read_text(), "depth", table(measured), COMMAND))
        plot(measured)


if __name__ == "__main__":
    main()
