"""`torchrun --nproc-per-node N -m umbra.trainer CONFIG.toml [section.key=value ...]`."""

from umbra.runtime.cluster.environment import bind_to_agent

if __name__ == "__main__":
    bind_to_agent()  # before the other imports, which take half a second
    from umbra.trainer.command_line import run_program

    run_program()
