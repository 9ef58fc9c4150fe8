"""The pytest plugin: the options and the lane of a run, known before any conftest is imported.

pyproject.toml loads it with `-p bumpgate.plugin`, and an installed bumpgate through an entry point of the same name,
so that pytest registers it once. An option that a conftest defines is unknown while pytest looks for the conftest
files: its value would count as a test path. Imports neither torch nor the suites.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Generator
from dataclasses import replace

import pytest

from bumpgate.baseline import LANES
from bumpgate.processes.host import cpu_workers

# Each worker of the H200 lane holds a context and its last test's memory on the GPU. One waits for the others' end, to
# run what is timed.
MOST_GPU_WORKERS = 15
SPARE_CORES = 1
# Set by the lane's session once it has judged the run: whether it is green.
GREEN = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("bumpgate")
    group.addoption(
        "--gate",
        action="store_true",
        help="a skip, an xpass, a deselected lane test, or a part of the lane is red too",
    )
    group.addoption(
        "--part",
        action="store_true",
        help="this run is a part of its lane on purpose: --gate does not take that for red",
    )
    group.addoption(
        "--launcher", metavar="COMMAND", help="whose environment and exit codes suites/launch judges (ours)"
    )
    # With = and no space: pytest takes a file that exists for a test path until it has read pyproject.toml.
    group.addoption(
        "--record", metavar="PATH", help="--record=PATH: where the rows go (default: record.json)"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    record, given = config.option.record, config.invocation_params
    if not (record or config.option.launcher) or hasattr(config, "workerinput"):
        return
    if config.inipath:
        # A worker of xdist parses the line again, and by then the record is an existing file. An explicit
        # configuration file is found whatever pytest takes for a test path.
        where = ("-c", str(config.inipath), f"--rootdir={config.rootpath}")
        config.invocation_params = replace(given, args=(*where, *given.args))
    elif record:
        raise pytest.UsageError(
            f"no pytest configuration found from {config.rootpath}: pytest took the existing file {record} "
            f"for a test path; write --record={record}"
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, object, object]:
    """`--gate` exits with 0 only if a lane was judged green, whatever other options make pytest do instead."""
    code = yield
    # Not config.option, which --help leaves without its values.
    unjudged = config.known_args_namespace.gate and not config.stash.get(GREEN, False)
    if unjudged and not code and not hasattr(config, "workerinput"):
        print("ERROR: --gate: this run did not judge a lane green", file=sys.stderr)
        return pytest.ExitCode.USAGE_ERROR
    return code


def chosen_lane(config: pytest.Config) -> str | None:
    """The lane that -m selects. Raises UsageError on two lanes, or on a name that is not a marker."""
    known = {re.split(r"[:(]", line)[0].strip() for line in config.getini("markers")}
    expression, unknown = config.option.markexpr, sorted(_names(config) - known)
    if unknown:
        raise pytest.UsageError(f"-m {expression}: no marker {unknown[0]!r}; lanes: {', '.join(LANES)}")
    chosen = _lanes(config)
    if len(chosen) > 1:
        raise pytest.UsageError(f"-m {expression}: one lane a run, pick one of {', '.join(chosen)}")
    return chosen[0] if chosen else None


def _names(config: pytest.Config) -> set[str]:
    """The markers that -m names."""
    expression = re.sub(r"\([^()]*=[^()]*\)", "", config.option.markexpr)
    return set(re.findall(r"[\w:+\-.\[\]\\/]+", expression)) - {"and", "or", "not"}


def _lanes(config: pytest.Config) -> list[str]:
    """The lanes that -m names, without those that it excludes."""
    names, expression = _names(config), config.option.markexpr
    return [lane for lane in LANES if lane in names and not re.search(rf"\bnot\s+{lane}\b", expression)]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """The workers of `-n auto`, the default. At least one: a crash or a hang then costs one test, not the run.

    On a GPU as many as its machine has cores for: nearly all of the lane's time is compiling. On a CPU one for each
    core that has memory for it, or what PYTEST_XDIST_AUTO_NUM_WORKERS says. None, which is xdist's own number,
    outside a lane.
    """
    lanes = _lanes(config)
    if lanes == ["h200"]:
        return max(1, min(MOST_GPU_WORKERS, (os.cpu_count() or 1) - SPARE_CORES))
    if lanes == ["cpu"]:
        return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else cpu_workers()
    return 1 if lanes else None
