"""Checkpoints, sharded by torch.distributed.checkpoint; each is complete or ignored.

    run.dir/checkpoints/step-000040/    __R_0.distcp of each rank R, .metadata, trainer.json,
                                        and COMPLETE, written last, with the digests of the others

Each rank writes its own shards, and any number of ranks can read them. A directory without COMPLETE
is being written, or left over from an interrupted save: it is never read, and the next save removes
it. A save that fails removes its own directory.

    save       every rank copies its shards to host memory, then trains on
    meanwhile  a thread of each rank writes the copy; when all have, rank 0's writes COMPLETE and
               announces the checkpoint: only then may a run resume from it
    finish     waits for the threads, and raises their error: at the next save, and at the end
Checkpoints are trusted input: their metadata is a pickle.
"""

from __future__ import annotations

import shutil
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import WriteResult

from umbra.runtime.disk import check_free_space, sync
from umbra.runtime.errors import ConfigError, UmbraError
from umbra.runtime.settings import from_wire, to_wire
from umbra.runtime.tracing.spans import span
from umbra.trainer.checkpoint.file_digests import DigestingFileSystem, complete, find_damage
from umbra.trainer.checkpoint.host_copy import HostCopy
from umbra.trainer.checkpoint.run_dir import check_base, right_model
from umbra.trainer.checkpoint.trainer_state import (
    COMPLETE,
    IF_DAMAGED,
    STATE_FILE,
    TrainerState,
    best_checkpoint,
    checkpoint_step,
    complete_checkpoints,
    describe_cause,
    is_complete,
    read_trainer_state,
    reading_checkpoint,
)
from umbra.trainer.config.trainer_config import LoraSection
from umbra.trainer.model.optimizer import EMA
from umbra.trainer.model.train_model import CRITIC, POLICY, TrainModel
from umbra.trainer.world.mesh import (
    Mesh,
    any_rank,
    barrier,
    first_text,
    from_each_rank,
    from_lead,
)
from umbra.trainer.world.run_files import (
    HeldFolder,
    RunDirectoryError,
    write_json,
    writing,
)

_METADATA_FILE: Final = ".metadata"
_MODEL: Final = "model."
_OPTIMIZER: Final = "optimizer."
_WRITE: Final = "write the checkpoint"
_dcp: Final[Any] = dcp


class CheckpointStore:
    """The checkpoints of a run directory. Every rank has one; save and load are collective.
    `folder`, where the last one was saved, follows a run directory that is moved, also while one is
    written."""

    def __init__(self, folder: Path, mesh: Mesh, keep: int) -> None:
        self.folder = folder
        self._run_dir: HeldFolder | None = None
        if mesh.is_lead and folder.parent.is_dir():  # else saving reports the reason
            self._run_dir = HeldFolder(folder.parent)
        self._mesh = mesh
        self._keep = keep
        self._copy = HostCopy(mesh)
        self._group = mesh.new_group()  # the writers', because training uses the other meanwhile
        self._writing: Future[None] | None = None

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def save(
        self,
        state: TrainerState,
        models: Mapping[str, TrainModel],
        on_complete: Callable[[], None] = lambda: None,
        *,
        in_background: bool = False,
    ) -> Path:
        """Writes a checkpoint of the models that are trained, after the one before it, and removes
        the oldest beyond `keep`, except the best. Then every rank calls `on_complete`, on a thread.

        With `in_background`, this returns when the tensors have been copied, and `finish` raises
        what fails later. Raises RunDirectoryError on every rank if the disk is full or the
        directory was removed; earlier checkpoints stay unchanged.
        """
        self.finish()
        self.folder = from_lead(self._mesh, self._locate)
        state = replace(state, **models[POLICY].origin)
        target = self.path(state.step)
        tensors = _tensors({name: model for name, model in models.items() if model.is_saved})
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        from_lead(self._mesh, lambda: self._prepare(target, nbytes))
        copies = self._copy.take(tensors if in_background else {})
        tensors |= _random_state(self._mesh.rank)
        writer = _Writer(target, nbytes, tensors, copies)
        self._writing = _on_a_thread(partial(self._write, writer, state, on_complete))
        if not copies:
            self.finish()
        return target

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows that `finish` will raise."""
        writing = self._writing
        return writing is not None and writing.done() and writing.exception() is not None

    def finish(self) -> None:
        """Waits for the checkpoint that is being written; raises what `save` raises. Collective."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def load(self, path: Path, models: Mapping[str, TrainModel]) -> TrainerState:
        """Loads a checkpoint in place. A frozen model that it lacks stays as it is. Raises
        ConfigError if it is incomplete or of another model, RunDirectoryError if one of its files
        cannot be read."""
        state = read_trainer_state(path)
        tensors, random_state = dict[str, Tensor](), _random_state(self._mesh.rank)
        own_origin = models[POLICY].origin  # every rank may read it from its node's disk
        from_lead(self._mesh, lambda: _check_origin(path, state, own_origin))
        with _first_cause("read the checkpoint", path, IF_DAMAGED):
            reader = _Reader(path)
            saved = reader.read_metadata().state_dict_metadata
            for name, model in models.items():
                own = _tensors({name: model})
                if (
                    model.optimizer is not None or own.keys() <= saved.keys()
                ):  # else the starting model
                    _check_fit(path, own, saved, model.path)
                    tensors |= own
                    model.is_saved = True
            if random_state.keys() <= saved.keys():  # fewer ranks may have written it
                tensors |= random_state
            _dcp.load(tensors, storage_reader=reader)
        for value in random_state.values():
            torch.set_rng_state(value)
        barrier()
        return state

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints."""
        return [checkpoint_step(path) for path in complete_checkpoints(self.folder)]

    def _locate(self) -> Path:
        return self.folder if self._run_dir is None else self._run_dir.path / self.folder.name

    def find_damage(self, path: Path) -> str:
        """The damage of a checkpoint's files, or "". Collective: each rank reads a part of them."""
        found = find_damage(path, self._mesh.rank, self._mesh.world_size)
        return first_text(found) if any_rank(bool(found)) else ""

    def _prepare(self, target: Path, nbytes: int) -> None:
        """Removes what interrupted saves left, including `target` itself, and checks that the
        checkpoint fits. A save that fills the disk would make the ledger and the logs fail,
        too, minutes later."""
        with writing("prepare the checkpoint", target):
            self.folder.mkdir(exist_ok=True)
            for path in self.folder.glob("step-*"):
                if path == target or not is_complete(path):
                    _remove(path)
        with writing(_WRITE, target, nbytes):
            check_free_space(self.folder, nbytes)
            target.mkdir()

    def _write(self, writer: _Writer, state: TrainerState, on_complete: Callable[[], None]) -> None:
        """Runs on a thread of every rank. Their collectives are in a group of their own."""
        if self._mesh.device.type == "cuda":
            torch.cuda.set_device(self._mesh.device)  # of this thread
        try:
            with span("write the checkpoint", step=state.step, overlaps=True):
                writer.save(self._group)
                digests = from_each_rank(writer.files.digests, self._group)
                complete = partial(self._complete, writer.folder, state, digests)
                self.folder = from_lead(self._mesh, complete, self._group)
            on_complete()
        except RunDirectoryError:  # raised on every rank, when none of them writes any more
            from_lead(self._mesh, writer.clean_up, self._group)
            raise

    def _complete(
        self,
        held: HeldFolder,
        state: TrainerState,
        digests: Sequence[Mapping[str, str]],
    ) -> Path:
        """Returns the folder of the checkpoints, which may have been moved."""
        target, folder = held.path, held.path.parent
        write_json(target / STATE_FILE, asdict(state))
        with writing("complete the checkpoint", target):
            sync(target)
            complete(target, {name: d for of_rank in digests for name, d in of_rank.items()})
            sync(folder)
            # Later ones belong to a discarded history: they do not count, and stay.
            found = [
                path for path in complete_checkpoints(folder) if checkpoint_step(path) <= state.step
            ]
            best = best_checkpoint(folder)
            for path in found[: -self._keep]:
                if path != best:
                    _remove(path)
        return folder


class StoredParameters:
    """Reads the parameters of a complete checkpoint one at a time, or with `is_average` their
    moving averages."""

    def __init__(self, path: Path, *, is_average: bool = False) -> None:
        self._path = path
        self._key = f"{_OPTIMIZER}{{}}.{EMA}" if is_average else f"{_MODEL}{{}}"
        self._reader = _Reader(path)
        self._saved = self._reader.read_metadata().state_dict_metadata

    def check_fit(self, parameters: Mapping[str, Tensor], model: Path) -> None:
        """Raises ConfigError if the checkpoint is of another model than that in the folder `model`,
        which has these parameters."""
        tensors = {f"{_MODEL}{name}": p for name, p in parameters.items()}
        tensors |= {self._key.format(name): p for name, p in parameters.items()}
        _check_fit(self._path, tensors, self._saved, model)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One parameter, whole, cast to `dtype`."""
        key = self._key.format(name)
        tensor = torch.empty(cast("Any", self._saved[key]).size, dtype=dtype)
        with (
            _first_cause("read the checkpoint", self._path, IF_DAMAGED),
            warnings.catch_warnings(),
        ):
            # torch warns that it loads without a process group, which is intended.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            _dcp.load({key: tensor}, storage_reader=self._reader)
        return tensor


def _remove(path: Path) -> None:
    (path / COMPLETE).unlink(missing_ok=True)  # first, so that half a checkpoint is never complete
    shutil.rmtree(path)


def _on_a_thread(work: Callable[[], None]) -> Future[None]:
    """A daemon's: a rank that ends early waits for no disk."""
    outcome = Future[None]()

    def run() -> None:
        try:
            outcome.set_result(work())
        except Exception as error:  # noqa: BLE001  `finish` raises it
            outcome.set_exception(error)

    threading.Thread(target=run, name="umbra-checkpoint", daemon=True).start()
    return outcome


class _Writer(FileSystemWriter):
    """Writes this rank's part of `tensors`, from `copies` where that has the part. Raises an error
    that names why this rank cannot write: torch's own errors do not, and reach the other ranks
    without their cause. `nbytes` is the whole checkpoint's."""

    def __init__(
        self,
        path: Path,
        nbytes: int,
        tensors: Mapping[str, Tensor],
        copies: Mapping[str, Tensor],
    ) -> None:
        # To copy ahead, torch waits for all work of the GPU, in which training is then behind.
        super().__init__(path, per_thread_copy_ahead=0)  # pyright: ignore[reportUnknownMemberType]
        self.fs = self.files = DigestingFileSystem()
        self.checkpoint = path
        self._nbytes = nbytes
        self._tensors = tensors
        self._copies = copies

    def save(self, group: Any) -> None:
        place = self.checkpoint
        with writing(_WRITE, place, self._nbytes), _first_cause(_WRITE, place):
            _dcp.save(
                self._tensors,
                storage_writer=self,
                planner=_CopiesFirst(self._copies),
                process_group=group,
            )

    @cached_property
    def folder(self) -> HeldFolder:
        return HeldFolder(self.checkpoint)

    def clean_up(self) -> None:
        """Removes the checkpoint unless it is complete. Raises RunDirectoryError if it was removed
        before."""
        target = self.folder.path
        if not is_complete(target):
            shutil.rmtree(target, ignore_errors=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.path = self.folder.inside
        return super().prepare_local_plan(plan)

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        with writing(_WRITE, self.checkpoint, self._nbytes):
            return super().write_data(plan, planner)


class _CopiesFirst(DefaultSavePlanner):
    """Plans by the tensors, which may change meanwhile, and takes what is written from copies."""

    def __init__(self, copies: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._copies = copies

    def lookup_object(self, index: MetadataIndex) -> Any:
        copy = self._copies.get(index.fqn)
        return super().lookup_object(index) if copy is None else copy


class _Reader(FileSystemReader):
    """Raises an error that names the file that cannot be read; torch's own errors do not. Reads the
    metadata once, however often torch asks for it."""

    _metadata: Metadata | None = None

    @property
    def _checkpoint(self) -> Path:
        return Path(cast("Any", self).path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            with reading_checkpoint(self._checkpoint, _METADATA_FILE):
                self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        items: defaultdict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            items[self.storage_data[item.storage_index].relative_path].append(item)
        for name, of_file in items.items():
            with reading_checkpoint(self._checkpoint, name):
                super().read_data(replace(plan, items=of_file), planner).wait()
        return super().read_data(replace(plan, items=[]), planner)  # returns a completed future


def _tensors(models: Mapping[str, TrainModel]) -> dict[str, Tensor]:
    """The live tensors by flat name (DTensors: each rank holds its part). Names of models other
    than the policy begin with the model's."""
    tensors: dict[str, Tensor] = {}
    for model_name, model in models.items():
        prefix = "" if model_name == POLICY else f"{model_name}/"
        for name, parameter in model.stored.items():
            tensors[f"{prefix}{_MODEL}{name}"] = parameter.data
        if model.optimizer is not None:
            model.optimizer.start()  # `load` needs all of its state
            for name, value in model.optimizer.states.items():
                tensors[f"{prefix}{_OPTIMIZER}{name}"] = value
    return tensors


def _random_state(rank: int) -> dict[str, Tensor]:
    return {f"random.rank{rank}": torch.get_rng_state()}


def _check_fit(
    path: Path, tensors: Mapping[str, Tensor], saved: Mapping[str, Any], model: Path
) -> None:
    """Raises ConfigError for the first tensor that differs between a checkpoint and a model, which
    is in the folder `model`. The first of the `tensors` is a parameter."""
    prefix = next(iter(tensors)).partition(_MODEL)[0] + _MODEL
    for name in (*tensors, *(each for each in saved if each.startswith(prefix))):
        there = list(saved[name].size) if name in saved else "missing"
        here = list(tensors[name].shape) if name in tensors else "missing"
        if there == here:
            continue
        difference = f"{name} is {there} there and {here} here"
        if misfit := _other_settings(name, saved):
            raise ConfigError(f"checkpoint {path} {misfit}: {difference}")
        remedy = "set critic.path as its run did"
        if not name.startswith(f"{CRITIC}/"):
            remedy = right_model(path, lambda start: start.resolve() != model.resolve())
        raise ConfigError(
            f"checkpoint {path} is of another model than {model}: {difference}; {remedy}"
        )


def _check_origin(path: Path, state: TrainerState, own: Mapping[str, Any]) -> None:
    """Raises ConfigError if a checkpoint's adapters have other settings or change other weights
    than those whose `origin` is `own`."""
    saved, here = (from_wire(LoraSection, each) for each in (state.lora, own.get("lora", {})))
    same = replace(here, targets=saved.targets, merge=saved.merge)
    if saved != same or {*saved.targets} != {*here.targets}:
        raise ConfigError(
            f"checkpoint {path} was trained with other settings of LoRA: set model.lora "
            f"to {to_wire(saved)} again, or export the checkpoint and start from that"
        )
    check_base(path, state, own.get("base", ""))


def _other_settings(name: str, saved: Collection[str]) -> str:
    """Why a checkpoint has not the same tensor; "" if that is no setting but the model."""
    if name.startswith(f"{CRITIC}/") and not any(each.startswith(f"{CRITIC}/") for each in saved):
        return "was saved without a critic (train.advantage = 'gae')"
    if _OPTIMIZER not in name:
        return ""
    if name.endswith(f".{EMA}"):
        return "was saved without train.ema"
    return "was saved by another train.optimizer"


@contextmanager
def _first_cause(what: str, path: Path, advice: str = "") -> Generator[None]:
    """Raises the first of the errors that torch.distributed.checkpoint collects from the ranks.
    `advice` is the remedy for those that do not come from the disk."""
    try:
        yield
    except CheckpointException as error:
        causes = [failure[0] for failure in error.failures.values()]
        for cause in causes:
            if isinstance(cause, OSError | UmbraError):
                raise cause from error
        raise RunDirectoryError(
            f"cannot {what} {path}: {describe_cause(causes[0])}{advice}"
        ) from error
