from __future__ import annotations

from umbra.engines.echo.echo_core import EchoCore
from umbra.engines.echo.echo_weights import EchoUpdates, EchoWeights
from umbra.engines.shell.engine_shell import EngineShell
from umbra.engines.shell.polled_requests import PolledRequests
from umbra.runtime.errors import ConfigError


class EchoEngine(EngineShell[EchoCore]):
    """An engine without a model: the whole protocol, made-up tokens, no torch.

    It serves tests, benchmarks and trials of a cluster. Each token depends on the trajectory's
    seed, its position and all tokens before it (`EchoTokens`), so a trajectory that was cut
    resumes exactly, on any engine, and differs if it is resumed from another context. The
    embedded engine's settings are accepted; model_path, dtype, device, kv_cache_num_tokens and
    num_threads are ignored.

    Args:
        vocab_size: tokens are below it; a prompt with others is refused.
        tokens_per_s: speed of each running request; None: as fast as possible.
        verify_checksums: check what a sync delivers (imports torch).
        weights_in_logprobs: keep the bytes that syncs deliver, and derive every logprob from
            them, the token and its context (`echo_logprobs`); otherwise it is 0. A test that knows
            each version's bytes can prove which weights made a token, whatever its label.
        load_weights: serve as version 0 at once.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 256,
        tokens_per_s: float | None = None,
        verify_checksums: bool = False,
        weights_in_logprobs: bool = False,
        max_num_seqs: int = 256,
        max_context_len: int = 4096,
        tick_ms: float = 50.0,
        load_weights: bool = False,
        model_path: str = "",
        dtype: str = "float32",
        device: str = "cpu",
        kv_cache_num_tokens: int | None = None,
        num_threads: int = 1,
    ) -> None:
        if vocab_size < 1 or max_num_seqs < 1 or (tokens_per_s is not None and tokens_per_s <= 0):
            raise ConfigError(
                f"vocab_size={vocab_size}, max_num_seqs={max_num_seqs} and tokens_per_s="
                f"{tokens_per_s} must be above 0"
            )
        self._held = EchoWeights()
        kept = self._held if verify_checksums or weights_in_logprobs else None
        core = EchoCore(
            vocab_size=vocab_size,
            tokens_per_s=tokens_per_s,
            max_num_seqs=max_num_seqs,
            weights=kept,
            weights_in_logprobs=weights_in_logprobs,
        )
        super().__init__(
            core,
            PolledRequests(core, max_num_seqs=max_num_seqs, tick_ms=tick_ms),
            EchoUpdates(kept, verify=verify_checksums),
            max_context_len=max_context_len,
            load_weights=load_weights,
        )

    def weights_fingerprint(self) -> int:
        """A number for the bytes that the engine holds; without weights, for no bytes."""
        return self._held.fingerprint()
