"""Capabilities are probed and versions parsed: rule C16, and what follows from a GPU's compute capability.

The version strings are from real wheels and from public reports about such builds.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from torch.torch_version import TorchVersion

from bumpgate.plugin.instruments import reset_dynamo
from launch import train
from launch.capabilities import (
    GRAPHS,
    Seen,
    at_least,
    chosen,
    low_precision,
    probe,
    probe_in_child,
)
from launch.children import places
from launch.contract import PATH, ContractError
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted

# Oldest first. A build from source and a nightly precede the release that they lead to.
LABELS = (
    "2.6.0+cu124",
    "2.9.0a0+git21fec65",
    "2.9.0",
    "2.10.0+cu128",
    "2.10.0+cu130",
    "2.11.0a0+git7afdbae",
    "2.12.0.dev20260304+cu130",
    "2.12.0+cu130",
    "2.13.0+cpu",
)


@pytest.fixture(scope="module")
def found() -> dict[str, Seen]:
    return probe_in_child()


@lanes("cpu", "h200")
@pytest.mark.parametrize("form", GRAPHS)
def test_opaque_kernel_forms_that_work_in_this_torch(lane: Lane, form: str, found, row) -> None:
    """The result belongs to this build: it may differ under another torch, so the row is informative."""
    seen = found[form]
    about = {"seen": sum(one.graphs for one in found.values()), "rule": "C16", "per_build": True}
    about["evidence"] = [f"{form}: {seen.graphs} graphs; {seen.why or 'forward and gradient as in eager'}"]
    row.exact(f"launch/capability-{form}/works", seen.works, "bool", **about)


@lanes("cpu", "h200")
def test_probe_agrees_in_child_and_process(lane: Lane, found, row) -> None:
    reset_dynamo()
    here = {form: probe(form) for form in GRAPHS}
    differ = [f for f in GRAPHS if (here[f].works, here[f].graphs) != (found[f].works, found[f].graphs)]
    about = {"expected": len(GRAPHS), "seen": found, "rule": "C16"}
    about["evidence"] = [f"{form}: here {here[form]}, in a child {found[form]}" for form in differ]
    row.count("launch/capability/forms_that_agree_in_a_child", len(GRAPHS) - len(differ), **about)


@lanes("cpu", "h200")
@planted("C16", "a kernel that computes something else each time")
def test_kernel_of_plain_operators_works_in_every_form(lane: Lane, found, row) -> None:
    """A negative result above thus concerns the kernel and the form. A nondeterministic kernel works in none."""
    reset_dynamo()
    plain = {form: probe(form, lambda x: x + x) for form in GRAPHS}
    about = {"expected": len(GRAPHS), "seen": sum(seen.graphs for seen in plain.values()), "rule": "C16"}
    about["evidence"] = [f"{form}: {seen.why}" for form, seen in plain.items() if not seen.works]
    works = sum(seen.works for seen in plain.values())
    row.count("launch/capability-plain_kernel/forms_that_work", works, **about)
    assert {form: seen.graphs for form, seen in plain.items()} == GRAPHS
    wrong = "compiled, it computes something else"
    # A fault under one of the two compiled programs alone.
    for factors in ([2, 2, 3, 3, 2, 2], [2, 2, 2, 2, 3, 3]):
        assert probe("disable", partial(_multiplied, iter(factors))).why == wrong, factors
    noise = random.Random(0)
    for form in ("custom_op", "disable"):
        assert probe(form, lambda x: x * noise.random()).why == wrong


def _multiplied(factors: Iterator[int], x: torch.Tensor) -> torch.Tensor:
    return x * next(factors)


@lanes("cpu")
def test_first_working_form_is_chosen(lane: Lane, found, row) -> None:
    """Our own kernels are custom ops: if the probe chose another form, they would have to change."""
    about = {"expected": "custom_op", "seen": sum(seen.works for seen in found.values()), "rule": "C16"}
    row.bound("launch/capability/chosen_form", chosen(found), "form", **about)
    no, yes = Seen(False, 0, "no"), Seen(True, 1)
    assert chosen({"custom_op": no, "allow_in_graph": yes, "disable": yes}) == "allow_in_graph"
    assert chosen({"custom_op": no, "allow_in_graph": no, "disable": yes}) == "disable"
    with pytest.raises(ContractError, match="works in none of the forms custom_op, allow_in_graph, disable"):
        chosen(dict.fromkeys(GRAPHS, no))


ODD = """
import json, os, sys
from launch.children import places
for form in sys.argv[1:]:
    if form == "allow_in_graph":
        os.abort()
    seen = {"works": True, "graphs": 1, "why": ""}
    where = places() | json.loads(os.environ["ELSEWHERE"])
    print(json.dumps({"form": form, "seen": seen, "places": where}), flush=True)
"""


@lanes("cpu")
@planted("C16", "a form that crashes the process, and a probe of another installation")
def test_crashed_or_foreign_probe_is_not_a_success(lane: Lane, monkeypatch, tmp_path) -> None:
    odd = (sys.executable, "-c", ODD)
    monkeypatch.setenv("ELSEWHERE", "{}")
    seen = probe_in_child(command=odd)
    assert [form for form in GRAPHS if seen[form].works] == ["custom_op", "disable"]
    assert seen["allow_in_graph"].why.startswith("probe: killed by SIGABRT")
    monkeypatch.setenv("ELSEWHERE", json.dumps({"checkout": str(tmp_path)}))
    with pytest.raises(ContractError, match="about another installation: the child's checkout"):
        probe_in_child(command=odd)
    assert os.path.isdir(places()["checkout"])


@lanes("cpu")
@planted("C16", "allow_in_graph by torch.__version__ >= '2.12', as text and as TorchVersion")
def test_version_labels_are_parsed_not_compared_as_text(lane: Lane, found, row) -> None:
    later = set(LABELS[LABELS.index("2.12.0.dev20260304+cu130") :])
    right = {label: label in later for label in LABELS}
    gate = {label: at_least(label, "2.12") for label in LABELS}
    about = {"expected": len(LABELS), "seen": sum(gate.values()), "rule": "C16"}
    about["evidence"] = [
        f"torch {torch.__version__} >= 2.12 is {at_least(torch.__version__, '2.12')}, "
        f"allow_in_graph works is {found['allow_in_graph'].works}"
    ]
    same = sum(gate[label] == right[label] for label in LABELS)
    row.count("launch/version_labels/of_a_release_or_later", same, **about)
    assert sorted(random.Random(0).sample(LABELS, len(LABELS)), key=Version) == list(LABELS)
    assert [str(Version(label)) for label in LABELS] == list(LABELS)
    assert {Version(label).local for label in LABELS} >= {"cu128", "cu130", "git21fec65", "git7afdbae", "cpu"}
    # The two version gates of the reports, on the same table.
    text = {label for label in LABELS if (label >= "2.12") != right[label]}
    typed = {label for label in LABELS if (TorchVersion(label) >= "2.12") != right[label]}
    assert text == {"2.6.0+cu124", "2.9.0a0+git21fec65", "2.9.0"}
    assert typed == {"2.12.0.dev20260304+cu130"}


AGES = [("cuda", 70), ("cuda", 75), ("cuda", 80), ("cuda", 90), ("cuda", 120), ("cpu", 0), ("xla", 0)]


def dtypes(switch: str | None, path: Path = PATH) -> list[str]:
    """Return the dtype of each of AGES, or "refused"."""
    given, found = {} if switch is None else {"BUMPGATE_FP16_BELOW_SM80": switch}, []
    for device, sm in AGES:
        try:
            found.append(low_precision(device, sm, given, path))
        except ContractError as error:
            words = r"sm_\d+ is below sm_80: .*; to use float16: BUMPGATE_FP16_BELOW_SM80=1"
            found.append("refused" if re.fullmatch(words, str(error)) else str(error))
    return found


@lanes("cpu")
@planted("C16", "bf16 on every GPU")
def test_low_precision_dtype_of_an_old_gpu(lane: Lane, tmp_path: Path, row) -> None:
    new = ["bfloat16"] * 5
    expected = {"1": ["float16"] * 2 + new, **dict.fromkeys((None, "", "0"), ["refused"] * 2 + new)}
    found = {switch: dtypes(switch) for switch in expected}
    right = sum(a == b for switch in expected for a, b in zip(found[switch], expected[switch]))
    about = {"expected": len(expected) * len(AGES), "rule": "C16"}
    seen = sum(line.count("float16") for line in found.values())
    row.count("launch/low_precision/decisions_as_the_rule", right, seen=seen, **about)
    careless = tmp_path / "contract.toml"
    careless.write_text(PATH.read_text().replace("minimum_sm = 80", "minimum_sm = 0"))
    assert dtypes("1", careless) == ["bfloat16"] * len(AGES) != expected["1"]


@lanes("cpu")
def test_training_in_bf16_asks_for_the_age_of_the_gpu(lane: Lane, launched, monkeypatch, capsys) -> None:
    """On an old GPU --dtype bfloat16 is refused before the model is built, or becomes float16 on request."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(train, "Trainer", lambda config, plan, *_, **__: pytest.fail(plan.dtype))
    options = ["--steps", "1", "--smoke", "--device", "cuda", "--dtype"]
    assert train.main([*options, "bfloat16"]) == 3
    assert "refused: sm_75 is below sm_80" in capsys.readouterr().err
    with pytest.raises(pytest.fail.Exception, match="float32"):
        train.main([*options, "float32"])
    monkeypatch.setenv("BUMPGATE_FP16_BELOW_SM80", "1")
    with pytest.raises(pytest.fail.Exception, match="float16"):
        train.main([*options, "bfloat16"])
