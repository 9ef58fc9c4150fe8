"""Tests that silently do not run in the candidate's environment: the gate does not adopt it.

Each one passes in the adopted set, and no row depends on it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gate_tree import COUNTS, Tree

pytestmark = pytest.mark.long(20)

CANDIDATE = 'CANDIDATE = os.environ.get("SIDE") == "candidate"\n'
LAW = '@lanes("cpu")\ndef test_law(lane):\n    pass\n'
# Name -> test module, text of suites/conftest.py.
LOST = {
    "a test that a version defines": (
        f"{CANDIDATE}if not CANDIDATE:\n    " + LAW.replace("\n", "\n    "),
        "",
    ),
    "a parameter that a version has": (
        f'{CANDIDATE}@lanes("cpu")\n@pytest.mark.parametrize("op", ["add"] if CANDIDATE else ["add", "mul"])\n'
        "def test_law(lane, op):\n    pass\n",
        "",
    ),
    "an xfail by version": (
        f'{CANDIDATE}@lanes("cpu")\ndef test_law(lane):\n    if CANDIDATE:\n        pytest.xfail("later")\n',
        "",
    ),
    "a skip by version": (
        f'{CANDIDATE}@lanes("cpu")\ndef test_law(lane):\n    if CANDIDATE:\n        pytest.skip("later")\n',
        "",
    ),
    "a file ignored by version": (
        LAW,
        f'{CANDIDATE}collect_ignore = ["compile/test_law.py"] if CANDIDATE else []\n',
    ),
    "a plugin of one environment": (
        LAW.replace("pass", 'assert os.environ.get("SIDE") != "candidate"'),
        f"{CANDIDATE}def pytest_collection_modifyitems(items):\n"
        '    items[:] = [item for item in items if not (CANDIDATE and "test_law" in item.nodeid)]\n',
    ),
    "a marker by version": (
        f"{CANDIDATE}def test_law():\n    pass\nif not CANDIDATE:\n    pytestmark = pytest.mark.cpu\n",
        "",
    ),
}


@pytest.mark.parametrize("what", LOST)
def test_candidate_without_a_test_is_not_adopted(tmp_path: Path, what: str) -> None:
    tree = Tree(tmp_path)
    module, conftest = LOST[what]
    tree.tests(module, "suites/compile/test_law.py")
    if conftest:
        tree.write("suites/conftest.py", f"import os\n{conftest}")
    found = tree.gate(*COUNTS)
    assert tree.raw()["decision"] != "ADOPT", found.out
    assert found.code != 0
    assert "test_law" in found.out
