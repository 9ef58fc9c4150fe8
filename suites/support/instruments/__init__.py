"""Instruments that only this repository needs, next to bumpgate.plugin.instruments: together they hold every private
torch name that the project reads. Each has a canary (suites/support/canaries.py).
"""

from suites.support.instruments.inductor import (
    GraphSkips,
    autotune_count,
    autotuning,
    benchmark_one_choice,
    cuda_graph_skips,
    wrong_decomposition,
    wrong_lowering,
)
from suites.support.instruments.memory import peak_memory_bytes, peak_rss_bytes
from suites.support.instruments.phases import (
    Phases,
    compile_phases,
    cpu_seconds,
)
from suites.support.instruments.runtime import (
    EveryOperator,
    OpCheckError,
    OpDefinition,
    autograd_in_custom_op,
    disabled_functions,
    flight_record,
    foreach_add_,
    functional_all_reduce,
    functional_argument,
    group_class,
    group_timeout,
    grouped_mm,
    host_syncs,
    op_calls,
    op_definitions,
    present_activities,
    scan,
    synchronisations,
)

__all__ = [
    "EveryOperator",
    "GraphSkips",
    "OpCheckError",
    "OpDefinition",
    "Phases",
    "autograd_in_custom_op",
    "autotune_count",
    "autotuning",
    "benchmark_one_choice",
    "compile_phases",
    "cpu_seconds",
    "cuda_graph_skips",
    "disabled_functions",
    "flight_record",
    "foreach_add_",
    "functional_all_reduce",
    "functional_argument",
    "group_class",
    "group_timeout",
    "grouped_mm",
    "host_syncs",
    "op_calls",
    "op_definitions",
    "peak_memory_bytes",
    "peak_rss_bytes",
    "present_activities",
    "scan",
    "synchronisations",
    "wrong_decomposition",
    "wrong_lowering",
]
