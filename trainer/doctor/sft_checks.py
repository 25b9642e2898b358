from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from umbra.runtime.cluster.environment import TorchrunEnvironment
from umbra.trainer.config import setting_rules
from umbra.trainer.config.sft_config import SftConfig
from umbra.trainer.config.trainer_config import TrainerConfig
from umbra.trainer.doctor.node_checks import NodeChecks, Verdict, open_files, verdict_of
from umbra.trainer.sft.row_preparation import read_rows, summary_of
from umbra.trainer.sft.sft_command import check_sft_setup
from umbra.trainer.world.mesh import usable_gpus


class SftChecks(NodeChecks):
    """The checks of one node for fine-tuning, which has neither engines nor user code. `base` is
    the config as RL training would have it, with local paths."""

    def __init__(
        self, config: SftConfig, base: TrainerConfig, environment: TorchrunEnvironment
    ) -> None:
        on_gpu = base.train.device != "cpu" and bool(usable_gpus())
        if base.model.dtype == "auto":
            dtype = "bfloat16" if on_gpu else "float32"
            base = replace(base, model=replace(base.model, dtype=dtype))
        super().__init__(base, environment, (), ())
        self._sft = config.with_paths_of(base)

    def make(self) -> Iterator[Verdict]:
        yield from self._versions()
        yield self._verdict("setup", self._setup, after=self._hub("model", "data"))
        yield self._verdict("rows", self._rows, after="setup")
        warnings = {"rows": self._data_warnings, "settings": setting_rules.warnings(self._sft)}
        for check, texts in warnings.items():
            yield from (Verdict(check, "warning", text) for text in texts)
        if self._environment.node_rank == 0:
            yield self._verdict("run lock", self._run_lock, after="setup")
        yield self._verdict("disk space", self._disk_space, after="setup")
        yield verdict_of("open files", open_files)
        yield verdict_of("GPUs", self._gpus)

    def _setup(self) -> str:
        """All that a run checks on each rank before it starts anything."""
        check_sft_setup(self._sft, self._environment)
        batch, num_ranks = self._sft.sft.batch_size, self._environment.world_size
        return f"{self._sft.model.path}, {batch} rows a step for {num_ranks} ranks"

    def _rows(self) -> str:
        warnings = list[str]()
        rows = read_rows(self._sft, warnings.append)
        self._data_warnings = warnings
        return summary_of(rows)
