"""A warm restart, layer by layer: each cache's contribution is separated, and a lost layer is named.

Rule C18. Dynamo (traced again in each process), AOTAutograd, FX graphs, compiled code, autotuning. The restart of the
hybrid itself is in test_warm_restart.py; this is a program of two kernels, cheap enough to break in every layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from suites.cache.layers import cold_layers, compiled, new_code
from suites.support.child import ChildError
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted

pytestmark = [pytest.mark.cold, pytest.mark.long(110)]

# Instruction sets that Inductor generates code for: scalar only, and those that the lane itself uses.
CPUS = ("default", "avx2")
# Known defects, with the versions at both ends of each range on which they were reproduced.
UNKEYED_INSTRUCTIONS = "torch>=2.13,<2.16"  # seen on 2.13.0, 2.14.1, 2.15.0
TRUNCATED_OBJECTS = "torch>=2.13,<2.16"  # seen on 2.13.0, 2.14.1, 2.15.0


@pytest.fixture(scope="module")
def restart(lane: Lane, tmp_path_factory) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """A cache directory, its cold process, and its warm process, after which one layer after another is lost."""
    directory = tmp_path_factory.mktemp("inductor")
    cold = compiled(lane, directory, "same")["same"]
    return directory, cold, compiled(lane, directory, "same", "without_aotautograd", "without_fxgraph")


@lanes("cpu", "h200")
def test_every_cache_layer_is_warm_after_restart(lane: Lane, restart, row, canaries) -> None:
    canaries("cache", "autotune", "graphs")
    _, cold, warm = restart
    same, counts = warm["same"], warm["same"]["counts"]
    about = {"seen": (counts["aot_hit"] or 0) + (counts["fx_hit"] or 0), "unit": "layers", "rule": "C18"}
    about["evidence"] = [f"cold {cold['counts']}", f"warm {counts}"]
    case = f"cache/layers-{lane.name}"
    row.count(f"{case}/cold_after_restart", cold_layers(cold, same), expected=0, **about)
    # No restart saves Dynamo's tracing: guards and bytecode belong to the process.
    frames = cold["frames"]
    row.count(f"{case}/frames_traced_again", same["frames"], expected=frames, rule="C18", seen=frames)


@lanes("cpu", "h200")
def test_variables_exported_by_compilation(lane: Lane, restart, row) -> None:
    """Variables that children inherit, but not names that torch marks as its own (with "_").

    torch 2.9 to 2.11 for CUDA 13 sets Triton's ptxas to torch's own (pytorch#163988), which is in cache keys.
    """
    _, cold, _ = restart
    names = sorted(name for name in cold["exported"] if not name.startswith("_"))
    about = {"rule": "C18", "seen": cold["frames"], "per_build": True}
    about["evidence"] = [f"{name}={Path(cold['exported'][name]).name}" for name in names]
    found = " ".join(names) or "none"
    row.exact(f"cache/layers-{lane.name}/variables_exported", found, "variables", **about)


@lanes("cpu", "h200")
@planted("C18", "the directory of one layer deleted: AOTAutograd's, then the FX graphs'; the caches off")
def test_lost_cache_layer_is_reported(lane: Lane, restart) -> None:
    """An AOTAutograd entry refers to its FX graphs, so that losing those loses both."""
    directory, cold, warm = restart
    assert cold_layers(cold, warm["without_aotautograd"]) == ["aot"]
    assert cold_layers(cold, warm["without_fxgraph"]) == ["aot", "fx"]
    off = compiled(lane, directory, "same", TORCHINDUCTOR_FX_GRAPH_CACHE="0")["same"]
    assert not off["counts"]["aot_miss"], "a gate on misses alone would pass"
    assert not off["counts"]["fx_miss"]
    assert {"aot", "fx"} <= set(cold_layers(cold, off))


@lanes("cpu")
@planted("C18", "every shared object deleted; the same cache on a CPU of more instructions")
def test_hit_counters_despite_recompiled_code(lane: Lane, restart, tmp_path: Path, row, canaries) -> None:
    """Both cases read as hits in every counter while each kernel is compiled again: only the files show it."""
    canaries("cache")
    directory, cold, _ = restart
    for path in directory.rglob("*.so"):
        path.unlink()
    emptied = compiled(lane, directory, "same")["same"]
    assert cold_layers(cold, emptied) == ["code"]
    scalar, wide = (compiled(lane, tmp_path, "same", ATEN_CPU_CAPABILITY=isa)["same"] for isa in CPUS)
    assert cold_layers(scalar, wide) == ["code"]
    about = {"unit": "files", "at_least": 1, "rule": "C18", "seen": wide["counts"]["fx_hit"]}
    about["evidence"] = [f"counters {wide['counts']}"]
    built = len(new_code(scalar, wide))
    row.count("cache/layers-cpu/objects_built_for_another_cpu", built, **about)


@lanes("cpu")
def test_avx2_cache_on_cpu_without_avx2(lane: Lane, tmp_path: Path, row) -> None:
    """Defect present: a CPU without AVX2 finds the code that was generated for AVX2, and cannot compile it."""
    scalar, wide = CPUS
    cold = compiled(lane, tmp_path, "same", ATEN_CPU_CAPABILITY=wide)["same"]
    signature, _ = run_or_signature(lane, tmp_path, "CppCompileError", ATEN_CPU_CAPABILITY=scalar)
    if signature:  # the control: without the other CPU's cache the same program compiles
        assert compiled(lane, tmp_path / "own", "same", ATEN_CPU_CAPABILITY=scalar)["same"]["code"]
    reason = "the key of an FX graph lacks the CPU's vector instructions (torch/_inductor/codecache.py, "
    reason += "FxGraphHashDetails)"
    name = "avx2_code_found_without_avx2"
    report_defect(row, name, signature, UNKEYED_INSTRUCTIONS, reason, cold["code"])


@lanes("cpu")
def test_truncated_shared_object_is_rebuilt(lane: Lane, restart, row) -> None:
    """Defect present: a run that was killed while linking leaves an object on which every later run fails."""
    directory, cold, _ = restart
    truncated = list(directory.rglob("*.main.so"))
    for path in truncated:
        path.unlink()
        path.touch()
    signature, warm = run_or_signature(lane, directory, "file too short")
    assert signature or cold_layers(cold, warm) == ["code"]
    reason = "Inductor loads a shared object that exists, whole or not, and links under the final name "
    reason += "(torch/_inductor/codecache.py, CppCodeCache)"
    report_defect(row, "truncated_object_loaded", signature, TRUNCATED_OBJECTS, reason, truncated)


def run_or_signature(lane: Lane, directory: Path, words: str, **variables: str) -> tuple[str, dict[str, Any]]:
    """Return the last line of a run on this cache if it fails with `words`, "" if it succeeds; and its result.

    Raises ChildError on any other failure.
    """
    try:
        return "", compiled(lane, directory, "same", **variables)["same"]
    except ChildError as error:
        if words in str(error):
            return str(error), {}
        raise


def report_defect(row, name: str, signature: str, known_in: str, reason: str, seen: object) -> None:
    about = {"rule": "C18", "seen": seen, "evidence": [signature] if signature else []}
    row.defect(f"cache/layers-cpu/{name}", bool(signature), known_in=known_in, reason=reason, **about)
