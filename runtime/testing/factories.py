# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import itertools
import shutil
import string
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import pytest

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.rpc.sync_handle import SyncHandle
from umbra.runtime.session.launch import SessionConfig
from umbra.runtime.session.session import Session

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


_TORCHRUN_VARIABLES: Final = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
)  # fmt: skip
# A stopping supervisor needs its actors' grace; one that exceeds this hangs, which is a failure.
_EMPTY_WAIT_S: Final = 10.0
# Part of the folder's name: increase it with every change below.
_RECIPE: Final = "qwen3-1"
_SPECIALS: Final = ("<pad>", "<eos>", "<unk>")


class SessionFactory:
    """Opens sessions (rank 0 of 1, in the test's process), closes them in reverse order, and checks
    that their sockets are gone. `notes` are lines that supervisors showed to the operator."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sessions: list[Session] = []
        self.run_dirs: list[Path] = []
        self.notes: list[str] = []
        self._folder = folder
        self._monkeypatch = monkeypatch
        # Not below pytest's folder: a socket's path may have at most 100 bytes.
        self._root = Path(tempfile.mkdtemp(prefix="umbra-test-", dir="/tmp"))
        self._stack = contextlib.ExitStack()

    def __call__(
        self,
        *,
        environ: dict[str, str] | None = None,
        shutdown_grace_s: float = 3.0,
        **settings: Any,
    ) -> Session:
        """An open session.

        Args:
            environ: variables of torchrun or umbra to set, for this session and later ones.
            settings: fields of `SessionConfig`; `run_dir` is a new folder by default.
        """
        idx = len(self.run_dirs)
        run_dir = settings.setdefault("run_dir", self._folder / f"run{idx}")
        self.run_dirs.append(run_dir)
        for name in _TORCHRUN_VARIABLES:
            self._monkeypatch.delenv(name, raising=False)
        # Each has its own root: the directory is named after the process, which all share.
        self._monkeypatch.setenv("UMBRA_SOCKET_ROOT", str(self._root / str(idx)))
        self._monkeypatch.setenv("UMBRA_SECRET_FILE", str(self._folder / "job-keys"))
        for name, value in (environ or {}).items():
            self._monkeypatch.setenv(name, value)
        config = SessionConfig(shutdown_grace_s=shutdown_grace_s, **settings)
        session = Session.from_torchrun(config, on_note=self.notes.append)
        self._stack.enter_context(session)
        self.sessions.append(session)
        return session

    def close(self) -> None:
        """Closes the open sessions; the factory can be used again."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self._stack.close()
            left = self._wait_until_empty()
            assert not left, f"socket directories were left: {left}"
        finally:
            shutil.rmtree(self._root, ignore_errors=True)

    def _wait_until_empty(self) -> list[str]:
        deadline = time.monotonic() + _EMPTY_WAIT_S
        while True:
            left = [str(path) for root in self._root.iterdir() for path in root.iterdir()]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.02)


class EngineFactory:
    """Starts embedded engines in a session, each in a process that the session ends."""

    def __init__(self, session: Session, model_dir: Path) -> None:
        self._session = session
        self._model_dir = model_dir
        self._numbers = itertools.count()

    def __call__(
        self, model_dir: Path | None = None, *, name: str = "", **kwargs: Any
    ) -> SyncHandle:
        """Starts an engine with the weights of `model_dir` (default: the tiny model), on the CPU.
        `kwargs` are the engine's, such as `max_num_seqs`. For a pool, whose engines get their
        weights by a sync, use `session.create_pool`."""
        settings: dict[str, Any] = {
            "model_path": str(model_dir or self._model_dir),
            "max_context_len": 256,
            "max_num_seqs": 8,
            "tick_ms": 5.0,
            "load_weights": True,
            **kwargs,
        }
        spec = ActorSpec(
            name=name or f"engine-{next(self._numbers)}",
            target="umbra.engines.embedded.embedded_engine:EmbeddedEngine",
            kwargs=settings,
            role="engine",
        )
        return self._session.spawn(spec)


def make_tiny_model(parent: Path, seed: int = 0) -> Path:
    """A tiny Hugging Face directory below `parent`: Qwen3 of 0.1 M parameters; a token is
    a character. Made once per seed, the same on every machine; skips the test if
    transformers is missing."""
    path = parent / f"{_RECIPE}-seed{seed}"
    if path.exists():
        return path
    pytest.importorskip("transformers")
    # Under another name first, so that parallel test processes never see half of it.
    fresh = Path(tempfile.mkdtemp(dir=parent))
    try:
        _save(fresh, seed)
        if not path.exists():
            fresh.rename(path)
    except FileExistsError:
        pass  # another process was faster
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return path


def _save(folder: Path, seed: int) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = _make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        # Logits are far from uniform, so that greedy decoding has no near-ties.
        initializer_range=0.15,
        eos_token_id=_SPECIALS.index("<eos>"),
        pad_token_id=_SPECIALS.index("<pad>"),
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _make_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = string.digits + string.ascii_letters + string.punctuation + " \n"
    vocabulary = {token: idx for idx, token in enumerate((*_SPECIALS, *characters))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    make: Any = PreTrainedTokenizerFast  # it has no annotations
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    return tokenizer
