"""How long it takes from nothing to the first answered call: umbra beside its peers, in turn.

Each start is in a fresh interpreter. Per system, medians over the rounds:

- `ready_s`, from the start of its services until they can start an actor (umbra: from the
  guardian's start until the supervisor is ready)
- `first_call_s`, from entering the session (or `ray.init`, ...) to the first answered call of an
  actor
- `first_call_from_exec_s`, the same from the start of the caller's interpreter
- `resident_mb` of the processes beside the two that talk; `supervisor_resident_mb` of it is the
  supervisor's

    python tests/bench/startup.py [--rounds 5] [--peer-python .venv-bench/bin/python] [--json]
"""

from __future__ import annotations

import sys

from bench_options import add_peer_python, options_parser
from bench_programs import ALL_SYSTEMS
from bench_rounds import compare
from result_table import print_result


def main() -> int:
    parser = options_parser(__doc__)
    add_peer_python(parser)
    given = parser.parse_args()
    result = compare(
        "startup",
        ALL_SYSTEMS,
        rounds=given.rounds,
        peer_python=given.peer_python,
        duration_s=0.0,
        extra={"umbra": "umbra_supervisor"},
    )
    return print_result(result, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
