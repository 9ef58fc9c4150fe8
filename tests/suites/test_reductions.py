"""No reduction in suites/ may lose a NaN among measured floats: those of suites/support/reduce.py keep it.

`bare_reductions` flags, outside of tests (tests of bumpgate, which does not measure floats itself):

* `max` and `min`, `statistics.median` and its like, unless every operand is visibly discrete;
* `sorted`, if one item of its result is used, or if its elements or key divide, contain a float literal or call
  `float`, `abs` or `.item`;
* functions that skip NaN by design: `nanmax`, `nan_to_num` and their like, and `equal_nan=True`;
* `assert not a < b`, which NaN passes, unless both sides are visibly discrete.

An expression is visibly discrete if it is an int or a str: a literal, a dimension (one capital letter), `len`, `int`,
`range`, `.shape`, `.numel()`, sums and collections of these. Other expressions that lose no measured NaN are listed
in ALLOWED with a reason. A two-sided comparison of measured floats is not flagged: `assert a < b` fails on NaN.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support.tree import ROOT

EXTREMES = {"max", "min"}
ORDER_STATISTICS = {"median", "median_low", "median_high", "quantiles"}
SKIP_NAN = {"nanmax", "nanmin", "nanmean", "nanmedian", "nansum", "nanquantile", "nan_to_num", "fmax", "fmin"}
DISCRETE_CALLS = {"len", "int", "str", "ord", "repr", "range", "round", "hash"}
DISCRETE_METHODS = {"numel", "bit_length", "index", "count", "dim", "size", "element_size", "keys", "split"}
DISCRETE_ATTRIBUTES = {"shape", "ndim", "name"}
PATHS = {"glob", "rglob", "iterdir"}

CLOCK = "differences of one clock are finite"
COUNTS = "counts and positions, which are ints"
# File -> the flagged text, or "*" for a file whose floats are all of one kind -> reason why no NaN can be lost.
ALLOWED: dict[str, dict[str, str]] = {
    "compile/test_moe_buckets.py": {"max(block.min_bucket, config.bucket(config.seq_len))": COUNTS},
    "distributed/ranks.py": {"max(0.0, end - time.monotonic())": CLOCK},
    "distributed/test_data_parallel.py": {"min((one['alone'] for one in ours))": COUNTS},
    "kernels/interpret/test_dsa_indexer.py": {
        "k.nan_to_num(9.0)": "the test's own input",
        "v.nan_to_num(9.0)": "the test's own input",
    },
    "kernels/interpret/test_grouped_gemm.py": {"*": COUNTS},
    "kernels/interpret/test_upstream_ssd.py": {"min(kernel.configs, key=size)": COUNTS},
    "kernels/peer_tuning.py": {"*": COUNTS},
    "kernels/test_causal_conv1d.py": {"max(t - 1, 0)": COUNTS},
    "kernels/test_dsa_indexer.py": {"*": "the oracle's own choice, by scores of random inputs"},
    "kernels/test_mla.py": {"min(last, T)": COUNTS},
    "kernels/test_model_shapes.py": {"min(calls, key=lambda call: call['seconds'])": CLOCK},
    "kernels/test_mutants.py": {"*": "NaN is replaced by infinity: both are rejected by every bound"},
    "launch/test_caches.py": {"min(FILES, sum(copied))": COUNTS},
    "launch/test_retry.py": {"max((steps for steps, count in found.items() if count == 2))": COUNTS},
    "launch/test_surgery.py": {"min(shape)": COUNTS},
    "model/programs.py": {"*": COUNTS},
    "model/test_engram.py": {"max(0, t - order + 1)": COUNTS},
    "model/test_mtp.py": {"max(graphs.values())": COUNTS, "min(graphs.values())": COUNTS},
    "model/test_relations.py": {"min(known.level[b, i], known.level[b, j])": COUNTS},
    "model/test_structure.py": {"min(int(ids[b, t, s]), sizes[s] - 1)": COUNTS},
    "release/test_release.py": {"median(times)": CLOCK},
    "support/gpu_memory.py": {"min(count, slots)": COUNTS},
    "support/gpu_state.py": {"*": "bytes, which are ints"},
    "support/anchor.py": {"*": CLOCK},
    "support/gpu_timing.py": {"*": CLOCK},
    "support/recording_driver.py": {"*": COUNTS},
    "support/reduce.py": {"*": "the reductions themselves: tests/suites/test_non_finite.py tests them"},
    "throughput/full_size_restarts.py": {"*": CLOCK},
    "throughput/test_train_step.py": {"*": CLOCK},
    "throughput/test_upstream.py": {"*": CLOCK},
    "xla/test_sharding.py": {"*": COUNTS},
    "xla/test_steps.py": {"*": COUNTS},
    "xla/test_trace.py": {"*": COUNTS},
    "xla/test_upstream.py": {"*": COUNTS},
}


def discrete(node: ast.expr) -> bool:
    """Whether an expression is visibly an int, a str or a collection of them."""
    match node:
        case ast.Constant():
            return isinstance(node.value, int | str)
        case ast.JoinedStr():
            return True
        case ast.Name():  # dimensions are capital letters
            return len(node.id) == 1 and node.id.isupper()
        case ast.Starred() | ast.Subscript() | ast.UnaryOp():
            return discrete(node.operand if isinstance(node, ast.UnaryOp) else node.value)
        case ast.BinOp():
            return not isinstance(node.op, ast.Div) and discrete(node.left) and discrete(node.right)
        case ast.IfExp():
            return discrete(node.body) and discrete(node.orelse)
        case ast.Tuple() | ast.List() | ast.Set():
            return all(map(discrete, node.elts))
        case ast.GeneratorExp() | ast.ListComp() | ast.SetComp():
            return discrete(node.elt)
        case ast.Attribute():
            return node.attr in DISCRETE_ATTRIBUTES
        case ast.Call(func=ast.Name(id="map"), args=[ast.Name(id=name), *_]):
            return name in DISCRETE_CALLS
        case ast.Call(func=ast.Name(id=name)):
            return name in DISCRETE_CALLS or (
                name in EXTREMES | {"sum", "abs"} and all(map(discrete, node.args))
            )
        case ast.Call(func=ast.Attribute(attr=name)):
            return name in DISCRETE_METHODS | PATHS
    return False


def visibly_float(node: ast.AST) -> bool:
    """Whether an expression divides, contains a float literal, or calls float, abs, .item or a function of math."""
    paths = any(isinstance(n, ast.Call) and _called(n) in PATHS for n in ast.walk(node))
    for part in [] if paths else ast.walk(node):
        match part:
            case ast.BinOp(op=ast.Div()) | ast.Constant(value=float()):
                return True
            case (
                ast.Call(func=ast.Name(id="float" | "abs"))
                | ast.Call(func=ast.Attribute(attr="item" | "tolist"))
            ):
                return True
            case ast.Call(func=ast.Attribute(value=ast.Name(id="math"))):
                return True
    return False


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def bare_reductions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of every reduction listed in the module docstring."""
    subscripts = [node for node in ast.walk(tree) if isinstance(node, ast.Subscript)]
    indexed = {id(node.value) for node in subscripts if not isinstance(node.slice, ast.Slice)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name, values = _called(node), [*node.args, *(k.value for k in node.keywords if k.arg == "key")]
            builtin = isinstance(node.func, ast.Name)
            bad = name in SKIP_NAN or any(k.arg == "equal_nan" for k in node.keywords)
            if (builtin and name in EXTREMES | ORDER_STATISTICS) or (
                _of_statistics(node) and name in ORDER_STATISTICS
            ):
                bad = not all(map(discrete, node.args))
            if name == "sorted" and builtin:
                bad = any(map(visibly_float, values)) or (
                    id(node) in indexed and not all(map(discrete, node.args))
                )
        elif isinstance(node, ast.Assert):
            bad = _passes_nan(node.test)
        else:
            continue
        if bad:
            yield node.lineno, ast.unparse(node)


def _of_statistics(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "statistics"


def _passes_nan(test: ast.expr) -> bool:
    match test:
        case ast.UnaryOp(
            op=ast.Not(), operand=ast.Compare(ops=[ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE()]) as c
        ):
            return not (discrete(c.left) and discrete(c.comparators[0]))
    return False


def findings() -> list[tuple[str, int, str]]:
    """Return file in suites/, line and text of every bare reduction, allowed or not."""
    files = [path for path in sorted((ROOT / "suites").rglob("*.py")) if ROOT / "tests" not in path.parents]
    return [
        (path.relative_to(ROOT / "suites").as_posix(), line, text)
        for path in files
        for line, text in bare_reductions(ast.parse(path.read_text()))
    ]


def test_measured_floats_are_reduced_by_reduce_only() -> None:
    bare = [
        f"suites/{file}:{line}: {text}: use suites.support.reduce"
        for file, line, text in findings()
        if not {"*", text} & ALLOWED.get(file, {}).keys()
    ]
    assert not bare, "\n".join(bare)


def test_each_allowed_reduction_exists() -> None:
    found = {(file, text) for file, _, text in findings()}
    files = {file for file, _ in found}
    stale = [
        (file, text)
        for file, texts in ALLOWED.items()
        for text in texts
        if (file, text) not in found and not (text == "*" and file in files)
    ]
    assert not stale


@pytest.mark.parametrize(
    "line",
    [
        "worst = max(errors)",
        "worst = max(worst, error)",
        "worst = max(abs(a - b) for a, b in zip(ours, theirs))",
        "worst = max(0, loss)",
        "worst = max(errors, key=errors.get)",
        "best = min(map(float, seconds))",
        "middle = statistics.median(ratios)",
        "middle = median(ratios)",
        "least = sorted(ratios)[0]",
        "ordered = sorted(float(loss) for loss in losses)",
        "falls = losses == sorted(abs(loss) for loss in losses)",
        "worst = torch.nanmax(errors)",
        "error = difference.nan_to_num()",
        "assert torch.allclose(a, b, equal_nan=True)",
        "assert not error > bound",
    ],
)
def test_bare_reduction_is_flagged(line: str) -> None:
    assert [*bare_reductions(ast.parse(line))]


@pytest.mark.parametrize(
    "line",
    [
        "worst = largest(errors)",
        "longest = max(len(name) for name in names)",
        "width = max(x.shape[0], 1)",
        "block = max(16, B * T)",
        "names = sorted(found)",
        "files = sorted((ROOT / 'suites').glob('*.py'))",
        "error = difference.abs().max()",
        "assert error < bound",
        "assert not found",
        "assert not len(found) > 2",
    ],
)
def test_other_code_is_not_flagged(line: str) -> None:
    assert not [*bare_reductions(ast.parse(line))]


def test_planted_reduction_in_a_row_is_flagged() -> None:
    """The former code of the ratio rows, for which an all-NaN gradient was PASS."""
    path = ROOT / "suites/support/comparison.py"
    text = path.read_text()
    assert text.count("largest(ratios.values())") == 1
    planted = text.replace("largest(ratios.values())", "max(ratios.values())")
    assert [t for _, t in bare_reductions(ast.parse(planted))] == ["max(ratios.values())"]
