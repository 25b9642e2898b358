"""`python -m umbra.trainer.drill CONFIG`: trains while engines are killed."""

import sys

from umbra.trainer.drill.command import main
from umbra.trainer.reporting.console import Console

if __name__ == "__main__":
    Console.install()  # `make drill | head` still trains
    sys.exit(main())
