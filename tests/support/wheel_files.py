"""Files of the package `fast`: its wheels, right and wrong, its source archive and edits of it."""

from __future__ import annotations

import difflib
import io
import struct
import sys
import tarfile
from pathlib import Path

from tests.support.local_index import pack

TAG = (
    f"cp{sys.version_info[0]}{sys.version_info[1]}-cp{sys.version_info[0]}{sys.version_info[1]}-linux_x86_64"
)
SETUP = """
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension
setup(
    name="fast", version="1.0", packages=["fast"], cmdclass={"build_ext": BuildExtension},
    ext_modules=[CppExtension("fast._C", ["fast.cpp"], extra_compile_args=["-O0"])],
)
"""


def wheel(
    folder: Path,
    extension: bytes,
    init: str = "from fast._C import run\n",
    *,
    version: str = "1.0",
    requires: str = "torch",
    tag: str = TAG,
    library: str = "_C.so",
    own_name: str = "fast",
    swapped: bytes = b"",
) -> Path:
    """Build a wheel of the package fast. swapped: library in the archive instead of the one listed in RECORD."""
    info = f"fast-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {own_name}\nVersion: {version}\nRequires-Dist: {requires}\n"
    files = {
        "fast/__init__.py": f"import torch\n{init}",
        f"fast/{library}": extension,
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nTag: {tag}\n",
    }
    other = {f"fast/{library}": swapped} if swapped else {}
    return pack(folder / f"fast-{version}-{tag}.whl", info, files, other)


def gpu_code(arch: int, kind: int = 2) -> bytes:
    """Return a container with one entry of GPU code for an architecture, in nvcc's format."""
    entry = struct.pack("<HHIQ12xI", kind, 0, 64, 8, arch).ljust(64 + 8, b"\0")
    return struct.pack("<4sHHQ", b"\x50\xed\x55\xba", 1, 16, len(entry)) + entry


def sdist(folder: Path, code: str) -> Path:
    """Build a source archive of the package fast."""
    folder.mkdir(exist_ok=True)
    path = folder / "fast-1.0.tar.gz"
    files = {
        "setup.py": SETUP,
        "fast.cpp": code,
        "fast/__init__.py": "import torch\nfrom fast._C import run\n",
    }
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(f"fast-1.0/{name}")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return path


def difference(before: str, after: str) -> str:
    """Return the edit of fast.cpp as a patch."""
    lines = [text.splitlines(keepends=True) for text in (before, after)]
    return "".join(difflib.unified_diff(*lines, "a/fast.cpp", "b/fast.cpp"))
