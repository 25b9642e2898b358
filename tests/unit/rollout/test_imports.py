from __future__ import annotations

import subprocess
import sys


def test_managers_and_workers_need_no_torch() -> None:
    code = (
        "import sys, umbra.runtime.rollout.manager.rollout_manager; "
        "import umbra.runtime.rollout.agents.rollout_worker; "
        "print(*({'torch', 'pydantic', 'transformers'} & sys.modules.keys()))"
    )

    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )

    assert found.stdout.split() == []
