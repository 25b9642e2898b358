from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from umbra.engines.embedded.decoder_model import DecoderModel
from umbra.engines.embedded.kv_cache import KvCache
from umbra.engines.embedded.sampler import sample, uniforms
from umbra.engines.embedded.scheduler import Limits, plan_admission, plan_growth
from umbra.runtime.engine_api.generation_request import GenerationRequest
from umbra.runtime.engine_api.kept_tokens import Truncation, lowest_kept
from umbra.runtime.engine_api.token_deltas import DeltaBuffer, DeltaColumns

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

NOT_FINITE: Final = "error: the model's logits are not finite; its weights are broken"


class EngineCore:
    """The embedded engine without threads or sockets: requests in, token deltas out, step by step.

    A step admits what fits (prefill, first token), then gives every running sequence one more token
    (decode), all in one forward pass. Owns the queue, the row table and the KV cache; borrows the
    model. Not thread-safe.

    B: sequences in a pass, V: vocabulary.

    Attributes:
        version: of the weights; tokens are stamped with it.
    """

    def __init__(self, model: DecoderModel, limits: Limits) -> None:
        self.version = 0
        self.num_tokens_total = 0
        self._model = model
        self._limits = limits
        self._device = model.parameters.device
        self._waiting: deque[GenerationRequest] = deque()
        self._forced: deque[GenerationRequest] = deque()  # need neither row nor cache
        self._arrivals: dict[int, int] = {}  # request id -> index in the order of arrival
        self._num_arrived = 0
        self._rows = RowTable(max_rows=limits.max_num_seqs, max_context_len=limits.max_context_len)
        self._deltas = DeltaBuffer()
        self.cache = KvCache(
            model.config,
            num_tokens=limits.kv_cache_num_tokens,
            dtype=model.parameters.dtype,
            device=self._device,
        )

    @property
    def num_running(self) -> int:
        return self._rows.count

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._forced)

    @property
    def has_work(self) -> bool:
        return self.num_waiting > 0 or self._rows.count > 0

    @property
    def has_finishes(self) -> bool:
        return self._deltas.has_finishes

    @property
    def kv_tokens_used(self) -> int:
        rows = self._rows
        return int(rows.lens[: rows.count].sum())

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queues all requests, or none: raises ValueError if an id is in use."""
        ids = [request.id for request in requests]
        taken = sorted(set(ids) & self._arrivals.keys())
        if taken or len(set(ids)) < len(ids):
            raise ValueError(f"request ids must be unique; already here: {taken or 'repeated'}")
        for request in requests:
            self._arrivals[request.id] = self._num_arrived
            self._num_arrived += 1
            (self._forced if request.forced.size else self._waiting).append(request)

    def abort(self, ids: Iterable[int] | None = None) -> int:
        """Ends requests (None: all) with reason "abort"; tokens already sampled are delivered."""
        chosen = self._arrivals.keys() if ids is None else self._arrivals.keys() & set(ids)
        chosen = set(chosen)
        for queue in (self._waiting, self._forced):
            kept = [request for request in queue if request.id not in chosen]
            for request in queue:
                if request.id in chosen:
                    self._finish_id(request.id, "abort")
            queue.clear()
            queue.extend(kept)
        rows = self._rows
        self._remove([(row, "abort") for row in range(rows.count) if int(rows.ids[row]) in chosen])
        return len(chosen)

    def forget(self) -> None:
        self.abort()
        self._deltas.clear()

    def set_version(self, version: int) -> None:
        """Stamps tokens sampled from here on with `version`; a run never mixes two."""
        self._cut_runs()
        self.version = version

    def take_deltas(self) -> DeltaColumns | None:
        self._cut_runs()
        return self._deltas.take()

    def preempt_all(self) -> None:
        """Returns all running requests to the queue; their cache rows may then be lost."""
        self._evict(list(range(self._rows.count)))

    def step(self) -> None:
        with torch.inference_mode():
            if self._forced:
                self._score()
            if self._waiting:
                self._admit()
            if self._rows.count:
                self._evict_to_fit()
                self._decode()

    def _score(self) -> None:
        """Ends the first requests with forced tokens, as many as make one prefill."""
        requests, longest = list[GenerationRequest](), 0
        while self._forced:
            longest = max(longest, len(self._forced[0].tokens) + len(self._forced[0].forced))
            if requests and longest * (len(requests) + 1) > self._limits.prefill_num_tokens:
                break
            requests.append(self._forced.popleft())
        wholes = [np.concatenate([each.tokens, each.forced]) for each in requests]
        longest = max(map(len, wholes))
        padded = np.zeros((len(wholes), longest), np.int64)
        for row, whole in zip(padded, wholes, strict=True):
            row[: len(whole)] = whole
        counts = np.array([len(each.forced) for each in requests])
        places: list[Int64Array] = [
            row * longest + np.arange(len(whole) - count, len(whole)) - 1
            for row, (whole, count) in enumerate(zip(wholes, counts.tolist(), strict=True))
        ]
        tokens = np.concatenate([each.forced for each in requests])
        scored = self._model.score(
            self._to_device(padded),
            self._to_device(np.concatenate(places)),
            self._to_device(tokens.astype(np.int64)),
        )
        self._end_scored(requests, counts, tokens, scored.cpu().numpy())

    def _end_scored(
        self,
        requests: Sequence[GenerationRequest],
        counts: Int64Array,
        tokens: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
    ) -> None:
        is_broken = ~np.isfinite(logprobs)
        for request, stop, count in zip(requests, counts.cumsum(), counts, strict=True):
            own = slice(stop - count, stop)
            if is_broken[own].any():
                self._finish_id(request.id, NOT_FINITE)
                continue
            self._deltas.add_runs(
                ids=np.array([request.id]),
                positions=np.array([request.position]),
                counts=np.array([count]),
                tokens=tokens[own],
                logprobs=logprobs[own],
                version=self.version,
            )
            self.num_tokens_total += int(count)
            self._finish_id(request.id, "length")

    def _admit(self) -> None:
        rows, limits = self._rows, self._limits
        free = limits.max_num_seqs - rows.count
        heads = list(islice(self._waiting, free))
        admission = plan_admission(
            limits,
            waiting_lens=[len(request.tokens) for request in heads],
            num_running=rows.count,
            longest_running=self._longest(),
            capacity=self.cache.capacity,
        )
        if admission.count == 0:
            return
        self._resize(admission.capacity)
        first = rows.count
        requests = [self._waiting.popleft() for _ in range(admission.count)]
        for request in requests:
            rows.append(request, self._arrivals[request.id])
        prompts, copies = _unique([request.tokens for request in requests])
        lens = np.array([len(prompt) for prompt in prompts])
        padded = np.zeros((len(prompts), int(lens.max())), np.int64)
        for idx, prompt in enumerate(prompts):
            padded[idx, : len(prompt)] = prompt
        copies_tensor = None if copies is None else self._to_device(copies)
        logits = self._model.prefill(
            self._to_device(padded),
            self._to_device(lens - 1),
            self.cache,
            first_row=first,
            copies=copies_tensor,
        )
        if copies_tensor is not None:
            logits = logits.index_select(0, copies_tensor)
        self._sample(first, logits)

    def _longest(self) -> int:
        rows = self._rows
        return int(rows.lens[: rows.count].max()) if rows.count else 0

    def _resize(self, capacity: int) -> None:
        kept = min(self._longest(), self.cache.capacity)
        self.cache.set_capacity(capacity, num_rows=self._rows.count, num_tokens=kept)

    def _evict_to_fit(self) -> None:
        """Evicts requests until every running row can store its last token's keys and values."""
        rows = self._rows
        if self._longest() <= self.cache.capacity:
            return
        growth = plan_growth(
            self._limits,
            lens=rows.lens[: rows.count].tolist(),
            arrivals=rows.arrivals[: rows.count].tolist(),
            capacity=self.cache.capacity,
        )
        self._evict(growth.evicted)
        self._resize(growth.capacity)

    def _evict(self, evicted: Sequence[int]) -> None:
        rows = self._rows
        if not evicted:
            return
        rows.cut_runs(np.array(evicted), self._deltas, self.version)
        for row in sorted(evicted, key=lambda row: int(rows.arrivals[row]), reverse=True):
            self._waiting.appendleft(rows.rest_of(row))
        self._drop_rows(evicted)

    def _decode(self) -> None:
        rows = self._rows
        lens = rows.lens[: rows.count]
        token_ids = rows.tokens[rows.all_rows(), lens - 1].astype(np.int64)
        logits = self._model.decode(
            self._to_device(token_ids),
            self._to_device(lens - 1),
            self.cache,
            span=int(lens.max()),
        )
        self._sample(0, logits)

    def _sample(self, first: int, logits: Tensor) -> None:
        """Samples one token for each row from `first` on; `logits` has these rows, in order."""
        rows = self._rows
        chosen = slice(first, rows.count)
        temperatures, is_greedy = rows.temperatures[chosen], rows.is_greedy[chosen]
        self._truncate(chosen, logits)
        draws = uniforms(rows.seeds[chosen], rows.lens[chosen] + rows.offsets[chosen])
        sampled, sampled_logprobs = sample(
            logits,
            temperatures=(
                None
                if (temperatures == 1).all()
                else self._to_device(temperatures[:, None]).to(logits.dtype)
            ),
            is_greedy=self._to_device(is_greedy) if is_greedy.any() else None,
            uniforms=self._to_device(draws[:, None]),
        )
        tokens = sampled.cpu().numpy()
        logprobs = sampled_logprobs.float().cpu().numpy()
        self.num_tokens_total += len(tokens)
        rows.push(first, tokens, logprobs)
        stopped, ended = rows.finished(first, tokens)
        is_broken = ~np.isfinite(logprobs)
        if is_broken.any():
            rows.lens[first : rows.count][is_broken] -= 1  # drops the broken token
        done = stopped | ended | is_broken
        if done.any():
            reasons = np.where(is_broken, NOT_FINITE, np.where(stopped, "stop", "length"))
            self._remove([(first + int(idx), str(reasons[idx])) for idx in np.flatnonzero(done)])
        if is_broken.any():
            self.cache.clear_beyond((rows.lens[: rows.count] - 1).tolist())

    def _truncate(self, chosen: slice, logits: Tensor) -> None:
        rows = self._rows
        top_ps, top_ks = rows.top_ps[chosen], rows.top_ks[chosen]
        is_truncated = (top_ps < 1) | (top_ks > 0)
        for top_p, top_k in {*zip(top_ps[is_truncated], top_ks[is_truncated], strict=True)}:
            alike = np.flatnonzero((top_ps == top_p) & (top_ks == top_k))
            indices = self._to_device(alike)
            part = logits.index_select(0, indices)
            temperatures = self._to_device(rows.temperatures[chosen][alike, None])
            lowest = lowest_kept(part, temperatures, Truncation(float(top_p), int(top_k)))
            logits.index_copy_(0, indices, part.masked_fill_(part < lowest, -torch.inf))

    def _remove(self, finished: Sequence[tuple[int, str]]) -> None:
        if not finished:
            return
        numbers = [row for row, _ in finished]
        self._rows.cut_runs(np.array(numbers), self._deltas, self.version)
        for row, reason in finished:
            self._finish_id(int(self._rows.ids[row]), reason)
        self._drop_rows(numbers)

    def _finish_id(self, request_id: int, reason: str) -> None:
        del self._arrivals[request_id]
        self._deltas.add_finish(request_id, reason)

    def _drop_rows(self, numbers: Sequence[int]) -> None:
        for source, target in self._rows.remove(numbers):
            self.cache.move_row(source, target, num_tokens=int(self._rows.lens[target]))

    def _cut_runs(self) -> None:
        self._rows.cut_runs(self._rows.all_rows(), self._deltas, self.version)

    def _to_device(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.as_tensor(array, device=self._device)  # shares memory on the CPU


class RowTable:
    """The running sequences as columns: row i of every array is cache row i; 0..count-1 are in use.
    With a small model, Python per sequence would cost more than the model. R: rows, C: longest
    context, W: widest list of stop tokens."""

    def __init__(self, *, max_rows: int, max_context_len: int) -> None:
        self.count = 0
        self.requests: list[GenerationRequest] = []
        self.tokens = np.zeros((max_rows, max_context_len + 1), np.int32)  # [R, C+1]
        self.logprobs = np.zeros((max_rows, max_context_len + 1), np.float32)
        self.ids = np.zeros(max_rows, np.int64)
        self.arrivals = np.zeros(max_rows, np.int64)
        self.seeds = np.zeros(max_rows, np.uint64)
        self.lens = np.zeros(max_rows, np.int64)  # tokens known
        self.sent = np.zeros(max_rows, np.int64)  # tokens known to the consumer
        self.ends = np.zeros(max_rows, np.int64)  # tokens at which max_new_tokens is reached
        self.offsets = np.zeros(max_rows, np.int64)  # completion position minus sequence position
        self.temperatures = np.zeros(max_rows, np.float64)  # 1 where greedy
        self.is_greedy = np.zeros(max_rows, np.bool_)
        self.top_ps = np.ones(max_rows, np.float64)  # 1 where greedy
        self.top_ks = np.zeros(max_rows, np.int64)  # 0: all tokens
        self.stops = np.full((max_rows, 1), -1, np.int32)  # [R, W], -1 where unused
        columns: list[Any] = [c for c in vars(self).values() if isinstance(c, np.ndarray)]
        self._scalars: list[npt.NDArray[Any]] = [c for c in columns if c.ndim == 1]  # [R]
        self._numbers = np.arange(max_rows)

    def append(self, request: GenerationRequest, arrival: int) -> None:
        row, num_tokens = self.count, len(request.tokens)
        self.count += 1
        self.requests.append(request)
        self.tokens[row, :num_tokens] = request.tokens
        self.ids[row] = request.id
        self.arrivals[row] = arrival
        self.seeds[row] = request.seed
        self.lens[row] = self.sent[row] = num_tokens
        self.ends[row] = num_tokens + request.max_new_tokens
        self.offsets[row] = request.position - num_tokens
        self.is_greedy[row] = request.temperature == 0
        self.temperatures[row] = request.temperature or 1.0
        self.top_ps[row] = request.top_p if request.temperature else 1.0
        self.top_ks[row] = request.top_k if request.temperature else 0
        num_stops = len(request.stop_token_ids)
        if num_stops > self.stops.shape[1]:
            wider = np.full((len(self.stops), num_stops), -1, np.int32)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[row] = -1
        self.stops[row, :num_stops] = request.stop_token_ids

    def push(self, first: int, tokens: Int64Array, logprobs: npt.NDArray[np.float32]) -> None:
        rows, lens = self._numbers[first : self.count], self.lens[first : self.count]
        self.tokens[rows, lens] = tokens
        self.logprobs[rows, lens] = logprobs
        lens += 1

    def finished(self, first: int, tokens: Int64Array) -> tuple[BoolArray, BoolArray]:
        """Which rows from `first` on stop with `tokens`, and which reach their length."""
        rows = slice(first, self.count)
        stopped = (self.stops[rows] == tokens[:, None]).any(axis=1)
        return stopped, self.lens[rows] >= self.ends[rows]

    def cut_runs(self, rows: Int64Array, buffer: DeltaBuffer, version: int) -> None:
        counts = self.lens[rows] - self.sent[rows]
        rows, counts = rows[counts > 0], counts[counts > 0]
        if not len(rows):
            return
        sent = self.sent[rows]
        ends = counts.cumsum()
        columns = np.arange(int(ends[-1])) + np.repeat(sent - ends + counts, counts)
        repeated = np.repeat(rows, counts)
        buffer.add_runs(
            ids=self.ids[rows],
            positions=sent + self.offsets[rows],
            counts=counts,
            tokens=self.tokens[repeated, columns],
            logprobs=self.logprobs[repeated, columns],
            version=version,
        )
        self.sent[rows] = self.lens[rows]

    def all_rows(self) -> Int64Array:
        return self._numbers[: self.count]

    def rest_of(self, row: int) -> GenerationRequest:
        """The request that would continue this row elsewhere."""
        return self.requests[row].resumed(self.tokens[row, : self.lens[row]].copy())

    def remove(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Frees rows and closes the gaps; returns (from, to) of each row that moved."""
        removed = set(rows)
        num_kept = self.count - len(removed)
        gaps = sorted(row for row in removed if row < num_kept)
        movers = [row for row in range(num_kept, self.count) if row not in removed]
        for source, target in zip(movers, gaps, strict=True):
            self._move(source, target)
        del self.requests[num_kept:]
        self.count = num_kept
        return list(zip(movers, gaps, strict=True))

    def _move(self, source: int, target: int) -> None:
        num_tokens = self.lens[source]
        self.requests[target] = self.requests[source]
        self.tokens[target, :num_tokens] = self.tokens[source, :num_tokens]
        self.logprobs[target, :num_tokens] = self.logprobs[source, :num_tokens]
        self.stops[target] = self.stops[source]
        for column in self._scalars:
            column[target] = column[source]


def _unique(
    prompts: Sequence[npt.NDArray[np.int32]],
) -> tuple[list[npt.NDArray[np.int32]], Int64Array | None]:
    """Distinct prompts, and the index of each request's prompt (None: all differ). The samples of a
    group share a prompt, so it is computed once."""
    known: dict[bytes, int] = {}
    distinct: list[npt.NDArray[np.int32]] = []
    copies = np.zeros(len(prompts), np.int64)
    for idx, prompt in enumerate(prompts):
        copies[idx] = known.setdefault(prompt.tobytes(), len(distinct))
        if copies[idx] == len(distinct):
            distinct.append(prompt)
    return distinct, None if len(distinct) == len(prompts) else copies
