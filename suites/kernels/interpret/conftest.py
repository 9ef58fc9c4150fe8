"""Triton kernels run by Triton's interpreter, on CPU tensors.

The interpreter is selected for the whole process when triton is imported. So these files are collected only in a
process that was started for them: `TRITON_INTERPRET=1 pytest -m cpu -n 0 suites/kernels/interpret`.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
