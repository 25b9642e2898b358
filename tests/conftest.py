"""Settings for all tests: one thread a process, and no inherited torchrun environment."""

from __future__ import annotations

import os

# Before anything imports torch, here or in a child: tests share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
