"""Downloads a data set of the Hugging Face hub, and keeps the split that is used as a Parquet file.

The library `datasets` takes seconds to import, so only the process that downloads loads it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any
from urllib.parse import quote

from umbra.runtime.disk import replacing
from umbra.runtime.engine_api.hub_snapshot import not_downloaded
from umbra.runtime.errors import DataError, how_to_install
from umbra.trainer.hub.hub_names import HubName


def download_data(name: HubName) -> Path:
    """The rows of a split, beside the files that `datasets` has in its cache.

    Raises:
        DataError: it is neither in the cache nor on the hub, or has no such split.
    """
    try:
        datasets: Any = importlib.import_module("datasets")
        locks: Any = importlib.import_module("filelock")
    except ImportError:
        raise DataError(
            f"the data set {name.repo!r} of the hub needs datasets: {how_to_install('hub')}"
        ) from None
    try:
        rows = datasets.load_dataset(
            name.repo, name.subset or None, split=name.split, revision=name.revision
        )
        folder = Path(rows.cache_files[0]["filename"]).parent  # of this commit and configuration
        path = folder / f"umbra-{quote(name.split, safe='')}.parquet"
        with locks.FileLock(f"{path}.lock"):
            if not path.exists():
                with replacing(path) as file:
                    rows.to_parquet(file)
    except Exception as error:  # it reads formats of all kinds
        raise not_downloaded(f"the data set {name.repo!r}, split {name.split!r},", error) from error
    return path
