"""A library in NVML's place."""

from __future__ import annotations

from fake_nvml import fake_nvml

__all__ = ["fake_nvml"]
