"""The `umbra` command. Each subcommand imports its modules only when it is called."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from io import UnsupportedOperation
from typing import Any, Final, TextIO, cast

from umbra.runtime.errors import ConfigError, DataError, UmbraError
from umbra.runtime.terminal_text import escape_unprintable

_LEDGER: Final = (
    "Shows where the samples of a job are (pending, running, partial, finished, scored, leased, "
    "trained, dropped), lists them, or shows one's history, from the ledger in its run directory. "
    "The job may be running."
)
_SAMPLES: Final = (
    "Shows samples of a job as text: the prompt, the completion by turns with the versions of the "
    "weights that generated them, values that the agent loop recorded, reward and state. Without "
    "ids it shows the newest, the best or the worst. The job may be running."
)
_EVAL: Final = (
    "Evaluates a model on held-out prompts, data.eval and eval.sets, without training. The config "
    "is that of a training run; model.path=DIR and --checkpoint choose another model. [eval] says "
    "how: greedy, or several samples of each prompt."
)
_EXPORT: Final = (
    "Writes a checkpoint as a Hugging Face directory: config, tokenizer, and weights in the data "
    "type that engines get. Needs no GPU, and as much memory as one file of weights, 5 GB or less. "
    "The run may be in progress."
)
_SERVE: Final = (
    "Starts the engines of a config without a trainer, and an OpenAI-compatible HTTP server in "
    "front of them, until Ctrl-C. The config is that of a training run; [model] is enough."
)
_PLOT: Final = (
    "Draws a training run's metrics over its steps: reward, entropy, the parts of a step's time, "
    "the ranks' memory by phase, and others. The run may be in progress."
)
_TRACE: Final = (
    "Writes what ranks, supervisors, engines, rollout manager and workers did in some steps of a "
    "run as a timeline, which https://ui.perfetto.dev opens. The run may be in progress."
)
_STOP: Final = (
    "Ends a running job in order and waits for its end: the ranks end the step in progress, write "
    "a checkpoint and exit. Works on the job's node, and on any other that sees the run directory. "
    "A second call ends the job at once. Exit status: 0 if the job ended in order, with its newest "
    "checkpoint named; 3 if it ended without a checkpoint of the last steps, because the step in "
    "progress took longer than --within or the job failed; 1 if no job runs or it does not end."
)
_PREEMPT: Final = (
    "Like stop, for a job that its launcher is to start again: the ranks exit with status 75 "
    "(torchrun with 1), and RUN_DIR/preempted tells the launcher. launch/slurm/train.sbatch "
    "requeues such a job. Exit statuses are those of stop."
)
_DOCTOR: Final = (
    "Checks whether a training run could start on this node: settings, files, limits, GPUs, "
    "memory, engines. Each line has a verdict, and how to fix what fails. The exit status is 0 if "
    "all is well. With `torchrun ... -m umbra.trainer.doctor CONFIG` it checks all nodes and ranks."
)
_DRAIN: Final = (
    "Asks a machine that only generates (python -m umbra.runtime.node) to leave its job. Its "
    "trajectories continue on the job's other engines. Returns when the job has taken the request."
)
_DUMP: Final = (
    "Shows what every process of a running job is doing, on all its nodes: stacks, states of the "
    "engines, calls that wait and for how long, logs, GPUs. It is printed in short, and written in "
    "full to RUN_DIR/bundles. Nothing is stopped."
)
_TOP: Final = (
    "Shows what a run is doing, again each second until Ctrl-C: progress, the parts of a step's "
    "time, engines, queues, who waits for what, and the last events. Run it on the node of rank 0. "
    "Of a run that has ended, it shows what the files have."
)
_DASH: Final = (
    "Serves a web page about a run: charts of its metrics, engines, queues, faults, and samples as "
    "text. The run may be in progress, or have ended. Only this machine can open the page, unless "
    "--host says otherwise; there is no password."
)
_GENERATE: Final = (
    "Generates one completion and prints it as it comes: with an engine started for it, or, with "
    "--url, by a server that is running."
)

_STATUS: Final = 128 + signal.SIGPIPE
"""The status that a shell shows for a program that SIGPIPE ended; Python ignores SIGPIPE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. The exit status is 2 for wrong use, 1 for a failure, 130 for Ctrl-C,
    and 141 if the reader of the output closed it, for example `head`: the status of a program
    that SIGPIPE ended."""
    with contextlib.suppress(AttributeError):  # it was closed from the start, or is captured
        # As stderr: a terminal of another encoding cannot show all characters of a run's texts.
        cast("Any", sys.stdout).reconfigure(errors="backslashreplace")
    return run_until_unread(partial(_run_reporting_errors, sys.argv[1:] if argv is None else argv))


def umbra_version() -> str:
    """The installed version; "(not installed)" if umbra runs from its sources."""
    try:
        return version("umbra-rl")
    except PackageNotFoundError:
        return "(not installed)"


def _run_reporting_errors(argv: Sequence[str]) -> int:
    arguments = _parse(argv)
    try:
        return _run(arguments)
    except UmbraError as error:
        print(f"umbra: {escape_unprintable(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | DataError) else 1
    except BrokenPipeError:  # of the output, perhaps
        raise
    except OSError as error:
        cause = error.strerror or str(error)
        text = f"cannot use {error.filename}: {cause}" if error.filename else cause
        print(f"umbra: {escape_unprintable(text)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("umbra: interrupted", file=sys.stderr)
        return 130


def _run(arguments: argparse.Namespace) -> int:
    match arguments.command:
        case "stop" | "preempt" | "drain":
            from umbra.runtime.cli import stop_command

            return stop_command.run(arguments)
        case "ledger":
            from umbra.runtime.cli import ledger_command

            return ledger_command.run(arguments)
        case "samples":
            from umbra.runtime.cli import ledger_command

            return ledger_command.run_samples(arguments)
        case "dump":
            from umbra.runtime.cli import dump_command

            return dump_command.run(arguments)
        case "trace":
            from umbra.runtime.cli import dump_command

            return dump_command.run_trace(arguments)
        case "top":
            from umbra.runtime.cli import top_command

            return top_command.run(arguments)
        case "dash":
            # By name, because it is above the commands, whose parts it uses.
            return int(import_module("umbra.runtime.dash.dash_command").run(arguments))
        case "doctor":
            # By name, because nothing here imports the trainer, whose config it reads.
            return int(import_module("umbra.trainer.doctor.doctor").run(arguments))
        case "plot":
            return int(import_module("umbra.trainer.reporting.metrics_plot").run(arguments))
        case "export":
            return int(import_module("umbra.trainer.checkpoint.model_export").run(arguments))
        case "eval":
            return int(import_module("umbra.trainer.serving.eval_command").run(arguments))
        case "serve":
            return int(import_module("umbra.trainer.serving.serve_command").serve(arguments))
        case "generate" if arguments.url:
            from umbra.runtime.cli import generate_command

            return generate_command.run(arguments)
        case "generate":
            return int(import_module("umbra.trainer.serving.serve_command").generate(arguments))
        case _:
            raise AssertionError(arguments.command)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options may come before, between and after the settings of a command's config."""
    parser, commands = _parsers()
    if not argv or argv[0] not in commands:
        return parser.parse_args(argv)
    arguments = commands[argv[0]].parse_intermixed_args(argv[1:])
    arguments.command = argv[0]
    return arguments


def _parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser of the whole command line, and the parser of each command's own part."""
    parser = argparse.ArgumentParser(
        prog="umbra",
        description="Reinforcement-learning post-training of language models without Ray.",
    )
    parser.add_argument("--version", action="version", version=f"umbra {umbra_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_ledger_arguments(
        commands.add_parser("ledger", help="where a job's samples are", description=_LEDGER)
    )
    _add_samples_arguments(
        commands.add_parser("samples", help="a job's samples as text", description=_SAMPLES)
    )
    _add_plot_arguments(
        commands.add_parser("plot", help="a run's metrics as a picture", description=_PLOT)
    )
    _add_trace_arguments(
        commands.add_parser("trace", help="a timeline of a run's steps", description=_TRACE)
    )
    _add_dash_arguments(commands.add_parser("dash", help="a run's web page", description=_DASH))
    doctor = commands.add_parser("doctor", help="checks before a run", description=_DOCTOR)
    doctor.add_argument("config", metavar="CONFIG", help="the run's TOML file")
    _add_overrides(doctor)
    for name, purpose, description in (
        ("stop", "end a running job with a checkpoint", _STOP),
        ("preempt", "the same, to be started again", _PREEMPT),
    ):
        _add_stop_arguments(commands.add_parser(name, help=purpose, description=description))
    drain = commands.add_parser("drain", help="take a machine out of a job", description=_DRAIN)
    drain.add_argument("run_dir", metavar="RUN_DIR", help="the job's run.dir")
    drain.add_argument("node", metavar="NODE", help="its number or id, as the job reported it")
    dump = commands.add_parser("dump", help="what a job is doing", description=_DUMP)
    dump.add_argument("run_dir", metavar="RUN_DIR", help="the job's run.dir")
    top = commands.add_parser("top", help="watch a run", description=_TOP)
    top.add_argument("run_dir", metavar="RUN_DIR", help="the job's run.dir")
    top.add_argument("--once", action="store_true", help="print one frame and exit")
    _add_eval_arguments(
        commands.add_parser("eval", help="scores of a model, without training", description=_EVAL)
    )
    _add_export_arguments(
        commands.add_parser("export", help="a checkpoint for transformers", description=_EXPORT)
    )
    _add_serve_arguments(
        commands.add_parser("serve", help="engines behind an HTTP endpoint", description=_SERVE)
    )
    _add_generate_arguments(
        commands.add_parser("generate", help="one completion", description=_GENERATE)
    )
    return parser, commands.choices


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="settings to change; an empty value unsets one",
    )


def _add_stop_arguments(stop: argparse.ArgumentParser) -> None:
    stop.add_argument("run_dir", metavar="RUN_DIR", help="the job's run.dir")
    stop.add_argument(
        "--within",
        type=_seconds,
        default=300.0,
        metavar="SECONDS",
        help="longest time for the step in progress and its checkpoint (default 300)",
    )


def _add_eval_arguments(evaluate: argparse.ArgumentParser) -> None:
    evaluate.add_argument("config", metavar="CONFIG", help="the TOML file of a training run")
    _add_overrides(evaluate)
    evaluate.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="a checkpoint of the run, such as RUN_DIR/checkpoints/step-000040",
    )


def _add_export_arguments(export: argparse.ArgumentParser) -> None:
    export.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="such as RUN_DIR/checkpoints/step-000040"
    )
    export.add_argument(
        "out", nargs="?", metavar="OUT", help="a new directory (default: RUN-step-000040 here)"
    )
    export.add_argument(
        "--model",
        metavar="DIR",
        help="the model that the run started from (default: where the run found it)",
    )


def _add_serve_arguments(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "config",
        metavar="CONFIG",
        help="TOML file, or a model directory, or a model's name on the hub",
    )
    _add_overrides(serve)
    serve.add_argument("--host", default="127.0.0.1", help="address to bind (default 127.0.0.1)")
    serve.add_argument(
        "--port", type=_port, default=8000, help="port to bind; 0 chooses a free one (default 8000)"
    )
    serve.add_argument(
        "--api-key",
        metavar="KEY",
        help="key that clients must send (default: UMBRA_API_KEY, else none)",
    )


def _add_generate_arguments(generate: argparse.ArgumentParser) -> None:
    generate.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="a model directory or a model's name on the hub, or the TOML file of a training run, "
        "whose model and engine settings are used; not with --url",
    )
    _add_overrides(generate)
    generate.add_argument("--prompt", type=_text, required=True, metavar="TEXT")
    generate.add_argument(
        "--chat", action="store_true", help="the prompt is a user's message, for a chat template"
    )
    generate.add_argument(
        "--max-tokens", type=_positive, metavar="N", help="default: the rest of the context"
    )
    generate.add_argument(
        "--temperature", type=_temperature, default=1.0, metavar="T", help="0 is greedy (default 1)"
    )
    generate.add_argument("--seed", type=_seed, help="the same seed gives the same text again")
    generate.add_argument(
        "--pool",
        metavar="NAME",
        help="policy (the default), or judge for [pools.judge]; with --url any of its models",
    )
    generate.add_argument(
        "--engine",
        help="embedded (CPU and CUDA), vllm, sglang, echo (no model, for tests), or the "
        "module:Class of your own (default: the config's; embedded for a model directory)",
    )
    generate.add_argument("--url", help="a running server, such as http://127.0.0.1:8000")
    generate.add_argument("--api-key", metavar="KEY", help="default: UMBRA_API_KEY")


def _add_plot_arguments(plot: argparse.ArgumentParser) -> None:
    plot.add_argument("run_dir", metavar="RUN_DIR", help="the job's run.dir")
    plot.add_argument(
        "-o", "--output", metavar="FILE", help=".png, .svg or .pdf (default RUN_DIR/metrics.png)"
    )


def _add_trace_arguments(trace: argparse.ArgumentParser) -> None:
    trace.add_argument("run_dir", metavar="RUN_DIR", help="the job's run.dir")
    trace.add_argument(
        "--steps",
        type=_steps,
        metavar="A:B",
        help="from step A to step B, both included; the first is 1, as in metrics.jsonl "
        "(default: all that the trace has)",
    )
    trace.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help=".json or .json.gz (default RUN_DIR/trace/steps-A-B.json.gz)",
    )


def _add_dash_arguments(dash: argparse.ArgumentParser) -> None:
    dash.add_argument("run_dir", metavar="RUN_DIR", help="the job's run.dir")
    dash.add_argument("--host", default="127.0.0.1", help="address to bind (default 127.0.0.1)")
    dash.add_argument(
        "--port", type=_port, default=7007, help="port to bind; 0 chooses a free one (default 7007)"
    )


def _add_ledger_arguments(ledger: argparse.ArgumentParser) -> None:
    ledger.add_argument("run_dir", metavar="RUN_DIR", help="the job's run.dir")
    ledger.add_argument(
        "--sample",
        metavar="ID",
        help="one sample's history: e0/7/3 for epoch 0, the prompt's id or row, sample 3",
    )
    ledger.add_argument(
        "--text", action="store_true", help="with --sample: its text, as umbra samples shows it"
    )
    ledger.add_argument(
        "--samples",
        action="store_true",
        help="list samples, the last admitted first; --state, --step and --newest imply it",
    )
    ledger.add_argument("--state", help="list samples in this state, such as dropped")
    ledger.add_argument(
        "--step",
        type=_positive,
        metavar="N",
        help="list samples of optimizer step N; the first is 1, as in metrics.jsonl",
    )
    ledger.add_argument("--newest", type=_positive, metavar="N", help="list at most N (default 20)")
    ledger.add_argument("--json", action="store_true", help="print one JSON object, nothing else")


def _add_samples_arguments(samples: argparse.ArgumentParser) -> None:
    samples.add_argument("run_dir", metavar="RUN_DIR", help="the job's run.dir")
    samples.add_argument(
        "ids",
        nargs="*",
        default=[],
        metavar="ID",
        help="a sample: e0/7/3 for epoch 0, the prompt's id or row, sample 3",
    )
    samples.add_argument(
        "--step",
        type=_positive,
        metavar="N",
        help="of optimizer step N; the first is 1, as in metrics.jsonl",
    )
    extremes = samples.add_mutually_exclusive_group()
    extremes.add_argument(
        "--best", type=_positive, metavar="N", help="the N samples with the highest rewards"
    )
    extremes.add_argument(
        "--worst", type=_positive, metavar="N", help="the N samples with the lowest rewards"
    )
    samples.add_argument(
        "--model", metavar="DIR", help="directory with the tokenizer (default: the run's model)"
    )
    samples.add_argument("--json", action="store_true", help="print one JSON object, nothing else")


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # undecodable bytes of the command line are surrogates in Python
        raise argparse.ArgumentTypeError("is not text in this terminal's encoding") from None
    return text


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number below 2**63")
    return number


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    numbers = _positive(first), _positive(last or first)
    if numbers[0] > numbers[1]:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it begins: use A:B, such as 10:12")
    return numbers


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return number


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed: use 0 to 2**63 - 1")
    return int(text)


def _temperature(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a temperature: use 0 (greedy) or more")
    return number


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: use 0 to 65535")
    return int(text)


def run_until_unread(command: Callable[[], int]) -> int:
    """The command's exit status, or 141 if its output was closed before all was written, as in
    `umbra ledger RUN | head`. A pipe that broke elsewhere is an ordinary error."""
    try:
        try:
            return command()
        finally:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:  # None if it was closed from the start
                    stream.flush()  # else it fails at the interpreter's end, with a message
    except BrokenPipeError:
        if not any([_discard_unread(sys.stdout), _discard_unread(sys.stderr)]):
            raise
        return _STATUS


def _discard_unread(stream: TextIO | None) -> bool:
    """Whether nobody reads the stream. If so, its unwritten text is discarded."""
    descriptor = _descriptor(stream)
    if descriptor is None:
        return False
    poll = select.poll()
    poll.register(descriptor, 0)  # errors are always reported
    if not poll.poll(0):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, descriptor)
    finally:
        os.close(nowhere)
    return True


def _descriptor(stream: TextIO | None) -> int | None:
    """None if it was closed from the start, or captured by this process."""
    try:
        return None if stream is None else stream.fileno()
    except UnsupportedOperation:
        return None


if __name__ == "__main__":
    sys.exit(main())
