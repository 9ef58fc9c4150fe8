"""A miniature tree with a lane, a wheel index and gates of real environments, to adopt a candidate in.

torch 9.9.0 is adopted. Of the candidates, 9.10.0 only changes a value of one build, and another within its tolerance;
9.11.0 also changes a fact.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bumpgate.core.baseline import Baseline, Reviewed, save
from bumpgate.core.rows import read_record
from bumpgate.gate import evidence, state
from bumpgate.process.file_transaction import digest
from tests.support.builds import host_pytest
from tests.support.gate_tree import CANARY
from tests.support.local_index import LocalIndex, fake_wheel
from tests.support.project import Project, Result
from tests.support.reports import save_record

TEST = """
@lanes("cpu")
def test_facts(lane, row):
    import torch
    row.exact("release/facts/category", torch.CATEGORY, "text", seen=1, rule="R1")
    row.count("release/facts/graph_breaks", torch.BREAKS, unit="breaks", seen=1, rule="C6", expected=13)
    row.exact("release/facts/code_hash", torch.HASH, "text", seen=1, rule="R1", per_build=True)
    row.cost("release/facts/saved_bytes", torch.BYTES, "bytes", seen=1, rule="R1", tolerance=0.01)
"""
VERSIONS = {
    "9.9.0": {"CATEGORY": "DeprecationWarning", "BREAKS": 13, "HASH": "aaaa", "BYTES": 100},
    "9.10.0": {"CATEGORY": "DeprecationWarning", "BREAKS": 13, "HASH": "bbbb", "BYTES": 101},
    "9.11.0": {"CATEGORY": "FutureWarning", "BREAKS": 13, "HASH": "cccc", "BYTES": 100},
}
LANE = """# The reason for this lane.
device = "cpu"
canaries = "suites/canaries"
"""
NODE = "suites/release/test_facts.py::test_facts[cpu]"
CANARY_NODE = "suites/canaries/test_canaries.py::test_canary[cpu]"
WRITTEN = ("lanes/cpu/pylock.toml", "pyproject.toml", "baselines/cpu.json", "baselines/cpu.tests")
LOG = "baselines/adoptions.toml"


def torch_wheel(folder: Path, version: str, facts: dict[str, Any]) -> Path:
    body = "".join(f"{name} = {value!r}\n" for name, value in facts.items())
    files = {
        "torch/__init__.py": f"__version__ = {version!r}\n{body}",
        "torch/version.py": f"__version__ = {version!r}\ngit_version = 'f00d'\n",
    }
    return fake_wheel(folder, "torch", version, files)


def wheels(folder: Path) -> list[Path]:
    return [host_pytest(folder), *(torch_wheel(folder, *each) for each in VERSIONS.items())]


class AdoptTree(Project):
    """A project whose torch comes from an index, with a frozen lane. home: caches and the wheel store."""

    def __init__(self, root: Path, index: LocalIndex, home: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        super().__init__(root)
        shutil.rmtree(root / "torch")
        self._use(index, home)
        self.workers(0)
        text = (root / "pyproject.toml").read_text()
        text = re.sub(r"^suite = \[.*?^\]", 'suite = ["pytest==99.0"]', text, flags=re.MULTILINE | re.DOTALL)
        text = re.sub(
            r"^cpu = .*$", 'cpu = [{ include-group = "suite" }, "torch==9.9.0"]', text, flags=re.MULTILINE
        )
        self.write("pyproject.toml", text)
        self.write("lanes/cpu/lane.toml", LANE)
        self.tests(CANARY, "suites/canaries/test_canaries.py")
        self.tests(TEST, "suites/release/test_facts.py")
        facts = VERSIONS["9.9.0"]
        saved = Reviewed(facts["BYTES"], "bytes", "lower", 0.02, "widened by hand", NODE)
        rows = {
            "canaries/graphs/agrees": Reviewed(True, "bool", "derived", test=CANARY_NODE),
            "release/facts/category": Reviewed(facts["CATEGORY"], "text", "exact", test=NODE),
            "release/facts/graph_breaks": Reviewed(13, "breaks", "derived", test=NODE),
            "release/facts/code_hash": Reviewed(facts["HASH"], "text", "exact", test=NODE, per_build=True),
            "release/facts/saved_bytes": saved,
        }
        save(root / "baselines/cpu.json", Baseline("cpu", {"torch": "9.9.0", "triton": None}, rows))
        self.write("baselines/cpu.tests", f"{NODE}\n")  # the canary has never been reviewed
        frozen = self.bumpgate("freeze", "--lane", "cpu")
        assert frozen.code == 0, frozen.err

    def _use(self, index: LocalIndex, home: Path) -> None:
        self.env = {k: v for k, v in self.env.items() if not k.startswith(("PIP_", "UV_", "BUMPGATE_"))}
        self.env |= {"UV_DEFAULT_INDEX": index.url, "UV_HTTP_RETRIES": "0", "UV_CACHE_DIR": str(home / "uv")}
        self.env |= {"BUMPGATE_HOME": str(home / "bumpgate"), "TMPDIR": str(home)}
        self.home = home / "bumpgate"

    def copy(self, root: Path, home: Path) -> AdoptTree:
        """Copy the tree and its caches, for a test that changes them. Environments are not copied."""
        made = object.__new__(type(self))
        shutil.copytree(self.root, root, symlinks=True)
        made.root, made.processes, made.env = root, [], dict(self.env)
        for part in ("store", "adoptions"):
            if (self.home / part).exists():
                shutil.copytree(self.home / part, home / "bumpgate" / part)
        (home / "bumpgate").mkdir(parents=True, exist_ok=True)
        made.env |= {"BUMPGATE_HOME": str(home / "bumpgate"), "TMPDIR": str(home)}
        made.home = home / "bumpgate"
        return made

    def gate(self, version: str, *more: str) -> Result:
        """Gate a version, with results in a folder named after it."""
        return self.bumpgate(
            "gate", "--lane", "cpu", "--candidate", f"torch=={version}", "--out", version, *more
        )

    @property
    def journal(self) -> Path:
        """The place of the journal: the tree is outside of git."""
        return self.home / "trees" / digest(str(self.root.resolve()))[:16] / "adoption.json"

    def cut_short(self, text: str) -> None:
        """Leave a journal as a killed process does."""
        self.journal.parent.mkdir(parents=True, exist_ok=True)
        self.journal.write_text(text)

    def run_lane(self, gate: str) -> tuple[int, str]:
        """Run the lane in the candidate of a gate, as the adopted set: exit code and output."""
        command = [self.candidate(gate), "-m", "pytest", "-m", "cpu", "-n", "0", "--gate"]
        env = self.env | {"PYTHONPATH": str(self.root)}
        done = subprocess.run(command, cwd=self.root, env=env, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout

    def candidate(self, gate: str) -> str:
        raw = json.loads((self.root / gate / "gate.json").read_text())
        return str(raw["sides"]["candidate"]["python"])

    def refused(self, words: str, *args: str) -> None:
        """Run a command, which must be refused in one line and change nothing."""
        before = self.files()
        done = self.bumpgate(*args)
        assert (done.code, done.out, len(done.err.splitlines())) == (4, "", 1), done.out + done.err
        assert words in done.err
        assert self.files() == before

    def files(self) -> dict[str, bytes | None]:
        """Return the current content of the files that an adoption writes."""
        found = [self.root / path for path in (*WRITTEN, LOG)]
        return {p.name: p.read_bytes() if p.exists() else None for p in found}


Change = Callable[[dict[str, Any]], Any]


def rewrite_gate(folder: Path, gate: Change = bool, candidate: Change = bool) -> None:
    """Write what a gate with other evidence would have written, judged again. gate, candidate: change its JSON."""
    raw = json.loads((folder / "candidate.json").read_text())
    candidate(raw)
    save_record(folder / "candidate.json", raw)
    raw = json.loads((folder / state.NAME).read_text())
    gate(raw)
    found = state.parse(folder / state.NAME, raw)
    records = {name: read_record(folder / f"{name}.json") for name in found.sides}
    (evidence.judge(found, records) if found.finished else found).write(folder)


def patched(tree: AdoptTree, fault: str, *arguments: str) -> tuple[int, str, str]:
    """Run bumpgate with `fault` before each write of an adopted file, of which `seen` has the paths; code, out, err."""
    program = f"""
import os, signal, sys
real, seen = os.replace, []
def replace(a, b):
    if str(a).endswith(".adoption.partial"):
        seen.append(b)
        {fault}
    return real(a, b)
os.replace = replace
from bumpgate.cli import main; main()
"""
    process = tree.start("-c", program, *arguments)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err
