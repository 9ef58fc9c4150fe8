"""Print the cases with their releases as GitHub Markdown: python -m suites.features.corpus."""

from __future__ import annotations

from suites.features.corpus import CASES
from suites.support.tables import line

HEAD = ("case", "what breaks", "bad", "good", "upstream")


def table() -> str:
    """Return a line for each case."""
    rows = [line(HEAD), line("---" for _ in HEAD)]
    for case in CASES:
        upstream = f"[#{case.issue}]({case.link})" if case.issue else case.link
        rows.append(line((f"`{case.name}`", case.title, " ".join(case.bad), " ".join(case.good), upstream)))
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
