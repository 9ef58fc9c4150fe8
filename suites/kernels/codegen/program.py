"""Write one launch of a kernel as a program of its own, which needs triton and no GPU.

`python -m suites.kernels.codegen.program CASE DTYPE KERNEL "spill stores" LIMIT > program.py` compiles the case's op
for an H200. The program ends with 1 if ptxas reports more than LIMIT bytes of spill stores, or with `registers`, more
registers. `bumpgate reproduce --program program.py` makes it smaller and proves it.
"""

import ast
import inspect
import sys

import triton.language as tl
from triton.runtime.jit import JITFunction

from suites.kernels.codegen.test_codegen import compile_case
from suites.support.comparison import DTYPES

PROGRAM = '''"""{count} of {kernel}, compiled for an H200."""
import re, subprocess, sys, tempfile, triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
{definitions}
source = ASTSource({kernel}, {signature}, {constants}, {attributes})
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={options})
with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
    file.write(made.asm["ptx"])
    file.flush()
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file.name, "-o", file.name + ".o"]
    said = subprocess.run(command, capture_output=True, text=True).stderr
found = int(re.search(r"(\\d+)(?: bytes)? {count}", said)[1])
print("{count}:", found)
sys.exit(found > {limit})'''


def program(case: str, dtype: str, kernel: str, count: str, limit: str) -> str:
    """Return the program. Raises StopIteration if the case launches no such kernel."""
    compiled = next(c for c in compile_case(case, DTYPES[dtype])[0] if c.kernel == kernel)
    source, definitions = compiled.source, dict[str, str]()
    _define(source.fn, definitions)
    constants = {path: getattr(value, "value", value) for path, value in source.constants.items()}
    return PROGRAM.format(
        kernel=kernel, count=count, limit=limit, definitions="\n".join(definitions.values()), constants=constants,
        signature=dict(source.signature), attributes=source.attrs,
        options={"num_warps": compiled.num_warps, "num_stages": compiled.num_stages},
    )  # fmt: skip


def _define(function: JITFunction, found: dict[str, str]) -> None:
    """Collect the code of a kernel after what it uses: functions without docstrings, and constants."""
    names = inspect.getclosurevars(function.fn).globals
    for name, value in names.items():
        if isinstance(value, JITFunction) and name not in found:
            _define(value, found)
        elif isinstance(value, tl.constexpr):
            found[name] = f"{name} = tl.constexpr({value.value!r})"
    (code,) = ast.parse(function.src).body
    assert isinstance(code, ast.FunctionDef)
    code.body = code.body[ast.get_docstring(code) is not None :]
    found[function.__name__] = f"@triton.jit\n{ast.unparse(code)}"


if __name__ == "__main__":
    print(program(*sys.argv[1:]))
