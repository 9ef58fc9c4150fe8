"""Instruments for Dynamo, AOTAutograd and Inductor: every private torch name that this project reads.

Nothing here judges. If torch moves or renames a private counter, the instrument must fail rather than read 0: each is
checked by a canary (suites/support/canaries.py), a tiny program with a known count, before any row may rely on it.

What is counted, and how:
* graphs and compiled calls by our own backend wrapper, which is public and cannot be renamed away;
* graph breaks and recompiles from the structured trace log, because only it gives user call sites and guard
  reasons, and because `counters["graph_break"]` reads 0 when a break inside a loop makes Dynamo drop the frame;
* eager islands by the interpreter's profile hook, which also sees a block that silently fell back to eager.
"""

from suites.support.instruments.dynamo import (
    METRICS_KEPT,
    Break,
    DynamoReport,
    DynamoWatch,
    Graph,
    Recompile,
    disabled_functions,
    dynamo_config,
    eager_islands,
    forget_graphs,
    host_reads,
    operator_names,
    read_dynamo_config,
    require_dynamic_batch,
)
from suites.support.instruments.inductor import (
    CacheCounts,
    GraphSkips,
    InductorReport,
    autotune_count,
    autotuning,
    benchmark_one_choice,
    cache_counts,
    count_bytes_accessed,
    cuda_graph_skips,
    empty_cache,
    inductor_report,
    wrong_decomposition,
    wrong_lowering,
)
from suites.support.instruments.phases import Phases, compile_phases, cpu_seconds
from suites.support.instruments.runtime import (
    EveryOperator,
    OpCheckError,
    OpDefinition,
    flight_record,
    functional_all_reduce,
    group_timeout,
    grouped_mm,
    host_syncs,
    op_calls,
    op_definitions,
    synchronisations,
)
from suites.support.instruments.trace import trace_artifacts

__all__ = [
    "METRICS_KEPT",
    "Break",
    "CacheCounts",
    "DynamoReport",
    "DynamoWatch",
    "EveryOperator",
    "Graph",
    "GraphSkips",
    "InductorReport",
    "OpCheckError",
    "OpDefinition",
    "Phases",
    "Recompile",
    "autotune_count",
    "autotuning",
    "benchmark_one_choice",
    "cache_counts",
    "compile_phases",
    "count_bytes_accessed",
    "cpu_seconds",
    "cuda_graph_skips",
    "disabled_functions",
    "dynamo_config",
    "eager_islands",
    "empty_cache",
    "flight_record",
    "forget_graphs",
    "functional_all_reduce",
    "group_timeout",
    "grouped_mm",
    "host_reads",
    "host_syncs",
    "inductor_report",
    "op_calls",
    "op_definitions",
    "operator_names",
    "read_dynamo_config",
    "require_dynamic_batch",
    "synchronisations",
    "trace_artifacts",
    "wrong_decomposition",
    "wrong_lowering",
]
