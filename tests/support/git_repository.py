"""A small git repository for tests, independent of the host's git settings."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass
class GitRepository:
    """A repository whose commits are one day apart. folder: must exist."""

    folder: Path
    day: int = 0

    def __post_init__(self) -> None:
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *arguments: str) -> str:
        date = f"2026-11-{self.day % 30 + 1:02}T12:00:00+0000"
        identity = {
            f"GIT_{who}_{what}": value
            for who in ("AUTHOR", "COMMITTER")
            for what, value in (("NAME", "A"), ("EMAIL", "a@example.com"), ("DATE", date))
        }
        settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        done = subprocess.run(
            ["git", *arguments],
            cwd=self.folder,
            env=os.environ | identity | settings,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    def commit(self, title: str, files: dict[str, str] | None = None) -> str:
        self.day += 1
        for name, text in (files or {}).items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            self.git("add", name)
        self.git("commit", "--quiet", "--allow-empty", "-m", title)
        return self.git("rev-parse", "HEAD")

    def merge(self, branch: str, title: str) -> str:
        self.day += 1
        self.git("merge", "--quiet", "--no-ff", "-m", title, branch)
        return self.git("rev-parse", "HEAD")
