"""Prepares prompts: from the user's data set to the tokenized file of a rollout manager."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import xxhash

from umbra.runtime.errors import ConfigError, DataError
from umbra.runtime.rollout.prompts import write_prompts
from umbra.runtime.text.model_tokenizer import ModelTokenizer
from umbra.trainer.config.trainer_config import DataSection
from umbra.trainer.data.data_rows import check_data_file, read_rows
from umbra.trainer.data.kept_prompts import KeptPrompts
from umbra.trainer.data.prompt_content import (
    SUCCESSFUL,
    check_template,
    no_column,
    prompt_content,
    row_variables,
    teacher_content,
)
from umbra.trainer.world.run_files import writing

logger = logging.getLogger(__name__)

_SHOWN_LEN: Final = 100
"""Characters of an example: enough for a question and the template behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBudget:
    """The settings that limit the length of a prompt, in tokens."""

    max_context_len: int
    max_new_tokens: int
    eval_max_new_tokens: int | None = None  # None: as `max_new_tokens`
    setting: str = "rollout.max_new_tokens"  # which `max_new_tokens` comes from

    @property
    def max_prompt_len(self) -> int:
        return self.max_context_len - self.max_new_tokens

    def teacher_excess(self, parts: Sequence[Sequence[int]]) -> int:
        """By how many tokens a teacher's prompt is too long for a completion behind it, another one
        between two parts, and the token that vLLM and SGLang generate after all."""
        num_tokens = sum(map(len, parts)) + len(parts) * self.max_new_tokens + 1
        return num_tokens - self.max_context_len

    def for_eval(self) -> PromptBudget:
        if self.eval_max_new_tokens is None:
            return self
        limit = self.eval_max_new_tokens
        return replace(self, max_new_tokens=limit, setting="eval.max_new_tokens")

    def check(self) -> None:
        """Raises ConfigError if the context leaves no room for any prompt."""
        if self.max_prompt_len < 1:
            raise ConfigError(
                f"{self.setting} = {self.max_new_tokens} leaves no room for a prompt in a context "
                f"of {self.max_context_len} tokens (pool.max_context_len, else the model's "
                f"max_position_embeddings, at most 4096): lower {self.setting}, or raise "
                "pool.max_context_len"
            )


NO_SETS: Final[Mapping[str, Path]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFiles:
    """The prompt files of a run, and what is wrong with the data without ending the run."""

    train_path: Path
    num_train: int
    eval_path: Path | None  # None if nothing is evaluated
    num_eval: int
    # Prompts of each named set in `eval_path`, in its order.
    eval_sets: Mapping[str, int] = field(default_factory=dict[str, int])
    warnings: Sequence[str] = ()


def check_data(data: DataSection, sets: Mapping[str, Path] = NO_SETS) -> None:
    """Cheap checks of the files and their first rows, also of further held-out `sets`, before
    anything is started. Raises DataError with the setting, or file, line, cause and remedy."""
    for path in data.train_files:
        _check_prompts(data, path, "data.train")
    check_held_out(data, sets)


def check_held_out(data: DataSection, sets: Mapping[str, Path]) -> None:
    for path in data.eval_files:
        _check_prompts(data, path, "data.eval")
    for name, path in sets.items():
        _check_prompts(data, path, f"eval.sets.{name}")


def _check_prompts(data: DataSection, path: Path, key: str) -> None:
    """Checks one file, which the setting `key` names."""
    check_data_file(path, key)
    first = next(read_rows(path), None)
    if first is None:
        raise _empty([path], "it has no rows")
    content = prompt_content(data, *first)
    if data.teacher_template and key == "data.train":
        teacher_content(data, *first, content)
    _prompt_id(data, *first, idx=0)


def prepare_prompts(
    data: DataSection,
    tokenizer: ModelTokenizer,
    budget: PromptBudget,
    *,
    folder: Path,
    min_prompts: int,
    groups_per_step: int,
    sets: Mapping[str, Path] = NO_SETS,
    on_prompt: Callable[[], None] = lambda: None,
    kept: KeptPrompts | None = None,
) -> PromptFiles:
    """Tokenizes the data sets into `folder`, those of `sets` behind `data.eval`. One rank calls it.

    There must be `min_prompts` useful training prompts (one per rank); fewer than `groups_per_step`
    cause a warning. `on_prompt` is called for each tokenized prompt; `kept` has the prompts that a
    resumed run began with. Raises DataError with file, line, cause and remedy, and
    RunDirectoryError if `folder` is full or the like.
    """
    train_path, train = folder / "prompts.msgpack", f"data.train: {_names(data.train_files)}"
    repeated = RepeatedPrompts()
    prompts = _read_prompts(data, data.train_files, tokenizer, budget, for_training=True)
    prompts = repeated.pass_train(prompts)
    if kept is not None:
        prompts = kept.unchanged(prompts, train_path.name, train)
    num_train = _write(train_path, prompts, on_prompt)
    if num_train < min_prompts:
        raise DataError(
            f"{train} has {num_train} prompts for {min_prompts} ranks; every rank needs one: use "
            f"{num_train} ranks or fewer, or more prompts"
        )
    few = list[str]()
    if num_train < groups_per_step:
        few = [
            f"{train} has {num_train} prompts, fewer than "
            f"rollout.groups_per_step = {groups_per_step}: a step has some of them more than once; "
            "lower rollout.groups_per_step, or give more prompts"
        ]
    eval_path, num_eval, sizes = None, 0, dict[str, int]()
    if data.eval is not None:
        all_sets = held_out_sets(data, sets)
        prompts = _read_held_out(data, all_sets, tokenizer, budget, sizes, named=bool(sets))
        eval_path = folder / "eval_prompts.msgpack"
        prompts = repeated.pass_held_out(prompts)
        if kept is not None:
            prompts = kept.noted(prompts, eval_path.name, f"data.eval: {_names(data.eval_files)}")
        num_eval = _write(eval_path, prompts, on_prompt)
    return PromptFiles(
        train_path=train_path,
        num_train=num_train,
        eval_path=eval_path,
        num_eval=num_eval,
        eval_sets=sizes if sets else {},
        warnings=[*few, *repeated.warnings()],
    )


def prepare_held_out(
    data: DataSection,
    sets: Mapping[str, Sequence[Path]],
    tokenizer: ModelTokenizer,
    budget: PromptBudget,
    *,
    folder: Path,
) -> PromptFiles:
    """Tokenizes sets of held-out prompts into one file in `folder`, in which ids are SET/ID. Raises
    like `prepare_prompts`."""
    sizes = dict[str, int]()
    path = folder / "eval_prompts.msgpack"
    num_eval = _write(path, _read_held_out(data, sets, tokenizer, budget, sizes))
    return PromptFiles(
        train_path=path, num_train=0, eval_path=path, num_eval=num_eval, eval_sets=sizes
    )


def held_out_sets(data: DataSection, sets: Mapping[str, Path]) -> dict[str, Sequence[Path]]:
    """The files of held-out prompts by name; `data.eval` is called "eval"."""
    first = {} if data.eval is None else {"eval": data.eval_files}
    return {**first, **{name: [path] for name, path in sets.items()}}


def _read_held_out(
    data: DataSection,
    sets: Mapping[str, Sequence[Path]],
    tokenizer: ModelTokenizer,
    budget: PromptBudget,
    sizes: dict[str, int],
    *,
    named: bool = True,
) -> Iterator[dict[str, Any]]:
    """Prompts of one set after the other, whose `sizes` are known at the end. If `named`,
    ids are SET/ID."""
    for name, paths in sets.items():
        sizes[name] = 0
        for prompt in _take(
            _read_prompts(data, paths, tokenizer, budget.for_eval()), data.eval_limit
        ):
            sizes[name] += 1
            yield prompt | {"id": f"{name}/{prompt['id']}"} if named else prompt


def _write(
    path: Path, prompts: Iterator[dict[str, Any]], on_prompt: Callable[[], None] = lambda: None
) -> int:
    def counted() -> Iterator[dict[str, Any]]:
        for prompt in prompts:
            yield prompt
            on_prompt()

    with writing("write", path):
        return write_prompts(path, counted())


def _take(prompts: Iterator[dict[str, Any]], limit: int) -> Iterator[dict[str, Any]]:
    for idx, prompt in enumerate(prompts):
        if limit and idx >= limit:
            return
        yield prompt


def _read_prompts(
    data: DataSection,
    paths: Sequence[Path],
    tokenizer: ModelTokenizer,
    budget: PromptBudget,
    *,
    for_training: bool = False,
) -> Iterator[dict[str, Any]]:
    num_rows = num_dropped = 0
    names: set[str] = set()
    rows = chain.from_iterable(read_rows(path) for path in paths)
    for num_rows, (where, row) in enumerate(rows, 1):
        content = prompt_content(data, where, row)
        text, (tokens,) = _tokenize(data, tokenizer, where, row, content)
        problem, teacher = "", list[list[int]]()
        if len(tokens) > budget.max_prompt_len:
            problem = _overlong_message(where, len(tokens), budget)
        elif for_training and data.teacher_template:
            privileged = teacher_content(data, where, row, content)
            teacher = _tokenize(data, tokenizer, where, row, privileged)[1]
            if (excess := budget.teacher_excess(teacher)) > 0:
                problem = (
                    f"{where}: the prompt of data.teacher_template and what follows it are "
                    f"{excess} tokens longer than the context of {budget.max_context_len}: raise "
                    f"pool.max_context_len, lower {budget.setting}, or set data.overlong = 'drop'"
                )
        if problem:
            if data.overlong == "error":
                raise DataError(problem)
            num_dropped += 1
            continue
        name = _prompt_id(data, where, row, num_rows - 1)
        if name in names:
            raise DataError(f"{where}: prompt id {name!r} occurs twice; ids are unique")
        if data.id_column is not None:
            names.add(name)
        prompt = {"id": name, "prompt": text, "tokens": _packed(tokens), "row": row}
        yield prompt | {"teacher": [_packed(part) for part in teacher]} if teacher else prompt
    if num_dropped:
        files = _names(paths)
        logger.warning("%s: dropped %d of %d prompts: too long", files, num_dropped, num_rows)
    if num_rows == num_dropped:
        cause = "all of its prompts are too long" if num_rows else "it has no rows"
        raise _empty(paths, cause)


def _packed(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, "<i4").tobytes()


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths))


def _empty(paths: Sequence[Path], cause: str) -> DataError:
    return DataError(f"data set {_names(paths)} is empty: {cause}")


def _tokenize(
    data: DataSection,
    tokenizer: ModelTokenizer,
    where: str,
    row: Mapping[str, Any],
    content: str | list[dict[str, Any]],
) -> tuple[str, list[list[int]]]:
    """The text, and its tokens before and after a successful completion, or all of them."""
    if isinstance(content, str):
        text = content
    else:
        try:
            variables = row_variables(data, row)
            check_template(tokenizer, content, variables)
            text = tokenizer.render_chat(
                content, variables, continue_final_message=data.continue_final_message
            )
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
    first, *others = text.split(SUCCESSFUL)
    encode = tokenizer.encode_prompt if isinstance(content, str) else tokenizer.encode
    parts = [encode(first), *map(tokenizer.encode_more, others)]
    if not parts[0]:
        raise DataError(f"{where}: the prompt is empty: {text!r}")
    return text, parts


def _prompt_id(data: DataSection, where: str, row: Mapping[str, Any], idx: int) -> str:
    if data.id_column is None:
        return str(idx)
    if data.id_column not in row:
        raise no_column(data.id_column, where, row, "data.id_column")
    value = row[data.id_column]
    if not isinstance(value, str | int | float):
        raise DataError(
            f"{where}: the id in column {data.id_column!r} is a {type(value).__name__}; give text "
            "or a number"
        )
    return str(value)


def _overlong_message(where: str, num_tokens: int, budget: PromptBudget) -> str:
    return (
        f"{where}: the prompt has {num_tokens} tokens; with {budget.setting} = "
        f"{budget.max_new_tokens} only {budget.max_prompt_len} fit a context of "
        f"{budget.max_context_len}: raise pool.max_context_len, lower {budget.setting}, or set "
        "data.overlong = 'drop'"
    )


class RepeatedPrompts:
    """Finds prompts that are trained on twice, or held out and trained on, by their tokens.
    Training prompts have to pass before held-out ones."""

    def __init__(self) -> None:
        self._digests: set[int] = set()
        self._train = _Found()
        self._held_out = _Found()

    def pass_train(self, prompts: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for prompt in prompts:
            digest = xxhash.xxh3_64_intdigest(prompt["tokens"])
            self._train.count(prompt, digest in self._digests)
            self._digests.add(digest)
            yield prompt

    def pass_held_out(self, prompts: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for prompt in prompts:
            digest = xxhash.xxh3_64_intdigest(prompt["tokens"])
            self._held_out.count(prompt, digest in self._digests)
            yield prompt

    def warnings(self) -> list[str]:
        """A warning per data set, with the first example and the remedy."""
        found: list[str] = []
        if self._train.num_repeated:
            found.append(
                f"data.train: {self._train} repeat an earlier one, such as "
                f"{self._train.first!r}: they are trained on more often; remove them unless "
                "that is meant"
            )
        if self._held_out.num_repeated:
            found.append(
                f"data.eval: {self._held_out} are in data.train, too, such as "
                f"{self._held_out.first!r}: evaluations measure what was trained on; remove "
                "them from one of the two"
            )
        return found


@dataclass(slots=True)
class _Found:
    num_prompts: int = 0
    num_repeated: int = 0
    first: str = ""

    def count(self, prompt: dict[str, Any], is_repeated: bool) -> None:
        self.num_prompts += 1
        if is_repeated:
            self.num_repeated += 1
            self.first = self.first or _ending(prompt["prompt"])

    def __str__(self) -> str:
        return f"{self.num_repeated} of {self.num_prompts} prompts"


def _ending(text: str) -> str:
    """The end of a prompt: chats begin alike."""
    return text if len(text) <= _SHOWN_LEN else f"...{text[-_SHOWN_LEN:]}"
