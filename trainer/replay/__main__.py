import sys

from umbra.runtime.cluster.environment import bind_to_agent

if __name__ == "__main__":
    bind_to_agent()  # before the other imports, which take half a second
    from umbra.trainer.replay.replay_command import main

    sys.exit(main(sys.argv[1:]))
