"""The weights of a model directory, by the headers of their files.

    model.safetensors.index.json    names the files of weights that are in several
    model.safetensors               else all weights are in this one; other files are none of them

Every process finds them here, so that trainer and engines have the same model. It imports no torch.

A model of the Hugging Face hub is a folder in this machine's cache, whose path names the repository
and the commit:

    HF_HOME/hub/models--Qwen--Qwen3-0.6B/snapshots/COMMIT/     config.json, *.safetensors, ...

A job passes the path to all its processes. A machine that lacks the folder downloads the same
commit into its own cache, whatever its HF_HOME is. huggingface_hub reads HF_HOME, HF_ENDPOINT,
HF_HUB_OFFLINE and HF_TOKEN, and locks each file while a process downloads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from umbra.runtime.errors import DataError

_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
_MAX_HEADER_NBYTES: Final = 100 << 20  # safetensors' own limit
_COMPARED_NBYTES: Final = 1 << 20
_DIGESTED_NBYTES: Final = 1 << 12
"""Bytes of each tensor. Any training changes nearly all of them; more take more time."""
_HEAD: Final = "lm_head.weight"
_MEND: Final = "download it again, or save the model again with save_pretrained"
_PREFIX: Final = "models--"
_CONFIG_AND_TOKENIZER: Final = ("*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja", "*.py")
_WEIGHTS: Final = "*.safetensors"
# The same weights once more, in formats of other programs.
_NOT_USED: Final = ("consolidated*", "original/*", "onnx/*")
_MAX_CAUSE_LEN: Final = 300


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file, from byte `start` on; `dtype` as there, such as "BF16"."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class WeightFiles:
    """The safetensors files of a model directory, by their headers. Raises DataError if a file is
    missing, cut off or damaged, or the choice is unclear."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        index = folder / _INDEX
        places = _read_index(index) if index.is_file() else {}
        self.files = [folder / name for name in sorted(set(places.values())) or [_SINGLE]]
        if (missing := [file.name for file in self.files if not file.is_file()]) and not places:
            raise DataError(_no_weights(folder))
        if missing:
            raise DataError(
                f"{index} names {', '.join(missing)}, and {folder} does not have "
                f"{'it' if len(missing) == 1 else 'them'}: {_MEND}"
            )
        if places and (folder / _SINGLE) not in self.files and (folder / _SINGLE).exists():
            raise DataError(
                f"{folder} has {_SINGLE}, and an index that names {self.files[0].name} in its "
                "place: transformers reads the one and engines the other. Remove what is not the "
                "model"
            )
        self.tensors: dict[str, StoredTensor] = {}
        for file in self.files:
            self.tensors |= read_header(file)
        if lost := [name for name in places if name not in self.tensors]:
            raise DataError(
                f"{index} places {lost[0]} in {places[lost[0]]}, which does not have it: {_MEND}"
            )

    @property
    def strays(self) -> list[str]:
        """Other safetensors files in the folder, unless there is an index."""
        if (self._folder / _INDEX).is_file():
            return []
        found = {path.name for path in self._folder.glob("*.safetensors")}
        return sorted(found - {file.name for file in self.files})

    def digest(self) -> str:
        """The digest covers names, dtypes, shapes and the first bytes of each tensor: another model
        has another one. The division into files does not count. Raises DataError if a file cannot
        be read."""
        found = xxhash.xxh3_128()
        try:
            with ExitStack() as stack:
                opened = {file: stack.enter_context(file.open("rb")) for file in self.files}
                for name, each in sorted(self.tensors.items()):
                    found.update(repr((name, each.dtype, each.shape)).encode())
                    opened[each.file].seek(each.start)
                    found.update(opened[each.file].read(min(_DIGESTED_NBYTES, each.nbytes)))
        except OSError as error:
            raise DataError(f"{self._folder} cannot be read: {error}") from error
        return found.hexdigest()

    def are_equal(self, one: StoredTensor, other: StoredTensor) -> bool:
        """Whether two tensors have the same bytes. Stops reading at the first difference."""
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return all(a == b for a, b in zip(_chunks(one), _chunks(other), strict=True))


def has_own_head(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether the files have a head that differs from the embeddings, which the config may tie.
    Then transformers does not tie them; engines read only the config, so umbra changes it. False
    without files: an engine may get its weights from the trainer."""
    inner: Any = config.get("text_config") or {}
    if config.get("tie_word_embeddings", inner.get("tie_word_embeddings")) is False:
        return False
    try:
        stored = WeightFiles(folder)
    except DataError:
        return False
    heads = {name: each for name, each in stored.tensors.items() if name.endswith(_HEAD)}
    for head in heads.values():
        embeddings = [
            each
            for name, each in stored.tensors.items()
            if name not in heads and ".layers." not in name and each.shape == head.shape
        ]
        if embeddings and not any(stored.are_equal(head, each) for each in embeddings):
            return True
    return False


def is_tied(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether head and embeddings are one tensor."""
    inner: Any = config.get("text_config") or {}
    ties = config.get("tie_word_embeddings", inner.get("tie_word_embeddings"))
    return bool(ties) and not has_own_head(folder, config)


def untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of config.json that untie the head from the embeddings."""
    changes: dict[str, Any] = {"tie_word_embeddings": False}
    if isinstance(config.get("text_config"), Mapping):
        changes["text_config"] = {"tie_word_embeddings": False}
    return changes


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name. Raises DataError if it is unreadable."""
    tensors: dict[str, StoredTensor] = {}
    try:
        file_nbytes = file.stat().st_size
        with file.open("rb") as opened:
            header_nbytes = int.from_bytes(opened.read(8), "little")
            if not 0 < header_nbytes <= _MAX_HEADER_NBYTES:
                raise ValueError("it has no header")
            text = opened.read(header_nbytes)
        if len(text) < header_nbytes:
            raise ValueError(f"its header ends after {len(text)} of {header_nbytes} bytes")
        header: Any = json.loads(text)
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = map(int, entry["data_offsets"])
                shape = tuple(map(int, entry["shape"]))
                start = 8 + header_nbytes + first
                tensors[name] = StoredTensor(file, entry["dtype"], shape, start, last - first)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file} is no safetensors file: {error!r}; {_MEND}") from error
    ends = [each.start + each.nbytes for each in tensors.values()]
    if file_nbytes != (expected := max(ends, default=8 + header_nbytes)):
        raise DataError(
            f"{file} has {file_nbytes} bytes, and its header says {expected}: it is cut off or "
            f"damaged; {_MEND}"
        )
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    try:
        places: Any = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in places.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{index} cannot be read: {error!r}; {_MEND}") from error


def _no_weights(folder: Path) -> str:
    found = sorted(
        path.name for path in folder.glob("*") if path.suffix in (".safetensors", ".bin")
    )
    beside = f" It has {', '.join(found[:3])}, which umbra does not read." if found else ""
    return (
        f"{folder} has neither {_SINGLE} nor {_INDEX}.{beside} Load the model with transformers, "
        "and save it with save_pretrained"
    )


def _chunks(tensor: StoredTensor) -> Iterator[bytes]:
    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        for done in range(0, tensor.nbytes, _COMPARED_NBYTES):
            yield file.read(min(_COMPARED_NBYTES, tensor.nbytes - done))


def download_model(repo: str, revision: str | None, *, with_weights: bool) -> Path:
    """The folder of a model in the cache. Requests nothing that the cache has. `revision` is a
    branch, tag or commit; None is the newest. Without `with_weights`, config and tokenizer only.
    Raises DataError if it is neither in the cache nor on the hub, or the hub cannot be reached."""
    import huggingface_hub

    library: Any = huggingface_hub
    allowed = [*_CONFIG_AND_TOKENIZER, *[_WEIGHTS] * with_weights]
    try:
        return Path(
            library.snapshot_download(
                repo, revision=revision, allow_patterns=allowed, ignore_patterns=_NOT_USED
            )
        )
    except Exception as error:  # its HTTP client has errors of its own
        raise not_downloaded(f"the model {repo!r}", error) from error


def local_model(path: str, *, with_weights: bool) -> str:
    """The folder of a model here: `path`, or its snapshot if it is another machine's."""
    folder = Path(path)
    name = snapshot_name(folder)
    if not name or (folder.is_dir() and (not with_weights or any(folder.glob(_WEIGHTS)))):
        return path
    return str(download_model(name, folder.name, with_weights=with_weights))


def snapshot_name(folder: Path) -> str:
    """The name on the hub of a snapshot in a cache; "" for any other folder."""
    repository = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not repository.startswith(_PREFIX):
        return ""
    return repository.removeprefix(_PREFIX).replace("--", "/")


def not_downloaded(what: str, error: Exception) -> DataError:
    from huggingface_hub import constants

    cause = f"{' '.join(str(error).split()) or type(error).__name__:.{_MAX_CAUSE_LEN}}"
    if constants.HF_HUB_OFFLINE:
        return DataError(
            f"{what} is not in the cache {constants.HF_HOME}, and HF_HUB_OFFLINE is set ({cause}). "
            "Check the name, unset HF_HUB_OFFLINE, or set HF_HOME to a cache that another machine "
            "has filled"
        )
    return DataError(
        f"{what} is neither in the cache {constants.HF_HOME} nor at {constants.ENDPOINT} "
        f"({cause}). Check the name and the network. Where this machine reaches "
        "no hub, set HF_ENDPOINT to a mirror, or set HF_HUB_OFFLINE=1 and HF_HOME to a cache that "
        "another machine has filled"
    )
