"""Renews the picture of docs/watch.md: the page of `umbra dash` while the quickstart trains, after
one of its engines was killed.

    python tests/captures/dash_picture.py runs/quickstart-assets [docs/dash.png]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from playwright.sync_api import sync_playwright

ROOT: Final = Path(__file__).resolve().parents[2]
_STEPS: Final = 45  # before the engine is killed
_LIMIT_S: Final = 120.0
_PROGRAM: Final = "import sys; from umbra.runtime.cli.umbra_command import main; sys.exit(main())"


def take_picture(run_dir: Path, picture: Path) -> None:
    """Photographs the page about a run directory, as a desktop browser shows it."""
    command = [sys.executable, "-c", _PROGRAM, "dash", str(run_dir), "--port", "0"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        sync_playwright() as playwright,
    ):
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found is not None
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1200, "height": 1000})
        page.goto(found[0])
        page.wait_for_selector("#samples tbody tr")
        page.wait_for_selector("#charts canvas")
        page.evaluate("document.querySelectorAll('.wide').forEach(e => e.style.maxHeight = '9rem')")
        page.screenshot(path=picture, full_page=True)
        browser.close()
        server.send_signal(signal.SIGINT)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("assets", type=Path, help="made by python -m umbra.trainer.quickstart")
    parser.add_argument("picture", type=Path, nargs="?", default=ROOT / "docs" / "dash.png")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="umbra-", dir="/tmp") as name:
        # The page shows the settings, so its paths are those of the documentation.
        run_dir = Path(name) / "runs" / "quickstart"
        shutil.copytree(given.assets, run_dir.parent / "quickstart-assets")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        config = ROOT / "launch" / "configs" / "quickstart.toml"
        command = [*torchrun, "--nproc-per-node", "2", "-m", "umbra.trainer", str(config)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        log = Path(name) / "log"
        with (
            log.open("wb") as output,
            subprocess.Popen(
                [*command, "train.steps=1000"],
                cwd=name,
                env=environment,
                stdout=output,
                stderr=output,
            ) as run,
        ):
            try:
                _wait_for(run_dir / "metrics.jsonl", f'"step": {_STEPS},')
                processes = json.loads((run_dir / "processes.json").read_text())
                os.kill(processes["policy-1"]["pid"], signal.SIGKILL)
                _wait_for(run_dir / "events.jsonl", "serves again")
                take_picture(run_dir, given.picture)
            finally:
                run.send_signal(signal.SIGTERM)


def _wait_for(path: Path, text: str) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not (path.exists() and text in path.read_text()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} has no {text!r}")
        time.sleep(0.2)


if __name__ == "__main__":
    main()
