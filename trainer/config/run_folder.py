"""`python -m umbra.trainer.config.run_folder CONFIG.toml [section.key=value ...]`: prints run.dir,
for launch scripts. Loads no torch."""

from __future__ import annotations

import sys

from umbra.runtime.errors import UmbraError
from umbra.trainer.config.config_file import load_config


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    try:
        print(load_config(argv[0], argv[1:]).run.dir)
    except UmbraError as error:
        print(f"umbra: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
