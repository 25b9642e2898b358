"""The command lines of `umbra`: each command's purpose, arguments and module."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, NamedTuple, TypeVar

T = TypeVar("T", int, float)


class Argument:
    """One argument of a command, with the parameters of `add_argument`."""

    def __init__(self, *names: str, **options: Any) -> None:
        self.names = names
        self.options = options


class Command(NamedTuple):
    """One subcommand. At most one argument of each of the `alternatives` may be given."""

    name: str
    purpose: str  # in the list of commands
    target: str  # module:function, imported when the command is called
    description: str
    arguments: Sequence[Argument] = ()
    alternatives: Sequence[Argument] = ()
    needs_alternative: bool = False
    sft_lacks: str = ""  # what it needs of RUN_DIR, and a run of SFT does not have


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
        own = commands.add_parser(
            command.name, help=command.purpose, description=command.description
        )
        for argument in command.arguments:
            own.add_argument(*argument.names, **argument.options)
        if command.alternatives:
            group = own.add_mutually_exclusive_group(required=command.needs_alternative)
            for argument in command.alternatives:
                group.add_argument(*argument.names, **argument.options)
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


_RUN_DIR: Final = Argument("run_dir", metavar="RUN_DIR", help="the job's run.dir")
_OVERRIDES: Final = Argument(
    "overrides",
    nargs="*",
    default=[],
    metavar="section.key=value",
    help="settings to change; an empty value unsets one",
)
_HOST: Final = Argument("--host", default="127.0.0.1", help="address to bind (default 127.0.0.1)")
_EMA: Final = Argument(
    "--ema",
    action="store_true",
    help="use the moving average of the checkpoint's weights (train.ema)",
)
_JSON: Final = Argument("--json", action="store_true", help="print one JSON object, nothing else")
_BEST: Final = Argument(
    "--best", type=_positive, metavar="N", help="the N samples with the highest rewards"
)
_WITHIN: Final = Argument(
    "--within",
    type=_seconds,
    default=300.0,
    metavar="SECONDS",
    help="longest time for the step in progress and its checkpoint (default 300)",
)
_SAMPLE: Final = "e0/7/3 for epoch 0, the prompt's id or row, sample 3"
_STEP: Final = "optimizer step N; the first is 1, as in metrics.jsonl"
_FIRST_TO_LAST: Final = "from step A to step B, both included; the first is 1, as in metrics.jsonl"


def _port_from(default: int) -> Argument:
    help = f"port to bind; 0 chooses a free one (default {default})"
    return Argument("--port", type=_port, default=default, help=help)


COMMANDS: Final = (
    Command(
        "ledger",
        "where a job's samples are",
        "umbra.runtime.cli.ledger_command:run",
        "Shows where the samples of a job are (pending, running, partial, finished, scored, "
        "leased, trained, dropped), lists them, or shows one's history, from the ledger in its "
        "run directory. The job may be running.",
        (
            _RUN_DIR,
            Argument("--sample", metavar="ID", help=f"one sample's history: {_SAMPLE}"),
            Argument(
                "--samples",
                action="store_true",
                help="list samples, the last admitted first; --state, --step and --newest imply it",
            ),
            Argument("--state", help="list samples in this state, such as dropped"),
            Argument("--step", type=_positive, metavar="N", help=f"list samples of {_STEP}"),
            Argument("--newest", type=_positive, metavar="N", help="list at most N (default 20)"),
            _JSON,
        ),
        sft_lacks="samples",
    ),
    Command(
        "samples",
        "a job's samples as text",
        "umbra.runtime.cli.ledger_command:run_samples",
        "Shows samples of a job as text: the prompt, the completion by turns with the versions of "
        "the weights that generated them, values that the agent loop recorded, reward and state. "
        "Without ids it shows the newest, the best or the worst. The job may be running.",
        (
            _RUN_DIR,
            Argument("ids", nargs="*", default=[], metavar="ID", help=f"a sample: {_SAMPLE}"),
            Argument("--step", type=_positive, metavar="N", help=f"of {_STEP}"),
            Argument(
                "--model",
                metavar="DIR",
                help="directory with the tokenizer (default: the run's model)",
            ),
            _JSON,
        ),
        (
            _BEST,
            Argument(
                "--worst", type=_positive, metavar="N", help="the N samples with the lowest rewards"
            ),
        ),
        sft_lacks="samples",
    ),
    Command(
        "plot",
        "a run's metrics as a picture",
        "umbra.trainer.reporting.metrics_plot:run",
        "Draws a training run's metrics over its steps: reward, entropy, the parts of a step's "
        "time, the ranks' memory by phase, and others. The run may be in progress.",
        (
            _RUN_DIR,
            Argument(
                "-o",
                "--output",
                metavar="FILE",
                help=".png, .svg or .pdf (default RUN_DIR/metrics.png)",
            ),
        ),
    ),
    Command(
        "trace",
        "a timeline of a run's steps",
        "umbra.runtime.tracing.trace_files:run",
        "Writes what ranks, supervisors, engines, rollout manager and workers did in some steps "
        "of a run as a timeline, which https://ui.perfetto.dev opens. The run may be in progress.",
        (
            _RUN_DIR,
            Argument(
                "--steps",
                type=_steps,
                metavar="A:B",
                help=f"{_FIRST_TO_LAST} (default: all that the trace has)",
            ),
            Argument(
                "-o",
                "--output",
                metavar="FILE",
                help=".json or .json.gz (default RUN_DIR/trace/steps-A-B.json.gz)",
            ),
        ),
        sft_lacks="trace",
    ),
    Command(
        "dataset",
        "a job's samples as a data set",
        "umbra.trainer.replay.dataset_command:run",
        "Writes the best samples of a run as JSON Lines for supervised fine-tuning: prompt and "
        "completion, or a chat, with reward, step and versions of the weights. Truncated and "
        "repeated completions are left out, and those of several turns. The run may be in "
        "progress.",
        (
            _RUN_DIR,
            Argument(
                "-o",
                "--output",
                metavar="FILE",
                help="a .jsonl file (default: RUN-best.jsonl here)",
            ),
        ),
        (
            _BEST,
            Argument(
                "--min-reward",
                type=_reward,
                metavar="R",
                help="all samples with at least this reward",
            ),
        ),
        needs_alternative=True,
        sft_lacks="samples",
    ),
    Command(
        "replay",
        "steps of a run, trained again without engines",
        "umbra.trainer.replay.replay_command:run",
        "Trains steps of a run again, from its checkpoint before them and the samples in its "
        "ledger, without engines. As it is, a replay computes what the run has computed, bit for "
        "bit; with settings of [train], it shows what another loss, advantage or learning rate "
        "would have made of the same samples. The run's directory is not changed.",
        (
            _RUN_DIR,
            _OVERRIDES,
            Argument("--steps", type=_steps, required=True, metavar="A:B", help=_FIRST_TO_LAST),
            Argument(
                "-o",
                "--output",
                metavar="DIR",
                help="a new directory (default: RUN-replay-A-B here)",
            ),
        ),
        sft_lacks="samples",
    ),
    Command(
        "dash",
        "a run's web page",
        "umbra.runtime.dash.dash_server:run",
        "Serves a web page about a run: charts of its metrics, engines, queues, faults, and "
        "samples as text. The run may be in progress, or have ended. Only this machine can open "
        "the page, unless --host says otherwise; there is no password.",
        (_RUN_DIR, _HOST, _port_from(7007)),
    ),
    Command(
        "doctor",
        "checks before a run",
        "umbra.trainer.doctor.doctor:run",
        "Checks whether a training run could start on this node: settings, files, limits, GPUs, "
        "memory, engines. Each line has a verdict, and how to fix what fails. The exit status is "
        "0 if all is well. With `torchrun ... -m umbra.trainer.doctor CONFIG` it checks all nodes "
        "and ranks.",
        (Argument("config", metavar="CONFIG", help="the run's TOML file"), _OVERRIDES),
    ),
    Command(
        "stop",
        "end a running job with a checkpoint",
        "umbra.runtime.cli.job_commands:run",
        "Ends a running job in order and waits for its end: the ranks end the step in progress, "
        "write a checkpoint and exit. Works on the job's node, and on any other that sees the run "
        "directory. A second call ends the job at once. Exit status: 0 if the job ended in order, "
        "with its newest checkpoint named; 3 if it ended without a checkpoint of the last steps, "
        "because the step in progress took longer than --within or the job failed; 1 if no job "
        "runs or it does not end.",
        (_RUN_DIR, _WITHIN),
        sft_lacks="supervisor to ask: use Ctrl-C, or SIGTERM for torchrun",
    ),
    Command(
        "preempt",
        "the same, to be started again",
        "umbra.runtime.cli.job_commands:run",
        "Like stop, for a job that its launcher is to start again: the ranks exit with status 75 "
        "(torchrun with 1), and RUN_DIR/preempted tells the launcher. launch/slurm/train.sbatch "
        "requeues such a job. Exit statuses are those of stop.",
        (_RUN_DIR, _WITHIN),
        sft_lacks="supervisor to ask: use Ctrl-C, or SIGTERM for torchrun",
    ),
    Command(
        "drain",
        "take a machine out of a job",
        "umbra.runtime.cli.job_commands:run",
        "Asks a machine that only generates (python -m umbra.runtime.node) to leave its job. Its "
        "trajectories continue on the job's other engines. Returns when the job has taken the "
        "request.",
        (
            _RUN_DIR,
            Argument("node", metavar="NODE", help="its number or id, as the job reported it"),
        ),
        sft_lacks="supervisor to ask",
    ),
    Command(
        "dump",
        "what a job is doing",
        "umbra.runtime.cli.job_commands:dump",
        "Shows what every process of a running job is doing, on all its nodes: stacks, states of "
        "the engines, calls that wait and for how long, logs, GPUs. It is printed in short, and "
        "written in full to RUN_DIR/bundles. Nothing is stopped.",
        (_RUN_DIR,),
        sft_lacks="supervisor to ask",
    ),
    Command(
        "top",
        "watch a run",
        "umbra.runtime.cli.top_command:run",
        "Shows what a run is doing, again each second until Ctrl-C: progress, the parts of a "
        "step's time, engines, queues, who waits for what, and the last events. Run it on the "
        "node of rank 0. Of a run that has ended, it shows what the files have.",
        (
            _RUN_DIR,
            Argument("--once", action="store_true", help="print one frame and exit"),
        ),
        sft_lacks="supervisor: umbra plot and umbra dash show its metrics",
    ),
    Command(
        "eval",
        "scores of a model, without training",
        "umbra.trainer.serving.eval_command:run",
        "Evaluates a model on held-out prompts, data.eval and eval.sets, without training. The "
        "config is that of a training run; model.path=DIR and --checkpoint choose another model. "
        "[eval] says how: greedy, or several samples of each prompt. --compare A B compares the "
        "results.json of two evaluations instead: the difference, its interval, and a paired test.",
        (
            Argument("config", nargs="?", metavar="CONFIG", help="the TOML file of a training run"),
            _OVERRIDES,
            Argument(
                "--compare",
                nargs=2,
                metavar=("A", "B"),
                help="two results.json of the same prompts, or the run.dir of each, to compare "
                "instead of an evaluation",
            ),
            Argument(
                "--checkpoint",
                metavar="DIR",
                help="a checkpoint of the run, such as RUN_DIR/checkpoints/step-000040",
            ),
            _EMA,
        ),
    ),
    Command(
        "export",
        "a checkpoint for transformers",
        "umbra.trainer.checkpoint.model_export:run",
        "Writes a checkpoint as a Hugging Face directory: config, tokenizer, and weights in the "
        "data type that engines get. Needs no GPU, and as much memory as one file of weights, 5 "
        "GB or less. The run may be in progress.",
        (
            Argument(
                "checkpoint", metavar="CHECKPOINT", help="such as RUN_DIR/checkpoints/step-000040"
            ),
            Argument(
                "out",
                nargs="?",
                metavar="OUT",
                help="a new directory (default: RUN-step-000040 here)",
            ),
            Argument(
                "--model",
                metavar="DIR",
                help="the model that the run started from (default: where the run found it)",
            ),
            _EMA,
        ),
    ),
    Command(
        "serve",
        "engines behind an HTTP endpoint",
        "umbra.trainer.serving.serve_command:serve",
        "Starts the engines of a config without a trainer, and an OpenAI-compatible HTTP server "
        "in front of them, until Ctrl-C. The config is that of a training run; [model] is enough.",
        (
            Argument(
                "config",
                metavar="CONFIG",
                help="TOML file, or a model directory, or a model's name on the hub",
            ),
            _OVERRIDES,
            _HOST,
            _port_from(8000),
            Argument(
                "--api-key",
                metavar="KEY",
                help="key that clients must send (default: UMBRA_API_KEY, else none)",
            ),
        ),
    ),
    Command(
        "generate",
        "one completion",
        "umbra.trainer.serving.serve_command:generate",
        "Starts one engine, and prints one completion as it comes. A running server answers any "
        "OpenAI client.",
        (
            Argument(
                "config",
                metavar="CONFIG",
                help="a model directory or a model's name on the hub, or the TOML file of a "
                "training run, whose model and engine settings are used",
            ),
            _OVERRIDES,
            Argument("--prompt", type=_text, required=True, metavar="TEXT"),
            Argument(
                "--chat",
                action="store_true",
                help="the prompt is a user's message, for a chat template",
            ),
            Argument(
                "--max-tokens", type=_positive, metavar="N", help="default: the rest of the context"
            ),
            Argument(
                "--temperature",
                type=_temperature,
                default=1.0,
                metavar="T",
                help="0 is greedy (default 1)",
            ),
            Argument("--seed", type=_seed, help="the same seed gives the same text again"),
            Argument(
                "--pool", metavar="NAME", help="policy (the default), or judge for [pools.judge]"
            ),
            Argument(
                "--engine",
                help="embedded (CPU and CUDA), vllm, sglang, echo (no model, for tests), or the "
                "module:Class of your own (default: the config's; embedded for a model directory)",
            ),
        ),
    ),
)
