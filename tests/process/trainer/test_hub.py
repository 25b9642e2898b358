"""Models and data sets by their names on a hub, which serves this machine only."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
from hub_folders import DATA, MODEL, write_data_set
from local_hub import LocalHub, serve_hub
from training_models import save_model

from umbra.trainer.data.data_rows import read_rows

pytestmark = [pytest.mark.process, pytest.mark.slow]

PROGRAM = str(Path(__file__).with_name("hub_programs.py"))
LIMIT_S = 120.0
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(tmp_path: Path) -> Generator[LocalHub]:
    save_model(tmp_path / "hub" / "models" / MODEL)
    (tmp_path / "hub" / "models" / MODEL / "pytorch_model.bin").write_bytes(b"the same once more")
    write_data_set(tmp_path / "hub")
    with serve_hub(tmp_path / "hub") as serving:
        yield serving


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "train.toml"
    path.write_text(
        f'model.path = "{MODEL}"\n'
        f'data = {{train = ["{DATA}/main"], eval = "{DATA}/main:test"}}\n'
        'reward.function = "rewards:score"\n'
        f'eval.sets = {{more = "{DATA}/main:train[:2]"}}\n'
        'train = {steps = 1, advantage = "gae"}\n'
        f'critic.path = "{MODEL}"\n'
        f'[pools.judge]\nmodel_path = "{MODEL}"\n'
    )
    return path


def run(command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environ, timeout=LIMIT_S, capture_output=True, text=True, check=False
    )


def local_paths(config: Path, environ: dict[str, str]) -> tuple[list[Path], str]:
    """Those that one process found, and its error output."""
    out = config.with_name("paths")
    done = run([sys.executable, PROGRAM, "paths", str(out), str(config)], environ)
    if done.returncode:
        return [], done.stderr
    return [Path(path) for path in json.loads(Path(f"{out}-0").read_text())], done.stderr


def test_one_of_all_ranks_downloads_each_file_of_a_shared_cache(
    hub: LocalHub, config: Path, tmp_path: Path
) -> None:
    out, port = tmp_path / "ranks", _free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM, "paths", str(out), str(config)],
            env=hub.environment(tmp_path / "home") | _rank_variables(rank, port),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]

    errors = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]

    assert [rank.returncode for rank in ranks] == [0] * 3, errors
    found = [json.loads(Path(f"{out}-{rank}").read_text()) for rank in range(3)]
    assert found[0] == found[1] == found[2]
    expected = [*_files_of_model(hub), "README.md", "test.jsonl", "train.jsonl"]
    assert hub.downloads() == sorted(expected)


def test_a_filled_cache_needs_no_network(hub: LocalHub, config: Path, tmp_path: Path) -> None:
    environ = hub.environment(tmp_path / "home")
    first, _ = local_paths(config, environ)
    num_requests = len(hub.requests)

    again, errors = local_paths(config, environ | {"HF_HUB_OFFLINE": "1"})

    assert again == first, errors
    assert len(hub.requests) == num_requests
    model, judge, critic, *data = first
    assert model == judge == critic
    rows = [[row for _, row in read_rows(path)] for path in data]
    assert [len(each) for each in rows] == [8, 3, 2]
    assert rows[1][0] == {"question": "8+1=", "answer": "9"}


def test_a_local_path_wins_over_the_hub(
    hub: LocalHub, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(MODEL).mkdir(parents=True)

    found, errors = local_paths(config, hub.environment(tmp_path / "home"))

    assert found[0] == Path(MODEL), errors
    assert hub.downloads() == ["README.md", "test.jsonl", "train.jsonl"]


@pytest.mark.parametrize("offline", ["0", "1"])
def test_without_a_network_the_error_names_what_to_set(
    config: Path, tmp_path: Path, offline: str
) -> None:
    nobody = f"http://127.0.0.1:{_free_port()}"
    environ = LocalHub(tmp_path, 0).environment(tmp_path / "home")
    environ |= {"HF_ENDPOINT": nobody, "HF_HUB_OFFLINE": offline}

    _, errors = local_paths(config, environ)

    said = errors.strip().splitlines()[-1]
    assert f"model.path: no directory {Path(MODEL).absolute()}, and the model '{MODEL}'" in said
    if offline == "1":
        assert f"not in the cache {tmp_path / 'home'}, and HF_HUB_OFFLINE is set (" in said
        remedies = ("unset HF_HUB_OFFLINE", "HF_HOME", "or model.path to a local")
    else:
        assert f"neither in the cache {tmp_path / 'home'} nor at {nobody} (" in said
        remedies = ("HF_ENDPOINT", "HF_HUB_OFFLINE=1", "HF_HOME", "or model.path to a local")
    for remedy in remedies:
        assert remedy in said


def test_a_machine_that_only_generates_downloads_no_weights(
    hub: LocalHub, config: Path, tmp_path: Path
) -> None:
    (folder, *_), errors = local_paths(config, hub.environment(tmp_path / "home"))
    assert folder.is_dir(), errors
    sent = hub.downloads()
    elsewhere = hub.environment(tmp_path / "elsewhere")
    folder.rename(folder.with_name("gone"))

    done = run([sys.executable, PROGRAM, "engine", str(folder)], elsewhere)

    assert done.stdout == "started\n", done.stderr
    more = Counter(hub.downloads()) - Counter(sent)
    assert sorted(more.elements()) == [name for name in _files_of_model(hub) if name != WEIGHTS]


def _rank_variables(rank: int, port: int) -> dict[str, str]:
    """Those that torchrun gives to two ranks on node 0 and one on node 1; rank 0 has the store."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % 2),
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": str(2 - rank // 2),
        "GROUP_RANK": str(rank // 2),
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _files_of_model(hub: LocalHub) -> list[str]:
    """Those that umbra needs."""
    files = (hub.folder / "models" / MODEL).iterdir()
    return sorted(file.name for file in files if file.suffix != ".bin")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
