"""A rank's memory in each phase: resident bytes on the CPU, torch's own count on CUDA."""

from __future__ import annotations

import pytest
import torch

from umbra.trainer.reporting.memory_metrics import MemoryAccount

MIB_256 = 1 << 28


def account_of(device: torch.device) -> dict[str, float]:
    """The metrics of a phase that takes 256 MiB for a while, and of one that takes nothing."""
    account = MemoryAccount(device)
    with account.phase("train"):
        torch.ones(MIB_256, dtype=torch.uint8, device=device)
    with account.phase("sync"):
        pass
    row = account.take()
    assert account.take() == {}
    return row


def check(row: dict[str, float], *whats: str) -> None:
    assert set(row) == {
        f"memory/{phase}_{what}_gib" for phase in ("train", "sync") for what in whats
    }
    growth = {
        phase: row[f"memory/{phase}_peak_gib"] - row[f"memory/{phase}_allocated_gib"]
        for phase in ("train", "sync")
    }
    assert growth["train"] == pytest.approx(0.25, abs=0.02)
    assert growth["sync"] == pytest.approx(0.0, abs=0.02)


def test_a_peak_belongs_to_its_phase() -> None:
    check(account_of(torch.device("cpu")), "allocated", "peak")


def test_a_phase_that_fails_is_over() -> None:
    account = MemoryAccount(torch.device("cpu"))

    with pytest.raises(RuntimeError), account.phase("train"):
        raise RuntimeError

    assert len(account.take()) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_peak_belongs_to_its_phase_on_a_gpu() -> None:
    row = account_of(torch.device("cuda"))

    check(row, "allocated", "peak", "reserved")
    assert row["memory/train_reserved_gib"] >= row["memory/train_peak_gib"]
