"""Small wheels with one compiled extension each, built during the test: correct ones, and ones for another torch.

The sources of the incompatible ones declare what another torch's headers declare, so they need none of its files: a
compiler trusts a declaration, which is how a real wheel becomes incompatible.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sysconfig
from pathlib import Path

TORCH = Path(importlib.util.find_spec("torch").origin).parent

MODULE = """
#include <Python.h>
{code}
static PyObject* run(PyObject*, PyObject* argument) {{ {body} }}
static PyMethodDef methods[] = {{{{"run", run, METH_O, ""}}, {{nullptr, nullptr, 0, nullptr}}}};
static PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods}};
PyMODINIT_FUNC PyInit__C() {{ return PyModule_Create(&definition); }}
"""
# Sums four copies of a number, through torch's own headers and libraries.
REAL = (
    "#include <ATen/core/Tensor.h>\n#include <ATen/ops/full.h>",
    "return PyFloat_FromDouble(at::full({4}, PyFloat_AsDouble(argument)).sum().item<double>());",
)
# One function of c10, as torch 2.11 and torch 2.13 declare it; each has only its own.
BY_TORCH = {
    "2.11": ("materialize_cow_storage(StorageImpl&)", "materialize_cow_storage(*(c10::StorageImpl*)argument)"),
    "2.13": ("materialize_cow(StorageImpl*)", "materialize_cow((c10::StorageImpl*)argument)"),
}  # fmt: skip
OTHER_TORCH = {
    torch: (
        f"namespace c10 {{ struct StorageImpl; namespace impl::cow {{ void {declared}; }} }}",
        f"c10::impl::cow::{call}; Py_RETURN_NONE;",
    )
    for torch, (declared, call) in BY_TORCH.items()
}
DEVICE = """
#include <string>
namespace c10 {{ enum class DeviceType : {width} {{ CPU }};
struct Device {{ DeviceType type; {width} index; std::string str() const; }}; }}"""
# Returns the name of a device by its index. Up to torch 1.5 both fields were as wide as in WIDE; the function's name
# has not changed.
NAME_OF_DEVICE = (
    "c10::Device d{{c10::DeviceType::CPU, ({width})PyLong_AsLong(argument)}};"
    "return PyUnicode_FromString(d.str().c_str());"
)
NARROW, WIDE = (
    (DEVICE.format(width=width), NAME_OF_DEVICE.format(width=width)) for width in ("signed char", "short")
)


def build(
    site: Path, name: str, source: tuple[str, str], *flags: str, version: str = "1.0", lazy: bool = False
) -> Path:
    """Install a package `name` with an extension `_C` into `site` and return the extension.

    lazy: the package opens its extension with RTLD_LAZY, so that a missing function is only detected at its call.
    """
    package = site / name
    package.mkdir(parents=True)
    extension = package / "_C.so"
    includes = [TORCH / "include", TORCH / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    command = [
        *shlex.split(os.environ.get("CXX", "g++")),
        *shlex.split("-std=c++20 -O0 -fPIC -shared -x c++ -"),
    ]
    command += [f"-I{path}" for path in includes] + [*flags, "-o", str(extension), f"-L{TORCH / 'lib'}"]
    command += shlex.split("-Wl,--no-as-needed -ltorch_python -ltorch_cpu -lc10 -Wl,--allow-shlib-undefined")
    code = MODULE.format(code=source[0], body=source[1])
    subprocess.run(command, input=code, text=True, check=True, capture_output=True)
    flags_line = "sys.setdlopenflags(os.RTLD_LAZY)\n" if lazy else ""
    (package / "__init__.py").write_text(f"import os, sys, torch\n{flags_line}from {name}._C import run\n")
    label(site, name, version)
    return extension


def label(site: Path, name: str, version: str, *requires: str) -> None:
    """Write the metadata that an installer records for a wheel: its name, version and files."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    required = "".join(f"Requires-Dist: {r}\n" for r in requires)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}")
    files = [path.relative_to(site) for path in (site / name).rglob("*") if path.is_file()]
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))
