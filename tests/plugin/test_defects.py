"""Rows of known defects: the package and the versions that have the defect decide what is expected."""

from __future__ import annotations

from importlib import metadata

import pytest

from bumpgate.core.rows import read_record
from tests.support.project import Project

RUN = ("-m", "cpu", "-n", "0")
TEST = """
@lanes("cpu")
def test_defect(lane, row):
    row.defect("compile/known/defect", {present}, known_in="{known}", reason="see #1", witness=1, rule="C6")
"""


@pytest.mark.parametrize(
    ("known", "version", "limit"),
    [
        ("torch>=9.9,<10", "9.9.0", 1),  # the project's torch
        ("torch<9.9", "9.9.0", 0),
        ("packaging>=20,<1000", metadata.version("packaging"), 1),
        ("packaging<1", metadata.version("packaging"), 0),
    ],
)
def test_defect_is_expected_in_the_versions_of_its_package(
    project: Project, known: str, version: str, limit: int
) -> None:
    project.tests(TEST.format(present=True, known=known))
    project.pytest(*RUN)
    (judgement,) = read_record(project.root / "record.json").judgements
    assert (judgement.row.value, judgement.row.at_most) == (1, limit)
    assert judgement.row.evidence == (f"known in {known}, installed {version}: see #1",)
    assert (judgement.verdict.value == "REGRESSION") is (limit == 0)


@pytest.mark.parametrize("known", ["no-such-package<2", "torch=>2"])
def test_defect_of_no_known_package_is_an_error_of_the_test(project: Project, known: str) -> None:
    project.tests(TEST.format(present=True, known=known))
    assert f"known_in '{known}'" in project.pytest(*RUN).out


@pytest.mark.parametrize("present", ["0.5", "float('nan')", "2"])
def test_defect_that_is_neither_present_nor_absent(project: Project, present: str) -> None:
    """A share of wrong values is no answer: 0.5 would be read as absent."""
    project.tests(TEST.format(present=present, known="torch<9.9"))
    assert "present must be True or False, got" in project.pytest(*RUN).out
    assert project.record().judgements == ()
