"""Injected faults, each with the row that it must turn red.

A mutant is one exact edit of a copy of the tree. It is killed if the named row of the named test is red and its
message names the rule and the location. A surviving mutant means that a rule is not checked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bumpgate.core.errors import one_line
from tests.support.tree import LaneRun, edit

# The verdicts that an injected fault must cause.
RED = ("REGRESSION", "CHANGED")


@dataclass(frozen=True)
class Mutant:
    """name; edits as (file, old, new), each `old` exactly once; the test to run; the row id; words of its message."""

    name: str
    edits: tuple[tuple[str, str, str], ...]
    test: str
    row: str
    words: tuple[str, ...]

    def plant(self, root: Path) -> None:
        """Edit a copy of the tree. Raises AssertionError if an edit no longer matches the code."""
        for file, old, new in self.edits:
            edit(root, file, old, new)

    def survived(self, run: LaneRun, unchanged: LaneRun | None = None) -> str:
        """Return why a run of the mutant's test in the edited tree is no kill; "" if its row is red.

        unchanged: a run of the same test without the fault, in which the row must be right.
        """
        if run.verdict(self.row) not in RED:
            return self._reason(run)
        if unchanged and not measured_right(unchanged, self.row):
            return f"without it {unchanged.verdict(self.row)}: {self._reason(unchanged)}"
        absent = [word for word in self.words if word not in message(run.rows[self.row])]
        return f"the message does not name {', '.join(absent)}" if absent else ""

    def also_red(self, run: LaneRun) -> tuple[str, ...]:
        """Return the other rows that are red in a run."""
        return tuple(sorted(row for row in run.rows if row != self.row and run.verdict(row) in RED))

    def _reason(self, run: LaneRun) -> str:
        """Return the reason of the row's verdict, or how a run without the row ended."""
        found = run.rows.get(self.row)
        return one_line(found["reason"] or "no fault found") if found else one_line(run.output[-300:])


def measured_right(run: LaneRun, row: str) -> bool:
    """Return whether a row was measured and is not red. A row that is not reviewed yet is MISSING."""
    judged = run.rows.get(row)
    good = judged is not None and judged["verdict"] in ("PASS", "WIN", "MISSING")
    return good and judged["row"]["value"] is not None


def message(judged: dict[str, Any]) -> str:
    """Return the message of a judgement from its record."""
    return " ".join([judged["row"]["rule"], judged["reason"], *judged["row"]["evidence"]])


MUTANTS = (
    Mutant(
        "int_overflow_counter",
        (
            (
                "model/moe.py",
                "        self.min_bucket = 0\n",
                "        self.min_bucket = 0\n        self.calls = 0\n",
            ),
            (
                "model/moe.py",
                "        u = rms_norm(x, self.eps)\n        routing =",
                "        self.calls += 1\n        u = rms_norm(x, self.eps)\n        routing =",
            ),
            ("model/moe.py", "return x + routed +", "return x + self.calls * 0.0 + routed +"),
        ),
        "suites/compile/test_recompiles.py::test_no_recompiles_in_seventy_steps[nam52-cpu]",
        "compile/nam52-regional-70_steps/graphs_after_warmup",
        ("C8", "model/moe.py", "calls"),
    ),
    Mutant(
        "item_in_attention",
        (
            (
                "model/attention.py",
                "        u = rms_norm(x, self.eps)\n",
                "        u = rms_norm(x, self.eps) * (1.0 + 0.0 * x[0, 0, 0].item())\n",
            ),
        ),
        "suites/compile/test_host_syncs.py::test_forward_reads_nothing_on_the_host[regional-cpu]",
        "compile/nam12-regional/host_syncs",
        ("C2", "model/attention.py", ".item()"),
    ),
    Mutant(
        "print_in_attention",
        (("model/attention.py", "        y = attention(", '        print(end="")\n        y = attention('),),
        "suites/compile/test_policies.py::test_counts[nam52-regional-cpu]",
        "compile/nam52-regional/graph_breaks",
        ("C6", "model/attention.py", "print"),
    ),
    Mutant(
        "bf16_combine",
        (
            (
                "kernels/moe_combine/eager.py",
                "    products = (outputs * weights.to(acc).reshape(-1, 1)).where(",
                "    products = (outputs.bfloat16() * weights.bfloat16().reshape(-1, 1)).to(acc).where(",
            ),
        ),
        "suites/kernels/test_moe_combine.py::test_error_before_the_cast_is_that_of_fp32[cancelling-cpu]",
        "kernels/moe_combine-cpu-cancelling/error_before_cast",
        ("C33",),
    ),
    Mutant(
        "nan_in_the_gradients_after_the_first",
        (
            (
                "kernels/rms_norm_gated/op.py",
                "    return rms_norm_gated_backward_eager(x, gate,",
                "    return with_nan(x, gate,",
            ),
            (
                "kernels/rms_norm_gated/op.py",
                '@opaque_op("kernels.rms_norm_gated.kernel:rms_norm_gated_bwd_kernel")\ndef rms_norm_gated_bwd(',
                "def with_nan(x, *rest):\n"
                "    dx, *others = rms_norm_gated_backward_eager(x, *rest)\n"
                '    return dx, *(g * float("nan") if str(x.dtype) == "torch.bfloat16" else g for g in others)\n'
                '\n\n@opaque_op("kernels.rms_norm_gated.kernel:rms_norm_gated_bwd_kernel")\ndef rms_norm_gated_bwd(',
            ),
        ),
        "suites/kernels/test_rms_norm_gated.py::test_error_is_at_most_that_of_the_plain_formula[bf16-cpu]",
        "kernels/rms_norm_gated-cpu-bf16/gradient_error_ratio",
        ("C36", "measured nan, not a finite number"),
    ),
    Mutant(
        "nan_in_a_weight_after_the_first_step",
        (
            (
                "launch/step.py",
                "    optimizer.step()\n",
                '    optimizer.step()\n    next(compiled.model.parameters()).data.fill_(float("nan"))\n',
            ),
        ),
        "suites/numerics/test_loss_explosion.py::test_loss_does_not_explode[cpu]",
        "numerics/cancelling_experts-four_steps/largest_loss",
        ("C33", "measured nan, not a finite number", "-> nan"),
    ),
    Mutant(
        "no_disable_of_m",
        (
            (
                "launch/policies.py",
                "        if letter in contract.disabled_letters(policy):\n            disable(block)\n",
                "        pass\n",
            ),
        ),
        "suites/compile/test_policies.py::test_counts[nam52-whole_disabled-cpu]",
        "compile/nam52-whole_disabled/graph_breaks",
        ("C6", "expected 13"),
    ),
    Mutant(
        "no_dynamic_mark",
        (
            (
                "launch/policies.py",
                "        torch._dynamo.maybe_mark_dynamic(tensor, self.contract.dynamic_dim)\n",
                "",
            ),
        ),
        "suites/compile/test_dynamic_batch.py::test_batch_is_dynamic_and_sequence_is_static[regional-2-cpu]",
        "compile/nam52-regional-warmup_2/graphs_over_batches_2_8_32",
        ("C12", "size mismatch at index 0", "model/"),
    ),
    Mutant(
        "automatic_dynamic_shapes",
        (
            (
                "launch/contract.toml",
                "[dynamo.automatic_dynamic_shapes]\nvalue = false",
                "[dynamo.automatic_dynamic_shapes]\nvalue = true",
            ),
        ),
        "suites/compile/test_contract.py::test_dynamo_options_at_first_backend_call[cpu]",
        "compile/contract/dynamo_lines_at_first_compile",
        ("C1", "automatic_dynamic_shapes"),
    ),
    Mutant(
        "undeclared_disable",
        (("model/moe.py", "    def route(self", "    @torch.compiler.disable\n    def route(self"),),
        "suites/compile/test_policies.py::test_counts[nam52-regional-cpu]",
        "compile/nam52-regional/graph_breaks",
        ("C6", "model/moe.py", "disable"),
    ),
    Mutant(
        "layer_number_at_limit_8",
        (
            (
                "model/moe.py",
                "        self.min_bucket = 0\n",
                "        self.min_bucket = 0\n        MoEBlock.n = self.layer = getattr(MoEBlock, 'n', 0) + 1\n",
            ),
            ("model/moe.py", "return x + routed +", "return x + self.layer * 0.0 + routed +"),
            (
                "launch/contract.toml",
                "[dynamo.recompile_limit]\nvalue = 64",
                "[dynamo.recompile_limit]\nvalue = 8",
            ),
        ),
        "suites/compile/test_policies.py::test_counts[nam56r-regional-cpu]",
        "compile/nam56r-regional/eager_islands",
        ("C6", "model/moe.py", "recompile_limit"),
    ),
    Mutant(
        "slice_to_largest_count",
        (
            (
                "launch/step.py",
                "    return 1 << (int(counts.max()) - 1).bit_length()\n",
                "    return int(counts.max())\n",
            ),
        ),
        "suites/compile/test_moe_buckets.py::test_moe_compiles_one_graph_per_bucket[cpu]",
        "compile/nam52-moe_buckets/graphs",
        ("C11", "min_bucket"),
    ),
)

_CPU = {mutant.name: mutant for mutant in MUTANTS}

# On an H200, by class (tools/on_device.py). Whole models without Inductor, so that a fault costs seconds: graph breaks
# and recompilations of Dynamo do not depend on the code generator.
ON_DEVICE = {
    "graph_break": replace(
        _CPU["print_in_attention"],
        test="suites/compile/test_policies.py::test_counts[nam52-per_block-h200]",
        row="compile/nam52-per_block/graph_breaks",
    ),
    "recompile": replace(
        _CPU["no_dynamic_mark"],
        test="suites/compile/test_dynamic_batch.py::test_batch_is_dynamic_and_sequence_is_static[regional-2-h200]",
        words=("C12", "model/"),
    ),
    # Not every layer: if a restart hits no cache at all, the row is INSTRUMENT.
    "cache": Mutant(
        "autograd_cache_cleared_at_start",
        (
            (
                "suites/cache/programs.py",
                '    if forget:\n        shutil.rmtree(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / forget)\n',
                '    directory = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])\n'
                '    shutil.rmtree(directory / (forget or "aotautograd"), ignore_errors=True)\n',
            ),
        ),
        "suites/cache/test_layers.py::test_every_cache_layer_is_warm_after_restart[h200]",
        "cache/layers-h200/cold_after_restart",
        ("C18", "aot"),
    ),
    "numerics": Mutant(
        "log2_of_e_to_five_digits",
        (
            (
                "kernels/rms_norm_gated/kernel.py",
                "from kernels._triton.constants import LOG2E\n",
                "LOG2E = tl.constexpr(1.4427)\n",
            ),
        ),
        "suites/kernels/test_rms_norm_gated.py::test_error_is_at_most_that_of_the_plain_formula[fp32-h200]",
        "kernels/rms_norm_gated-h200-fp32/forward_error_ratio",
        ("C36", "groups of"),
    ),
}

# Sleeps on the device for a number of milliseconds. _sleep counts clock cycles, whose rate varies with the power draw
# of the step: each sleep is calibrated by the events of the last one.
SLEEP = """
class Asleep:
    cycles, events = 10**6, []

    @classmethod
    def for_milliseconds(cls, milliseconds: float) -> None:
        if cls.events:
            start, end = cls.events
            end.synchronize()
            cls.cycles = int(cls.cycles * milliseconds / start.elapsed_time(end))
        cls.events = start, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        start.record()
        torch.cuda._sleep(cls.cycles)
        end.record()


"""


def slower_step(milliseconds: float) -> Mutant:
    """End a training step with a sleep on the device, so that host work cannot overlap it."""
    head = "def train_step("
    end = "    optimizer.zero_grad(set_to_none=True)\n    return loss.detach()\n"
    slept = end.replace("    return", f"    Asleep.for_milliseconds({milliseconds!r})\n    return")
    return Mutant(
        "sleep_in_the_step",
        (("launch/step.py", head, SLEEP.lstrip() + head), ("launch/step.py", end, slept)),
        "suites/throughput/test_full_size.py::test_full_size_training_step[nam56r-eager-h200]",
        "throughput/nam56r-full-eager-2x4096/tokens_per_second",
        ("C37",),
    )
