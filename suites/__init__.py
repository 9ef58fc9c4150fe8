"""The lanes' tests of the model, its kernels and launch code, and the programs that they start."""

import gc

# Python's own thresholds, under which users train: for programs whose time is measured.
USERS_COLLECTION = gc.get_threshold()

# Less garbage collection: under Python's own thresholds it takes a quarter of the time of importing torch and Inductor,
# and 13 % of the time of tracing the 52-layer model.
gc.set_threshold(50_000, 20, 20)
