"""M2RNN, a non-linear recurrence over a matrix state (arXiv 2603.14360)."""

from kernels.m2rnn.eager import m2rnn_eager
from kernels.m2rnn.naive import m2rnn_recurrent, m2rnn_step
from kernels.m2rnn.op import m2rnn

__all__ = ["m2rnn", "m2rnn_eager", "m2rnn_recurrent", "m2rnn_step"]
