"""One process of the assembler check: compile a kernel for an H200, and print its cache key and a digest of its code.

`python -m suites.kernels.codegen.assembler [VARIABLE=PATH ...]` on the TRITON_CACHE_DIR of its environment. With
arguments, the process first compiles another kernel, and then sets these environment variables: torch 2.9 to 2.11 for
CUDA 13 set TRITON_PTXAS_PATH to their own ptxas when they first compile (pytorch#163988).
"""

from __future__ import annotations

import hashlib
import os
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from suites.support.child import print_result

H200 = GPUTarget("cuda", 90, 32)


@triton.jit
def _first_kernel(x_ptr):
    tl.store(x_ptr, 1.0)


@triton.jit
def _later_kernel(x_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(x_ptr + i, tl.exp(x) * tl.sin(x) / (x + 3))


def compiled(kernel: object, **constants: int) -> CompiledKernel:
    names = dict.fromkeys(constants, "constexpr")
    return triton.compile(ASTSource(kernel, {"x_ptr": "*fp32", **names}, constants), target=H200)


def main(variables: list[str]) -> dict[str, str]:
    """Compile the later kernel. Returns its key in Triton's cache and the SHA-256 of its machine code."""
    if variables:
        compiled(_first_kernel)
        os.environ.update(dict(text.split("=", 1) for text in variables))
    later = compiled(_later_kernel, N=256)
    return {"key": later.metadata.hash, "code": hashlib.sha256(later.asm["cubin"]).hexdigest()}


if __name__ == "__main__":
    print_result(main(sys.argv[1:]))
