"""`python -m umbra.trainer.quickstart OUT_DIR`: makes the quickstart's model and data sets."""

from umbra.trainer.quickstart.quickstart_command import main
from umbra.trainer.reporting.console import Console

if __name__ == "__main__":
    Console.install()  # `make quickstart | head` still trains
    main()
