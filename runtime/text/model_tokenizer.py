"""A model's tokenizer, chat template and end tokens, in one state for all processes.

    trainer, serving: ModelTokenizer.open(model directory)
      └ save ─▶ RUN_DIR/tokenizers/policy.json
                  └ ModelTokenizer.open: rollout workers, `umbra samples`, the dashboard

The state is the one that transformers builds from the directory. A saved one opens in a tenth of a
second, because transformers would import torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Protocol, cast

from umbra.runtime.disk import replacing
from umbra.runtime.engine_api.weight_files import local_model
from umbra.runtime.errors import ConfigError, DataError, how_to_install
from umbra.runtime.text.messages import normal_messages
from umbra.runtime.text.model_files import configured_end_tokens, read_model_config, vocab_size

_MAX_CHARACTER_NBYTES: Final = 4  # in UTF-8
_GENERATION: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DATE: Final = re.compile(r"""strftime_now\(\s*(['"])(?P<format>[^'"]*)\1\s*\)""")
_ARGUMENTS: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "messages",
        "return_assistant_tokens_mask",
        "tokenize",
    }
)
"""Arguments of the functions that render, which are no variables of a template."""


def tokenizer_path(folder: Path, pool: str = "policy") -> Path:
    """Where a run stores the state of a pool's tokenizer."""
    return folder / "tokenizers" / f"{pool}.json"


class _Backend(Protocol):
    """The tokenizer itself. Neither of its two kinds truncates or pads."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str: ...

    def get_vocab(self) -> dict[str, int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerState:
    """The contents of the file that `ModelTokenizer.save` writes.

    Attributes:
        model_path, trust_remote_code: where the tokenizer came from.
        tokenizer: in the format of the library `tokenizers`, without truncation and padding; "" for
            a tokenizer written in Python, which is opened from `model_path`.
        splits_special_tokens: whether special tokens in a text are tokenized as text.
        chat_template: "" if there is none.
        special_tokens: variables of the chat template.
        end_token_ids: end a completion: those of the tokenizer, config.json and
            generation_config.json, sorted.
        special_token_ids: those that `tokenizers` calls special.
    """

    model_path: str
    trust_remote_code: bool
    tokenizer: str
    splits_special_tokens: bool
    chat_template: str
    special_tokens: Mapping[str, Any]
    eos_token_id: int | None
    pad_token_id: int | None
    end_token_ids: Sequence[int]
    special_token_ids: Sequence[int]


class ModelTokenizer:
    """Tokenizes prompts, renders chats and decodes completions of one model. Thread-safe."""

    def __init__(
        self, state: TokenizerState, backend: _Backend, render: Callable[..., str]
    ) -> None:
        self.state = state
        self.end_token_ids = list(state.end_token_ids)
        self._backend = backend
        self._render = render
        self._special = frozenset(state.special_token_ids)
        self._prefix, self._suffix = self._added_tokens()
        self._break = backend.encode("\n", False)
        self._adds_space = self.encode("a") != self._behind("\n", self._break, "a")
        self._hidden = self._special & {*state.end_token_ids, state.pad_token_id}

    @classmethod
    def open(
        cls, path: str | Path, *, trust_remote_code: bool = False, began_at: datetime | None = None
    ) -> ModelTokenizer:
        """Opens a file of `save`, or the tokenizer of a model directory, by transformers. With
        `began_at`, a chat template that shows the date always shows this one, so that a run has the
        same prompts on each day. Raises DataError if there is no usable tokenizer, or one with more
        tokens than the model has embeddings; raises ConfigError if a library is not installed."""
        target = Path(local_model(str(path), with_weights=False))
        if target.is_file():
            state = _read_state(target)
            if state.tokenizer:
                return cls.of_state(state)
            target, trust_remote_code = Path(state.model_path), state.trust_remote_code
        return cls._load(target, trust_remote_code, began_at)

    @classmethod
    def of_state(cls, state: TokenizerState) -> ModelTokenizer:
        """A tokenizer of the library `tokenizers`. Raises ConfigError if it is not installed."""
        return cls(state, _RustBackend(state), _template_renderer(state))

    @classmethod
    def _load(
        cls, folder: Path, trust_remote_code: bool, began_at: datetime | None
    ) -> ModelTokenizer:
        read_model_config(folder)
        try:
            import transformers
        except ImportError as error:
            raise ConfigError(
                f"the tokenizer of a model needs `transformers`: {how_to_install('train')}"
            ) from error
        library: Any = transformers
        try:
            found: Any = library.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError, KeyError) as error:
            raise _no_tokenizer(folder, _first_line(error)) from error
        # Without files, transformers would make an empty tokenizer of the model's kind.
        files = set[str](found.vocab_files_names.values())
        if files and not any((folder / name).exists() for name in files):
            raise _no_tokenizer(folder, f"none of {', '.join(sorted(files))} is there")
        usual = library.PreTrainedTokenizerBase.apply_chat_template
        renders_itself = found.apply_chat_template.__func__ is not usual
        rust: Any = None if renders_itself else getattr(found, "backend_tokenizer", None)
        if rust is not None:
            rust.no_truncation()
            rust.no_padding()
        end_tokens = configured_end_tokens(folder)
        if found.eos_token_id is not None:
            end_tokens.add(found.eos_token_id)
        state = TokenizerState(
            model_path=str(folder.absolute()),
            trust_remote_code=trust_remote_code,
            tokenizer="" if rust is None else rust.to_str(),
            splits_special_tokens=bool(getattr(found, "split_special_tokens", False)),
            chat_template=_dated(_chat_template(found), began_at),
            special_tokens=dict(found.special_tokens_map),
            eos_token_id=found.eos_token_id,
            pad_token_id=found.pad_token_id,
            end_token_ids=sorted(end_tokens),
            special_token_ids=sorted(found.all_special_ids if rust is None else _special_ids(rust)),
        )
        if rust is None:
            opened = cls(state, _PythonBackend(found), _own_renderer(found))
        else:
            opened = cls.of_state(state)
        opened._check_vocabulary(folder)
        return opened

    def save(self, path: Path) -> None:
        """Writes the state for `open`, all or nothing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps(asdict(self.state)).encode())

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return 1 + max(self._backend.get_vocab().values(), default=-1)

    @property
    def max_token_nbytes(self) -> int:
        """The most bytes of UTF-8 text that one token stands for.

        This is the longest entry of the vocabulary, whose alphabet may take more bytes than the
        text, but never fewer; an unknown character takes four. A token can only stand for more if
        the tokenizer shortens text, drops spaces, or has one token for any unknown word.
        """
        entries: Iterable[str] = self._backend.get_vocab()
        return max(_MAX_CHARACTER_NBYTES, *(len(entry.encode()) for entry in entries))

    def stop_token_ids(self, extra: Sequence[int] = ()) -> list[int]:
        """The end tokens and `extra`, sorted. Raises DataError if none could end a completion."""
        if found := sorted({*self.end_token_ids, *extra}):
            return found
        raise DataError(
            f"model.path: {self.state.model_path} names no eos_token_id (generation_config.json, "
            "config.json or the tokenizer): add it there, or for the policy set "
            "rollout.stop_token_ids"
        )

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, with no others added: of a rendered chat, a tool's answer and so on."""
        return self._backend.encode(text, False)

    def encode_more(self, text: str, last: int | None = None) -> list[int]:
        """Tokens of a text that follows other tokens, of which the `last` matters if it is special:
        without the space that SentencePiece's models put in front of each text, unless they put one
        behind that token, too."""
        if last in self._special:
            return self._behind(self._backend.decode([last], False), [last], text)
        return self._behind("\n", self._break, text) if self._adds_space else self.encode(text)

    def _behind(self, before: str, tokens_before: list[int], text: str) -> list[int]:
        """Tokens of `text` behind `before`; its own, if one token would have a part of both."""
        tokens, num_before = self._backend.encode(before + text, False), len(tokens_before)
        found = tokens[:num_before] == tokens_before
        return tokens[num_before:] if found else self.encode(text)

    def encode_prompt(self, text: str) -> list[int]:
        """Tokens of a plain prompt, with the special tokens that the tokenizer adds. A text that
        begins with them gets no second ones. An end-of-text token is not added, because a
        completion follows."""
        tokens = self._backend.encode(text, False)
        has_prefix = tokens[: len(self._prefix)] == self._prefix
        return [*([] if has_prefix else self._prefix), *tokens, *self._suffix]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._backend.decode(tokens, True)

    def decode_completion(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of a completion for programs: without end and padding, or any special tokens."""
        shown = [token for token in tokens if token not in self._hidden]
        return self._backend.decode(shown, skip_special_tokens)

    def decode_all(self, tokens: Sequence[int]) -> str:
        return self._backend.decode(tokens, False)

    def render_chat(
        self,
        messages: Sequence[object],
        variables: Mapping[str, Any],
        *,
        continue_final_message: bool = False,
    ) -> str:
        """The text of a conversation up to the beginning of the assistant's answer. Its
        final message may be the assistant's, and then begins the answer, only with
        `continue_final_message`. Raises DataError if there is no chat template, it refuses the
        messages, or `variables` name an argument of the functions that render."""
        self._check(variables)
        found = normal_messages(messages, continue_final_message=continue_final_message)
        continues = found[-1]["role"] == "assistant"
        how = {"add_generation_prompt": not continues, "continue_final_message": continues}
        with _refusals():
            return self._render(found, **how, **variables)

    def render_whole(
        self, messages: Sequence[object], variables: Mapping[str, Any], *, asks_for_answer: bool
    ) -> str:
        """The text of a whole conversation, whoever has the last word, and with `asks_for_answer`
        the beginning of the assistant's next message. Raises like `render_chat`."""
        self._check(variables)
        with _refusals():
            return self._render(messages, add_generation_prompt=asks_for_answer, **variables)

    @property
    def marks_generation(self) -> bool:
        """Whether the chat template marks what the assistant generates: `{% generation %}`."""
        is_own = bool(self.state.tokenizer)  # a tokenizer in Python may not use its template
        return is_own and _GENERATION.search(self.state.chat_template) is not None

    def render_marked(
        self, messages: Sequence[object], variables: Mapping[str, Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a whole conversation, and the start and end of each part of it that the
        template marks. Raises like `render_chat`."""
        self._check(variables)
        with _refusals():
            return _render_marked(self.state, messages, variables)

    def encode_chat(
        self, messages: Sequence[object], *, continue_final_message: bool = False, **variables: Any
    ) -> list[int]:
        return self.encode(
            self.render_chat(messages, variables, continue_final_message=continue_final_message)
        )

    def _check(self, variables: Mapping[str, Any]) -> None:
        if not self.state.chat_template:
            raise DataError(
                f"{self.state.model_path}: the tokenizer has no chat template, so it cannot render "
                "messages; put one into this folder, a file chat_template.jinja as that of the "
                "model's instruct variant, or give plain prompts (data.format = 'text')"
            )
        if wrong := sorted(_ARGUMENTS.intersection(variables)):
            raise DataError(
                f"{wrong[0]!r} is no variable of a chat template, but what umbra renders or how: "
                "leave it out of chat_template_kwargs"
            )

    def _added_tokens(self) -> tuple[list[int], list[int]]:
        """The tokens that the tokenizer adds before and after a text, without its EOS."""
        vocabulary = self._backend.get_vocab().items()
        entries = (entry for entry, idx in vocabulary if idx not in self._special)
        probe = next((text for text in ("a", *entries) if self._backend.encode(text, False)), "")
        whole, inner = self._backend.encode(probe, True), self._backend.encode(probe, False)
        num_added = len(whole) - len(inner)
        starts = (n for n in range(num_added + 1) if whole[n : n + len(inner)] == inner)
        start = next(starts, num_added)
        suffix = whole[start + len(inner) :]
        return whole[:start], [token for token in suffix if token != self.state.eos_token_id]

    def _check_vocabulary(self, folder: Path) -> None:
        known, highest = vocab_size(folder), self.vocab_size - 1
        if known and highest >= known:
            raise DataError(
                f"model.path: the tokenizer in {folder} has token id {highest}, but the model "
                f"has vocab_size {known}: they do not belong together; copy the tokenizer "
                "that the model was trained with, or resize the model's embeddings"
            )


class _RustBackend:
    def __init__(self, state: TokenizerState) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(
                f"text of tokens needs `tokenizers`: {how_to_install('train')}"
            ) from error
        self._tokenizer: Any = Tokenizer.from_str(state.tokenizer)
        self._tokenizer.encode_special_tokens = state.splits_special_tokens

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Unlike `encode`, it releases the GIL, and it computes no offsets.
        (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return cast("list[int]", found.ids)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary


class _PythonBackend:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        found = self._tokenizer(text, add_special_tokens=add_special_tokens)
        return cast("list[int]", found["input_ids"])

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary


def _template_renderer(state: TokenizerState) -> Callable[..., str]:
    """Renders as `apply_chat_template` of transformers, without importing torch."""

    def render(messages: list[Mapping[str, Any]], **variables: Any) -> str:
        from transformers.utils import chat_template_utils

        library: Any = chat_template_utils
        texts, _ = library.render_jinja_template(
            conversations=[messages],
            chat_template=state.chat_template,
            **{**state.special_tokens, **variables},
        )
        return cast("str", texts[0])

    return render


def _render_marked(
    state: TokenizerState, messages: Sequence[object], variables: Mapping[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    from transformers.utils import chat_template_utils

    library: Any = chat_template_utils
    (text,), (spans,) = library.render_jinja_template(
        conversations=[messages],
        chat_template=state.chat_template,
        return_assistant_tokens_mask=True,
        **{**state.special_tokens, **variables},
    )
    return text, [(start, stop) for start, stop in spans]


@contextmanager
def _refusals() -> Generator[None]:
    try:
        yield
    except Exception as error:  # a template may raise anything
        raise DataError(f"the chat template refused the messages: {_first_line(error)}") from error


def _own_renderer(tokenizer: Any) -> Callable[..., str]:
    def render(messages: list[Mapping[str, Any]], **variables: Any) -> str:
        return cast("str", tokenizer.apply_chat_template(messages, tokenize=False, **variables))

    return render


def _chat_template(tokenizer: Any) -> str:
    """The tokenizer's chat template, or the default one of several; "" if there is none."""
    if not tokenizer.chat_template:
        return ""
    return cast("str", tokenizer.get_chat_template())


def _dated(template: str, time: datetime | None) -> str:
    """The template with texts in place of its calls of `strftime_now`."""
    if time is None:
        return template
    return _DATE.sub(lambda call: json.dumps(time.strftime(call["format"])), template)


def _special_ids(rust: Any) -> list[int]:
    return [idx for idx, token in rust.get_added_tokens_decoder().items() if token.special]


def _read_state(path: Path) -> TokenizerState:
    try:
        return TokenizerState(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} does not hold a saved tokenizer: {error}") from error


def _no_tokenizer(folder: Path, cause: str) -> DataError:
    return DataError(
        f"model.path: {folder} holds no usable tokenizer ({cause}); it needs tokenizer.json "
        "and tokenizer_config.json"
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
