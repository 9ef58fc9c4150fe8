"""Injected faults, each with the row that it must turn red.

A mutant is one exact edit of a copy of the tree. It is killed if the named row of the named test is red and its
message names the rule and the location. A surviving mutant means that a rule is not checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.tree import edit

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

    def unnamed(self, judged: dict[str, Any]) -> list[str]:
        """Return the words missing from the message of a judgement."""
        return [word for word in self.words if word not in message(judged)]


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
        "suites/numerics/test_moe_combine.py::test_error_before_the_cast[cancelling-cpu]",
        "numerics/moe_combine-cancelling/error_before_cast",
        ("C33", "kernels/moe_combine"),
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
                "@opaque_op()\ndef rms_norm_gated_bwd(",
                "def with_nan(x, *rest):\n"
                "    dx, *others = rms_norm_gated_backward_eager(x, *rest)\n"
                '    return dx, *(g * float("nan") if str(x.dtype) == "torch.bfloat16" else g for g in others)\n'
                "\n\n@opaque_op()\ndef rms_norm_gated_bwd(",
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
