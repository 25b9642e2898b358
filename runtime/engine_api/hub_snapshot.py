"""Models of the Hugging Face hub, as folders in this machine's cache.

    HF_HOME/hub/models--Qwen--Qwen3-0.6B/snapshots/COMMIT/     config.json, *.safetensors, ...

Such a path names the repository and the commit. A job passes it to all its processes. A machine
that lacks the folder downloads the same commit into its own cache, whatever its HF_HOME is.

huggingface_hub reads HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE and HF_TOKEN, and locks each file while a
process downloads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from umbra.runtime.errors import DataError

_PREFIX: Final = "models--"
_CONFIG_AND_TOKENIZER: Final = ("*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja", "*.py")
_WEIGHTS: Final = "*.safetensors"
# The same weights once more, in formats of other programs.
_NOT_USED: Final = ("consolidated*", "original/*", "onnx/*")
_MAX_CAUSE_LEN: Final = 300


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
