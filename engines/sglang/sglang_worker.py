"""Runs in SGLang's scheduler processes, and carries out the adapter's orders, such as to load
weights or a LoRA adapter. SGLang imports `obey` by name."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import cache, partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import msgpack
import torch
from torch import Tensor, nn

from umbra.engines.loading.loader_recording import WatchedLoader
from umbra.engines.loading.weight_source import WeightSource
from umbra.engines.loading.worker_updates import WorkerUpdates
from umbra.engines.sglang import sglang_library
from umbra.engines.sglang.sglang_orders import unpack_order, write_reports
from umbra.engines.sglang.sglang_settings import SYNCED_ADAPTER
from umbra.runtime.engine_api.lora import module_shapes
from umbra.runtime.errors import WeightSyncError
from umbra.runtime.process.thread_stacks import answer_stack_requests

_dist: Final[Any] = torch.distributed
_updates: MutableMapping[nn.Module, WorkerUpdates] = WeakKeyDictionary()
_saved: dict[int, Tensor] = {}  # in host memory, by address, while the weights sleep


def obey(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Carries out one order, as SGLang's custom weight loader. Never raises: SGLang would end."""
    ((name, _),) = named_tensors
    order = unpack_order(name)
    try:
        _synchronize()  # a batch may still be computed
        own = _ACTIONS.get(order["action"])
        report = _updates_of(model).obey(order) if own is None else own(model)
        _synchronize()
    except Exception as error:  # noqa: BLE001 - the report carries any error to the adapter
        report = {"error": f"{type(error).__name__}: {error}"}
    reports = [report]
    if _dist.is_initialized() and _dist.get_world_size() > 1:
        try:
            reports = gather_reports(report, _cpu_group())
        except RuntimeError as error:  # another worker has ended, as SGLang will notice, too
            reports = [{"error": str(error)}]
        if _dist.get_rank() > 0:  # maybe on another node than the file
            return
    with contextlib.suppress(OSError):  # the adapter has ended, or no longer reads reports
        write_reports(order["report"], reports)


def _updates_of(model: nn.Module) -> WorkerUpdates:
    if model not in _updates:
        named: Any = model
        loader = WatchedLoader("SGLang", model, named.load_weights)
        _updates[model] = WorkerUpdates(model, loader, partial(load_adapter, model))
    return _updates[model]


def _cpu_group() -> Any:
    state: Any = importlib.import_module("sglang.srt.distributed.parallel_state")
    return state.get_tp_group().cpu_group


def gather_reports(report: Mapping[str, Any], group: Any) -> list[dict[str, Any]]:
    """The reports of all workers, by rank, in the first one; empty in the others. Every rank of the
    gloo group calls it."""
    data = bytearray(msgpack.packb(dict(report)))
    world_size: int = _dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(world_size)]
    own_size = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
    _dist.all_gather(sizes, own_size, group=group)
    nbytes = [int(size) for size in sizes]
    padded = data.ljust(max(nbytes), b"\0")
    gathered = [bytearray(len(padded)) for _ in nbytes] if _dist.get_rank() == 0 else []
    views = [torch.frombuffer(each, dtype=torch.uint8) for each in gathered]
    own = torch.frombuffer(padded, dtype=torch.uint8)
    _dist.gather(own, views or None, dst=0, group=group)
    return [
        msgpack.unpackb(memoryview(each)[:size])
        for each, size in zip(gathered, nbytes, strict=False)
    ]


def _settle(model: nn.Module) -> dict[str, Any]:
    """Does nothing: `obey` has waited until nothing is being computed."""
    return {}


def _measure(model: nn.Module) -> dict[str, Any]:
    sglang_library.allow_stack_dumps()
    answer_stack_requests()
    _wait_before_pauses()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    return {"weights_nbytes": nbytes, "pid": os.getpid()}


def _wait_before_pauses() -> None:
    """Lets SGLang's memory saver wait for the GPU before it unmaps memory. SGLang (0.5.23) waits
    afterwards: kernels of the last step, and its copies of buffers, could find the memory gone."""
    with contextlib.suppress(ImportError):  # without it, SGLang cannot sleep
        saver: Any = importlib.import_module("torch_memory_saver").torch_memory_saver
        pause: Callable[[str | None], None] = saver.pause

        def wait_and_pause(tag: str | None = None) -> None:
            _synchronize()
            pause(tag)

        saver.pause = wait_and_pause


def _save(model: nn.Module) -> dict[str, Any]:
    _saved.clear()
    for address, memory in _weight_memory(model).items():
        _saved[address] = memory.to("cpu", copy=True)
    return {}


def _restore(model: nn.Module) -> dict[str, Any]:
    memories = _weight_memory(model)
    for address, saved in _saved.items():
        memories[address].copy_(saved)
    _saved.clear()
    return {}


def _weight_memory(model: nn.Module) -> dict[int, Tensor]:
    """The bytes of all parameters, and of tensors that layers derived from them (such as w_kc of
    latent attention), by address, which a sleep does not change. SGLang itself keeps buffers."""
    kept = [value for layer in model.modules() for value in vars(layer).values()]
    tensors = [*model.parameters(), *(value for value in kept if isinstance(value, Tensor))]
    device = tensors[0].device
    memories: dict[int, Tensor] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device == device and storage.nbytes():
            empty = torch.empty(0, dtype=torch.uint8, device=device)
            memories[storage.data_ptr()] = empty.set_(storage)
    return memories


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def load_adapter(model: nn.Module, source: WeightSource) -> str:
    """Returns how the adapter was loaded, for the engine's log. SGLang's own call would wait for
    the last adapter's requests, which may be frozen."""
    spec = source.manifest.lora
    assert spec is not None
    # SGLang keeps adapters in host memory; the source's own memory is gone after the update.
    tensors: dict[str, Tensor] = {
        name: tensor.to("cpu", copy=True) for name, tensor in source.tensors()
    }
    modules = module_shapes(source.manifest.shapes)
    config = {
        "peft_type": "LORA",
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
    }
    manager = _lora_manager(model)
    named: Any = importlib.import_module("sglang.srt.lora.lora_registry").LoRARef(
        lora_id=SYNCED_ADAPTER, lora_name=SYNCED_ADAPTER, lora_path="no folder", pinned=False
    )
    if SYNCED_ADAPTER in manager.loras:
        _check_done(manager.unload_lora_adapter(named))
    _check_done(manager.load_lora_adapter_from_tensors(named, tensors, config))
    # Copies to the GPU now: SGLang would with the next batch, and end if that failed.
    manager.fetch_new_loras({SYNCED_ADAPTER})
    return f"loaded a LoRA adapter of rank {spec.rank} for {len(modules)} modules"


@cache
def _lora_manager(model: nn.Module) -> Any:
    """SGLang's manager of the model's adapters, which it gives to no weight loader."""
    kind: Any = importlib.import_module("sglang.srt.lora.lora_manager").LoRAManager
    managers = (found for found in gc.get_objects() if type(found) is kind)
    return next(manager for manager in managers if manager.base_model is model)


def _check_done(result: Any) -> None:
    if not result.success:
        raise WeightSyncError(f"SGLang refuses the LoRA adapter: {result.error_message}")


_ACTIONS: Final[Mapping[str, Callable[[nn.Module], dict[str, Any]]]] = {
    "settle": _settle,
    "measure": _measure,
    "save": _save,
    "restore": _restore,
}
