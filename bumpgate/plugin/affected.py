"""`--affected BASE`: run only the tests that depend on what changed since a commit (bumpgate.affected)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bumpgate.affected import affected, changed
from bumpgate.core.errors import BumpgateError


class Affected:
    """Deselects the tests that do not depend on the changed files.

    The controller reads the changed files once, before the run may change any, and passes them to the workers.
    """

    def __init__(self, config: pytest.Config, base: str) -> None:
        self.config, self.base = config, base
        worker_input = getattr(config, "workerinput", None)
        try:
            self.paths = set(worker_input["affected"]) if worker_input else changed(config.rootpath, base)
        except BumpgateError as error:
            raise pytest.UsageError(str(error)) from None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["affected"] = sorted(self.paths)

    def pytest_report_header(self) -> str:
        return f"affected: tests that depend on the {len(self.paths)} files changed since {self.base}"

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.config.inipath and _relative(self.config.inipath, self.config.rootpath) in self.paths:
            return  # every test depends on the configuration of pytest
        files = {item.nodeid: _relative(item.path, self.config.rootpath) for item in items}
        try:
            chosen = affected(self.config.rootpath, files.values(), self.paths)
        except BumpgateError as error:
            raise pytest.UsageError(str(error)) from None
        left_out = [item for item in items if files[item.nodeid] not in chosen]
        items[:] = [item for item in items if files[item.nodeid] in chosen]
        self.config.hook.pytest_deselected(items=left_out)


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()
