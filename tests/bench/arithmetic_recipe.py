"""One training of the recipes in launch/recipes/arithmetic, by umbra or TRL, within a given time.

    python tests/bench/arithmetic_recipe.py umbra --metrics FILE [--task sums] [--seed 1]
        [--steps 250] [--learning-rate 1e-5] [--groups 32] [--group-size 16] [--eval-every 50]
        [--seconds 520] [--kill-at STEP] [--model FOLDER] [--lora RANK] [section.key=value ...]
    TRL_PYTHON tests/bench/arithmetic_recipe.py trl --metrics FILE [the same, without --kill-at]
        [FIELD=VALUE ... of TRL's configuration]

`trl-rloo` is TRL's RLOOTrainer. `umbra-sft` and `trl-sft` learn the worked answers (`--steps 64
--learning-rate 5e-5`), and umbra leaves its model beside FILE as NAME.model, for `--model`.

Both train the same model on the same problems and rewards, with vLLM on the same GPU; `--assets` is
the folder that `make smollm2` made. `--kill-at` kills umbra's whole job after that step and starts
it again. FILE gets one JSON object a line: the options and versions, each step (with `time_s` since
the start, and where it was evaluated the `accuracy` of greedy answers to eval.jsonl), and the end
with `final_accuracy`, which the same code measures for both. Several may run side by side, each
with CUDA_VISIBLE_DEVICES of its own.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportMissingImports=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportUntypedBaseClass=false

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from bench_report import describe, torchrun

RECIPE: Final = Path(__file__).parents[2] / "launch/recipes/arithmetic"
STOP_LIMIT_S: Final = 20.0
FINAL_S: Final = 25.0
"""Time kept for the final evaluation."""
NAMES: Final = {
    "rollout/reward_mean": "reward",
    "train/loss": "loss",
    "train/entropy": "entropy",
    "train/grad_norm": "grad_norm",
    "train/behaviour_kl": "behaviour_kl",
    "rollout/completion_len_mean": "completion_len",
    "rollout/truncated_share": "truncated_share",
    "time/step_s": "step_s",
    "eval/accuracy": "accuracy",
    "critic/explained_variance": "explained_variance",
    "critic/value_mean": "value",
}
"""Metric of umbra -> its name in FILE."""
TRL_NAMES: Final = {
    "loss": "loss",
    "reward": "reward",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "completions/mean_length": "completion_len",
    "completions/clipped_ratio": "truncated_share",
}
STARTED: Final = time.time()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trainer", choices=["umbra", "trl", "trl-rloo", "umbra-sft", "trl-sft"])
    parser.add_argument("--metrics", type=Path, required=True)
    parser.add_argument("--assets", type=Path, help="default: where `make smollm2` has it")
    parser.add_argument("--model", type=Path, help="default: that of the assets")
    parser.add_argument("--task", default="sums", help="sums or boxed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--eval-limit", type=int, default=512, help="held-out problems")
    parser.add_argument("--seconds", type=float, default=520.0, help="for all of it")
    parser.add_argument("--kill-at", type=int, default=0, metavar="STEP")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="alpha is twice that")
    parser.add_argument(
        "settings",
        nargs="*",
        help="section.key=value of umbra, or FIELD=VALUE of TRL's configuration",
    )
    options = parser.parse_intermixed_args()
    if options.assets is None:
        options.assets = runpy.run_path(str(RECIPE / "arithmetic_assets.py"))["assets_folder"]()
    options.model = options.model or options.assets / "model"
    options.metrics.parent.mkdir(parents=True, exist_ok=True)
    with options.metrics.open("w", buffering=1) as file:

        def write(row: dict[str, Any]) -> None:
            file.write(json.dumps(row, default=str) + "\n")

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        described = describe("torch", "transformers", "vllm", "trl")
        write({"options": vars(options), "device": device, **described})
        run = run_umbra if options.trainer.startswith("umbra") else run_trl
        return run(options, write)


def recipe_of(options: argparse.Namespace) -> dict[str, Any]:
    return tomllib.loads((RECIPE / f"{options.task}.toml").read_text())


def run_umbra(options: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> int:
    from transformers import AutoModelForCausalLM

    from umbra.trainer.reporting.metrics_loggers import read_metrics

    deadline = STARTED + options.seconds - FINAL_S
    is_sft = options.trainer == "umbra-sft"
    with tempfile.TemporaryDirectory(prefix="umbra-recipe-") as folder:
        run_dir = Path(folder) / "run"
        metrics = run_dir / "metrics.jsonl"
        settings = {
            "run.dir": run_dir,
            "run.resume": "auto",
            "model.path": options.model,
            "data.train": options.assets / options.task / "train.jsonl",
            "train.steps": options.steps,
            "train.learning_rate": options.learning_rate,
            "train.seed": options.seed,
        }
        if is_sft:
            settings["data.train"] = options.assets / "sums/worked.jsonl"
        else:
            settings |= {
                "data.eval": options.assets / options.task / "eval.jsonl",
                "data.eval_limit": options.eval_limit,
                "reward.python_path": json.dumps([str(RECIPE)]),
                "rollout.groups_per_step": options.groups,
                "rollout.group_size": options.group_size,
                "train.eval_every": options.eval_every,
            }
        if options.lora:
            settings |= {"model.lora.rank": options.lora, "model.lora.alpha": 2 * options.lora}
        program = "umbra.trainer.sft" if is_sft else "umbra.trainer"
        config = RECIPE / ("worked.toml" if is_sft else f"{options.task}.toml")
        given = [*(f"{key}={value}" for key, value in settings.items()), *options.settings]
        command = torchrun("-m", program, str(config), *given)
        if options.kill_at:
            run_job(command, metrics, deadline, kill_at=options.kill_at)
        status = run_job(command, metrics, deadline)
        for row in read_metrics(metrics):
            named = {NAMES[name]: value for name, value in row.items() if name in NAMES}
            write({"step": row["step"], "time_s": row["time"] - STARTED} | named)
        end: dict[str, Any] = {"status": status, "train_s": time.time() - STARTED}
        if (run_dir / "export").exists():
            auto: Any = AutoModelForCausalLM
            model = auto.from_pretrained(run_dir / "export", dtype=torch.float32)
            device = "cuda" if torch.cuda.is_available() else "cpu"
            end["final_accuracy"] = accuracy_of(model.to(device), options)
            if is_sft:
                shutil.move(run_dir / "export", options.metrics.with_suffix(".model"))
        write(end | {"wall_s": time.time() - STARTED})
    return status


def run_job(command: list[str], metrics: Path, deadline: float, kill_at: int = 0) -> int:
    """The job's status; ends it by SIGTERM when the time is over, by SIGKILL after a step."""
    from umbra.trainer.reporting.metrics_loggers import read_metrics

    with subprocess.Popen(command, start_new_session=True) as job:
        while job.poll() is None and time.time() < deadline:
            if kill_at and any(row["step"] >= kill_at for row in read_metrics(metrics)):
                os.killpg(job.pid, signal.SIGKILL)
            time.sleep(0.2)
        if job.poll() is None:
            job.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(STOP_LIMIT_S)
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
        return job.wait()


def run_trl(options: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> int:
    import datasets  # pyright: ignore[reportMissingTypeStubs]
    import trl
    from transformers import AutoTokenizer, TrainerCallback

    with socket.create_server(("127.0.0.1", 0)) as free:  # 29500, TRL's own, serves one job only
        os.environ.setdefault("MASTER_PORT", str(free.getsockname()[1]))
    has_gpu = torch.cuda.is_available()
    recipe = recipe_of(options)
    deadline = STARTED + options.seconds - FINAL_S
    kind = {"trl": "GRPO", "trl-rloo": "RLOO", "trl-sft": "SFT"}[options.trainer]
    name = "sums/worked.jsonl" if kind == "SFT" else f"{options.task}/train.jsonl"
    rows: list[dict[str, Any]] = []
    for line in (options.assets / name).read_text().splitlines():
        row = json.loads(line)
        chat = row["messages"]
        work = {"completion": chat[1:]} if kind == "SFT" else {"answer": row["answer"]}
        rows.append({"prompt": chat[:1]} | work)
    score = reward_of(options)

    def reward(
        prompts: list[Any], completions: list[Any], answer: list[str], **_: Any
    ) -> list[float]:
        texts = [completion[-1]["content"] for completion in completions]
        return score([], texts, answer=answer)

    class Log(TrainerCallback):
        """Writes a row as soon as TRL logs a step, and evaluates where umbra does."""

        def __init__(self) -> None:
            self.began = time.time()

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            write({"step": 0, "accuracy": accuracy_of(trainer.model, options)})

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = time.time()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            self.step_s = time.time() - self.began
            if time.time() > deadline:
                control.should_training_stop = True
            return control

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
        ) -> None:
            if "loss" not in logs:
                return
            row = {"step": state.global_step, "time_s": time.time() - STARTED}
            row |= {TRL_NAMES[name]: float(logs[name]) for name in TRL_NAMES if name in logs}
            row["step_s"] = self.step_s
            if state.global_step % options.eval_every == 0:
                row["accuracy"] = accuracy_of(trainer.model, options)
            write(row)

    with tempfile.TemporaryDirectory(prefix="trl-recipe-") as folder:
        own: dict[str, Any] = dict(
            output_dir=folder,
            max_steps=options.steps,
            learning_rate=options.learning_rate,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            bf16=has_gpu,
            use_cpu=not has_gpu,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=options.seed,
        )
        if kind == "SFT":
            own |= dict(per_device_train_batch_size=64, max_length=256)
        else:
            own |= dict(
                per_device_train_batch_size=options.groups * options.group_size,
                num_generations=options.group_size,
                gradient_accumulation_steps=1,
                max_completion_length=recipe["rollout"]["max_new_tokens"],
                temperature=1.0,
                beta=0.0,
                epsilon=0.2,
                num_iterations=1,
                use_vllm=has_gpu,
                vllm_mode="colocate",
                vllm_gpu_memory_utilization=0.3,
                vllm_max_model_length=recipe["pool"]["max_context_len"],
            )
        if kind == "GRPO":  # "dapo" is the mean over the batch's tokens
            own |= dict(loss_type="dapo", scale_rewards="group")
        given = (setting.partition("=")[::2] for setting in options.settings)
        config = getattr(trl, f"{kind}Config")(
            **own | {name: as_value(text) for name, text in given}
        )
        others: dict[str, Any] = {} if kind == "SFT" else {"reward_funcs": reward}
        if options.lora:
            from peft import LoraConfig

            others["peft_config"] = LoraConfig(
                r=options.lora, lora_alpha=2 * options.lora, target_modules="all-linear"
            )
        trainer = getattr(trl, f"{kind}Trainer")(
            model=str(options.model),
            args=config,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(options.model),
            callbacks=[Log()],
            **others,
        )
        trainer.train()
        end = {"status": 0, "train_s": time.time() - STARTED}
        end["final_accuracy"] = accuracy_of(trainer.model, options)
        write(end | {"wall_s": time.time() - STARTED})
    return 0


def as_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def reward_of(options: argparse.Namespace) -> Callable[..., list[float]]:
    module, _, function = recipe_of(options)["reward"]["function"].partition(":")
    found: Callable[..., list[float]] = runpy.run_path(str(RECIPE / f"{module}.py"))[function]
    return found


def accuracy_of(model: Any, options: argparse.Namespace) -> float:
    """The share of held-out problems that greedy answers of transformers solve."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    lines = (options.assets / options.task / "eval.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[: options.eval_limit]]
    texts = [
        tokenizer.apply_chat_template(row["messages"], tokenize=False, add_generation_prompt=True)
        for row in rows
    ]
    device = next(model.parameters()).device
    inputs = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt")
    inputs = inputs.to(device)
    was_training = model.training
    model.eval()
    with (
        torch.no_grad(),
        torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"),
    ):
        tokens = model.generate(
            **inputs,
            max_new_tokens=recipe_of(options)["rollout"]["max_new_tokens"],
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
    model.train(was_training)
    answers = tokenizer.batch_decode(
        tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    rewards = reward_of(options)([], answers, answer=[row["answer"] for row in rows])
    return sum(reward >= 1.0 for reward in rewards) / len(rows)


if __name__ == "__main__":
    sys.exit(main())
