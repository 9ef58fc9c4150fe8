"""The pytest plugin: its hooks, which bumpgate.plugin.run defines.

pyproject.toml loads it with `-p bumpgate.plugin`, and an installed bumpgate through an entry point of the same name,
so that pytest registers it once. An option that a conftest defines is unknown while pytest looks for the conftest
files: its value would count as a test path. Imports no torch, and the machinery of a lane only in a repository that
declares lanes.
"""

from bumpgate.plugin.run import (
    pytest_addhooks,
    pytest_addoption,
    pytest_cmdline_main,
    pytest_configure,
    pytest_load_initial_conftests,
    pytest_xdist_auto_num_workers,
)

__all__ = [
    "pytest_addhooks",
    "pytest_addoption",
    "pytest_cmdline_main",
    "pytest_configure",
    "pytest_load_initial_conftests",
    "pytest_xdist_auto_num_workers",
]
