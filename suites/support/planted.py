"""A fault that a test plants itself and passes only if the check refuses it.

`suites/self/mutants.py` plants its faults in a copy of the tree and reads the row they turn red; some faults need no
copy: a wrong environment variable, a corrupt file, a collective that one rank never enters. Their tests carry this
mark, so that the mutant matrix counts them beside the mutants.
"""

from __future__ import annotations

import pytest


def planted(rule: str, fault: str) -> pytest.MarkDecorator:
    """rule: the contract row that must kill it ("C17"). fault: what is planted, in a few words."""
    return pytest.mark.planted(rule, fault)
