"""No op hears autocast: under it, forward and backward give the bits that they give without.

Autocast reaches into the body of a custom op. Its list of operators would run fp32 products there in bf16, and
the gradient formula is run by autograd wherever backward() stands, often inside the same block.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention import attention
from kernels.causal_conv1d import causal_conv1d
from kernels.m2rnn import m2rnn
from kernels.mamba3_siso import mamba3_siso
from kernels.moe_combine import moe_combine
from kernels.moe_dispatch import moe_dispatch
from kernels.rms_norm_gated import rms_norm_gated
from kernels.ssd_chunk_scan import ssd_chunk_scan
from suites.kernels import test_attention as attention_suite
from suites.kernels import test_causal_conv1d as causal_conv1d_suite
from suites.kernels import test_m2rnn as m2rnn_suite
from suites.kernels import test_mamba3_siso as mamba3_siso_suite
from suites.kernels import test_moe_combine as moe_combine_suite
from suites.kernels import test_moe_dispatch as moe_dispatch_suite
from suites.kernels import test_rms_norm_gated as rms_norm_gated_suite
from suites.kernels import test_ssd_chunk_scan as ssd_chunk_scan_suite
from suites.support.comparison import error, gradients
from suites.support.lanes import Lane, lanes

# Outputs and gradients of each op on the problem of its own suite.
STEPS: dict[str, Callable[..., Iterable[Tensor]]] = {
    "attention": lambda **o: gradients(attention, *attention_suite.problem(**o)),
    "causal_conv1d": lambda **o: gradients(causal_conv1d, *causal_conv1d_suite.problem(**o)),
    "m2rnn": lambda **o: m2rnn_suite.results(m2rnn, m2rnn_suite.problem(**o)).values(),
    "mamba3_siso": lambda **o: mamba3_siso_suite.results(
        mamba3_siso_suite.flat(mamba3_siso), mamba3_siso_suite.problem(**o)
    ).values(),
    "moe_combine": lambda **o: gradients(moe_combine, *moe_combine_suite.problem(**o)),
    "moe_dispatch": lambda **o: gradients(moe_dispatch, *moe_dispatch_suite.problem(**o), 5, 4),
    "rms_norm_gated": lambda **o: gradients(rms_norm_gated, *rms_norm_gated_suite.problem(**o)),
    "ssd_chunk_scan": lambda **o: ssd_chunk_scan_suite.results(
        ssd_chunk_scan, ssd_chunk_scan_suite.problem(**o)
    ).values(),
}
WITH_PRODUCTS = ("attention", "m2rnn", "mamba3_siso", "ssd_chunk_scan")
