import signal

if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Ends the process without a traceback, until the trainer handles signals itself.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from umbra.runtime.cluster.environment import bind_to_agent

    bind_to_agent()  # before the other imports, which take half a second
    from umbra.trainer.command_line import run_program
    from umbra.trainer.sft.sft_command import main

    run_program(main)
