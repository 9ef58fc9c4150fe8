"""A lane that several files here run: two reviewed rows in two folders."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.project import GOOD, Project, counted


@pytest.fixture
def lane(project: Project) -> Project:
    """Its rows are `good` of suites/compile and `other` of suites/model. A complete run is green."""
    project.tests(GOOD)
    project.tests(GOOD.replace("good", "other"), "suites/model/test_b.py")
    other = replace(counted("x"), test="suites/model/test_b.py::test_other[cpu]")
    project.baseline(good=counted("test_good"), other=other)
    return project
