"""What triton's version and the GPU allow: Gluon kernels for compute capability 9.0 (H100, H200)."""

import triton
from torch import Tensor

TRITON = tuple(int(n) for n in triton.__version__.split(".")[:2])


def has_hopper_gluon(t: Tensor) -> bool:
    """Return whether Gluon kernels for compute capability 9.0 can compute with a tensor.

    They need triton 3.9 or later. Triton's interpreter, which runs on CPU tensors, has no Gluon.
    """
    if t.device.type == "cpu" or TRITON < (3, 9):
        return False
    target = triton.runtime.driver.active.get_current_target()
    return (target.backend, target.arch) == ("cuda", 90)
