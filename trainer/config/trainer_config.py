"""The settings of a training run: what a TOML config may say, and the defaults. `[rollout]`,
`[pool]` and `[pools.NAME]` are defined beside the code that uses them. Relative paths are taken
from the current directory; the config file's own place does not matter."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import ConfigDict

from umbra.runtime.engine_api.lora import is_in_block, is_of_experts
from umbra.runtime.engine_api.pool_settings import AuxiliaryPoolSettings, PoolSettings
from umbra.runtime.errors import ConfigError, SettingError
from umbra.runtime.rollout.rollout_config import NO_REWARD, OVERLONG, RolloutSettings, TopK
from umbra.runtime.settings import (
    Address,
    Bounds,
    Checked,
    Count,
    Dtype,
    DtypeOrAuto,
    FilePath,
    FilePaths,
    FunctionName,
    PathText,
    Positive,
    Seconds,
    Settings,
    Share,
    check_function_name,
    files_of,
)
from umbra.trainer.config.algorithm_names import ADVANTAGE_ESTIMATORS, LOSSES, unknown_algorithm

_POOL_NAME: Final = re.compile(r"[A-Za-z0-9_]+")
_TAKEN: Final = ("policy", "worker", "rollouts", "supervisor")
"""Names of other processes."""
_NUM_NAMED: Final = 12
"""Ends of layers' names in an error. A decoder block has about seven; more are hard to read."""


def _check_loss(spec: str) -> None:
    _check_algorithm("loss", spec, LOSSES)


def _check_advantage(spec: str) -> None:
    _check_algorithm("advantage estimator", spec, ADVANTAGE_ESTIMATORS)


def _check_algorithm(kind: str, spec: str, registered: Mapping[str, str]) -> None:
    if ":" in spec:
        check_function_name(spec)
    elif spec not in registered:
        raise ValueError(unknown_algorithm(kind, spec, registered))


def template_columns(template: str) -> list[str]:
    """The columns that a template of a prompt names. Raises ValueError if it is malformed."""
    return [name for _, name, _, _ in Formatter().parse(template) if name is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection(Settings):
    """`[run]`: where results go.

    Attributes:
        dir: Directory for all results (docs/run-directory.md).
        resume: "never" starts from scratch. "auto" resumes from the newest complete checkpoint in
            `dir`; without one it starts at step 1, but keeps what was generated. Or the path of a
            checkpoint; one from another run keeps its step count but restarts the data, or in SFT
            continues it.
        overwrite: Whether a fresh start may replace what an earlier run left in `dir`. The earlier
            run stays in `dir`/replaced until the new one has done a step.
        name: Name in progress and report. Where empty, the directory's.
        loggers: Where metrics go besides `dir`/metrics.jsonl. "wandb" and "mlflow" read their own
            environment variables. Default: TensorBoard where it is installed.
        trace: Whether all processes record what they do in `dir`/trace, for `umbra trace`, in at
            most 32 MiB of disk each.
        profile_steps: Steps whose training is profiled by torch.profiler (docs/watch.md), such as
            [3, 100]. Each takes longer, and up to 20 MB of disk.
        metrics_address: HOST:PORT at which rank 0's supervisor serves metrics for Prometheus
            (docs/watch.md), such as "127.0.0.1:9464".
    """

    dir: FilePath = Path("runs/default")
    resume: PathText = "never"
    overwrite: bool = False
    name: str = ""
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] | None = None
    trace: bool = True
    profile_steps: tuple[Positive, ...] = ()
    metrics_address: Address = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSection(Settings):
    """`[job]`: the machines.

    Attributes:
        trainer_gpus_per_node: GPUs per node for the trainer: the first ones, one per rank. The
            scripts in launch/ start as many ranks; with plain torchrun pass the number as
            --nproc-per-node. Lower numbers leave GPUs to standalone engines. Default: all.
    """

    trainer_gpus_per_node: Positive | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSection(Settings):
    """`[model.lora]`: adapters that are trained in place of the model's weights.

    Attributes:
        rank: Higher ranks can learn more and take more memory; 8 to 64 are usual. 0 trains the
            model itself.
        alpha: An adapter's product is scaled by alpha / `rank`. Larger values change the model more
            with each step.
        targets: Ends of the names of layers that get an adapter, such as "q_proj", and also
            "embed_tokens", "lm_head" and "experts". Where empty, all linear layers of decoder
            blocks do.
        rslora: Whether the scale is alpha / sqrt(`rank`) instead, by which higher ranks learn as
            fast as lower ones (arXiv:2312.03732).
        merge: Whether engines get the weights with adapters merged in. Completions are then as fast
            as without adapters, and ranks keep the frozen weights in host memory, too. Otherwise
            engines get adapters alone, which are less to send to other nodes.
    """

    rank: Count = 0
    alpha: Annotated[float, Bounds(gt=0)] = 32.0
    targets: tuple[str, ...] = ()
    rslora: bool = False
    merge: bool = True

    @property
    def synced_rank(self) -> int:
        """The rank of adapters that engines get; 0 if they get weights alone."""
        return 0 if self.merge else self.rank

    @property
    def scale(self) -> float:
        """The factor of the product of the two matrices."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def chosen(self, names: Iterable[str], model: str, *, is_tied: bool) -> list[str]:
        """The layers that get an adapter, by name, of all that can have one. `is_tied`: embeddings
        and head are one tensor. Raises ConfigError if a target matches none, or such a tensor."""
        names = list(names)
        if not self.targets:
            return [name for name in names if is_in_block(name) and not is_of_experts(name)]
        layers = {name: re.sub(r"(\.experts)\..*", r"\1", name) for name in names}
        found: dict[str, None] = {}
        for target in self.targets:
            matched = [name for name, layer in layers.items() if f".{layer}".endswith(f".{target}")]
            if not matched:
                ends = dict.fromkeys(layer.rpartition(".")[2] for layer in layers.values())
                raise ConfigError(
                    f"model.lora.targets: {target!r} matches none of the "
                    f"{len(set(layers.values()))} layers of "
                    f"{model} that can have an adapter, whose names end in "
                    f"{', '.join(list(ends)[:_NUM_NAMED])}: name some of these, or leave it out "
                    "for all linear layers in decoder blocks"
                )
            if is_tied and not all(is_in_block(name) for name in matched):
                raise ConfigError(
                    f"model.lora.targets: {target!r} is one tensor with the "
                    f"{'embeddings' if 'head' in target else 'head'} of {model}, and merged into "
                    "it an adapter of one would change both: leave it out, or save the model with "
                    "tie_word_embeddings = false and a head of its own"
                )
            found |= dict.fromkeys(matched)
        return list(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection(Settings):
    """`[model]`: the policy.

    Attributes:
        path: A Hugging Face model directory, or the name of a model on the hub, such as
            "Qwen/Qwen3-0.6B" or "Qwen/Qwen3-0.6B@COMMIT" (docs/data-and-rewards.md).
        dtype: Data type of computation, and of the weights that engines get. bfloat16 takes half
            the memory of float32 and is less exact. "auto" is bfloat16 where the trainer runs on a
            GPU, and float32 on the CPU.
        master_dtype: Data type of trained parameters and optimizer state; others are in `dtype`.
            Default: float32, or float64 where `dtype` is.
        attention: "packed" computes a group's common prompt once and pads nothing. "padded" uses
            the model's own attention. "auto" is "packed" where the model allows it.
        fsdp_wrap: What FSDP gathers at a time: "layer" one decoder layer, "root" the whole model,
            with less communication and more memory. "auto" is "root" below 64 M parameters, and
            below 1 B where the memory plan has room.
        trust_remote_code: Whether to run Python code that comes with the model directory.
        lora: Adapters that are trained in place of the model's weights.
    """

    path: FilePath
    dtype: DtypeOrAuto = "auto"
    master_dtype: Dtype | None = None
    attention: Literal["auto", "packed", "padded"] = "auto"
    fsdp_wrap: Literal["auto", "layer", "root"] = "auto"
    trust_remote_code: bool = False
    lora: LoraSection = LoraSection()

    @property
    def compute_dtype(self) -> Dtype:
        """`dtype`, once "auto" is replaced for this machine."""
        assert self.dtype != "auto"
        return self.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection(Settings):
    """`[data]`: prompts, as JSON or Parquet, or on the hub.

    Attributes:
        train: File of prompts to train on, or the name of a data set on the hub, such as
            "openai/gsm8k/main:train" (docs/data-and-rewards.md). A list is one data set, in this
            order.
        eval: Held-out prompts, named like those of `train`; the split is "test" where none is
            given.
        format: "text" takes plain prompts from `prompt_column`. "chat" takes lists of {role,
            content} from `messages_column`, also as JSON text, or texts, each the one message of a
            user, and renders them by the tokenizer's chat template. "auto" chooses by the column
            that is there, and takes a list in `prompt_column` for a chat.
        prompt_column: Column of plain prompts.
        messages_column: Column of chats, or of users' messages.
        tools_column: Column of the tools that the template of a chat gets: a list of JSON schemas,
            also as text.
        template: Text made of a row's columns, such as "Question: {question} Answer:", in place of
            `prompt_column`, or with format = "chat" of the one message of a user. Double braces are
            braces.
        teacher_template: Text made of a row's columns, such as "{prompt} The answer is {answer}.",
            that the teacher gets in place of a plain prompt or of the user's last message, which
            are {prompt} (docs/algorithms.md). {successful_completion} is another completion of the
            group with a reward from `reward.accuracy_threshold`.
        system_prompt: System message in front of each chat. A chat that has one already and a
            plain prompt are refused.
        continue_final_message: Whether a chat's final message of the assistant, which is otherwise
            refused, is the beginning of the completion.
        chat_template_kwargs: Further variables of the chat template, such as enable_thinking =
            false. They apply in agent loops and in `umbra serve` as well. A row's column of this
            name sets them for the row's chat alone.
        id_column: Column of unique names of the prompts. Default: row numbers.
        overlong: What to do with a prompt that leaves no room for `rollout.max_new_tokens` in
            `pool.max_context_len`: "error" ends the run, "drop" leaves it out. In SFT, what to do
            with a row of more than `sft.max_len` tokens; "truncate" cuts off its end.
        eval_limit: Number of held-out prompts to evaluate on, from the first. 0 is all.
        shuffle: Whether each pass over the data has a new order, from `train.seed`.
    """

    train: FilePaths
    eval: FilePaths | None = None
    format: Literal["auto", "text", "chat"] = "auto"
    prompt_column: str = "prompt"
    messages_column: str = "messages"
    tools_column: str = "tools"
    template: str = ""
    teacher_template: str = ""
    system_prompt: str = ""
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    id_column: str | None = None
    overlong: Literal["error", "drop", "truncate"] = "error"
    eval_limit: Count = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        for key in ("template", "teacher_template"):
            template: str = getattr(self, key)
            try:
                columns = template_columns(template)
            except ValueError as error:
                raise SettingError(
                    f"{key} {template!r} is malformed ({error}): write {{{{ and }}}} for braces"
                ) from None
            if odd := [name for name in columns if not name.isidentifier()]:
                raise SettingError(
                    f"{key} has {{{odd[0]}}}, which names no column: write {{column}} for each "
                    "column, and {{ and }} for braces"
                )
            if template and not columns:
                raise SettingError(
                    f"{key} names no column, so all prompts would be the same: write {{column}}"
                )

    @property
    def train_files(self) -> tuple[Path, ...]:
        return files_of(self.train)

    @property
    def eval_files(self) -> tuple[Path, ...]:
        return files_of(self.eval)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSection(Settings):
    """`[eval]`: how held-out prompts are evaluated, in a training and by `umbra eval`.

    Attributes:
        samples: Completions per held-out prompt. Above 1, pass@k is measured, too, and
            `temperature` has to be above 0.
        temperature: 0 is greedy.
        top_p: As `rollout.top_p`.
        top_k: As `rollout.top_k`.
        max_new_tokens: As `rollout.max_new_tokens`, which is the default.
        sets: Further files of held-out prompts, or data sets as for `data.eval`, by name. They have
            scores of their own, and are part of those of all. A training evaluates them with
            `data.eval` only.
    """

    samples: Positive = 1
    temperature: Annotated[float, Bounds(ge=0)] = 0.0
    top_p: Annotated[float, Bounds(gt=0, le=1)] = 1.0
    top_k: TopK = 0
    max_new_tokens: Positive | None = None
    sets: Mapping[str, FilePath] = field(default_factory=dict[str, Path])


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSection(Settings):
    """`[reward]`: Python functions, run in rollout worker processes.

    Attributes:
        function: "module:function", called as function(prompts, completions, **columns) with lists
            of equal length (docs/data-and-rewards.md). It returns one finite number per completion.
            It may be async, and then take an argument `ctx`, by which it calls auxiliary pools.
            With `train.advantage` "none" it may be left out.
        functions: Several such functions by name, instead of `function`. The reward is the sum of
            their results, each times its weight. One may return None where it does not apply.
        weights: Weight of each of `functions`, by name. Default: 1.
        overlong_buffer: Number of the last tokens before `rollout.max_new_tokens` over which the
            reward of a training completion falls linearly, by up to `overlong_penalty`
            (`reward/overlong_mean`). A group whose rewards differ by it alone is trained on. 0: no
            penalty.
        overlong_penalty: Penalty of a completion of `rollout.max_new_tokens` tokens, or the weight
            of this part with `train.advantage` "gdpo". Larger values keep completions shorter.
        timeout_s: Limit for one call of a function, without its waits for its turn and for
            auxiliary pools. Exceeding it drops the prompt, and restarts the process of a function
            without async. An async function may block its process for half of it, at most for
            `rollout.block_limit_s`.
        accuracy_threshold: Reward from which on a held-out answer counts as right.
        python_path: Folders searched for the module, before the current directory.
    """

    function: FunctionName | None = None
    functions: Mapping[str, FunctionName] = field(default_factory=dict[str, str])
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    overlong_buffer: Count = 0
    overlong_penalty: Annotated[float, Bounds(gt=0, le=1e6)] = 1.0
    timeout_s: Seconds = 120.0
    accuracy_threshold: float = 1.0
    python_path: tuple[FilePath, ...] = ()

    @property
    def has_functions(self) -> bool:
        """False where a teacher alone trains."""
        return self.function is not None or bool(self.functions)

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        for name in self.functions:
            if not name.isidentifier():
                raise SettingError(f"functions: name {name!r} has more than letters, digits and _")
        if self.overlong_buffer and OVERLONG in self.functions:
            raise SettingError(f"functions: {OVERLONG!r} is the penalty's name: use another one")
        if unknown := sorted(self.weights.keys() - self.functions.keys()):
            known = ", ".join(self.functions) or "none"
            raise SettingError(f"weights: {', '.join(unknown)} is none of functions ({known})")

    @property
    def targets(self) -> dict[str, str]:
        """All functions by name; the name of a single `function` is empty. Without any, rewards
        are 0."""
        return dict(self.functions) or {"": self.function or NO_REWARD}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSection(Settings):
    """`[train]`: the optimisation.

    Attributes:
        steps: Optimizer steps of the whole run, including those before a resume. Give this or
            `epochs`.
        epochs: Passes over the training prompts instead of `steps`, rounded up to whole steps of
            `rollout.groups_per_step` prompts. Prompts that `data.overlong` leaves out do not count,
            and dropped ones add no steps.
        optimizer: "muon" (docs/algorithms.md) takes half of AdamW's memory for the matrices that it
            trains, "adamw_8bit" a quarter for all matrices. Good learning rates are the same.
        learning_rate: Peak learning rate, after warm-up.
        schedule: How the learning rate falls after warm-up, until the last step.
        warmup_steps: Steps over which the learning rate rises from near 0 to its peak.
        warmup_ratio: The same as a share of all steps, instead of `warmup_steps`.
        min_lr_ratio: Share of the peak learning rate that is left after the last step.
        weight_decay: Decoupled weight decay of matrices.
        embedding_lr_ratio: Learning rate of embeddings and head as a multiple of `learning_rate`. A
            critic's new head has its whole rate.
        embedding_weight_decay: Weight decay of embeddings and head. Default: `weight_decay`.
        vector_lr_ratio: As `embedding_lr_ratio`, for vectors: norms and biases.
        vector_weight_decay: Weight decay of vectors.
        betas: Decay rates of AdamW's first and second moments.
        eps: Added to AdamW's denominator. Larger values damp the update of parameters whose
            gradients are small.
        ema: Decay of an exponential moving average of the weights, over about 1 / (1 - ema)
            optimizer steps (docs/algorithms.md). 0 keeps none.
        max_grad_norm: Gradients are scaled down to this norm. 0 switches clipping off.
        skip_nonfinite: Optimizer steps in a row that may be skipped, with a warning, because their
            gradient has an infinite or NaN element (docs/algorithms.md). One more ends the run.
        mini_batches: Parts of a batch, each of as many prompts, for an optimizer step each. Later
            ones are slightly off-policy.
        micro_batches: Micro-batches per rank and mini-batch. More take less memory and are slower.
            0 goes by `max_tokens_per_micro_batch`.
        max_tokens_per_micro_batch: Largest number of tokens of a micro-batch. 0 is 2048 on the CPU,
            whose caches hold about that, and on a GPU 32768 where the memory plan has room, else
            16384.
        updates_per_batch: Passes over a batch, with an optimizer step for each of `mini_batches`.
        loss: "clipped", "decoupled", "gspo", "cispo", "sapo" or "dppo" (docs/algorithms.md), or
            "module:function", a `PolicyLoss` of your own (docs/add-an-algorithm.md).
        clip_eps_low: The ratio is clipped to at least 1 - this; 1 is no lower bound. Larger values
            allow larger updates.
        clip_eps_high: The ratio is clipped to at most 1 + this.
        dual_clip: With a negative advantage, a token's term is at least this times the advantage. 3
            is usual; 0 is no bound.
        loss_args: Constants of the loss by name. "sapo" takes tau_positive and tau_negative, by
            default 1 and 1.05. A loss of your own gets them in its settings.
        importance_level: With loss = "decoupled", whether a token, a sample or its mean has an
            importance weight (docs/algorithms.md).
        importance_cap: Importance weights above it are limited. 1e9 limits none.
        importance_above_cap: "truncate" sets importance weights above the cap to the cap, "mask"
            leaves their tokens out.
        importance_floor: Tokens with importance weights below it are left out.
        advantage: "grpo", "dr_grpo", "rloo", "maxrl", "reinforce", "gdpo", "gae" or, for a teacher
            alone, "none" (docs/algorithms.md), or "module:function", an `AdvantageEstimator` of
            your own.
        advantage_norm: "batch" subtracts the mean of all advantages of a batch and divides by their
            standard deviation.
        loss_aggregation: How losses of tokens become one (docs/algorithms.md).
        mask_truncated: Whether completions whose last generation reached its largest length are
            left out of the loss. Their rewards still count in the advantages of their group.
        kl_coef: Weight of the KL term to the starting model (docs/algorithms.md). Larger values
            keep the policy closer to it; 0 keeps no reference model.
        kl_in_reward: Whether the KL is in the reward of each token instead of the loss.
        reference_every: Steps after which the current policy becomes the reference model of the KL
            term. 0 keeps the starting model.
        kl_estimator: Estimator of the KL term in the loss.
        teacher_kl_coef: Weight of on-policy distillation (docs/algorithms.md) from
            `[pools.teacher]`, or from the policy by `data.teacher_template`. Larger values let
            rewards count less; 1 is usual. 0: no teacher.
        max_logprob_difference: Largest mean difference, in nats, between the logprobs of engines
            and trainer for the same tokens and weights, beyond which a run ends (docs/engines.md).
            0 is the bound of `model.dtype`. Raise it for engines that are quantised on purpose; 1e9
            switches the check off.
        entropy_coef: Weight of the policy's mean entropy in the objective. Larger values keep the
            policy from becoming deterministic; 1e-3 is a usual one.
        log_entropy: Whether to measure the policy's entropy, which takes one more pass over the
            logits.
        activation_checkpointing: "full" keeps only the input of each decoder block, and computes
            the block again: a third more work for far less memory. "auto" is "full" where the
            memory plan has no room for all activations.
        compile: Whether torch.compile compiles decoder blocks, log-probabilities and
            "adamw_8bit": steps take up to half the time and less memory. Compiling takes up to a
            minute: while engines start, if samples are packed and engines standalone or, without
            SGLang, `pool.sleep` is "none", else in the first step. "auto" compiles models of 0.5 B
            parameters and above on GPUs, with a C++ compiler and headers of Python and torch.
        offload: What goes to host memory while engines generate that sleep in training
            (`pool.sleep`): "optimizer" the optimizer's state and the moving average, "all" the
            parameters too.
        eval_every: Steps between evaluations. 0: only at the end, and by `eval_at_start`.
        eval_at_start: Whether to evaluate before the first step of the run or of a resume, too.
        eval_beside: Whether a standalone pool evaluates while training continues. The evaluation is
            logged at its step, although engines may have got later weights before its last token
            (`eval/later_tokens_share`).
        checkpoint_every: Steps between checkpoints. Fewer lose less work in a crash; 0 means only
            at the end, and a run that begins again needs its whole ledger (`rollout.ledger_gb`).
            Training continues while one is written, and waits only where host memory for its copy
            is short.
        keep_checkpoints: Number of checkpoints kept, the newest.
        keep_best_by: Also keeps the checkpoint whose evaluation had the highest "accuracy" or mean
            "reward" (docs/results.md), and makes a checkpoint for each evaluation between steps.
            Needs `data.eval`.
        export: Whether to write a Hugging Face directory at the end.
        seed: Seed of data order and sampling.
        shutdown_grace_s: How long the step in progress and a checkpoint may take after SIGTERM or
            SIGHUP (docs/troubleshoot.md). Default: twice the longest so far, at least 5 s.
        device: Device of the trainer. "auto" is cuda where there is one.
    """

    steps: Positive | None = None
    epochs: Annotated[float, Bounds(gt=0)] | None = None
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    learning_rate: Annotated[float, Bounds(gt=0)] = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Count = 0
    warmup_ratio: Share = 0.0
    min_lr_ratio: Annotated[float, Bounds(ge=0, le=1)] = 0.0
    weight_decay: Annotated[float, Bounds(ge=0)] = 0.0
    embedding_lr_ratio: Annotated[float, Bounds(gt=0)] = 1.0
    embedding_weight_decay: Annotated[float, Bounds(ge=0)] | None = None
    vector_lr_ratio: Annotated[float, Bounds(gt=0)] = 1.0
    vector_weight_decay: Annotated[float, Bounds(ge=0)] = 0.0
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: Annotated[float, Bounds(gt=0)] = 1e-8
    ema: Share = 0.0
    max_grad_norm: Annotated[float, Bounds(ge=0)] = 1.0
    skip_nonfinite: Count = 0
    mini_batches: Positive = 1
    micro_batches: Count = 0
    max_tokens_per_micro_batch: Count = 0
    updates_per_batch: Positive = 1
    loss: Annotated[str, Checked(_check_loss)] = "clipped"
    clip_eps_low: Annotated[float, Bounds(ge=0, le=1)] = 0.2
    clip_eps_high: Annotated[float, Bounds(ge=0)] = 0.2
    dual_clip: Annotated[float, Bounds(ge=0)] = 0.0
    loss_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    importance_level: Literal["token", "sequence", "geometric", "none"] = "token"
    importance_cap: Annotated[float, Bounds(ge=1)] = 2.0
    importance_above_cap: Literal["truncate", "mask"] = "truncate"
    importance_floor: Share = 0.0
    advantage: Annotated[str, Checked(_check_advantage)] = "grpo"
    advantage_norm: Literal["none", "batch"] = "none"
    loss_aggregation: Literal["token", "sequence", "constant"] = "token"
    mask_truncated: bool = False
    kl_coef: Annotated[float, Bounds(ge=0)] = 0.0
    kl_in_reward: bool = False
    reference_every: Count = 0
    kl_estimator: Literal["k2", "k3"] = "k3"
    teacher_kl_coef: Annotated[float, Bounds(ge=0)] = 0.0
    max_logprob_difference: Annotated[float, Bounds(ge=0)] = 0.0
    entropy_coef: Annotated[float, Bounds(ge=0)] = 0.0
    log_entropy: bool = True
    activation_checkpointing: Literal["auto", "none", "full"] = "auto"
    compile: Literal[True, False, "auto"] = "auto"
    offload: Literal["none", "optimizer", "all"] = "none"
    eval_every: Count = 0
    eval_at_start: bool = True
    eval_beside: bool = False
    checkpoint_every: Count = 0
    keep_checkpoints: Positive = 2
    keep_best_by: Literal["accuracy", "reward"] | None = None
    export: bool = True
    seed: Count = 0
    shutdown_grace_s: Seconds | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"

    @property
    def total_steps(self) -> int:
        """`steps`; where the config has `epochs`, known once the prompts are counted."""
        assert self.steps is not None
        return self.steps

    @property
    def num_warmup_steps(self) -> int:
        """`warmup_steps`, or `warmup_ratio` of `total_steps`."""
        return self.warmup_steps or math.ceil(self.warmup_ratio * self.total_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSection(Settings):
    """`[critic]`: the critic of `train.advantage` "gae". Its other settings are the policy's.

    Attributes:
        path: Model whose decoder the critic starts with. Default: `model.path`.
        learning_rate: Peak learning rate, usually 5 to 10 times the policy's.
        warmup_steps: First steps, in which the critic alone learns. The policy's schedule begins
            after them. More give its first steps better advantages, and cost time.
        value_clip: Change of a value in a step beyond which it has no gradient. 0 is no bound.
        gamma: Share of a reward that is left one token earlier.
        lam: GAE's lambda. 1 has no bias; lower ones trust the critic more, with less noise.
        returns_lam: The same for the critic's returns. Below 1, a reward takes many steps to reach
            the first tokens of long completions.
    """

    path: FilePath | None = None
    learning_rate: Annotated[float, Bounds(gt=0)] = 1e-5
    warmup_steps: Count = 0
    value_clip: Annotated[float, Bounds(ge=0)] = 0.5
    gamma: Annotated[float, Bounds(ge=0, le=1)] = 1.0
    lam: Annotated[float, Bounds(ge=0, le=1)] = 1.0
    returns_lam: Annotated[float, Bounds(ge=0, le=1)] = 1.0


STRICT: Final = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""How pydantic reads a config and all its sections: no unknown keys, no silent conversions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    run: RunSection = RunSection()
    job: JobSection = JobSection()
    model: ModelSection
    data: DataSection
    eval: EvalSection = field(default_factory=EvalSection)
    reward: RewardSection = field(default_factory=RewardSection)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    pool: PoolSettings = field(default_factory=PoolSettings)
    pools: Mapping[str, AuxiliaryPoolSettings] = field(
        default_factory=dict[str, AuxiliaryPoolSettings]
    )
    train: TrainSection
    critic: CriticSection = CriticSection()

    def __post_init__(self) -> None:
        _check_pool_names(self.pools)

    @property
    def has_critic(self) -> bool:
        return self.train.advantage == "gae"

    @property
    def of_policy(self) -> Self:
        """The config by which the policy is loaded and trained, whose first step is the one after a
        critic's warm-up."""
        steps = self.train.total_steps - self.critic.warmup_steps
        return replace(self, train=replace(self.train, steps=steps))

    @property
    def of_critic(self) -> Self:
        """The config by which a critic is loaded and trained. It has a head of its own."""
        path, rate = self.critic.path or self.model.path, self.critic.learning_rate
        targets = tuple(each for each in self.model.lora.targets if each != "lm_head")
        model = replace(self.model, path=path, lora=replace(self.model.lora, targets=targets))
        train = replace(self.train, learning_rate=rate, ema=0.0, kl_coef=0.0, reference_every=0)
        return replace(self, model=model, train=train)

    @property
    def master_dtype(self) -> Dtype:
        """Dtype of parameters and optimizer state."""
        if self.model.master_dtype is not None:
            return self.model.master_dtype
        return "float64" if self.model.dtype == "float64" else "float32"

    @property
    def run_name(self) -> str:
        """The name of the run in progress lines and the report."""
        return self.run.name or self.run.dir.absolute().name

    @property
    def samples_per_step(self) -> int:
        """Completions of one step, over all ranks."""
        return self.rollout.groups_per_step * self.rollout.group_size

    @property
    def compared_parts(self) -> dict[str, float]:
        """Weights of the parts of rewards that advantages compare apart, by name; none where
        they compare rewards."""
        if self.train.advantage != "gdpo":
            return {}
        reward = self.reward
        weights = {name: reward.weights.get(name, 1.0) for name in reward.functions}
        return weights | ({OVERLONG: reward.overlong_penalty} if reward.overlong_buffer else {})

    def with_steps(self, num_prompts: int) -> Self:
        """With `train.steps` for `train.epochs` over `num_prompts` training prompts. Raises
        ConfigError if all of them are a critic's warm-up."""
        if self.train.epochs is None:
            return self
        # Rounded first: 1.1 passes over 10 prompts are 11.000000000000002 steps of one prompt.
        steps = math.ceil(round(self.train.epochs * num_prompts / self.rollout.groups_per_step, 6))
        if (warmup_steps := self.critic.warmup_steps) >= steps:
            raise ConfigError(
                f"critic.warmup_steps is {warmup_steps}, and train.epochs = {self.train.epochs} "
                f"are {steps} steps: the policy would never be trained: use fewer steps of warm-up"
            )
        return replace(self, train=replace(self.train, steps=steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The sections that `umbra serve` and `umbra generate` use. The others of a training config may
    be present, and are checked."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    run: RunSection = RunSection()
    job: JobSection = JobSection()
    model: ModelSection
    data: DataSection | None = None
    eval: EvalSection = field(default_factory=EvalSection)
    reward: RewardSection | None = None
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    pool: PoolSettings = field(default_factory=PoolSettings)
    pools: Mapping[str, AuxiliaryPoolSettings] = field(
        default_factory=dict[str, AuxiliaryPoolSettings]
    )
    train: TrainSection | None = None
    critic: CriticSection | None = None

    def __post_init__(self) -> None:
        if self.pool.count == 0:
            raise SettingError(
                "pool.count = 0 leaves the engines to machines that join a training: set it to 1 "
                "or more, or 'auto'"
            )
        _check_pool_names(self.pools)


def _check_pool_names(pools: Mapping[str, AuxiliaryPoolSettings]) -> None:
    for name in pools:
        if not _POOL_NAME.fullmatch(name):
            raise SettingError(f"pools.{name}: name a pool with letters, digits and '_' only")
        if name in _TAKEN:
            raise SettingError(
                f"pools.{name}: this name is taken"
                + (" by the pool of the section [pool]" if name == "policy" else "")
                + "; choose another one"
            )
