"""How fast an echo of 100 bytes between two processes is: umbra beside its peers, in turn.

Per system, medians over the rounds:

- `p50_us` and `p99_us` of sequential calls
- `calls_per_s` with many calls in flight, in the way named by `idiom`, the fastest of several tried
- `ready_s`, from the start of its services until they are ready
- `first_call_s`, from the same start to the first answered call
- `resident_mb` of its processes beside the two that talk

The callee is a plain method for umbra and bare_zmq, and an asyncio actor for the others. `async_*`
is umbra's `async def`, `sync_actor_*` Ray's plain actor, `session_p50_us` umbra's synchronous face
with its thread hop, `batch_calls_per_s` Xoscar's batches, which have one outcome for all their
calls.

    python tests/bench/rpc.py [--rounds 5] [--peer-python .venv-bench/bin/python] [--json]
"""

from __future__ import annotations

import sys
from typing import Final

from bench_options import add_peer_python, options_parser
from bench_programs import ALL_SYSTEMS
from bench_rounds import compare
from result_table import print_result

_DURATION_S: Final = 0.6
"""Of each measurement in a round. Shorter, a 99th percentile of Ray rests on a handful of calls;
longer, five rounds of five systems take minutes."""


def main() -> int:
    parser = options_parser(__doc__)
    add_peer_python(parser)
    given = parser.parse_args()
    result = compare(
        "rpc",
        ALL_SYSTEMS,
        rounds=given.rounds,
        peer_python=given.peer_python,
        duration_s=_DURATION_S,
    )
    return print_result(result, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
