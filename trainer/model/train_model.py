"""A model of a run: sharded over the ranks, scoring tokens and, if it is trained, updated.

M: tokens to score; E: hidden size; V: vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from umbra.runtime.engine_api.kept_tokens import WHOLE, Truncation
from umbra.runtime.weights.shards import local_part
from umbra.trainer.config.trainer_config import TrainSection
from umbra.trainer.model.compiling import compile_blocks, decoder_blocks, recompute_blocks
from umbra.trainer.model.lora_layers import LoraAdapters, LoraLinear, peft_names
from umbra.trainer.model.micro_batches import MicroBatch, PaddedInputs
from umbra.trainer.model.optimizer import ModelOptimizer, parameter_kinds
from umbra.trainer.model.packing import PackedInputs, Sample, pack
from umbra.trainer.model.stored_weights import StoredWeights
from umbra.trainer.model.token_scoring import EntropyUse, score_hidden, score_logits

POLICY: Final = "policy"
REFERENCE: Final = "reference"
"""The frozen starting model."""
CRITIC: Final = "critic"
# Up to this size, gathering the whole model at once is cheaper than a collective for each layer.
_ROOT_WRAP_MAX_PARAMETERS: Final = 64_000_000

_NUM_COMPARED: Final = 8
"""Tokens to compare the scoring of hidden states with the model's own forward pass. Any number
shows a difference; more take time."""
_MAX_DIFFERENCE: Final = 0.03
"""Accepted difference of hidden states, as a share of their norm. Rounding in bfloat16 differs by
less, a model that changes hidden states by more."""
_LARGEST_PROBE: Final = 50.0
"""The largest of the logits that show what a model does after its head, such as caps and masks."""

_dist: Final[Any] = torch.distributed

logger = logging.getLogger(__name__)

Wrap = Literal["auto", "layer", "root"]


@dataclass(frozen=True, slots=True)
class TokenScores:
    logprobs: Tensor  # a critic's are values
    entropy: Tensor | None


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model whose parameters may still have to be read. It has the same parameters in their
    master dtype on every rank, or has them on the meta device for `weights` to fill. The values of
    `adapters` are given later; `origin` is what they belong to. A critic has a head of one output,
    which starts with zeros, in the place of the model's own."""

    model: nn.Module
    is_packed: bool  # by `packed_attention`
    weights: StoredWeights | None = None
    adapters: LoraAdapters | None = None
    origin: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_critic: bool = False
    path: Path = Path()  # the model's directory


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings:
    """How a model computes. Log-probabilities are of softmax(logits / temperature), among the
    tokens that `truncation` keeps and the scored token."""

    compute_dtype: torch.dtype  # parameters are cast to it as they are gathered
    wrap: Wrap = "auto"
    temperature: float = 1.0
    truncation: Truncation = WHOLE
    recomputes: bool = False
    compiles: bool = False


class TrainModel:
    """A causal language model, sharded by FSDP2 (`fully_shard`). Every rank has one.

    With `train`, it is trained by those settings, and has an `optimizer`; without, it is frozen. If
    it has LoRA `adapters`, these alone are trained. Gradients are summed over ranks: each rank's
    loss is its share of the global loss. Checkpoints have the `stored` parameters where `is_saved`,
    which is so for a trained model. Engines and exports get the persistent `buffers`, by which some
    models choose experts, in their own dtype. With `keeps_logits`, which may change between steps,
    a backward pass does not compute logits again.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        mesh: DeviceMesh,
        passes: PassSettings,
        train: TrainSection | None = None,
    ) -> None:
        model, weights, self.adapters = prepared.model, prepared.weights, prepared.adapters
        if passes.compiles:
            compile_blocks(model)
        if passes.recomputes:
            recompute_blocks(model)
        self.is_packed, self.origin = prepared.is_packed, prepared.origin
        self.path = prepared.path
        self._passes, self.keeps_logits = passes, False
        self._scorer = _Scorer(model, passes, is_critic=prepared.is_critic)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._wraps_layers = wraps_layers(passes.wrap, self.num_parameters)
        _shard(self._scorer, mesh, self._wraps_layers, passes.compute_dtype)
        if weights is not None:
            _allocate(self._scorer, mesh)
        # FSDP swaps in gathered parameters during a pass; these objects are the permanent ones.
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        persistent = model.state_dict().keys() - self._parameters.keys()
        self.buffers = {name: b for name, b in model.named_buffers() if name in persistent}
        head: Any = cast("Any", model).get_output_embeddings() if prepared.is_critic else None
        if weights is not None:
            read = self.tensors.items()
            weights.fill({name: each for name, each in read if not head or each is not head.weight})
        if head:
            torch.nn.init.zeros_(local_part(head.weight))
        self.optimizer = self._begin_training(train, is_critic=prepared.is_critic)
        self.is_saved = train is not None
        self._is_compared = prepared.is_critic  # whose head has nothing to be compared with

    def _begin_training(
        self, train: TrainSection | None, *, is_critic: bool
    ) -> ModelOptimizer | None:
        if train is None:
            self.model.requires_grad_(False)
            return None
        if self.adapters is not None:
            self.adapters.start(train.seed)
        kinds = parameter_kinds(self.model, is_critic=is_critic)
        return ModelOptimizer(self.parameters, kinds, train)

    @property
    def model(self) -> nn.Module:
        """The Hugging Face model, with sharded parameters."""
        return self._scorer.model

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Name -> sharded parameter (DTensor); tied ones once, under their first name."""
        seen: dict[int, str] = {}
        for name, parameter in self._parameters.items():
            seen.setdefault(id(parameter), name)
        return {name: self._parameters[name] for name in seen.values()}

    @property
    def stored(self) -> dict[str, nn.Parameter]:
        """The parameters that no model directory has: the adapters, or all."""
        if self.adapters is None:
            return self.parameters
        return {name: each for name, each in self._parameters.items() if each.requires_grad}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers, by Hugging Face name; tied names share one tensor."""
        return {**self._parameters, **self.buffers}

    @property
    def published(self) -> Mapping[str, Tensor]:
        """The tensors that engines load: those of the model, or adapters alone by PEFT's names."""
        if self.adapters is None:
            return self.tensors
        if self.adapters.spec is not None:
            return peft_names(self.stored)
        return {name: each for name, each in self.tensors.items() if name not in self.stored}

    def score(self, micro_batch: MicroBatch, entropy_use: EntropyUse = "none") -> TokenScores:
        """Log-probabilities of the micro-batch's targets, or a critic's values before them.
        Collective."""
        if not self._is_compared:
            self._compare(micro_batch.targets.device)
        keeps = self.keeps_logits and torch.is_grad_enabled()
        logprobs, entropy = self._scorer(
            micro_batch.inputs, micro_batch.targets, entropy_use, keeps
        )
        return TokenScores(logprobs, None if entropy_use == "none" else entropy)

    @torch.no_grad()
    def measure(self, micro_batch: MicroBatch, entropy_use: EntropyUse = "none") -> TokenScores:
        """Like `score`, without gradient. Collective; reshards the parameters afterwards."""
        scores = self.score(micro_batch, entropy_use)
        cast("FSDPModule", self._scorer).reshard()
        return scores

    def measure_start(self, micro_batch: MicroBatch) -> TokenScores:
        """Like `measure`, by the model without its adapters. Collective."""
        assert self.adapters is not None
        with self.adapters.switched_off():
            return self.measure(micro_batch)

    @contextmanager
    def recorded_calls(self) -> Generator[Mapping[str, int]]:
        """Fills the mapping with the names of the model's modules, numbered in the order in which
        they are first called. Compiled blocks run eagerly meanwhile."""
        calls: dict[str, int] = {}

        def record(name: str, *_: Any) -> None:
            calls.setdefault(name, len(calls))

        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            model: Any = self.model
            for name, module in model.named_modules():
                stack.enter_context(module.register_forward_hook(partial(record, name)))
            yield calls

    @torch.no_grad()
    def _compare(self, device: torch.device) -> None:
        """Lets the model compute its own logits if they would differ otherwise. Collective."""
        self._is_compared = True
        vocab_size: int = cast("Any", self.model).config.get_text_config().vocab_size
        tokens = vocab_size // 2 + np.arange(_NUM_COMPARED, dtype=np.int32) % (vocab_size // 2)
        inputs: PackedInputs | PaddedInputs = PaddedInputs(
            token_ids=torch.as_tensor(tokens[None], dtype=torch.int64, device=device),
            predicting=torch.arange(_NUM_COMPARED, device=device),
        )
        if self.is_packed:
            sample = Sample(tokens=tokens, prompt_len=1, generated=np.arange(1, _NUM_COMPARED))
            inputs = pack([sample], self._passes.compute_dtype, device)
        with torch.compiler.set_stance("force_eager"):
            obstacle = self._scorer.head_obstacle(inputs)
        cast("FSDPModule", self._scorer).reshard()
        found = torch.tensor(float(bool(obstacle)), device=device)
        _dist.all_reduce(found, _dist.ReduceOp.MAX)  # rounding may differ
        if found:
            self._scorer.uses_own_logits = True
            logger.warning(
                "all logits of a micro-batch are computed at once, which takes memory: %s",
                obstacle or "another rank's model does more than apply its head",
            )

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Adds to the gradients and frees the graph. Gradients are reduced over ranks at a step's
        last micro-batch or, with wrapped layers, each time, because whole gradients would not
        fit."""
        if not self._wraps_layers:
            root = cast("FSDPModule", self._scorer)
            root.set_is_last_backward(is_last)
            root.set_requires_gradient_sync(is_last)
            root.set_reshard_after_backward(is_last)
        torch.autograd.backward(loss)

    @torch.no_grad()
    def copy_from(self, other: TrainModel) -> None:
        """Takes the parameters of a model of the same kind."""
        for name, parameter in self.parameters.items():
            parameter.copy_(other.parameters[name])

    def step(self, step: int) -> dict[str, float]:
        """Updates the parameters by their gradients; see `ModelOptimizer`."""
        assert self.optimizer is not None
        return self.optimizer.step(step)

    def clear_gradients(self) -> None:
        assert self.optimizer is not None
        self.optimizer.clear_gradients()


def wraps_layers(wrap: Wrap, num_parameters: int) -> bool:
    """Whether FSDP gathers one layer at a time, and not the whole model."""
    return wrap == "layer" or (wrap == "auto" and num_parameters > _ROOT_WRAP_MAX_PARAMETERS)


class _Scorer(nn.Module):
    """Decoder, head and log-probabilities as one module, so that FSDP gathers once for all. With
    `uses_own_logits`, the model computes all logits itself. A critic's has the values in the place
    of log-probabilities."""

    def __init__(self, model: nn.Module, passes: PassSettings, *, is_critic: bool = False) -> None:
        super().__init__()
        self.model = model
        self._passes = passes
        self._is_critic = is_critic
        self._regathers = not (passes.compiles or passes.recomputes)  # see `packed_attention`
        self.uses_own_logits = False

    def forward(
        self,
        inputs: PackedInputs | PaddedInputs,
        targets: Tensor,
        entropy_use: EntropyUse,
        keeps_logits: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """[M] log-probabilities and [M] entropies (or nothing, [0])."""
        passes = self._passes
        if self.uses_own_logits:
            logits = self._own_logits(inputs)
            return score_logits(logits, targets, passes.temperature, entropy_use, passes.truncation)
        model: Any = self.model
        hidden = self._hidden(inputs).index_select(0, inputs.predicting)  # [M, E]
        head: nn.Linear = model.get_output_embeddings()
        if self._is_critic:
            wide = torch.promote_types(hidden.dtype, torch.float32)
            return hidden.to(wide) @ head.weight[0].to(wide), hidden.new_empty(0)
        return score_hidden(
            head,
            hidden,
            targets,
            passes.temperature,
            entropy_use,
            truncation=passes.truncation,
            compiles=passes.compiles,
            keeps_logits=keeps_logits,
        )

    def head_obstacle(self, inputs: PackedInputs | PaddedInputs) -> str:
        """Why the model's logits are not its head, a linear layer, applied to `_hidden`'s result;
        "" if they are. One pass shows what the model gives to its head, and what it makes of the
        head's output, in whose place it gets large values."""
        model: Any = self.model
        head = model.get_output_embeddings()
        if type(head) not in (nn.Linear, LoraLinear):
            return f"the model's head is a {type(head).__name__}"
        given: list[Tensor] = []
        probes: list[Tensor] = []

        def replace(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
            values = torch.linspace(
                -_LARGEST_PROBE, _LARGEST_PROBE, output.numel(), device=output.device
            )
            given.extend(arguments)
            probes.append(values.to(output.dtype).view_as(output))
            return probes[-1].clone()

        with head.register_forward_hook(replace):
            logits = model(use_cache=False, **self._arguments(inputs)).logits
        if len(given) != 1:
            return "the model does not call its head"
        if logits.shape != probes[0].shape or not torch.equal(logits.float(), probes[0].float()):
            return "the model changes the logits after its head"
        hidden = self._hidden(inputs)
        difference = (given[0].flatten(0, -2) - hidden).float().square().sum()
        if not difference <= _MAX_DIFFERENCE**2 * hidden.float().square().sum():
            return "the model changes the decoder's hidden states before its head"
        return ""

    def _hidden(self, inputs: PackedInputs | PaddedInputs) -> Tensor:
        """[rows, E] final hidden states."""
        model: Any = self.model
        decoder = model.get_decoder()
        if decoder in (model, model.get_output_embeddings()):  # Llama 4, ModernBERT
            decoder = model.model
        output = decoder(use_cache=False, **self._arguments(inputs))
        return cast("Tensor", output.last_hidden_state).flatten(0, 1)

    def _own_logits(self, inputs: PackedInputs | PaddedInputs) -> Tensor:
        """[M, V] as computed by the model itself."""
        model: Any = self.model
        output = model(use_cache=False, **self._arguments(inputs))
        return cast("Tensor", output.logits).flatten(0, 1).index_select(0, inputs.predicting)

    def _arguments(self, inputs: PackedInputs | PaddedInputs) -> dict[str, Any]:
        if isinstance(inputs, PaddedInputs):
            return {"input_ids": inputs.token_ids}
        return {
            "input_ids": inputs.token_ids,
            "position_ids": inputs.position_ids,
            "packed": inputs,
            "regathers": self._regathers,
        }


def _shard(
    scorer: _Scorer, mesh: DeviceMesh, wraps_layers: bool, compute_dtype: torch.dtype
) -> None:
    is_cast = any(each.dtype != compute_dtype for each in scorer.parameters())
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype if is_cast else None,
        reduce_dtype=torch.float32 if is_cast else None,
    )
    if wraps_layers:
        for layer in decoder_blocks(scorer.model):
            fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(scorer, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    register_fsdp_forward_method(scorer, "head_obstacle")
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _allocate(scorer: _Scorer, mesh: DeviceMesh) -> None:
    """Allocates the shards of parameters on the meta device; buffers keep their values."""
    buffers = {name: buffer.clone() for name, buffer in scorer.named_buffers()}
    device = torch.device("cpu")
    if mesh.device_type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    scorer.to_empty(device=device)
    for name, buffer in scorer.named_buffers():
        buffer.copy_(buffers[name])
