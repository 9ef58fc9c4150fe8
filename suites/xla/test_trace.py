"""Programs that are traced and never executed: their number, their size, and the absence of host reads.

B batch, T tokens, C chunks, K edges.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch_xla
from torch import Tensor

from model import preset
from model.config import StructureConfig, TreeConfig
from model.features import Features
from model.relations import chunk_relations
from model.structure import StructureEmbedding, stack_columns
from model.tree_ffn import TreeFFN
from suites.model.programs import FEATURES, TOGETHER, VARIANTS, PresentOnly, levels_pair_by_pair, program
from suites.support.lanes import lanes
from suites.support.planted import planted
from suites.xla import support
from suites.xla.support import TOKENS, counted, graph_hash, instructions, on_device, refused_by_tracer

pytestmark = [lanes("v6e"), pytest.mark.usefixtures("lane")]


INSTRUMENTS = ("xla_fallbacks", "xla_programs", "xla_no_execution")
COLUMNS = 5


def traced(made: support.OnDevice, inputs: Features | None = None) -> tuple[str, list[Tensor]]:
    """Trace one forward and backward; return where it would have executed (empty: nowhere), loss and gradients."""
    ids, found = made.batch(), []

    def step() -> None:
        loss = made.model(ids, inputs)
        loss.backward()
        found.extend([loss.detach(), *(p.grad for p in made.model.parameters() if p.grad is not None)])
        made.model.zero_grad(set_to_none=True)

    return refused_by_tracer(step), found


@pytest.mark.parametrize("name", ["nam12", "nam52", "nam56r"])
def test_model_is_one_program_without_a_host_read(name: str, row, canaries) -> None:
    canaries(*INSTRUMENTS)
    made = on_device(preset(name, "narrow"))
    with counted() as counts:
        (where, results), (again, _) = traced(made), traced(made)
        first = graph_hash(results) if results else ""
        hashes = {first, graph_hash(traced(made)[1])} if results else set()
    shared = {"rule": "X3", "seen": len(results), "instruments": INSTRUMENTS}
    row.count(f"xla/{name}/host_reads", bool(where) + bool(again), expected=0, evidence=[where], **shared)
    fallbacks = sum(counts.fallbacks.values())
    row.count(f"xla/{name}/cpu_fallbacks", fallbacks, expected=0, evidence=[counts], **shared)
    row.count(f"xla/{name}/executions_of_a_trace", counts.executions, expected=0, **shared)
    row.count(f"xla/{name}/programs", hashes, expected=1, **shared)
    # The program as XLA receives it: an unrolled loop or an expanded op shows here first.
    row.count(f"xla/{name}/hlo_instructions", instructions(results), **shared)


def test_features_and_variants_trace_without_a_host_read(row, canaries) -> None:
    canaries(*INSTRUMENTS)
    reads, fallbacks, seen = [], [], 0
    for name, changes in (FEATURES | VARIANTS | TOGETHER).items():
        config = preset("nam12", "narrow", **changes)
        made = on_device(config)
        inputs = None
        if config.structure or config.ngram or config.tree:
            inputs = Features(*(t.to(torch_xla.device()) for t in program(config, 2, (0, TOKENS, 1))))
        with counted() as counts:
            where, results = traced(made, inputs)
        seen += bool(results)
        reads += [f"{name}: {where}"] if where else []
        fallbacks += [f"{name}: {dict(counts.fallbacks)}"] if counts.fallbacks else []
        # Pending tensors would be compiled by the next model's sync.
        del made, results
    shared = {"rule": "X3", "unit": "programs", "expected": 0, "seen": seen, "instruments": INSTRUMENTS}
    row.count("xla/variants/host_reads", reads, **shared)
    row.count("xla/variants/cpu_fallbacks", fallbacks, **shared)


def uniform_documents(doc_ids: Tensor, x: Tensor) -> Tensor:
    """Whether all tokens are of one document, evaluated on the host."""
    return x if (doc_ids == doc_ids[:, :1]).all().item() else x * 2


def has_boundaries(doc_ids: Tensor, x: Tensor) -> Tensor:
    """A branch on mask.any()."""
    return x * 2 if (doc_ids[:, 1:] != doc_ids[:, :-1]).any() else x


def pad_value(doc_ids: Tensor, x: Tensor) -> Tensor:
    """An id that no document has, computed from the maximum."""
    return x + F.pad(doc_ids, (0, 1), value=doc_ids.max().item() + 1)[:, :-1]


def aux_branch(doc_ids: Tensor, x: Tensor) -> Tensor:
    """An auxiliary loss added only if it is not zero."""
    return x + x.sum() if x.sum().abs() > 0 else x


@planted(
    "X3",
    "the four host reads of the incidents: .item() of a comparison, mask.any(), doc_ids.max().item(), abs() > 0",
)
@pytest.mark.parametrize("incident", [uniform_documents, has_boundaries, pad_value, aux_branch])
def test_host_read_of_each_incident_is_refused(incident: Callable[..., Tensor], row, canaries) -> None:
    canaries("xla_no_execution")
    made = on_device(preset("nam12", "narrow", layer_pattern="A", depth=1))
    doc_ids = torch.zeros(2, TOKENS, dtype=torch.int32, device=torch_xla.device())
    x = made.model.embedding(made.batch()).sum(-1)
    torch_xla.sync()
    where = refused_by_tracer(lambda: incident(doc_ids, x))
    row.bound(
        f"xla/incident-{incident.__name__}/refused", where.rpartition("/")[2].startswith("test_trace.py"),
        "bool", expected=True, seen=[where], rule="X3", evidence=[where], instruments=["xla_no_execution"],
    )  # fmt: skip


def presences() -> list[list[Tensor | None]]:
    """For each of the 2^5 sets of columns, return the columns (B,T), None for one that the data lacks."""
    column = torch.ones(2, TOKENS, dtype=torch.int64)
    return [[column if mask >> c & 1 else None for c in range(COLUMNS)] for mask in range(2**COLUMNS)]


@planted("X4", "a list of the components that are present: a program for each of the 32 presences")
def test_every_presence_of_columns_is_one_program(row, canaries) -> None:
    canaries("xla_programs")
    device = torch_xla.device()
    ours = StructureEmbedding(preset("nam12", "narrow", structure=StructureConfig(dim=16))).to(device)
    theirs = PresentOnly(range(8, 8 + COLUMNS)).to(device)
    like = torch.zeros(2, TOKENS)
    stacked = [stack_columns(columns, like).to(device) for columns in presences()]
    lists = [[c if c is None else c.to(device) for c in columns] for columns in presences()]
    torch_xla.sync()
    found = {graph_hash([ours(columns)]) for columns in stacked}
    by_list = {graph_hash([theirs(*columns)]) for columns in lists}
    assert len(by_list) == 2**COLUMNS
    shared = {"seen": len(by_list), "rule": "X4", "instruments": ["xla_programs"]}
    row.count("xla/structure/programs_of_32_presences", len(found), expected=1, **shared)


def chunk_tables(C: int) -> Features:
    config = preset("nam12", "narrow", tree=TreeConfig(chunks=C, edges=C, width=16))
    known = program(config, 2, (0, TOKENS, 1))
    return Features(*(t.to(torch_xla.device()) for t in known))


@planted("X5", "relations by a Python loop over pairs of chunks: the program grows with their number squared")
def test_program_size_does_not_grow_with_chunk_count(row, canaries) -> None:
    canaries(*INSTRUMENTS)
    device, sizes = torch_xla.device(), (4, 8, 16)
    relations, trees, loops, fallbacks = [], [], [], 0
    for C in sizes:
        tables = chunk_tables(C)
        config = preset("nam12", "narrow", tree=TreeConfig(chunks=C, edges=C, width=16))
        tree = TreeFFN(config).to(device)
        x = torch.ones(2, TOKENS, config.d_model).to(device).requires_grad_()
        doc_ids = torch.zeros(2, TOKENS, dtype=torch.int32).to(device)
        torch_xla.sync()
        _, start, end, level, preamble, calls, types = tables
        document = start.clamp(max=1)
        relations.append(instructions([chunk_relations(document, level, preamble, calls, types)]))
        with counted() as counts:
            y = tree(x, doc_ids, start, end, level, preamble, calls, types)
            (dx,) = torch.autograd.grad(y.square().sum(), x)
        fallbacks += sum(counts.fallbacks.values())
        trees.append(instructions([y, dx]))
        loops.append(instructions([levels_pair_by_pair(level)]))
    assert loops[1] > 3 * loops[0]
    assert loops[2] > 3 * loops[1]
    shared = {"expected": 0, "rule": "X5", "seen": min(relations), "instruments": INSTRUMENTS}
    shared["evidence"] = [f"C {sizes}", f"relations {relations}", f"TreeFFN {trees}", f"pair loop {loops}"]
    row.count("xla/relations/hlo_growth", max(relations) - min(relations), **shared)
    row.count("xla/tree_ffn/hlo_growth", max(trees) - min(trees), **shared)
    row.count("xla/tree_ffn/cpu_fallbacks", fallbacks, **shared)
