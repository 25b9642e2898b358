"""`python -m umbra.trainer.quickstart OUT_DIR`: makes the quickstart's model and data sets."""

from umbra.trainer.console import Console
from umbra.trainer.quickstart.command import main

if __name__ == "__main__":
    Console.install()  # `make quickstart | head` still trains
    main()
