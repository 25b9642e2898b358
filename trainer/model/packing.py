"""Packs samples into one row of tokens without padding, each distinct prompt once.

    prompts          completions, longest first (without their last token, which predicts nothing)
    | p0 | p1 | ... | c0 ........ | c1 ..... | c2 .... |

The samples of a group share their prompt, so it is computed once. A completion attends to
its prompt's rows, then its own. Only attention needs rectangles: it runs in blocks of
sequences of similar length.

L: packed rows; N: samples; M: generated tokens; B, C, K: sequences, queries and keys of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

# A block takes sequences down to this share of its longest. Lower means fewer, larger blocks with
# more padding; higher means more kernel launches.
_BLOCK_LENGTH_RATIO: Final = 0.75
# In elements; bounds the memory of blocks with many long samples.
_MAX_MASK_ELEMENTS: Final = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    tokens: NDArray[np.int32]  # [T] int32, prompt and completion
    prompt_len: int  # at least 1
    generated: NDArray[np.int64]  # [G] ascending positions in `tokens`, all behind the prompt

    @property
    def num_inputs(self) -> int:
        """The completion's tokens that are fed to the model: all but the last."""
        return max(0, len(self.tokens) - self.prompt_len - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
    """Sequences that attend in one call, padded to C queries and K keys."""

    rows: tuple[int, int]  # the packed rows [first, last) of the queries
    shape: tuple[int, int, int]  # (B, C, K)
    query_rows: Tensor | None  # [B*C] packed row of each query; None: all B have C queries
    output_rows: Tensor | None  # [last - first] index of each row's output among the B*C
    key_rows: Tensor  # [B*K] packed row of each key
    mask: Tensor | None  # [1 or B, 1, C, K] float, 0 or -inf; None: causal (prompts, C = K)


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenLayout:
    """The layout for a kernel that takes sequences of any length. S: sequences."""

    query_starts: Tensor  # [S + 1] int32; the queries are the packed rows in order
    key_starts: Tensor  # [S + 1] int32
    keys: KeyRows
    max_queries: int  # of one sequence
    max_keys: int  # of one sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedInputs:
    """Inputs of one packed forward pass. Attention uses `varlen` where the device has such a kernel
    for the dtype, else `blocks`."""

    token_ids: Tensor  # [1, L] int64
    position_ids: Tensor  # [1, L] int64
    predicting: Tensor  # [M] int64 rows whose hidden state predicts the M generated tokens
    varlen: VarlenLayout | None
    blocks: tuple[AttentionBlock, ...]  # cover the L rows in order


def packing_order(samples: Sequence[Sample]) -> list[int]:
    """Indices of the samples, longest completion first."""
    return sorted(range(len(samples)), key=lambda idx: -samples[idx].num_inputs)


def pack(samples: Sequence[Sample], dtype: torch.dtype, device: torch.device) -> PackedInputs:
    """Packs samples, which must be in `packing_order`; `dtype` is that of attention masks."""
    prompts: dict[bytes, int] = {}
    prompt_of = [
        prompts.setdefault(sample.tokens[: sample.prompt_len].tobytes(), len(prompts))
        for sample in samples
    ]
    parts = [np.frombuffer(prompt, np.int32) for prompt in prompts]
    of_prompts = _Spans.in_order(0, [len(tokens) for tokens in parts])
    of_completions = _Spans.in_order(
        of_prompts.end,
        [sample.num_inputs for sample in samples],
        of_prompts.first_rows[prompt_of],
        of_prompts.num_rows[prompt_of],
    )
    for sample, num_inputs in zip(samples, of_completions.num_rows, strict=True):
        parts.append(sample.tokens[sample.prompt_len :][:num_inputs])
    has_kernel = device.type == "cuda" and dtype.itemsize == 2
    return PackedInputs(
        token_ids=_to_row(parts, device),
        position_ids=_to_row([of_prompts.positions(), of_completions.positions()], device),
        predicting=_to_row([_predicting(samples, of_completions)], device)[0],
        varlen=_varlen(of_prompts, of_completions, device) if has_kernel else None,
        blocks=() if has_kernel else _blocks(of_prompts, of_completions, dtype, device),
    )


@dataclass(frozen=True, slots=True)
class _Spans:
    """Rows of sequences, and of the prompts that they follow (none for prompts); [S] int64 each."""

    first_rows: NDArray[np.int64]
    num_rows: NDArray[np.int64]
    prompt_rows: NDArray[np.int64]
    prompt_lens: NDArray[np.int64]

    @classmethod
    def in_order(
        cls,
        first: int,
        num_rows: Sequence[int],
        prompt_rows: NDArray[np.int64] | None = None,
        prompt_lens: NDArray[np.int64] | None = None,
    ) -> _Spans:
        """Sequences one after the other, from the row `first` on."""
        none = np.zeros(len(num_rows), np.int64)
        return cls(
            first + _starts(num_rows)[:-1],
            np.asarray(num_rows, np.int64),
            none if prompt_rows is None else prompt_rows,
            none if prompt_lens is None else prompt_lens,
        )

    @property
    def end(self) -> int:
        return int(self.first_rows[-1] + self.num_rows[-1])

    @property
    def num_keys(self) -> NDArray[np.int64]:
        return self.prompt_lens + self.num_rows

    def positions(self) -> NDArray[np.int64]:
        """[R] position of each row in its text."""
        return _within(self.num_rows) + np.repeat(self.prompt_lens, self.num_rows)

    def key_rows(self) -> NDArray[np.int64]:
        """The rows of the keys of each sequence: its prompt's, and its own."""
        return self.rows_of(_within(self.num_keys), self.num_keys)

    def rows_of(
        self, positions: NDArray[np.int64], counts: Sequence[int] | NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """The rows of positions in the texts, `counts` of each sequence."""
        in_prompt = positions < np.repeat(self.prompt_lens, counts)
        own = np.repeat(self.first_rows - self.prompt_lens, counts)
        return positions + np.where(in_prompt, np.repeat(self.prompt_rows, counts), own)

    def __getitem__(self, which: list[int] | NDArray[np.bool_]) -> _Spans:
        return _Spans(*(getattr(self, field.name)[which] for field in fields(self)))

    def followed_by(self, others: _Spans) -> _Spans:
        pairs = [(getattr(self, f.name), getattr(others, f.name)) for f in fields(self)]
        return _Spans(*map(np.concatenate, pairs))


def _predicting(samples: Sequence[Sample], spans: _Spans) -> NDArray[np.int64]:
    """[M] rows; the prompt's last row predicts the first completion token."""
    before = np.concatenate([sample.generated for sample in samples]) - 1
    return spans.rows_of(before, [len(sample.generated) for sample in samples])


def _varlen(prompts: _Spans, completions: _Spans, device: torch.device) -> VarlenLayout:
    spans = prompts.followed_by(completions[completions.num_rows > 0])
    num_rows = int(spans.num_rows.sum())
    return VarlenLayout(
        query_starts=torch.as_tensor(_starts(spans.num_rows).astype(np.int32), device=device),
        key_starts=torch.as_tensor(_starts(spans.num_keys).astype(np.int32), device=device),
        keys=KeyRows.invert(spans.key_rows(), prompts.end, num_rows, device),
        max_queries=int(spans.num_rows.max()),
        max_keys=int(spans.num_keys.max()),
    )


def _blocks(
    prompts: _Spans, completions: _Spans, dtype: torch.dtype, device: torch.device
) -> tuple[AttentionBlock, ...]:
    chunks = [spans[chunk] for spans in (prompts, completions) for chunk in _chunks(spans)]
    return tuple(_make_block(chunk, dtype, device) for chunk in chunks)


def _chunks(spans: _Spans) -> list[list[int]]:
    """Groups neighbours of similar length into blocks of bounded mask size."""
    chunks: list[list[int]] = []
    for idx, num_rows in enumerate(spans.num_rows):
        if num_rows == 0:
            continue
        if chunks and _fits(spans, chunks[-1], idx):
            chunks[-1].append(idx)
        else:
            chunks.append([idx])
    return chunks


def _fits(spans: _Spans, chunk: list[int], idx: int) -> bool:
    ends = [chunk[0], idx]
    longest, shortest = spans.num_rows[ends].max(), spans.num_rows[ends].min()
    keys = longest + spans.prompt_lens[ends].max()
    return bool(
        shortest >= _BLOCK_LENGTH_RATIO * longest
        and (len(chunk) + 1) * longest * keys <= _MAX_MASK_ELEMENTS
    )


def _make_block(spans: _Spans, dtype: torch.dtype, device: torch.device) -> AttentionBlock:
    lens = spans.num_rows
    num_queries, num_keys = int(lens.max()), int(spans.num_keys.max())
    first, last = int(spans.first_rows[0]), spans.end
    is_dense = bool((lens == num_queries).all())
    query_rows = output_rows = None
    if not is_dense:
        within = np.arange(num_queries) < lens[:, None]  # [B, C]
        padded = np.full(within.shape, first)
        padded[within] = np.arange(first, last)
        query_rows = torch.as_tensor(padded.reshape(-1), device=device)
        output_rows = torch.as_tensor(np.flatnonzero(within), device=device)
    key_rows = np.full((len(lens), num_keys), first)
    key_rows[np.arange(num_keys) < spans.num_keys[:, None]] = spans.key_rows()
    return AttentionBlock(
        rows=(first, last),
        shape=(len(lens), num_queries, num_keys),
        query_rows=query_rows,
        output_rows=output_rows,
        key_rows=torch.as_tensor(key_rows.reshape(-1), device=device),
        mask=_mask(spans.prompt_lens, num_queries, num_keys, dtype, device),
    )


def _mask(
    prompt_lens: NDArray[np.int64],
    num_queries: int,
    num_keys: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    """Lets query c of a completion see its prompt and the completion up to itself. Padding is at
    the end, where causality hides it from real queries."""
    if not prompt_lens.any():
        return None
    lens = torch.as_tensor(np.unique(prompt_lens), device=device)
    if len(lens) > 1:
        lens = torch.as_tensor(prompt_lens, device=device)
    last_seen = lens[:, None] + torch.arange(num_queries, device=device)  # [1 or B, C]
    hidden = torch.arange(num_keys, device=device) > last_seen[..., None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
    return mask.masked_fill_(hidden, float("-inf")).unsqueeze(1)


def _starts(lens: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """[n + 1] exclusive prefix sums."""
    return np.concatenate([[0], np.cumsum(lens, dtype=np.int64)])


def _within(lens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Counts from 0 for each of the lengths."""
    starts = _starts(lens)
    return np.arange(int(starts[-1])) - np.repeat(starts[:-1], lens)


def _to_row(parts: Sequence[NDArray[np.int64] | NDArray[np.int32]], device: torch.device) -> Tensor:
    """[1, n] int64."""
    flat = np.concatenate(parts).astype(np.int64)
    return torch.as_tensor(flat, device=device).unsqueeze(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRows:
    """Maps keys to packed rows, and packed rows to keys.

    A prompt's rows are keys of its own sequence and of all its completions, so the gradient of such
    a row is a sum, here in a fixed order. Adding in place, like `index_select` on a GPU, takes four
    times as long and adds in a different order each time.

    K: keys of all sequences; L: packed rows, the first P of prompts; U: most uses of a prompt's
    row; W: width of a row.
    """

    rows: Tensor  # [K] packed row of each key
    own: Tensor  # [L - P] index of the one key of each completion's row
    shared: Tensor  # [U, P] indices of the keys of each prompt row
    is_use: Tensor  # [U, P] bool, the valid entries of `shared`

    @classmethod
    def invert(
        cls, rows: NDArray[np.int64], num_prompt_rows: int, num_rows: int, device: torch.device
    ) -> KeyRows:
        """`rows` has the packed row of each key, [K]; every packed row is among them."""
        order = np.argsort(rows, kind="stable")  # [K] key indices, sorted by row
        counts = np.bincount(rows, minlength=num_rows)
        firsts = np.cumsum(counts) - counts  # [L] where a row's key indices begin in `order`
        num_uses: int = counts[:num_prompt_rows].max(initial=1)
        use: NDArray[np.int64] = np.arange(num_uses)[:, None]
        is_use: NDArray[np.bool_] = use < counts[:num_prompt_rows]  # [U, P]
        indices = order[firsts[:num_prompt_rows] + np.where(is_use, use, 0)]
        return cls(
            rows=torch.as_tensor(rows, device=device),
            own=torch.as_tensor(order[firsts[num_prompt_rows:]], device=device),
            shared=torch.as_tensor(indices, device=device),
            is_use=torch.as_tensor(is_use, device=device),
        )

    def gather(self, values: Tensor) -> Tensor:
        """[L, W] packed rows to [K, W] keys."""
        untyped: Any = _Gather
        keys: Tensor = untyped.apply(values, self.rows, self.own, self.shared, self.is_use)
        return keys


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, rows: Tensor, own: Tensor, shared: Tensor, is_use: Tensor
    ) -> Tensor:
        ctx.save_for_backward(own, shared, is_use)
        return values.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        own, shared, is_use = ctx.saved_tensors
        (of_keys,) = gradients  # [K, W]
        uses = of_keys.index_select(0, shared.flatten()).view(*shared.shape, -1)  # [U, P, W]
        of_prompts = uses.masked_fill(~is_use.unsqueeze(2), 0).sum(0)
        of_values = torch.cat([of_prompts, of_keys.index_select(0, own)])
        return of_values, None, None, None, None
