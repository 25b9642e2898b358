from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from umbra.runtime.cluster.gpu_shortage import lacks_gpu_memory
from umbra.runtime.cluster.memory_plan import GIB, MemoryPlan
from umbra.runtime.engine_api.lifecycle import ALL_TAGS
from umbra.runtime.errors import UmbraError, WeightSyncError
from umbra.runtime.session.rollouts import Rollouts
from umbra.runtime.session.session import Session
from umbra.runtime.session.weight_publisher import WeightPublisher
from umbra.runtime.tracing.spans import span
from umbra.runtime.weights.shards import wire_manifest
from umbra.runtime.weights.sync_messages import SyncReport
from umbra.trainer.checkpoint.run_dir import RunDir, VersionCounter, newest_version
from umbra.trainer.checkpoint.trainer_state import TrainerState
from umbra.trainer.config.trainer_config import TrainerConfig
from umbra.trainer.model.host_offload import HostOffload
from umbra.trainer.model.merged_weights import MergedWeights
from umbra.trainer.model.train_model import TrainModel
from umbra.trainer.reporting.memory_metrics import GpuMemorySeen
from umbra.trainer.services.memory_needs import SLEEPING_TAGS, trains_early
from umbra.trainer.services.services import MANAGER, POOL
from umbra.trainer.world.mesh import Mesh, any_rank, first_text, from_lead
from umbra.trainer.world.signals import StopRequested, StopSignals

T = TypeVar("T")
_MARGIN: Final = 0.1
"""Share by which a step may take more than any before it. A larger one lets engines sleep where
they need not; a smaller one finds fragmentation and longer samples too late."""
_MEASURED_STEPS: Final = 2
"""Steps beside engines that sleep. The optimizer makes its state at the end of the first, so only
the second has it beside activations."""

_LEAN: Final = "training computes logits twice"
_ASLEEP: Final = "engines sleep while the trainer computes"
_LATE: Final = "nothing is compiled while engines start"


class TrainingRoom:
    """The memory of a rank's GPU for training steps, while engines keep some. Unlimited on the CPU.

    A step needs `planned_nbytes`, or more than the largest so far.
    """

    def __init__(self, device: torch.device, planned_nbytes: int) -> None:
        self._num_steps = 0
        self._device = device
        self._needed_nbytes = planned_nbytes

    @property
    def is_measured(self) -> bool:
        return self._num_steps >= _MEASURED_STEPS

    def measure(self) -> None:
        """Must be called after a step, while torch's allocator keeps what it took."""
        self._num_steps += 1
        if self._device.type == "cuda":
            taken = torch.cuda.memory_reserved(self._device)
            self._needed_nbytes = max(self._needed_nbytes, int(taken * (1 + _MARGIN)))

    def lack(self) -> str:
        """Returns a sentence if the next step lacks memory, else ""."""
        if self._device.type != "cuda":
            return ""
        free, _ = torch.cuda.mem_get_info(self._device)
        room = free + torch.cuda.memory_reserved(self._device)
        if room >= self._needed_nbytes:
            return ""
        return (
            f"{self._device} has room for {room / GIB:.1f} GiB beside the engines, and training "
            f"may need {self._needed_nbytes / GIB:.1f} GiB"
        )


class PolicyEngines:
    """Gives the policy's weights to the engines and gets batches and evaluations for them. Every
    rank has one; all methods are collective. A signal to any rank ends a wait on all of them."""

    def __init__(
        self,
        config: TrainerConfig,
        session: Session,
        mesh: Mesh,
        policy: TrainModel,
        offload: HostOffload,
        memory: MemoryPlan,
        gpu_memory: GpuMemorySeen,
        stop: StopSignals,
        note: Callable[[str], None],
    ) -> None:
        self.rollouts = Rollouts(session, MANAGER)
        self._config = config
        self._is_hybrid = config.pool.mode == "hybrid"
        self._mesh = mesh
        self._policy = policy
        self._offload = offload
        self._merged = MergedWeights(policy)
        self._gpu_memory = gpu_memory
        self._stop = stop
        self._note = note
        self._room = TrainingRoom(mesh.device, memory.training_nbytes)
        self._memory = memory
        self._shortage = RunDir(config.run.dir).out_of_memory
        self._sleeps = SLEEPING_TAGS[config.pool.sleep]
        may_need_less = policy.keeps_logits or (self._is_hybrid and self._sleeps != ALL_TAGS)
        if may_need_less and (remedy := from_lead(mesh, self._recorded_remedy)):
            self._stop_keeping_logits()
            if remedy == _ASLEEP:
                self._sleeps = ALL_TAGS
            note(
                f"{remedy}, because this run ran out of memory; remove {self._shortage} to let it "
                "try again"
            )
        self._frees = ALL_TAGS  # in the next sleep and sync: all, until steps have been measured
        self._pool = session.pool(POOL)
        lora = policy.adapters and policy.adapters.spec
        self._sleep_level = 1 if lora else 2  # engines keep a model that no sync would bring back
        dtype: torch.dtype = getattr(torch, config.model.compute_dtype)
        self._publisher = WeightPublisher(
            session,
            policy.published,
            wire_manifest(policy.published, dtype, kept=policy.buffers, lora=lora),
            locate=offload.locate,
            keeps_memory=not offload.moves_parameters,
        )

    def begin(self, state: TrainerState, resumed_from: Path | None) -> None:
        """Takes the ledger back to the checkpoint, which may be another run's."""
        versions = RunDir(self._config.run.dir).versions
        newest = from_lead(self._mesh, lambda: self._begin(state, resumed_from, versions))
        self.versions = VersionCounter(versions, newest, writes=self._mesh.is_lead)

    def _begin(self, state: TrainerState, resumed_from: Path | None, versions: Path) -> int:
        """The newest version that was ever used, because numbers are not reused."""
        is_own = resumed_from is not None and RunDir(self._config.run.dir).holds(resumed_from)
        position = state.ledger if is_own else ""
        timeout_s = self._config.pool.sync_timeout_s
        kept = self.rollouts.begin(state.step, state.version, position, timeout_s)
        return max(kept["version"], state.version, newest_version(versions))

    def publish(self, step: int) -> dict[str, float] | None:
        """Publishes the weights after `step` steps under a new version; returns metrics. None if a
        signal ended it: nothing would be generated with these weights."""
        version = self.versions.next(step)
        with span("sync", version=version) as sync:
            self._merged.merge()  # they stay so until training: engines may come up meanwhile
            if self._mesh.is_lead:
                self.rollouts.announce(version, step)
            report = self._wait(lambda: self._sync(version))
        if any_rank(report is None) or report is None:
            return None
        return {**sync_metrics(report), "time/sync_s": sync.seconds}

    def next_batch(self, step: int) -> Mapping[str, Any] | None:
        """This rank's columns; None if a signal ended the wait."""
        timeout_s = self._config.rollout.timeout_s
        columns = self._wait(
            lambda: self.rollouts.next_batch(
                step, self.versions.current, self._sync_again, timeout_s
            )
        )
        return None if any_rank(columns is None) else columns

    def begin_evaluation(self, step: int) -> None:
        """Has the held-out prompts generated beside batches, for `evaluate`."""
        if self._mesh.is_lead:
            self.rollouts.begin_evaluation(step, self._config.eval.temperature)

    def evaluate(self, step: int) -> Mapping[str, Any] | None:
        """Scores of the held-out prompts; None if a signal ended the wait of this rank."""
        config = self._config
        return self._wait(
            lambda: self.rollouts.evaluate(
                step, config.eval.temperature, self._sync_again, config.rollout.timeout_s
            )
        )

    def sleep(self) -> None:
        """Pauses hybrid engines, and gives the memory that `pool.sleep` names to the ranks.

        Engines free all of it before the first steps, which show what training takes, and from a
        step on for which a rank lacks room, unless it kept logits, which it then stops.
        """
        if self._is_hybrid:
            if self._room.is_measured:
                self._frees = self._sleeps
            lacks = self._free()
            if self._policy.keeps_logits and any_rank(bool(lacks)):
                self._stop_keeping_logits()
                self._offload.release_cache()  # which has the memory of kept logits
                self._frees = ALL_TAGS  # until steps without kept logits have been measured
                self._note(f"{first_text(lacks)}. From here on, {_LEAN}")
                lacks = self._free()
            if self._sleeps != ALL_TAGS and any_rank(bool(lacks)):
                self._sleeps = self._frees = ALL_TAGS
                self._note(f"{first_text(lacks)}. From here on, {_ASLEEP}")
                self._free()
        self._offload.bring_back()
        self._merged.restore()

    def _stop_keeping_logits(self) -> None:
        self._policy.keeps_logits = False
        lean_nbytes = self._memory.training_nbytes - self._memory.logits_nbytes
        self._room = TrainingRoom(self._mesh.device, lean_nbytes)

    def _recorded_remedy(self) -> str:
        """The remedy that the run recorded when it last ran out of memory; "" if it never did."""
        return self._shortage.read_text(encoding="utf-8") if self._shortage.exists() else ""

    def _free(self) -> str:
        """Makes engines free `_frees`, and returns what this rank then lacks (`TrainingRoom.lack`).
        Collective."""
        if self._mesh.is_lead:
            self._pool.sleep(self._sleep_level, tags=sorted(self._frees))
        any_rank(False)  # a barrier: no rank takes memory before the engines have released it
        return "" if self._frees == ALL_TAGS else self._room.lack()

    def may_warm_up(self, step: int) -> bool:
        """Whether to compile the passes of step `step` (from 0) while engines start, which a run
        that has run out of memory does not, nor one with padded samples, whose rows the plan does
        not know. Collective."""
        config, device = self._config, self._mesh.device
        is_due = config.train.compile is True and step < config.train.total_steps
        is_due &= not self._sleeps and trains_early(config, POOL, self._memory, device.type)
        is_due &= self._policy.is_packed and not self._shortage.exists()
        room = TrainingRoom(device, self._memory.shared_nbytes)
        return not any_rank(bool(room.lack()) or not is_due)

    @contextmanager
    def training_step(self, *, is_warm_up: bool = False) -> Generator[None]:
        """The ranks train or warm up in the block. One that runs out of memory leaves the others in
        a collective, so nothing is repeated: the run ends, and needs less when it resumes."""
        try:
            yield
        except RuntimeError as error:  # libraries have errors of their own for it
            is_awake = self._is_hybrid and (is_warm_up or self._frees != ALL_TAGS)
            may_need_less = is_warm_up or is_awake or self._policy.keeps_logits
            if not may_need_less or not lacks_gpu_memory(str(error)):
                raise
            remedy = _LEAN if self._policy.keeps_logits else _ASLEEP if is_awake else _LATE
            self._shortage.write_text(remedy, encoding="utf-8")
            beside = " beside engines that stayed awake" if is_awake else ""
            raise UmbraError(
                f"training ran out of memory{beside}: {error}. Resume the run: from now on, "
                f"{remedy}"
            ) from error
        if not is_warm_up:
            self._room.measure()

    def sleep_if_awake(self) -> None:
        if any_rank(self._offload.is_away):  # a signal may have reached only some ranks
            self.sleep()
        self._merged.restore()

    def _sync(self, version: int) -> SyncReport:
        timeout_s = self._config.pool.sync_timeout_s
        if not self._is_hybrid or not self._frees:
            if self._is_hybrid and self._room.lack():
                self._offload.release_cache()  # engines generate beside it
            report = self._publisher.publish(POOL, version, timeout_s)
            self._gpu_memory.look("sync")
            return report
        if "weights" in self._frees:
            # Engines wake once every rank has joined the sync, when all have released their cache.
            self._offload.release_cache()
        return self._publisher.publish(POOL, version, timeout_s, self._send_away)

    def _sync_again(self, version: int) -> None:
        """Publishes the current version again, to an engine that came up while this rank waits."""
        with span("sync again", version=version):
            self._sync(version)

    def _send_away(self) -> None:
        self._gpu_memory.look("sync")
        with self._stop.uninterruptible():  # otherwise a checkpoint could miss tensors in transit
            self._offload.send_away()

    def _wait(self, ask: Callable[[], T]) -> T | None:
        try:
            # A signal that reaches one rank during a sync fails the sync on all ranks.
            with self._stop.interruptible(WeightSyncError):
                return ask()
        except StopRequested:
            return None


def sync_metrics(report: SyncReport) -> dict[str, float]:
    return {
        "sync/version": float(report.version),
        "sync/prepare_s": report.prepare_s,
        "sync/transfer_s": report.transfer_s,
        "sync/verify_s": report.verify_s,
        "sync/resume_s": report.resume_s,
        "sync/network_mib": report.network_nbytes / (1 << 20),
        "sync/failed_engines": float(len(report.failed)),
    }
