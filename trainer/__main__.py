"""`torchrun --nproc-per-node N -m umbra.trainer CONFIG.toml [section.key=value ...]`."""

from umbra.trainer.cli import run_program

if __name__ == "__main__":
    run_program()
