"""The settings of a training run: what a TOML config may say, and the defaults.

Relative paths are taken from the current directory, as on any command line; the config file's
own place does not matter. `umbra.trainer.config.config_file` reads a file and words the errors.
"""

# ruff: noqa: RUF012  pydantic copies defaults

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from umbra.runtime.pools.pool_spec import update_waves_problem
from umbra.trainer.algorithms.algorithm_names import ADVANTAGE_ESTIMATORS
from umbra.trainer.config.auxiliary_pool_config import AuxiliaryPoolSection, auxiliary_pools_problem
from umbra.trainer.config.config_section import (
    AdvantageSpec,
    Betas,
    Count,
    Dtype,
    EngineSpec,
    FilePath,
    FunctionSpec,
    LoraAdapters,
    LossSpec,
    PathText,
    Positive,
    Seconds,
    Section,
    Share,
    check_lora_engine,
)


class RunSection(Section):
    """`[run]`: where results go.

    Attributes:
        dir: metrics, logs, checkpoints, report and summary.json are written here.
        resume: "never" starts from scratch. "auto" resumes from the newest complete checkpoint in
            `dir`; without one it starts at step 1, but keeps what was generated. Or the path of a
            checkpoint; one from another run keeps its step count but restarts the data. Ranks that
            torchrun restarted resume from the newest checkpoint that the run has made.
        overwrite: a fresh start may replace what an earlier run left in `dir`, which is kept in
            `dir`/replaced until the new one has done a step.
        name: shown in progress and report; the directory's name where empty.
        loggers: where the numbers of each step go besides `dir`/metrics.jsonl: any of "tensorboard"
            (in `dir`/tensorboard), "wandb" and "mlflow", which read their own environment
            variables. Default: TensorBoard where it is installed.
    """

    dir: FilePath = Path("runs/default")
    resume: PathText = "never"
    overwrite: bool = False
    name: str = ""
    loggers: list[Literal["tensorboard", "wandb", "mlflow"]] | None = None


class ModelSection(Section):
    """`[model]`: the policy.

    Attributes:
        path: a Hugging Face model directory with config, safetensors and tokenizer.
        dtype: of computation, and of the weights engines get.
        master_dtype: of parameters and optimizer state; default float32, or float64 where
            `dtype` is.
        attention: "packed" computes a group's common prompt once and pads nothing; "padded"
            uses the model's own attention; "auto" takes packed where the model allows it.
        fsdp_wrap: what FSDP gathers at a time: "layer" one decoder layer, "root" the whole
            model (less communication, more memory), "auto" root below 64 M parameters.
        trust_remote_code: run Python code that comes with the model directory.
    """

    path: FilePath
    dtype: Dtype = "float32"
    master_dtype: Dtype | None = None
    attention: Literal["auto", "packed", "padded"] = "auto"
    fsdp_wrap: Literal["auto", "layer", "root"] = "auto"
    trust_remote_code: bool = False


class DataSection(Section):
    """`[data]`: prompts, as JSONL or Parquet.

    Attributes:
        train: prompts to train on.
        eval: held-out prompts; without them nothing is evaluated.
        format: "text": plain prompts in `prompt_column`; "chat": lists of {role, content} in
            `messages_column`, rendered by the tokenizer's chat template; "auto": by which of
            the two columns is there.
        prompt_column, messages_column: where the prompts are.
        chat_template_kwargs: further variables of the chat template.
        id_column: unique names of the prompts; without it, row numbers.
        overlong: what to do with a prompt that leaves no room for `rollout.max_new_tokens`
            in `pool.max_context_len`.
        eval_limit: evaluate on the first so many held-out prompts; 0 is all.
        shuffle: a new order each epoch, from `train.seed`.
    """

    train: FilePath
    eval: FilePath | None = None
    format: Literal["auto", "text", "chat"] = "auto"
    prompt_column: str = "prompt"
    messages_column: str = "messages"
    chat_template_kwargs: dict[str, Any] = {}
    id_column: str | None = None
    overlong: Literal["error", "drop"] = "error"
    eval_limit: Count = 0
    shuffle: bool = True


class RewardSection(Section):
    """`[reward]`: a Python function, run in rollout worker processes.

    Attributes:
        function: "module:function", called as function(prompts, completions, **columns) with
            lists of equal length; returns one finite number per completion. May be async, and then
            take an argument `ctx`, by which it asks auxiliary pools: ctx.pool("judge").
        timeout_s: for one call, without what it waits for auxiliary pools.
        accuracy_threshold: a held-out answer counts as right from this reward on.
        python_path: searched for the module, before the current directory.
    """

    function: FunctionSpec
    timeout_s: Seconds = 120.0
    accuracy_threshold: float = 1.0
    python_path: list[FilePath] = []


class RolloutSection(Section):
    """`[rollout]`: how completions are made.

    Attributes:
        groups_per_step: prompts of one step; where the data has fewer, some more than once.
        group_size: completions of one prompt; advantages compare them, so training takes 2 or more,
            unless `train.advantage` is a function of your own.
        max_new_tokens: budget of a completion (all turns together for agent loops).
        temperature: of training rollouts. Evaluation is greedy.
        stop_token_ids: end a completion, besides the model's own end-of-text tokens.
        max_staleness: how many optimizer steps old a token may be when it is trained on. 0 is
            synchronous and on-policy; from 1 on, the next batches are generated while the trainer
            works (in a standalone pool) and long completions go on across steps.
        batch_order: "in_order": batches follow the order of the data, so that long completions are
            as often in them as short ones; "first_finished": whatever is scored first, and what is
            overtaken too often is dropped.
        over_sampling: prompts generated for each one that is needed; above 1 the batch is made of
            those that are done first, and what gets too old is dropped.
        drop_zero_variance_groups: prompts whose completions all have the same reward, from which
            nothing can be learned, are dropped and others take their place. As many in a row as
            the data has prompts, and at least 1000 and 10 steps' worth, end the run.
        max_failed_share: so many of the last 200 prompts, or of all so far, may be dropped because
            the reward function or agent loop failed; one more ends the run, so with 0.05 the first
            among fewer than 20.
        workers: processes that run rewards and agent loops.
        agent: "module:function" of an agent loop; without, one generation per prompt.
        agent_concurrency: agent loops in progress in each of these processes. Fewer than engines
            take at a time (`pool.max_num_seqs`) leave these idle; more have to be tried one after
            the other where their process dies, to find the one that it dies of.
        agent_timeout_s: for one run of the agent loop, without what it waits for auxiliary pools.
        agent_retries: how often the loop of one completion may raise, block or take too long and be
            run again, with what was generated replayed.
        block_limit_s: how long an agent loop may keep the others of its process from running, at
            most half of `agent_timeout_s`; then it has failed, and the process starts anew. Three
            prompts at which it does, and no loop that returns in between, end the run.
        timeout_s: how long ranks wait for a batch before the run is called stuck.
    """

    groups_per_step: Positive = 32
    group_size: Positive = 8
    max_new_tokens: Positive = 256
    temperature: Annotated[float, Field(gt=0)] = 1.0
    stop_token_ids: list[Count] = []
    max_staleness: Count = 0
    batch_order: Literal["in_order", "first_finished"] = "in_order"
    over_sampling: Annotated[float, Field(ge=1)] = 1.0
    drop_zero_variance_groups: bool = False
    max_failed_share: Share = 0.05
    workers: Positive = 1
    agent: FunctionSpec | None = None
    agent_concurrency: Positive = 32
    agent_timeout_s: Seconds = 600.0
    agent_retries: Count = 1
    block_limit_s: Seconds = 30.0
    timeout_s: Seconds = 1800.0


class PoolSection(Section):
    """`[pool]`: the inference engines.

    Attributes:
        engine: "embedded", "vllm" or "sglang" (see docs/engines.md), "echo" (no model, for tests:
            give it the model's vocab_size in `engine_args`), "faulty" (another one that fails on
            purpose, see docs/faults.md), or the "module:Class" of another.
        count: number of engines.
        mode: "hybrid": engines and trainer take turns with the memory, engines sleep while the
            trainer computes; "standalone": engines have their own and never sleep, which
            `rollout.max_staleness` above 0 makes use of.
        on_update: what new weights do to completions in progress: "abort" goes on under the new
            weights from the tokens so far, "keep" too, without computing their keys anew; "drain"
            finishes them first, which takes as long as the longest.
        update_waves: 1 updates all engines at once; more, for a standalone pool and at most
            `count`, updates so many parts of it one after the other, while the others generate on
            under the older weights. The trainer waits for all of them. What "abort" cuts goes on
            at the others meanwhile, and is cut again in their turn.
        device: "auto" is cuda where the trainer runs on it.
        max_num_seqs: completions an engine works on at a time.
        max_context_len: longest prompt + completion; default the model's limit, at most 4096.
        kv_cache_num_tokens: size of an engine's KV cache; the engine's choice by default.
        tick_ms: how often engines report new tokens. The end of a request waits for it with vLLM
            only.
        num_threads: CPU threads of an engine; default cores / engines.
        engine_args: passed on to the engine unchanged; for "vllm" options of its
            AsyncEngineArgs, such as tensor_parallel_size, for "sglang" of its ServerArgs, such as
            tp_size.
        lora_adapters: LoRA adapters by name, folders as PEFT saves them, that `ctx.generate(tokens,
            lora="NAME")` generates with, over the weights of the moment. For engine "vllm".
        transport: how weights travel to the engines: "cuda_ipc" has engines read them on the
            trainer's GPUs, "memfd" sends them through host memory; "auto" is the first where every
            rank and engine can, else the second.
        sync_bucket_mib: size of each of the four buffers that weights travel in.
        sync_timeout_s: Limit for one weight update across all waves; the first also covers engine
            start-up. An engine that makes no progress for most of it is replaced.
        max_restarts: of one engine within ten minutes; more fail the run.
        memory_limit_mib: host memory of an engine's processes, above which it is killed and
            restarted; 0 is no limit.
        hung_limit_s: an engine whose process does not react for so long is killed and restarted.
        stall_limit_s: an engine that has requests and has made no token for so long is killed and
            restarted. Set it above the longest time to a first token: a long prompt on a CPU may
            take minutes.
    """

    engine: EngineSpec = "embedded"
    count: Positive = 1
    mode: Literal["hybrid", "standalone"] = "hybrid"
    on_update: Literal["abort", "keep", "drain"] = "abort"
    update_waves: Positive = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_num_seqs: Positive = 256
    max_context_len: Positive | None = None
    kv_cache_num_tokens: Positive | None = None
    tick_ms: Seconds = 50.0
    num_threads: Positive | None = None
    engine_args: dict[str, Any] = {}
    lora_adapters: LoraAdapters = {}
    transport: Literal["auto", "memfd", "cuda_ipc"] = "auto"
    sync_bucket_mib: Positive = 2
    sync_timeout_s: Seconds = 600.0
    max_restarts: Count = 5
    memory_limit_mib: Count = 0
    hung_limit_s: Seconds = 15.0
    stall_limit_s: Seconds = 100.0

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        check_lora_engine(self.engine, self.lora_adapters)
        return self

    @model_validator(mode="after")
    def _check_update_waves(self) -> Self:
        problem = update_waves_problem(self.update_waves, self.mode, self.count)
        if problem:
            raise ValueError(problem)
        return self


class TrainSection(Section):
    """`[train]`: the optimisation.

    Attributes:
        steps: optimizer steps of the whole run, those before a resume included.
        learning_rate, schedule, warmup_steps, min_lr_ratio: see `umbra.trainer.model.optimizer`.
        weight_decay, betas, eps: of AdamW.
        max_grad_norm: gradients are scaled down to this norm; 0 switches clipping off.
        micro_batches: per rank and step, of about equal cost; 0 goes by the next.
        max_tokens_per_micro_batch: as many micro-batches as this cap of tokens asks for; 0 is
            2048 on the CPU, whose caches hold about that, and 16384 on a GPU.
        updates_per_batch: optimizer steps made from one batch; above 1 the later ones are
            slightly off-policy, which the clipped ratio bounds.
        loss: "clipped" is PPO's: the policy's ratio to the policy that made the tokens, clipped.
            "decoupled" is for tokens that older weights made: the ratio to the policy at the
            beginning of the step, clipped, times an importance weight, the ratio of that policy
            to the one that made the tokens. Where the two are the same, so are the losses.
            "gspo" is "clipped" with the ratio of a whole sample, to the power of 1 / length; use it
            with loss_aggregation = "sequence" and clip_eps_low and clip_eps_high below 0.001.
            "cispo" clips the ratio, as a weight, and leaves the gradient to every token.
            "module:function" is a `PolicyLoss` of your own, see `umbra.trainer.algorithms.base`;
            its module is searched for like the reward function's, on every node.
        clip_eps_low, clip_eps_high: the ratio is clipped to [1 - low, 1 + high]; a low of 1 is no
            lower bound.
        importance_cap: for loss = "decoupled": importance weights above it are limited; a large
            one, such as 1e9, limits none.
        importance_above_cap: "truncate" sets importance weights above the cap to the cap; "mask"
            leaves their tokens out.
        importance_floor: tokens of importance weights below it are left out; 0 leaves none out.
        advantage: "grpo" subtracts the mean reward of a group and divides by its standard
            deviation; "dr_grpo" does not divide. "module:function" is an `AdvantageEstimator` of
            your own, found like `loss`.
        loss_aggregation: see `umbra.trainer.algorithms.loss_aggregation.token_weights`.
        kl_coef: weight of the KL term to the starting model; 0 keeps no reference model.
        kl_estimator: see `umbra.trainer.algorithms.kl_estimators.kl_terms`.
        log_entropy: measure the policy's entropy (one more pass over the logits).
        activation_checkpointing: "full" keeps only the input of each decoder block for the backward
            pass, which computes the block again: about a third more work for far less memory.
        compile: decoder blocks and log-probabilities by torch.compile: on a GPU about twice as fast
            and in less memory. The first step takes a minute longer; needs a C++ compiler.
        offload: what goes to host memory while engines generate, in a hybrid pool: "optimizer" the
            optimizer's state, "all" the parameters too.
        eval_every: steps between evaluations, which also run before the first step and at
            the end; 0 means only those two.
        checkpoint_every: steps between checkpoints; 0 means only at the end.
        keep_checkpoints: the newest so many stay.
        export: write a Hugging Face directory at the end.
        seed: of data order and sampling.
        shutdown_grace_s: after SIGINT, SIGTERM or SIGHUP, how long the step in progress may take
            to end and be checkpointed. For 30 s and more give torchrun a longer --shutdown-timeout.
        device: "auto" is cuda where there is one.
    """

    steps: Positive
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Count = 0
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: Betas = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    micro_batches: Count = 0
    max_tokens_per_micro_batch: Count = 0
    updates_per_batch: Positive = 1
    loss: LossSpec = "clipped"
    clip_eps_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    clip_eps_high: Annotated[float, Field(ge=0)] = 0.2
    importance_cap: Annotated[float, Field(ge=1)] = 2.0
    importance_above_cap: Literal["truncate", "mask"] = "truncate"
    importance_floor: Share = 0.0
    advantage: AdvantageSpec = "grpo"
    loss_aggregation: Literal["token", "sequence", "constant"] = "token"
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    log_entropy: bool = True
    activation_checkpointing: Literal["none", "full"] = "none"
    compile: bool = False
    offload: Literal["none", "optimizer", "all"] = "none"
    eval_every: Count = 0
    checkpoint_every: Count = 0
    keep_checkpoints: Positive = 2
    export: bool = True
    seed: Count = 0
    shutdown_grace_s: Seconds = 5.0
    device: Literal["auto", "cpu", "cuda"] = "auto"


class TrainerConfig(Section):
    """A whole config file; each attribute is the section of its name, `pools` a table of them."""

    run: RunSection = RunSection()
    model: ModelSection
    data: DataSection
    reward: RewardSection
    rollout: RolloutSection = RolloutSection()
    pool: PoolSection = PoolSection()
    pools: dict[str, AuxiliaryPoolSection] = {}
    train: TrainSection

    @model_validator(mode="after")
    def _check_group_size(self) -> Self:
        if self.rollout.group_size < 2 and self.train.advantage in ADVANTAGE_ESTIMATORS:
            raise ValueError(
                "rollout.group_size = 1: advantages compare the completions of one prompt; that of "
                "a single one is always 0, and nothing would be learned: use 2 or more"
            )
        if self.rollout.group_size < 2 and self.rollout.drop_zero_variance_groups:
            raise ValueError(
                "rollout.group_size = 1 with rollout.drop_zero_variance_groups would drop every "
                "group, because a single completion has one reward: set one of the two differently"
            )
        return self

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        if self.train.offload != "none" and self.pool.mode != "hybrid":
            raise ValueError(
                f"train.offload = {self.train.offload!r} needs pool.mode = 'hybrid': engines of a "
                "standalone pool do not share the trainer's memory"
            )
        return self

    @model_validator(mode="after")
    def _check_pools(self) -> Self:
        problem = auxiliary_pools_problem(self.pools)
        if problem:
            raise ValueError(problem)
        return self

    @property
    def master_dtype(self) -> Dtype:
        """Dtype of parameters and optimizer state."""
        if self.model.master_dtype is not None:
            return self.model.master_dtype
        return "float64" if self.model.dtype == "float64" else "float32"

    @property
    def run_name(self) -> str:
        """How the run is called in progress and report."""
        return self.run.name or self.run.dir.absolute().name

    @property
    def samples_per_step(self) -> int:
        """Completions of one step, over all ranks."""
        return self.rollout.groups_per_step * self.rollout.group_size


class ServeConfig(Section):
    """What `umbra serve` and `umbra generate` read of a config file; the other sections may be
    there, as in the file of a training run, and are checked."""

    run: RunSection = RunSection()
    model: ModelSection
    data: DataSection | None = None
    reward: RewardSection | None = None
    rollout: RolloutSection = RolloutSection()
    pool: PoolSection = PoolSection()
    pools: dict[str, AuxiliaryPoolSection] = {}
    train: TrainSection | None = None

    @model_validator(mode="after")
    def _check_pools(self) -> Self:
        problem = auxiliary_pools_problem(self.pools)
        if problem:
            raise ValueError(problem)
        return self
