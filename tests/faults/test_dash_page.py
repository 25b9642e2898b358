"""`umbra dash` in a real browser: while a run goes, when an engine is killed, and after the end."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright
from run_assets import write_rows
from whole_runs import start_run

from umbra.trainer.reporting.run_reporter import write_report

pytestmark = [pytest.mark.process, pytest.mark.slow]

_PROGRAM = "import sys; from umbra.runtime.cli.umbra_command import main; sys.exit(main())"
_HOSTILE = "<img src=x onerror=alert(1)>"
_LIMIT_MS = 60_000.0  # on a busy machine an engine takes long to start


@contextmanager
def dash(run_dir: Path) -> Generator[str]:
    """The address of a server about a run; it must end in order, and report nothing."""
    command = [sys.executable, "-c", _PROGRAM, "dash", str(run_dir), "--port", "0"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        try:
            found = re.search(r"http://\S+", server.stdout.readline())
            assert found is not None
            yield found[0]
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(30.0) == 0
        assert server.stderr.read() == ""


@contextmanager
def browser_page(url: str) -> Generator[Page]:
    """A page in Chromium. Whatever its console reports as wrong fails the test."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("there is no chromium: install it (apt-get install chromium)")
    wrong: list[str] = []
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 400, "height": 800})
        page.set_default_timeout(_LIMIT_MS)
        page.on("console", lambda m: wrong.append(m.text) if m.type != "log" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.goto(url)
        yield page
        chromium.close()
    assert wrong == []


def step_of(page: Page) -> int:
    return int(page.locator("#numbers dd").first.inner_text().partition(" of ")[0])


def test_the_page_follows_a_run_through_a_kill_to_its_end(folder: Path) -> None:
    rows = [{"prompt": f"all {i}=", "answer": "", "id": f"{_HOSTILE}{i}"} for i in range(32)]
    write_rows(folder / "rows.jsonl", rows)
    data = ("data.train=rows.jsonl", "data.id_column=id", "data.shuffle=false")
    expect.set_options(timeout=_LIMIT_MS)
    with start_run(folder, *data, "train.steps=100000", "pool.count=2", num_ranks=0) as run:
        run.wait_for_step(2)
        with dash(run.run_dir) as url, browser_page(url) as page:
            expect(page.locator("#status")).to_have_text("running")
            expect(page.locator("#numbers dd").first).to_contain_text("of 100000")
            expect(page.locator("#engines > div")).to_have_count(2)
            expect(page.locator("#engines > div").first).to_contain_text("version")
            expect(page.locator("#charts canvas")).not_to_have_count(0)
            assert page.evaluate("document.documentElement.scrollWidth") <= 400  # fits a phone

            newest = page.locator("#samples tbody tr").first.locator("button")
            listed = newest.inner_text()
            newest.focus()
            expect(newest).not_to_have_text(listed)  # by itself

            page.locator("#step").fill("1")
            page.locator("#choose button").click()
            expect(page.locator("#samples tbody tr")).to_have_count(8)
            page.locator("#samples tbody button", has_text=f"e0/{_HOSTILE}0/1").click()
            expect(page.locator("#sample-facts")).to_contain_text("step 1")
            expect(page.locator("#sample-text pre.prompt")).to_have_text("all 0=")
            expect(page.locator("#sample-text pre.policy")).to_have_count(1)
            page.locator("#sample button").click()

            worker = run.pid_of("worker-0")
            os.kill(worker, signal.SIGSTOP)
            stopped = page.locator("#waiting li", has_text=f"worker-0 (pid {worker}) is stopped")
            expect(stopped).to_have_count(1)
            expect(page.locator("#waiting li", has_text="umbra dump")).to_have_count(1)
            os.kill(worker, signal.SIGCONT)
            expect(stopped).to_have_count(0)
            titles = page.locator("#charts figcaption").all_inner_texts()
            assert titles[:2] == ["Reward", "Truncated share"]
            assert "KL" not in titles, "there is no reference model"
            share = (
                "charts.find((chart) => chart?.key.startsWith('Truncated share ')).plot.scales.y"
            )
            assert page.evaluate(f"{share}.min") == 0
            assert page.evaluate(f"{share}.max") >= 0.1
            expect(page.locator("#settings")).to_contain_text("train.steps = 100000")

            seen = step_of(page)
            os.kill(run.pid_of("policy-0"), signal.SIGKILL)
            expect(page.locator("#engines > div").first).to_contain_text("restarted 1 time")
            killed = page.locator(
                "#events li", has_text=re.compile(r"policy-0#1.* killed by SIGKILL")
            )
            expect(killed).not_to_have_count(0)
            run.wait_for_step(seen + 1)
            expect(page.locator("#numbers dd").first).not_to_have_text(f"{seen} of 100000")

            back = page.locator("#events li", has_text="policy-0#2 serves again")
            expect(back).to_have_count(1)

            os.kill(run.process.pid, signal.SIGTERM)
            expect(page.locator("#status")).to_have_text("stopped by SIGTERM")
            expect(page.locator("#engines-section")).to_be_hidden()
            page.reload()
            expect(back).to_have_count(1)
            expect(page.locator("#samples tbody tr")).to_have_count(100)
            page.locator("#samples tbody tr").first.click()
            expect(page.locator("#sample-text pre.prompt")).to_contain_text("all ")


def test_a_report_is_the_page_with_its_data_and_loads_nothing(tmp_path: Path) -> None:
    rows = [{"step": step, "time": step, "rollout/reward_mean": step / 4} for step in (1, 2, 3)]
    write_rows(tmp_path / "metrics.jsonl", rows)
    sample = {"prompt": _HOSTILE, "completion": "</script>", "reward": 1.0, "num_tokens": 3}
    evaluation = {"step": 3, "samples": [sample | {"finish_reason": "stop"}]}
    write_rows(tmp_path / "eval_samples.jsonl", [evaluation])
    (tmp_path / "summary.json").write_text('{"stopped_by": "", "wall_s": 7, "accuracy_after": 0.5}')
    write_report(tmp_path / "report.html", tmp_path)
    alone = (tmp_path / "report.html").rename(tmp_path.parent / f"{tmp_path.name}.html")

    with browser_page(alone.as_uri()) as page:
        expect(page.locator("#status")).to_have_text("ended")
        expect(page.locator("#name")).to_have_text(tmp_path.name)
        expect(page.locator("#numbers")).to_contain_text("Accuracy after")
        expect(page.locator("#charts canvas")).to_have_count(1)
        page.locator("#evaluations summary").click()
        expect(page.locator("#evaluations pre.prompt")).to_have_text(_HOSTILE)
        expect(page.locator("#evaluations pre.policy")).to_have_text("</script>")
        expect(page.locator("#samples-note")).to_have_text("0 of 0 samples")
        page.locator("#step").fill("2")
        page.locator("#choose button").click()
        expect(page.locator("#samples-note")).to_contain_text("not in this report: umbra dash")


def answer_of(url: str, path: str, *, method: str = "GET", host: str = "") -> tuple[int, bytes]:
    address = url.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(address, timeout=60.0)
    try:
        connection.request(method, path, headers={"Host": host or address})
        response = connection.getresponse()
        assert response.headers["Content-Security-Policy"].startswith("default-src 'self'")
        return response.status, response.read()
    finally:
        connection.close()


def _status_of(url: str, request: bytes) -> bytes:
    host, _, port = url.removeprefix("http://").rstrip("/").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60.0) as connection:
        connection.sendall(request)
        return connection.recv(100).split()[1]


def test_ctrl_c_does_not_wait_for_what_is_being_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")  # opening it waits for a writer

    with dash(tmp_path) as url:
        assert answer_of(url, "/api/events")[0] == 200


def test_only_reads_of_its_own_files_under_its_own_name_are_answered(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "train/loss": NaN}\n')
    (tmp_path / "secret").write_text("secret")

    with dash(tmp_path) as url:
        port = url.rstrip("/").rpartition(":")[2]
        found = json.loads(answer_of(url, "/api/metrics?from=1")[1])
        refused = {
            path: answer_of(url, path)[0]
            for path in ("/../secret", "/%2e%2e/secret", "/..%2fsecret", "/static/dash.js", "/x")
        }
        assert answer_of(url, "/")[0] == 200
        assert _status_of(url, b"GET " + b"/a" * 9000 + b" HTTP/1.1\r\n\r\n") == b"400"
        assert answer_of(url, "/", method="POST")[0] == 405
        assert answer_of(url, "/api/samples?step=-1")[0] == 400
        assert answer_of(url, "/api/samples?order=any")[0] == 400
        assert answer_of(url, "/api/sample/e0/1/1")[0] == 404
        assert answer_of(url, "/api/state", host=f"rebound.example:{port}")[0] == 403
        for host in (f"localhost:{port}", "localhost", f"[::1]:{port}", socket.gethostname()):
            assert answer_of(url, "/api/state", host=host)[0] == 200, host

    assert found["rows"] == [{"step": 2, "train/loss": None}]
    assert refused == dict.fromkeys(refused, 404)
