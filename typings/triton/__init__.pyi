"""What umbra uses of Triton, which is installed only where torch is built for GPUs."""

from collections.abc import Callable
from typing import Any

def jit(fn: Callable[..., Any]) -> Any: ...
