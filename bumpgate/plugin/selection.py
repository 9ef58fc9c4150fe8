"""The tests that a run selects, and whether they are the whole lane."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from difflib import get_close_matches
from fnmatch import fnmatch
from glob import glob
from pathlib import Path
from typing import Any

import pytest

from bumpgate.core.errors import one_line, text_lines
from bumpgate.core.lanes import is_foreign
from bumpgate.core.outcomes import contains
from bumpgate.plugin.lanes import lane_of, lanes_of, unknown_marker
from bumpgate.plugin.reports import last_line


class Selection:
    """Selected lane tests; rejects those of another lane than the one that -m names.

    Registered in the controller and in every worker, which reports to the controller when it ends.
    dropped: collected tests of the lane that are neither selected nor deselected: a plugin or conftest removed them.
    worker_deaths: the last line of each worker that crashed. collected: any process has collected its tests.
    skipped: modules that were skipped, with the reason. xdist reports only one of those that the same line skips.
    near: markers of collected tests that read like the lane.
    """

    def __init__(self, config: pytest.Config, lane: str | None) -> None:
        self.config = config
        self.lane = lane
        self.selected: set[str] = set()
        self.deselected: set[str] = set()
        self.dropped: set[str] = set()
        self.items: list[pytest.Item] = []
        self.skipped: dict[str, str] = {}
        self.near: set[str] = set()
        self.refusal: str | None = None
        self.collected = False
        self.worker_deaths: list[str] = []

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Give the marker of the lane to tests below its `tests` that have no lane's marker."""
        self.items.append(item)
        marks = {mark.name for mark in item.iter_markers()} - {self.lane}
        self.near.update(get_close_matches(self.lane or "", marks, 1))
        if self.lane and contains(lanes_of(self.config)[self.lane], item.nodeid) and lane_of(item) is None:
            item.add_marker(self.lane)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.deselected.update(item.nodeid for item in items if self.lane and lane_of(item) == self.lane)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.skipped[report.nodeid] = last_line(report)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        guest = not self.lane and not self.config.option.gate and is_foreign(self.config.rootpath)
        if (
            guest
            or self.config.option.collectonly
            or all(lane_of(item) in (None, self.lane) for item in items)
        ):
            return
        refusal = f"pick a lane: pytest -m {' | '.join(lanes_of(self.config))}"
        if not hasattr(self.config, "workeroutput"):
            raise pytest.UsageError(refusal)
        # A worker cannot stop the run: it selects nothing and reports the reason to the controller.
        self.refusal = refusal
        items.clear()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.selected.update(item.nodeid for item in session.items)
        of_lane = {item.nodeid for item in self.items if self.lane and lane_of(item) == self.lane}
        self.dropped = of_lane - self.selected - self.deselected
        self.items.clear()
        self.collected = True

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.selected.update(ids)
        self.collected = True

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        if error:  # a traceback of the worker, or a line of xdist if it left none
            lines = text_lines(str(error))
            self.worker_deaths.append(one_line(lines[-1]) if lines else "no reason given")
        found = getattr(node, "workeroutput", {}).get("selection", (None, (), (), {}, ()))
        refusal, deselected, dropped, skipped, near = found
        self.near.update(near)
        self.refusal = refusal or self.refusal
        self.deselected.update(deselected)
        self.dropped.update(dropped)
        self.skipped.update(skipped)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self.config, "workeroutput"):
            left_out = sorted(self.deselected), sorted(self.dropped)
            self.config.workeroutput["selection"] = (self.refusal, *left_out, self.skipped, [*self.near])
        elif self.refusal:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
        terminalreporter.ensure_newline()
        if self.refusal:
            terminalreporter.write_line(f"ERROR: {self.refusal}")
        elif exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and not self.lane:
            if why := unknown_marker(self.config):
                terminalreporter.write_line(f"bumpgate: {why}")
        elif exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            base = self.config.option.affected
            of_base = f"no test of the lane depends on what changed since {base}"
            why = of_base if base else "nothing was selected"
            typo = (
                f"; the marker {min(self.near)!r} is no lane: did you mean {self.lane}?" if self.near else ""
            )
            terminalreporter.write_line(f"{why}: not green{typo}")


def default_paths(config: pytest.Config) -> list[str]:
    """Return the paths that pytest collects without an argument, as it does: of patterns, those that exist."""
    found = (
        glob(pattern, root_dir=config.rootpath, recursive=True) for pattern in config.getini("testpaths")
    )
    return [path for paths in found for path in paths] or ["."]


def selects_all(config: pytest.Config, lane: str, folders: Collection[str]) -> bool:
    """Whether this command line selects every test of the lane below these folders."""
    return not _is_narrowed(config, lane) and not _folders_outside(config, folders)


def collects(config: pytest.Config, file: str) -> bool:
    """Whether this command line collects a test file completely: each of its tests is selected or deselected."""
    o = config.option
    if o.ignore or o.ignore_glob or getattr(o, "lf", False) or _other_collection(config):
        return False
    return any((config.rootpath / file).resolve().is_relative_to(place) for place in _selected(config))


def leaves_out(config: pytest.Config, lane: str, folders: Collection[str]) -> bool:
    """Whether this command line leaves out tests of the lane below these folders, also tests without a row.

    If it selects paths, each test file outside of them that contains the lane's name counts as left out.
    """
    if _is_narrowed(config, lane):
        return True
    names, selected = config.getini("python_files"), _selected(config)
    word = re.compile(rf"\b{re.escape(lane)}\b")
    for root in _folders_outside(config, folders):
        for folder, below, files in os.walk(root):
            below[:] = [name for name in below if not name.startswith((".", "_")) and name != "node_modules"]
            for path in (Path(folder, name) for name in files if any(fnmatch(name, n) for n in names)):
                if any(path.is_relative_to(place) for place in selected) or not path.is_file():
                    continue
                if word.search(path.read_text(encoding="utf-8", errors="replace")):
                    return True
    return False


def _is_narrowed(config: pytest.Config, lane: str) -> bool:
    o = config.option
    narrowed = [
        o.markexpr.strip() != lane,
        o.affected,
        o.fast,
        o.keyword,
        o.deselect,
        o.ignore,
        o.ignore_glob,
    ]
    narrowed += [getattr(o, name, False) for name in ("lf", "stepwise")]  # of a plugin that -p may block
    return any(narrowed) or _other_collection(config)


def _other_collection(config: pytest.Config) -> bool:
    options = ("testpaths", "python_", "norecursedirs")
    return any(ini.startswith(options) for ini in config.option.override_ini or ())


def _selected(config: pytest.Config) -> list[Path]:
    """Return the selected paths. A node id such as test_a.py::test_b selects no file completely."""
    return [(config.invocation_params.dir / arg).resolve() for arg in config.args]


def _folders_outside(config: pytest.Config, folders: Collection[str]) -> list[Path]:
    selected = _selected(config)
    roots = [(config.rootpath / path).resolve() for path in folders]
    return [root for root in roots if not any(root.is_relative_to(place) for place in selected)]
