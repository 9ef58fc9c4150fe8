"""Instruments for Dynamo and Inductor: private torch names that a row may rest on. Imports torch: import it in a test
or in a fixture.

Nothing here judges. If torch moves or renames a private counter, the instrument must fail rather than read 0: each is
checked by a canary (canaries.py), a tiny program with a known count, before any row may rely on it.

What is counted, and how:
* graphs and compiled calls by a backend wrapper, which is public and cannot be renamed away;
* graph breaks and recompiles from the structured trace log, because only it gives user call sites and guard
  reasons, and because `counters["graph_break"]` reads 0 when a break inside a loop makes Dynamo drop the frame;
* eager islands by the interpreter's profile hook, which also sees a block that silently fell back to eager.
"""

from bumpgate.plugin.instruments.dynamo import (
    METRICS_KEPT,
    Break,
    DynamoReport,
    DynamoWatch,
    Graph,
    Recompile,
    count_bytes_accessed,
    dynamo_config,
    eager_islands,
    host_reads,
    operator_names,
    read_dynamo_config,
    require_dynamic_batch,
    reset_dynamo,
    trace_artifacts,
)
from bumpgate.plugin.instruments.inductor import (
    CacheCounts,
    InductorReport,
    cache_counts,
    empty_cache,
    inductor_report,
    inductor_watch,
)

__all__ = [
    "METRICS_KEPT",
    "Break",
    "CacheCounts",
    "DynamoReport",
    "DynamoWatch",
    "Graph",
    "InductorReport",
    "Recompile",
    "cache_counts",
    "count_bytes_accessed",
    "dynamo_config",
    "eager_islands",
    "empty_cache",
    "host_reads",
    "inductor_report",
    "inductor_watch",
    "operator_names",
    "read_dynamo_config",
    "require_dynamic_batch",
    "reset_dynamo",
    "trace_artifacts",
]
