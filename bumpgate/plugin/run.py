"""Hooks of every pytest run: the options, and what a run of a lane registers."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Generator
from dataclasses import replace
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bumpgate.core.lanes import how_to_declare, is_foreign
from bumpgate.plugin.lanes import GREEN, chosen_lane, lanes_of, markers, named_lanes
from bumpgate.process.gpu_shares import keep_to_cores, visible
from bumpgate.process.host import OWN_VARIABLES, PROJECT, cores, cpu_workers

if TYPE_CHECKING:
    from bumpgate.plugin.selection import Selection

# Each worker of the H200 lane holds a context and its last test's memory on the GPU. One of them waits for the others
# to finish, and then runs the timed tests.
MOST_GPU_WORKERS = 15
SPARE_CORES = 1


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    from bumpgate.plugin import hooks

    pluginmanager.add_hookspecs(hooks)


OPTIONS = {
    "--gate": ("", "a skip, an xpass, a deselected lane test, or a part of the lane is red too"),
    "--part": ("", "this run is intended to cover a part of its lane: --gate does not report that as red"),
    "--affected": (
        "BASE",
        "only the tests that depend on a file changed since the commit BASE; a part of the lane",
    ),
    "--fast": ("", "no test that is long or cold, or needs the machine to itself; a part of the lane"),
    "--launcher": ("COMMAND", "launcher that suites/launch checks (default: ours)"),
    # With "=", not a space: until pytest has read pyproject.toml it treats an existing file as a test path.
    "--record": ("PATH", "--record=PATH: output path of the rows (default: record.json)"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("bumpgate")
    for name, (metavar, text) in OPTIONS.items():
        kind = {"metavar": metavar} if metavar else {"action": "store_true"}
        group.addoption(name, help=text, **kind)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    from bumpgate.plugin import fixtures

    _register(config, fixtures, "bumpgate-fixtures")
    _register(config, _LaneHooks(), "bumpgate-lane")
    record, parameters = config.option.record, config.invocation_params
    if not (record or config.option.launcher) or hasattr(config, "workerinput"):
        return
    if config.inipath:
        # A worker of xdist parses the command line again, when the record is an existing file. An explicit
        # configuration file is found even if pytest treats the record as a test path.
        where = ("-c", str(config.inipath), f"--rootdir={config.rootpath}")
        config.invocation_params = replace(parameters, args=(*where, *parameters.args))
    elif record and not config.option.rootdir:
        raise pytest.UsageError(
            f"no pytest configuration found from {config.rootpath}: pytest treated the existing file {record} "
            f"as a test path; write --record={record}"
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest captures what a conftest prints
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, object, object]:
    """Make a record that is not complete, and under --gate a parent that judges it."""
    if (folder := os.environ.get(PROJECT)) and os.path.isdir(folder):  # _foreign_variables judges who set it
        sys.meta_path.insert(0, ProjectFinder(folder))
    lanes = named_lanes(early_config, early_config.known_args_namespace.markexpr)
    if lanes:
        from bumpgate.plugin import judge

        judge.begin(early_config, lanes[0])
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, object, object]:
    """Make `--gate` exit with 0 only if a lane was judged green, even if other options keep pytest from running."""
    gate = config.known_args_namespace.gate  # config.option has no values under --help
    code = yield
    unjudged = gate and not config.stash.get(GREEN, False)
    if unjudged and not code and not hasattr(config, "workerinput"):
        print("ERROR: --gate: this run did not judge a lane green", file=sys.stderr)
        return pytest.ExitCode.USAGE_ERROR
    return code


class ProjectFinder:
    """Finds the top-level modules of the project under test in one folder, whatever else is on the path.

    pytest puts the folders of the work tree in front of the path; a side of a gate must import its own build.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        found = (path for path in Path(folder).iterdir() if not path.name.startswith((".", "_")))
        modules = (p for p in found if (p / "__init__.py").is_file() or p.suffix in (".py", ".so"))
        self.names = {path.name.partition(".")[0] for path in modules} - {
            "conftest",
            "setup",
            "tests",
            "test",
        }

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [self.folder]) if path is None and name in self.names else None


def _foreign_variables() -> str | None:
    """Return a line on variables that bumpgate sets for its runs, if bumpgate did not start this one; else None."""
    from bumpgate.plugin.judge import started_by_bumpgate

    found = [name for name in OWN_VARIABLES if name in os.environ]
    if not found or started_by_bumpgate():
        return None
    return f"{' and '.join(found)} in the environment: only bumpgate sets them, for runs that it starts; unset them"


class _LaneHooks:
    """Hooks of a lane run, in a repository with lanes. An error is one line and exit code 4."""

    @pytest.hookimpl(trylast=True)  # after the plugins that declare markers
    def pytest_configure(self, config: pytest.Config) -> None:
        if not lanes_of(config):
            for option in ("gate", "fast"):
                if getattr(config.option, option):
                    raise pytest.UsageError(f"--{option}: no lanes here; {how_to_declare('mine')}")
            return
        _declare_markers(config)
        name = chosen_lane(config)
        judged = bool(name) or not is_foreign(config.rootpath)
        if judged and sys.flags.optimize:
            raise pytest.UsageError(
                "PYTHONOPTIMIZE or -O removes the checks that are assert statements: leave it out"
            )
        controller = not hasattr(config, "workerinput")
        if controller and judged and (fault := _foreign_variables()):
            raise pytest.UsageError(fault)
        from bumpgate.plugin import reports, rows, scheduling, sharing
        from bumpgate.plugin.selection import Selection
        from bumpgate.plugin.unjudged import UnjudgedRows

        if config.option.fast and not name:
            raise pytest.UsageError(f"--fast is a part of a lane: add -m {' | '.join(lanes_of(config))}")
        selection = Selection(config, name)
        _register(config, selection, "bumpgate-selection")
        _register(config, rows, "bumpgate-rows")
        if judged:
            _register(config, reports, "bumpgate-reports")
        if not name and controller:
            _register(config, UnjudgedRows(config), "bumpgate-unjudged")
        if name and not (getattr(config.option, "log_level", "-") or config.getini("log_level")):
            config.option.log_level = "WARNING"  # torch's trace log is thousands of lines under each red row
        if name and lanes_of(config)[name].tests:
            from bumpgate.plugin import parameters

            _register(config, parameters, "bumpgate-parameters")
        if name:
            _register(config, sharing, "bumpgate-sharing")
            _register(config, scheduling, "bumpgate-scheduling")
            if hasattr(config.option, "dist"):  # of xdist
                from bumpgate.plugin import assignment

                _register(config, assignment, "bumpgate-assignment")
            if hasattr(config.option, "benchmark_disable"):  # of pytest-benchmark
                from bumpgate.plugin import benchmark

                _register(config, benchmark, "bumpgate-benchmark")
        if config.option.affected:
            from bumpgate.plugin.affected import Affected

            _register(config, Affected(config, config.option.affected), "bumpgate-affected")
        if controller and (judged or config.option.gate):
            _check(config, name)
            if name and not config.option.collectonly:
                _register_session(config, name, selection)


def _declare_markers(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long(seconds): starts before tests that take less time")
    declared = markers(config)
    for lane in lanes_of(config).values():
        if lane.name not in declared:
            described = lane.description or f"a lane of bumpgate ({lane.device})"
            config.addinivalue_line("markers", f"{lane.name}: {described}")


def _check(config: pytest.Config, name: str | None) -> None:
    """Check the machine, and under --gate the options. The workers rely on it."""
    from bumpgate.plugin.devices import detect

    if fault := cache_fault() or (detect(lanes_of(config)[name]) if name else None):
        raise pytest.UsageError(fault)
    if not config.option.gate:
        return
    os.environ["BUMPGATE_GATE"] = "1"  # nothing that a gate starts may rewrite a baseline
    cut = config.invocation_params.dir / (config.known_args_namespace.confcutdir or config.rootpath)
    skips = config.rootpath in cut.parents and (config.rootpath / "conftest.py").is_file()
    no_conftest = "skips the conftest that prepares a lane"
    for option, given, why in (
        ("--noconftest", config.option.noconftest, no_conftest),
        (f"--confcutdir={cut}", skips, no_conftest),
        ("--collect-only", config.option.collectonly, "measures nothing"),
        ("--setup-plan", getattr(config.option, "setupplan", False), "runs no test"),
        ("--setup-only", getattr(config.option, "setuponly", False), "runs no test"),
    ):
        if given:
            raise pytest.UsageError(f"{option} {why}: leave it out, or leave out --gate")


def _register_session(config: pytest.Config, name: str, selection: Selection) -> None:
    from bumpgate.core.baseline import BaselineError
    from bumpgate.plugin import rows
    from bumpgate.plugin.progress import Progress
    from bumpgate.plugin.session import LaneSession

    try:
        session = LaneSession(config, rows.lane_baseline(rows.baseline_path(config, name), name), selection)
    except BaselineError as error:
        raise pytest.UsageError(str(error)) from None
    _register(config, session, "bumpgate-session")
    if getattr(config.option, "verbose", 0) == 0:  # -p no:terminal removes the option
        progress = Progress(config, name, session.run.judgements)
        config.pluginmanager.register(progress, "bumpgate-progress")


def _register(config: pytest.Config, plugin: object, name: str) -> None:
    """Register a plugin that a lane needs. Raises UsageError if -p blocks it."""
    if config.pluginmanager.register(plugin, name) is None:
        raise pytest.UsageError(f"-p no:{name}: a lane run needs this plugin: leave the option out")


@pytest.hookimpl(optionalhook=True, tryfirst=True)  # before xdist's own
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return the workers of `-n auto`, the default. At least one, so that a crash or hang costs one test, not the run.

    On a GPU, as many as the machine has cores for, and at most MOST_GPU_WORKERS for each visible GPU. On a CPU, one for
    each core that has memory for it, or PYTEST_XDIST_AUTO_NUM_WORKERS. None, xdist's own number, outside a lane. No
    worker with an option of pytest-benchmark that compares.
    """
    from bumpgate.plugin.benchmark import needs_one_process

    if named_lanes(config) and needs_one_process(config):
        return 0
    found = [lanes_of(config)[name] for name in named_lanes(config)]
    devices = [lane.device for lane in found]
    if devices == ["cuda"]:
        keep_to_cores()
        groups = len(visible(found[0].count)) or 1
        return max(1, min(MOST_GPU_WORKERS * groups, (cores() or 1) - SPARE_CORES))
    if devices == ["cpu"]:
        return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else cpu_workers()
    return 1 if devices else None


def cache_fault() -> str | None:
    """Return why a compile cache's folder cannot be used, in one line, or None. A missing folder is created.

    Checked by writing a file: mode bits do not apply to root.
    """
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        if name := os.environ.get(variable):
            try:
                Path(name).mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=name) as probe:
                    probe.write(b"0")
            except OSError as error:
                return f"{variable}={name}: {error.strerror}; unset it or name a writable directory"
    return None
