"""The command lines of `umbra`: each command's purpose, arguments and module."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Final, NamedTuple, TypeVar

T = TypeVar("T", int, float)


class Command(NamedTuple):
    """One subcommand."""

    name: str
    purpose: str  # in the list of commands
    target: str  # module:function, imported when the command is called
    add_arguments: Callable[[argparse.ArgumentParser], None]
    description: str


def umbra_version() -> str:
    """The installed version; "(not installed)" if umbra runs from its sources."""
    try:
        return version("umbra-rl")
    except PackageNotFoundError:
        return "(not installed)"


def command_parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser of the whole command line, and the parser of each command's own part."""
    parser = argparse.ArgumentParser(
        prog="umbra",
        description="Reinforcement-learning post-training of language models without Ray.",
    )
    parser.add_argument("--version", action="version", version=f"umbra {umbra_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_arguments(
            commands.add_parser(command.name, help=command.purpose, description=command.description)
        )
    return parser, commands.choices


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # undecodable bytes of the command line are surrogates in Python
        raise argparse.ArgumentTypeError("is not text in this terminal's encoding") from None
    return text


def _number(kind: type[T], what: str, is_allowed: Callable[[T], bool]) -> Callable[[str], T]:
    """The type of an option that takes a number."""

    def parse(text: str) -> T:
        with contextlib.suppress(ValueError):
            number = kind(text)
            if is_allowed(number):
                return number
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")

    return parse


_positive: Final = _number(
    int, "a positive whole number below 2**63", lambda number: 1 <= number < 1 << 63
)
_seed: Final = _number(int, "a seed: use 0 to 2**63 - 1", lambda number: 0 <= number < 1 << 63)
_port: Final = _number(int, "a port: use 0 to 65535", lambda number: 0 <= number <= 65535)
_seconds: Final = _number(
    float, "a positive number of seconds", lambda number: 0 < number < math.inf
)
_reward: Final = _number(float, "a finite number", math.isfinite)
_temperature: Final = _number(
    float, "a temperature: use 0 (greedy) or more", lambda number: 0 <= number < math.inf
)


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    try:
        numbers = _positive(first), _positive(last or first)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}: use A:B, such as 10:12") from None
    if numbers[0] > numbers[1]:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it begins: use A:B, such as 10:12")
    return numbers


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="settings to change; an empty value unsets one",
    )


def _add_run_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the job's run.dir")


def _add_address(parser: argparse.ArgumentParser, port: int) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default 127.0.0.1)")
    parser.add_argument(
        "--port",
        type=_port,
        default=port,
        help=f"port to bind; 0 chooses a free one (default {port})",
    )


def _add_drain_arguments(drain: argparse.ArgumentParser) -> None:
    _add_run_dir(drain)
    drain.add_argument("node", metavar="NODE", help="its number or id, as the job reported it")


def _add_top_arguments(top: argparse.ArgumentParser) -> None:
    _add_run_dir(top)
    top.add_argument("--once", action="store_true", help="print one frame and exit")


def _add_doctor_arguments(doctor: argparse.ArgumentParser) -> None:
    doctor.add_argument("config", metavar="CONFIG", help="the run's TOML file")
    _add_overrides(doctor)


def _add_stop_arguments(stop: argparse.ArgumentParser) -> None:
    _add_run_dir(stop)
    stop.add_argument(
        "--within",
        type=_seconds,
        default=300.0,
        metavar="SECONDS",
        help="longest time for the step in progress and its checkpoint (default 300)",
    )


def _add_eval_arguments(evaluate: argparse.ArgumentParser) -> None:
    evaluate.add_argument(
        "config", nargs="?", metavar="CONFIG", help="the TOML file of a training run"
    )
    _add_overrides(evaluate)
    evaluate.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="two results.json of the same prompts to compare, instead of an evaluation",
    )
    evaluate.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="a checkpoint of the run, such as RUN_DIR/checkpoints/step-000040",
    )
    _add_ema(evaluate)


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
    _add_ema(export)


def _add_ema(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--ema",
        action="store_true",
        help="use the moving average of the checkpoint's weights (train.ema)",
    )


def _add_serve_arguments(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "config",
        metavar="CONFIG",
        help="TOML file, or a model directory, or a model's name on the hub",
    )
    _add_overrides(serve)
    _add_address(serve, 8000)
    serve.add_argument(
        "--api-key",
        metavar="KEY",
        help="key that clients must send (default: UMBRA_API_KEY, else none)",
    )


def _add_generate_arguments(generate: argparse.ArgumentParser) -> None:
    generate.add_argument(
        "config",
        metavar="CONFIG",
        help="a model directory or a model's name on the hub, or the TOML file of a training run, "
        "whose model and engine settings are used",
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
        help="policy (the default), or judge for [pools.judge]",
    )
    generate.add_argument(
        "--engine",
        help="embedded (CPU and CUDA), vllm, sglang, echo (no model, for tests), or the "
        "module:Class of your own (default: the config's; embedded for a model directory)",
    )


def _add_plot_arguments(plot: argparse.ArgumentParser) -> None:
    _add_run_dir(plot)
    plot.add_argument(
        "-o", "--output", metavar="FILE", help=".png, .svg or .pdf (default RUN_DIR/metrics.png)"
    )


def _add_trace_arguments(trace: argparse.ArgumentParser) -> None:
    _add_run_dir(trace)
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


def _add_dataset_arguments(dataset: argparse.ArgumentParser) -> None:
    _add_run_dir(dataset)
    chosen = dataset.add_mutually_exclusive_group(required=True)
    chosen.add_argument(
        "--best", type=_positive, metavar="N", help="the N samples with the highest rewards"
    )
    chosen.add_argument(
        "--min-reward", type=_reward, metavar="R", help="all samples with at least this reward"
    )
    dataset.add_argument(
        "-o", "--output", metavar="FILE", help="a .jsonl file (default: RUN-best.jsonl here)"
    )


def _add_replay_arguments(replay: argparse.ArgumentParser) -> None:
    _add_run_dir(replay)
    _add_overrides(replay)
    replay.add_argument(
        "--steps",
        type=_steps,
        required=True,
        metavar="A:B",
        help="from step A to step B, both included; the first is 1, as in metrics.jsonl",
    )
    replay.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="a new directory (default: RUN-replay-A-B here)",
    )


def _add_dash_arguments(dash: argparse.ArgumentParser) -> None:
    _add_run_dir(dash)
    _add_address(dash, 7007)


def _add_ledger_arguments(ledger: argparse.ArgumentParser) -> None:
    _add_run_dir(ledger)
    ledger.add_argument(
        "--sample",
        metavar="ID",
        help="one sample's history: e0/7/3 for epoch 0, the prompt's id or row, sample 3",
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
    _add_run_dir(samples)
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


COMMANDS: Final = (
    Command(
        "ledger",
        "where a job's samples are",
        "umbra.runtime.cli.ledger_command:run",
        _add_ledger_arguments,
        "Shows where the samples of a job are (pending, running, partial, finished, scored, "
        "leased, trained, dropped), lists them, or shows one's history, from the ledger in its "
        "run directory. The job may be running.",
    ),
    Command(
        "samples",
        "a job's samples as text",
        "umbra.runtime.cli.ledger_command:run_samples",
        _add_samples_arguments,
        "Shows samples of a job as text: the prompt, the completion by turns with the versions of "
        "the weights that generated them, values that the agent loop recorded, reward and state. "
        "Without ids it shows the newest, the best or the worst. The job may be running.",
    ),
    Command(
        "plot",
        "a run's metrics as a picture",
        "umbra.trainer.reporting.metrics_plot:run",
        _add_plot_arguments,
        "Draws a training run's metrics over its steps: reward, entropy, the parts of a step's "
        "time, the ranks' memory by phase, and others. The run may be in progress.",
    ),
    Command(
        "trace",
        "a timeline of a run's steps",
        "umbra.runtime.cli.dump_command:run_trace",
        _add_trace_arguments,
        "Writes what ranks, supervisors, engines, rollout manager and workers did in some steps "
        "of a run as a timeline, which https://ui.perfetto.dev opens. The run may be in progress.",
    ),
    Command(
        "dataset",
        "a job's samples as a data set",
        "umbra.trainer.replay.dataset_command:run",
        _add_dataset_arguments,
        "Writes the best samples of a run as JSON Lines for supervised fine-tuning: prompt and "
        "completion, or a chat, with reward, step and versions of the weights. Truncated and "
        "repeated completions are left out, and those of several turns. The run may be in "
        "progress.",
    ),
    Command(
        "replay",
        "steps of a run, trained again without engines",
        "umbra.trainer.replay.replay_command:run",
        _add_replay_arguments,
        "Trains steps of a run again, from its checkpoint before them and the samples in its "
        "ledger, without engines. As it is, a replay computes what the run has computed, bit for "
        "bit; with settings of [train], it shows what another loss, advantage or learning rate "
        "would have made of the same samples. The run's directory is not changed.",
    ),
    Command(
        "dash",
        "a run's web page",
        "umbra.runtime.dash.dash_server:run",
        _add_dash_arguments,
        "Serves a web page about a run: charts of its metrics, engines, queues, faults, and "
        "samples as text. The run may be in progress, or have ended. Only this machine can open "
        "the page, unless --host says otherwise; there is no password.",
    ),
    Command(
        "doctor",
        "checks before a run",
        "umbra.trainer.doctor.doctor:run",
        _add_doctor_arguments,
        "Checks whether a training run could start on this node: settings, files, limits, GPUs, "
        "memory, engines. Each line has a verdict, and how to fix what fails. The exit status is "
        "0 if all is well. With `torchrun ... -m umbra.trainer.doctor CONFIG` it checks all nodes "
        "and ranks.",
    ),
    Command(
        "stop",
        "end a running job with a checkpoint",
        "umbra.runtime.cli.stop_command:run",
        _add_stop_arguments,
        "Ends a running job in order and waits for its end: the ranks end the step in progress, "
        "write a checkpoint and exit. Works on the job's node, and on any other that sees the run "
        "directory. A second call ends the job at once. Exit status: 0 if the job ended in order, "
        "with its newest checkpoint named; 3 if it ended without a checkpoint of the last steps, "
        "because the step in progress took longer than --within or the job failed; 1 if no job "
        "runs or it does not end.",
    ),
    Command(
        "preempt",
        "the same, to be started again",
        "umbra.runtime.cli.stop_command:run",
        _add_stop_arguments,
        "Like stop, for a job that its launcher is to start again: the ranks exit with status 75 "
        "(torchrun with 1), and RUN_DIR/preempted tells the launcher. launch/slurm/train.sbatch "
        "requeues such a job. Exit statuses are those of stop.",
    ),
    Command(
        "drain",
        "take a machine out of a job",
        "umbra.runtime.cli.stop_command:run",
        _add_drain_arguments,
        "Asks a machine that only generates (python -m umbra.runtime.node) to leave its job. Its "
        "trajectories continue on the job's other engines. Returns when the job has taken the "
        "request.",
    ),
    Command(
        "dump",
        "what a job is doing",
        "umbra.runtime.cli.dump_command:run",
        _add_run_dir,
        "Shows what every process of a running job is doing, on all its nodes: stacks, states of "
        "the engines, calls that wait and for how long, logs, GPUs. It is printed in short, and "
        "written in full to RUN_DIR/bundles. Nothing is stopped.",
    ),
    Command(
        "top",
        "watch a run",
        "umbra.runtime.cli.top_command:run",
        _add_top_arguments,
        "Shows what a run is doing, again each second until Ctrl-C: progress, the parts of a "
        "step's time, engines, queues, who waits for what, and the last events. Run it on the "
        "node of rank 0. Of a run that has ended, it shows what the files have.",
    ),
    Command(
        "eval",
        "scores of a model, without training",
        "umbra.trainer.serving.eval_command:run",
        _add_eval_arguments,
        "Evaluates a model on held-out prompts, data.eval and eval.sets, without training. The "
        "config is that of a training run; model.path=DIR and --checkpoint choose another model. "
        "[eval] says how: greedy, or several samples of each prompt. --compare A B compares the "
        "results.json of two evaluations instead: the difference, its interval, and a paired test.",
    ),
    Command(
        "export",
        "a checkpoint for transformers",
        "umbra.trainer.checkpoint.model_export:run",
        _add_export_arguments,
        "Writes a checkpoint as a Hugging Face directory: config, tokenizer, and weights in the "
        "data type that engines get. Needs no GPU, and as much memory as one file of weights, 5 "
        "GB or less. The run may be in progress.",
    ),
    Command(
        "serve",
        "engines behind an HTTP endpoint",
        "umbra.trainer.serving.serve_command:serve",
        _add_serve_arguments,
        "Starts the engines of a config without a trainer, and an OpenAI-compatible HTTP server "
        "in front of them, until Ctrl-C. The config is that of a training run; [model] is enough.",
    ),
    Command(
        "generate",
        "one completion",
        "umbra.trainer.serving.serve_command:generate",
        _add_generate_arguments,
        "Starts one engine, and prints one completion as it comes. A running server answers any "
        "OpenAI client.",
    ),
)
