"""Checks a run's setup before anything is started for it. The checks look at files, but load no
model or tokenizer and run no user code; the processes that do report further problems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from umbra.runtime.cluster.environment import TorchrunEnvironment
from umbra.runtime.engine_api.decoder_config import parse_model_config
from umbra.runtime.engine_api.engine_names import ENGINES, EngineKind, engine_kind
from umbra.runtime.engine_api.lora import matrix_shapes
from umbra.runtime.engine_api.pool_settings import EnginePoolSettings
from umbra.runtime.engine_api.weight_files import WeightFiles, is_tied
from umbra.runtime.errors import ConfigError, DataError, how_to_install
from umbra.runtime.package_versions import is_installed
from umbra.runtime.text.model_files import check_causal, read_model_config, vocab_size, vocabulary
from umbra.trainer.checkpoint.run_dir import check_kind, check_run_dir
from umbra.trainer.config.trainer_config import (
    ModelSection,
    RunSection,
    ServeConfig,
    TrainerConfig,
)
from umbra.trainer.data.prompt_preparation import check_data
from umbra.trainer.reporting.metrics_loggers import check_loggers
from umbra.trainer.services.pool_specs import (
    TEACHER,
    auxiliary_context_len,
    auxiliary_model_config,
    auxiliary_vocabulary,
)
from umbra.trainer.services.services import max_context_len, prompt_budget


def check_setup(config: TrainerConfig, environment: TorchrunEnvironment) -> None:
    """Checks a training run's setup, on every rank. Raises ConfigError, DataError
    or RunDirectoryError."""
    check_models(config)
    check_lora(config.model)
    check_teacher(config)
    check_critic(config)
    check_rotary_frequencies(config)
    check_stop_tokens(config)
    prompt_budget(config).check()
    prompt_budget(config).for_eval().check()
    check_data(config.data, config.eval.sets)
    check_batch_size(config, environment.world_size)
    check_loggers(config.run.loggers)
    if config.run.metrics_address and not is_installed("aiohttp"):
        raise ConfigError(f"run.metrics_address needs aiohttp: {how_to_install('serve')}")
    check_run_dir(config.run, environment.incarnation)
    check_kind(config)
    check_restarts(config.run, environment)


def check_restarts(run: RunSection, environment: TorchrunEnvironment) -> None:
    """Raises ConfigError if ranks that torchrun starts again would not resume."""
    if environment.nodes_may_change and run.resume != "auto":
        raise ConfigError(
            f"run.resume = {run.resume!r}, and torchrun may start the ranks again on other nodes "
            "(--max-restarts): set run.resume = 'auto', so that they resume"
        )


def check_models(config: TrainerConfig | ServeConfig, only: str = "") -> None:
    """Checks the folders of models, or of the section `only`, such as "pools.judge". Engines report
    other problems when they start, because their libraries take long to import.

    Raises DataError if a path is not a model directory or its weights are incomplete, and
    ConfigError if the embedded engine does not support the architecture or so long a context.
    """
    served: dict[str, tuple[EnginePoolSettings, Path, Mapping[str, Any]]] = {}
    if only in ("", "pool"):
        served["pool"] = config.pool, config.model.path, read_model_config(config.model.path)
    for name, pool in config.pools.items():
        if only in ("", f"pools.{name}"):
            model = auxiliary_model_config(name, pool)
            served[f"pools.{name}"] = pool, pool.model_path, model
    for section, (pool, folder, model) in served.items():
        kind = _kind(pool)
        if kind is ENGINES["embedded"]:
            _check_embedded(section, pool, model)
        is_trained = section == "pool" and isinstance(config, TrainerConfig)
        if is_trained or kind.reads_weight_files:
            setting = "model.path" if section == "pool" else f"{section}.model_path"
            check_model(setting, folder, reads_all=kind.wraps_library and not is_trained)


def _kind(pool: EnginePoolSettings) -> EngineKind:
    """The engine, or the one that it wraps."""
    kind = engine_kind(pool.engine)
    return (
        engine_kind(str(pool.engine_args.get("inner", "embedded"))) if kind.wraps_engine else kind
    )


def check_model(
    setting: str, folder: Path, *, reads_all: bool = False, may_score: bool = False
) -> None:
    """Raises ConfigError as `check_causal` does, and DataError for incomplete weights. With
    `reads_all`, an engine reads every safetensors file of a folder without an index."""
    check_causal(setting, folder, may_score=may_score)
    try:
        stored = WeightFiles(folder)
    except DataError as error:
        raise DataError(f"{setting}: {error}") from None
    if reads_all and stored.strays:
        raise DataError(
            f"{setting}: {folder} has {', '.join(stored.strays)} beside {stored.files[0].name}, "
            "and its engine would read both: move it to another folder"
        )


def _check_embedded(section: str, pool: EnginePoolSettings, model: Mapping[str, Any]) -> None:
    try:
        limit = parse_model_config(model).max_position_embeddings
    except ConfigError as error:
        raise ConfigError(f"{section}.engine = {pool.engine!r}: {error}") from None
    length = pool.max_context_len
    if length is not None and length > limit and "max_context_len" not in pool.engine_args:
        raise ConfigError(
            f"{section}.max_context_len = {length} exceeds the model's "
            f"max_position_embeddings = {limit}: lower it to that or less"
        )


def check_teacher(config: TrainerConfig) -> None:
    """Raises ConfigError if the teacher has no logprob for something that the policy may generate:
    a token that means another text to it, or a completion longer than its context. The policy
    itself has all."""
    if not config.train.teacher_kl_coef or TEACHER not in config.pools:
        return
    pool, section = config.pools[TEACHER], f"pools.{TEACHER}"
    vocabularies = vocabulary(config.model.path), auxiliary_vocabulary(TEACHER, pool)
    check_vocabulary(config, f"{section}.model_path", pool.model_path, *vocabularies)
    # vLLM and SGLang generate a token beyond the completion.
    needed = max_context_len(config) + int(_kind(pool).wraps_library)
    if (length := auxiliary_context_len(TEACHER, pool)) < needed:
        raise ConfigError(
            f"{section}.max_context_len is {length}, and the policy's prompts and completions need "
            f"{needed}: set it to that or more, or lower pool.max_context_len"
        )


def check_critic(config: TrainerConfig) -> None:
    """Raises ConfigError if the critic's own model cannot read something that the policy writes,
    DataError if it is incomplete."""
    path = config.critic.path
    if config.has_critic and path is not None:
        check_model("critic.path", path, may_score=True)
        own, other = vocabulary(config.model.path), vocabulary(path)
        check_vocabulary(config, "critic.path", path, own, other)


def check_vocabulary(
    config: TrainerConfig,
    setting: str,
    path: Path,
    own: Mapping[str, int],
    other: Mapping[str, int],
) -> None:
    """Raises ConfigError if a token of the policy's vocabulary, `own`, is not one of the model in
    `path`, or is another one."""
    differing = next((token for token, idx in own.items() if other.get(token) != idx), None)
    if differing is not None:
        theirs = other.get(differing, "not a token")
        raise ConfigError(
            f"{setting}: the token {differing!r} is {own[differing]} in the vocabulary "
            f"of {config.model.path} ({len(own)} tokens), and {theirs} in that of "
            f"{path} ({len(other)}): use a model with the policy's tokenizer"
        )
    sizes = vocab_size(config.model.path), vocab_size(path)
    if min(sizes) and sizes[0] > sizes[1]:
        raise ConfigError(
            f"{setting}: the policy may generate {sizes[0]} tokens, and this model "
            f"knows {sizes[1]}: use one with at least as many"
        )


def check_rotary_frequencies(config: TrainerConfig) -> None:
    """Raises ConfigError if engine and trainer would not have the same rotary frequencies for all
    sequences; see `fix_rotary_frequencies`."""
    model, context_len = read_model_config(config.model.path), max_context_len(config)
    engine, text = _kind(config.pool), model.get("text_config") or model
    for kind, limit in _rotary_limits(text):
        if context_len <= limit:
            continue
        reason = ""
        if kind == "dynamic":
            reason = "engines and transformers scale longer contexts in different ways"
        elif engine is ENGINES["sglang"]:
            reason = "SGLang has others for a sequence beside a longer one, unlike vLLM"
        elif text.get("model_type") == "phimoe":
            reason = "transformers scales a sequence beside a longer one in another way"
        if reason:
            raise ConfigError(
                f"pool.max_context_len = {context_len}, and the model's rotary embedding "
                f"{kind!r} has the same frequencies for all sequences of up to {limit} tokens "
                f"only: {reason}. Set pool.max_context_len to {limit} or less"
            )


def _rotary_limits(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Each rotary embedding whose frequencies depend on a length, and the length up to which they
    are as in training."""
    found: list[Any] = [config.get("rope_scaling"), config.get("rope_parameters")]
    found += [each for rope in found if rope for each in rope.values()]  # by the type of a layer
    trained: Any = config.get("max_position_embeddings")
    for rope in (cast("dict[str, Any]", each) for each in found if isinstance(each, dict)):
        kind = rope.get("rope_type", rope.get("type"))
        if kind in ("longrope", "su"):
            name = "original_max_position_embeddings"
            yield "longrope", int(rope.get(name) or config.get(name) or trained)
        elif kind == "dynamic" and trained:
            yield "dynamic", int(trained)


def check_lora(model: ModelSection) -> None:
    """Raises ConfigError if a target of model.lora matches no weight of the model's files, or its
    rank exceeds those of all that it matches. A quantised model is checked once it is loaded."""
    shapes = matrix_shapes(model.path) if model.lora.rank else {}
    if not shapes:
        return
    ties = is_tied(model.path, read_model_config(model.path))
    layers = shapes | ({"lm_head": ()} if ties else {})  # which the files may lack
    names = model.lora.chosen(layers, str(model.path), is_tied=ties)
    largest = max(min(shapes[name]) for name in names)
    if model.lora.rank > largest:
        raise ConfigError(
            f"model.lora.rank = {model.lora.rank} exceeds {largest}, the largest rank of the "
            f"weights of the {len(names)} layers that get an adapter: lower it to a small part of "
            "that"
        )


def check_stop_tokens(config: TrainerConfig) -> None:
    """Raises ConfigError if a configured stop token is outside the model's vocabulary."""
    size = vocab_size(config.model.path)
    beyond = [token for token in config.rollout.stop_token_ids if token >= size]
    if size and beyond:
        raise ConfigError(
            f"rollout.stop_token_ids has {beyond}, outside the model's vocabulary of {size} "
            f"(0 to {size - 1}): no completion would end by them"
        )


def check_batch_size(config: TrainerConfig, world_size: int) -> None:
    """Raises ConfigError if an optimizer step has fewer completions than there are ranks."""
    num_samples = config.samples_per_step // config.train.mini_batches
    if num_samples < world_size:
        raise ConfigError(
            "rollout.groups_per_step x rollout.group_size / train.mini_batches is "
            f"{num_samples} completions a step for {world_size} ranks; every rank needs one: raise "
            f"the number, or start {num_samples} ranks or fewer"
        )
