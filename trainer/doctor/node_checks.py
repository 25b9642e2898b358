"""The checks of `umbra doctor` that need one process of a node, and no other node. Most of them
call a check that a run's start makes, too."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import starmap
from pathlib import Path
from typing import Final, Literal

import torch

from umbra.runtime.actor.actor_check import check_actor
from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.cluster.environment import (
    TorchrunEnvironment,
    host_address,
    is_secret_file_named,
    secret_file,
    socket_root,
)
from umbra.runtime.cluster.job_nodes import own_address
from umbra.runtime.cluster.memory_plan import GIB
from umbra.runtime.cluster.placement import Node, Plan
from umbra.runtime.cluster.socket_dir import SocketDir
from umbra.runtime.disk import check_free_space, format_nbytes
from umbra.runtime.engine_api.engine_names import engine_kind
from umbra.runtime.errors import ConfigError, DataError, RemoteError, UmbraError
from umbra.runtime.package_versions import outside_tested_range
from umbra.runtime.process.cpu_affinity import cpu_quota, thread_limit
from umbra.runtime.process.nvml import Nvml
from umbra.runtime.rollout.prompts import Prompt, PromptSet
from umbra.runtime.rpc.curve_keys import CurveKeys
from umbra.trainer.algorithms.base import load_advantage_estimator, load_loss
from umbra.trainer.checkpoint.file_digests import check_format
from umbra.trainer.checkpoint.run_dir import RunDir, RunLock, check_kind, check_run_dir
from umbra.trainer.checkpoint.trainer_state import complete_checkpoints, read_trainer_state
from umbra.trainer.config import setting_rules
from umbra.trainer.config.trainer_config import TrainerConfig
from umbra.trainer.data.hub_paths import hub_settings
from umbra.trainer.data.prompt_preparation import check_data, prepare_prompts
from umbra.trainer.doctor.worker_trial import WorkerTrial
from umbra.trainer.reporting.metrics_loggers import check_loggers, logger_names
from umbra.trainer.services.memory_needs import (
    ITEMSIZES,
    ModelSizes,
    check_host_memory,
    plan_job_memory,
    planned_settings,
    trained_size,
)
from umbra.trainer.services.pool_specs import TEACHER, auxiliary_pool_spec, plan_pools
from umbra.trainer.services.services import (
    POOL,
    engine_pool_spec,
    open_policy_tokenizer,
    prompt_budget,
    user_folders,
)
from umbra.trainer.services.setup_check import (
    check_batch_size,
    check_critic,
    check_lora,
    check_models,
    check_rotary_frequencies,
    check_stop_tokens,
    check_teacher,
)
from umbra.trainer.world.mesh import pick_device, usable_gpus
from umbra.trainer.world.run_files import writing

HUB: Final = "hub"
"""The check of downloads, which `umbra doctor` makes before these."""
_PACKAGES: Final = ("umbra-rl", "torch", "transformers", "pyzmq", "vllm", "sglang")
_LEAST_NUM_FILES: Final = 4096
"""Files that each process should be allowed to open. A connection between processes takes four, and
a manager has one to each engine, rank and worker."""
_LEAST_NUM_THREADS: Final = 1024
"""Threads that all processes together should be allowed. A rank or engine has 10, and one more for
each core; vLLM and SGLang have several processes for an engine."""
_LEAST_SHARED_NBYTES: Final = 1 << 30
"""Size that /dev/shm should have for buffers of NCCL, vLLM and SGLang. Docker's 64 MiB are too
little."""
_ENGINE_NUM_THREADS: Final = 1
_NUM_OTHER_THREADS: Final = 2
"""Threads that are busy while engines generate: of an engine besides one for each of its GPUs, and
of the rollout manager and its workers. With more, sufficient nodes are warned of."""
_SLOW_LOOKUP_S: Final = 1.0
"""Time to look up the name of an address. With less, a busy name server is a warning; with more,
each restart of the ranks takes seconds longer and nothing says why."""
_MAX_USED_GPU_NBYTES: Final = 3 * GIB
"""Use of a GPU on which only these checks run, whose processes have a context each. With more,
small jobs of others go unnoticed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one check. `text` has the finding, or the fault and its remedy, or why the
    check was left out."""

    check: str
    state: Literal["ok", "warning", "FAILED", "-"]
    text: str


class NotApplicable(Exception):
    """A check has nothing to look at here; the message says why."""


def verdict_of(name: str, check: Callable[[], str]) -> Verdict:
    """Makes one check, which returns its finding."""
    try:
        return Verdict(name, "ok", check())
    except NotApplicable as reason:
        return Verdict(name, "-", str(reason))
    except UmbraError as error:
        return Verdict(name, "FAILED", str(error))
    except Exception as error:  # noqa: BLE001 -- the other checks are made all the same
        return Verdict(name, "FAILED", f"{type(error).__name__}: {error}")


def not_checked(name: str, cause: str) -> Verdict:
    """For a check that would fail for the same cause as the check `cause`."""
    return Verdict(name, "-", f"not checked: see {cause}")


class NodeChecks:
    """The checks of one node. `environment` has the numbers of ranks that the run would have,
    `nodes` all nodes with ranks, this one at the index of its rank, and `gpu_nbytes` the
    sizes of their GPUs."""

    def __init__(
        self,
        config: TrainerConfig,
        environment: TorchrunEnvironment,
        nodes: Sequence[Node],
        gpu_nbytes: Sequence[Sequence[int]],
    ) -> None:
        self._config = config
        self._environment = environment
        self._nodes = nodes
        self._gpu_nbytes = gpu_nbytes
        self._plan: Plan | None = None
        self._first_prompt: Prompt | None = None
        self._worker: WorkerTrial | None = None
        self._stack = contextlib.ExitStack()
        self._data_warnings: Sequence[str] = ()
        self._failed: set[str] = set()
        self._not_downloaded = hub_settings(config)  # else they would be local paths

    def make(self) -> Iterator[Verdict]:
        """Yields the verdicts as they come; the checks of engines take longest."""
        is_first = self._environment.node_rank == 0
        yield from self._versions()
        yield self._verdict("model", self._model, after=self._hub("model", "pools"))
        yield self._verdict("context", self._context, after="model")
        if self._config.train.teacher_kl_coef and TEACHER in self._config.pools:
            yield self._verdict("teacher", self._teacher, after="model")
        yield self._verdict("data", self._data, after=self._hub("data", "eval"))
        yield self._verdict("prompts", self._prompts, after=("model", "context", "data"))
        yield from (Verdict("prompts", "warning", text) for text in self._data_warnings)
        yield verdict_of("loss", self._loss)
        for text in setting_rules.warnings(self._config):
            yield Verdict("settings", "warning", text)
        yield verdict_of("batch", self._batch)
        yield verdict_of("loggers", self._loggers)
        yield self._verdict("run directory", self._run_directory)
        if is_first:
            yield self._verdict("run lock", self._run_lock, after="run directory")
        yield self._verdict("disk space", self._disk_space, after="model")
        yield verdict_of("sockets", self._sockets)
        yield verdict_of("keys", self._keys)
        yield verdict_of("address", self._address)
        if self._environment.spans_nodes:
            yield from slow_name_lookups(*self._environment.meeting_point)
        yield verdict_of("open files", open_files)
        yield verdict_of("threads", threads)
        yield verdict_of("/dev/shm", self._shared_memory)
        yield verdict_of("locked memory", self._locked_memory)
        with self._stack:
            yield self._verdict("reward, agent", self._user_functions, after="model")
            yield self._verdict("first reward", self._reward, after=("prompts", "reward, agent"))
        yield verdict_of("GPUs", self._gpus)
        yield verdict_of("placement", self._placement)
        if self._plan is None:
            return
        yield cores_verdict(self._plan, self._environment.node_rank, allowed_cores())
        if is_first:
            yield verdict_of("memory plan", self._memory_plan)
        yield self._verdict("host memory", self._host_memory, after="model")
        for name in (POOL, *self._config.pools):
            yield self._verdict(
                f"engine {name}", lambda name=name: self._engine(name), after="model"
            )

    def _verdict(
        self, name: str, check: Callable[[], str], after: str | Sequence[str] = ()
    ) -> Verdict:
        """Makes a check, unless one that it builds on (`after`) has failed or was not made."""
        for cause in (after,) if isinstance(after, str) else after:
            if cause == HUB or cause in self._failed:
                self._failed.add(name)
                return not_checked(name, cause)
        verdict = verdict_of(name, check)
        if verdict.state == "FAILED":
            self._failed.add(name)
        return verdict

    def _hub(self, *sections: str) -> str:
        """The check of downloads, if it has failed for a setting of these sections; else ""."""
        is_missing = any(key.partition(".")[0] in sections for key in self._not_downloaded)
        return HUB if is_missing else ""

    def _versions(self) -> Iterator[Verdict]:
        found: dict[str, str] = {}
        for package in _PACKAGES:
            with contextlib.suppress(PackageNotFoundError):  # umbra may run from its sources
                found[package] = version(package)
        cuda: str | None = torch.version.cuda
        texts = [f"Python {platform.python_version()}", *map(" ".join, found.items())]
        texts.append(f"CUDA {cuda}" if cuda else "torch without CUDA")
        yield Verdict("versions", "ok", ", ".join(texts))
        for warning in filter(None, starmap(outside_tested_range, found.items())):
            yield Verdict("versions", "warning", warning)

    def _model(self) -> str:
        check_models(self._config)
        check_lora(self._config.model)
        check_critic(self._config)
        return str(self._config.model.path)

    def _teacher(self) -> str:
        check_teacher(self._config)
        return str(self._config.pools[TEACHER].model_path)

    def _context(self) -> str:
        check_rotary_frequencies(self._config)
        check_stop_tokens(self._config)
        budget = prompt_budget(self._config)
        budget.check()
        budget.for_eval().check()
        return f"{budget.max_context_len} tokens, {budget.max_new_tokens} of them generated"

    def _data(self) -> str:
        check_data(self._config.data, self._config.eval.sets)
        return ", ".join(
            str(path) for path in (*self._config.data.train_files, *self._config.data.eval_files)
        )

    def _prompts(self) -> str:
        config = self._config
        with tempfile.TemporaryDirectory(prefix="umbra-doctor-") as folder:
            files = prepare_prompts(
                config.data,
                open_policy_tokenizer(config),
                prompt_budget(config),
                folder=Path(folder),
                min_prompts=self._environment.world_size,
                groups_per_step=config.rollout.groups_per_step,
                sets=config.eval.sets,
            )
            with contextlib.closing(PromptSet.open(files.train_path)) as prompts:
                self._first_prompt = prompts[0]
        self._data_warnings = files.warnings
        return f"{files.num_train:,} to train on, {files.num_eval:,} held out"

    def _loss(self) -> str:
        train, folders = self._config.train, user_folders(self._config)
        load_loss(train.loss, folders)
        load_advantage_estimator(train.advantage, folders)
        return f"{train.loss}, {train.advantage}"

    def _batch(self) -> str:
        num_ranks = self._environment.world_size
        check_batch_size(self._config, num_ranks)
        return f"{self._config.samples_per_step} completions a step for {num_ranks} ranks"

    def _loggers(self) -> str:
        check_loggers(self._config.run.loggers)
        return ", ".join(["metrics.jsonl", *logger_names(self._config.run.loggers)])

    def _run_directory(self) -> str:
        run = self._config.run
        check_run_dir(run, self._environment.incarnation)
        check_kind(self._config)
        if run.resume == "auto":
            for newest in complete_checkpoints(RunDir(run.dir).checkpoints)[-1:]:
                check_format(newest)
        elif run.resume != "never":
            check_format(Path(run.resume))
            read_trainer_state(Path(run.resume))
        return str(run.dir.absolute())

    def _run_lock(self) -> str:
        with RunLock(self._config.run.dir):
            return "no other run uses the run directory"

    def _disk_space(self) -> str:
        config, folder = self._config, self._config.run.dir
        try:
            sizes = ModelSizes.read(config.model.path)
            num_trained = trained_size(config, sizes)
            if config.has_critic:
                of_critic = ModelSizes.read(config.of_critic.model.path).without_head()
                num_trained += trained_size(config.of_critic, of_critic)
        except (ConfigError, DataError) as error:
            raise NotApplicable(f"the model's size is not known: {error}") from None
        # Parameters, AdamW's two states and perhaps a reference model; and one checkpoint is
        # written before one is removed.
        checkpoint = 3 * ITEMSIZES[config.master_dtype] * num_trained
        if config.train.kl_coef and config.train.reference_every:
            checkpoint += ITEMSIZES[config.model.dtype] * num_trained
        needed = checkpoint * (config.train.keep_checkpoints + 1)
        needed += ITEMSIZES[config.model.dtype] * sizes.num_parameters * config.train.export
        with writing("write checkpoints to", folder, needed):
            check_free_space(folder, needed)
        return f"checkpoints and export need {format_nbytes(needed)}, and fit"

    def _sockets(self) -> str:
        with SocketDir.create(f"doctor-{os.getpid()}", socket.gethostname(), socket_root()):
            return str(socket_root())

    def _keys(self) -> str:
        if is_secret_file_named():
            path = secret_file("")
            CurveKeys.load(path)
            return str(path)
        if not (self._environment.spans_nodes or host_address()):
            raise NotApplicable("a job of one node needs none")
        path = secret_file(f"doctor-{socket.gethostname()}-{os.getpid()}")
        try:
            CurveKeys.generate().save(path)
        except OSError as error:
            raise ConfigError(
                f"cannot write the job's keys to {path.parent}: {error.strerror}; make that folder "
                "writable, or make a file of keys and name it in UMBRA_SECRET_FILE"
            ) from error
        path.unlink()
        return f"can be written to {path.parent}"

    def _address(self) -> str:
        environment = self._environment
        address = host_address()
        if environment.spans_nodes:
            address = own_address(*environment.meeting_point)
        if not address:
            raise NotApplicable("a job of one node listens on none")
        listen(address).close()
        return f"listens on {address}"

    def _shared_memory(self) -> str:
        kinds = [
            engine_kind(pool.engine) for pool in (self._config.pool, *self._config.pools.values())
        ]
        if not (self._has_gpus or any(kind.wraps_library for kind in kinds)):
            raise NotApplicable("neither NCCL nor an engine uses it")
        stats = os.statvfs("/dev/shm")
        size = stats.f_frsize * stats.f_blocks
        if size < _LEAST_SHARED_NBYTES:
            raise ConfigError(
                f"/dev/shm has {format_nbytes(size)}, and NCCL and engines need "
                f"{format_nbytes(_LEAST_SHARED_NBYTES)}: start the container with --shm-size=16g, "
                "or --ipc=host"
            )
        return f"{format_nbytes(stats.f_frsize * stats.f_bavail)} free of {format_nbytes(size)}"

    def _locked_memory(self) -> str:
        adapters = Path("/sys/class/infiniband")
        if not (self._environment.spans_nodes and adapters.is_dir() and any(adapters.iterdir())):
            raise NotApplicable("only InfiniBand between nodes needs it")
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if soft != resource.RLIM_INFINITY:
            raise ConfigError(
                f"ulimit -l is {soft >> 10} KiB, and NCCL over InfiniBand locks all its buffers: "
                "set it to unlimited (LimitMEMLOCK=infinity for slurmd, --ulimit memlock=-1 for a "
                "container)"
            )
        return "unlimited"

    @property
    def _has_gpus(self) -> bool:
        return bool(usable_gpus())

    def _gpus(self) -> str:
        pick_device(self._config.train.device, 0)
        gpus = usable_gpus()
        if not gpus:
            raise NotApplicable("no GPU here")
        nvml = Nvml.open(gpus=gpus)
        if nvml is None:
            raise NotApplicable(f"{len(gpus)} GPUs, about which NVML reports nothing")
        try:
            uses = nvml.uses()
        finally:
            nvml.close()
        for gpu, use in zip(gpus, uses, strict=True):
            if use.used_nbytes > _MAX_USED_GPU_NBYTES:
                holders = ", ".join(map(str, use.by_pid)) or "unknown"
                raise ConfigError(
                    f"GPU {gpu}: {use.used_nbytes / GIB:.1f} of {use.total_nbytes / GIB:.1f} GiB "
                    f"are in use (processes: {holders}): end what uses it, or leave the GPU out of "
                    "CUDA_VISIBLE_DEVICES"
                )
        sizes = sorted({f"{use.total_nbytes / GIB:.0f} GiB" for use in uses})
        return f"{len(gpus)} of {', '.join(sizes)}, all free"

    def _placement(self) -> str:
        device = pick_device(self._config.train.device, 0)
        plan = plan_pools(self._config, POOL, device_type=device.type, nodes=self._nodes)
        self._plan = plan
        engines = ", ".join(f"{len(places)} of {pool}" for pool, places in plan.engines.items())
        return f"{self._environment.world_size} ranks on {device.type}, engines: {engines}"

    def _memory_plan(self) -> str:
        if not any(self._gpu_nbytes):
            raise NotApplicable("no GPU here")
        assert self._plan is not None
        memory, config = plan_job_memory(self._config, POOL, self._plan, self._gpu_nbytes, "cuda")
        self._plan = replace(self._plan, kv_num_tokens=memory.kv_num_tokens)
        if not memory.expected_nbytes:
            raise NotApplicable(*memory.notes)
        fits = f"fits with {planned_settings(config)}"
        return "\n".join([fits, *self._plan.table(memory.columns()), *memory.notes])

    def _host_memory(self) -> str:
        environment = self._environment
        if not any(self._gpu_nbytes):
            raise NotApplicable("no GPU here")
        try:
            ModelSizes.read(self._config.model.path)
        except (ConfigError, DataError) as error:
            raise NotApplicable(f"the model's size is not known: {error}") from None
        nbytes = check_host_memory(
            self._config, environment.world_size, environment.local_world_size
        )
        return f"ranks keep {nbytes / GIB:.1f} GiB in it"

    def _user_functions(self) -> str:
        try:
            self._worker = self._stack.enter_context(WorkerTrial.open(self._config))
        except RemoteError as error:  # user code may raise anything
            raise ConfigError(error.remote_traceback) from None
        functions = self._config.reward.targets.values()
        return ", ".join(filter(None, (*functions, self._config.rollout.agent)))

    def _reward(self) -> str:
        config = self._config
        if config.pools:
            names = ", ".join(config.pools)
            raise NotApplicable(f"it may ask {names}, and no engine runs here")
        assert self._first_prompt is not None
        assert self._worker is not None
        rewards = self._worker.score(self._first_prompt)
        shown = ", ".join(f"{reward:.4g}" for reward in dict.fromkeys(rewards))
        return f"{shown} for {len(rewards)} completions that repeat the first prompt"

    def _engine(self, name: str) -> str:
        assert self._plan is not None
        config, plan = self._config, self._plan
        device = pick_device(config.train.device, 0).type
        if name == POOL:
            pool, spec = config.pool, engine_pool_spec(config, plan, device)
        else:
            pool = config.pools[name]
            spec = auxiliary_pool_spec(name, config, plan, device, POOL)
        engines: list[ActorSpec] = spec.engine_specs()
        if not engines:
            raise NotApplicable("its engines are on machines that join later")
        return check_actor(engines[0]) or pool.engine


def slow_name_lookups(host: str, port: int) -> Iterator[Verdict]:
    """Yields a warning if it takes long to look up the name of rank 0's address, as torch's store
    does once in torchrun and in each rank."""
    began_at = time.monotonic()
    with contextlib.suppress(OSError):  # an answer that there is no name costs nothing
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
        socket.getnameinfo(address, socket.NI_NUMERICSERV)
    took_s = time.monotonic() - began_at
    if took_s > _SLOW_LOOKUP_S:
        yield Verdict(
            "names",
            "warning",
            f"the look-up of {host} in the name service took {took_s:.0f} s; torch makes one in "
            "torchrun, and one in each rank whenever the ranks start: list the addresses of all "
            "nodes in /etc/hosts, or start torchrun with RES_OPTIONS='timeout:1 attempts:1'",
        )


def listen(address: str) -> socket.socket:
    """A socket that listens on a free port. Raises ConfigError if `address` is not this host's."""
    try:
        return socket.create_server((address, 0), family=socket.getaddrinfo(address, 0)[0][0])
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {address!r}: {error.strerror}; set UMBRA_HOST_ADDRESS to an address "
            "of this host that the other nodes can reach"
        ) from error


def allowed_cores() -> float:
    """The cores that this process, and those that it starts, may keep busy."""
    return min(len(os.sched_getaffinity(0)), cpu_quota())


def cores_verdict(plan: Plan, node: int, num_cores: float) -> Verdict:
    """Whether ranks and engines of a node with GPUs have cores of their own."""
    own = [place.gpus for places in plan.engines.values() for place in places if place.node == node]
    num_ranks = plan.nodes[node].num_ranks
    if not plan.nodes[node].gpus:
        return Verdict("cores", "-", "without GPUs, they are shared")
    wanted = _NUM_OTHER_THREADS + num_ranks + sum(_ENGINE_NUM_THREADS + len(gpus) for gpus in own)
    text = f"{num_cores:g} for {num_ranks} ranks and {len(own)} engines"
    if num_cores >= wanted:
        return Verdict("cores", "ok", text)
    return Verdict(
        "cores",
        "warning",
        f"{text}, which can keep {wanted} busy: each waits for others. Give the job more (Slurm's "
        "--cpus-per-task, docker's --cpus), or fewer engines (pool.count)",
    )


def open_files() -> str:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _LEAST_NUM_FILES:
        raise ConfigError(
            f"ulimit -Hn is {hard}: raise it to {_LEAST_NUM_FILES} or more "
            "(LimitNOFILE for slurmd, --ulimit nofile for a container)"
        )
    return f"up to {'any number' if hard == resource.RLIM_INFINITY else hard}"


def threads() -> str:
    of_user, _ = resource.getrlimit(resource.RLIMIT_NPROC)  # does not bind root
    is_bound = of_user != resource.RLIM_INFINITY and os.geteuid() != 0
    limit = min(thread_limit(), of_user if is_bound else math.inf)
    if limit < _LEAST_NUM_THREADS:
        raise ConfigError(
            f"all processes together may have {limit:.0f} threads: raise it to "
            f"{_LEAST_NUM_THREADS} or more (ulimit -u, TasksMax for slurmd, --pids-limit for a "
            "container)"
        )
    return f"up to {'any number' if math.isinf(limit) else f'{limit:.0f}'}"
