"""`umbra samples` and `umbra dataset` on an artificial ledger: which samples they choose, and what
of them they show or write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import END, byte_tokenizer
from ledger_samples import admitted, runs_of
from minimal_config import config_with

from umbra.runtime.cli.umbra_command import main
from umbra.runtime.rollout.ledger.ledger_events import (
    Cut,
    Dropped,
    Event,
    Finished,
    Leased,
    PromptGiven,
    Recorded,
    Reset,
    Restored,
    RewardParts,
    Scored,
    Started,
    Tokens,
    Version,
    encode_batches,
    uids_of,
)
from umbra.runtime.rollout.ledger.ledger_history import Position, ledger_folder
from umbra.runtime.rollout.ledger.ledger_index import LedgerIndex
from umbra.runtime.rollout.ledger.ledger_log import LedgerLog
from umbra.runtime.rollout.prompts import write_prompts
from umbra.runtime.text.model_tokenizer import ModelTokenizer, tokenizer_path
from umbra.trainer.checkpoint.run_dir import record_settings
from umbra.trainer.replay import dataset_command

BOTH = uids_of(0, 1)


@dataclass(frozen=True)
class Run:
    """A run directory with a ledger, and what commands print about it."""

    folder: Path
    tokenizer: ModelTokenizer
    capsys: pytest.CaptureFixture[str]

    @property
    def ledger(self) -> Path:
        return ledger_folder(self.folder, "rollouts")

    def write(self, events: Sequence[Event]) -> None:
        """Each event gets a frame of its own."""
        with LedgerLog.open(self.ledger, "job") as log:
            for event in events:
                log.write(encode_batches(0.0, [event]))

    def text(self, uid: int, start: int, version: int, text: str) -> Tokens:
        return runs_of((uid, start, version, self.tokenizer.encode(text)))

    def show(self, command: str, *argv: str) -> str:
        assert main([command, str(self.folder), *argv]) == 0
        return self.capsys.readouterr().out

    def shown_ids(self, *argv: str) -> list[str]:
        found = json.loads(self.show("samples", *argv, "--json"))
        return [sample["sample_id"] for sample in found["samples"]]

    def error(self, command: str, *argv: str) -> str:
        assert main([command, str(self.folder), *argv]) == 2
        output = self.capsys.readouterr()
        assert output.out == ""
        return output.err


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    folder = tmp_path / "run"
    tokenizer = byte_tokenizer(folder)
    prompts: list[dict[str, Any]] = [
        {"id": name, "prompt": text, "tokens": np.asarray(tokenizer.encode(text), "<i4").tobytes(),
         "row": {"prompt": text, "messages": [{"role": "user", "content": text}]}}
        for name, text in (("a", "2+2="), ("b", "3+3="))
    ]  # fmt: skip
    write_prompts(folder / "prompts.msgpack", prompts)
    return Run(folder, tokenizer, capsys)


def test_an_agent_loops_turns_answers_and_values_are_shown(run: Run) -> None:
    run.write([
        Version(0, 0),
        admitted(0, "a"),
        Started(BOTH),
        PromptGiven(0, np.asarray(run.tokenizer.encode("Q: 2+2="), np.int32)),
        run.text(0, 0, 0, "thr"),
        Cut(uids_of(0), "sync"),
        Version(1, 1),
        Started(uids_of(0)),
        run.text(0, 3, 1, f"ee{END}"),
        run.text(0, 6, -1, "\nno: \x1b[2J"),
        run.text(0, 15, 1, "4"),
        Recorded(0, "turn/1", [0, 6, "stop"]),
        Recorded(0, "turn/2", [15, 16, "length"]),
        run.text(0, 16, 1, f"{END}"),
        Recorded(0, "turn/3", [16, 17, "stop"]),
        Recorded(0, "once/judge", {"verdict": "right\né", "score": 1, "raw": b"\xff"}),
        Finished(uids_of(0), ["stop"]),
        Scored(uids_of(0), np.asarray([0.5])),
    ])  # fmt: skip

    text = run.show("samples", "e0/a/0")

    assert text.splitlines() == [
        "e0/a/0: waits for its step, stop",
        "  reward 0.5, 17 tokens, 1 interruption",
        "prompt of the agent loop",
        "  | Q: 2+2=",
        "policy, version 0, 1, 6 tokens, stop",
        "  | three<eos>",
        "given, 9 tokens",
        "  | ",
        r"  | no: \x1b[2J",
        "policy, version 1, 1 token, length",
        "  | 4",
        "policy, version 1, 1 token, stop",
        "  | <eos>",
        "recorded judge",
        r'  | {"verdict": "right\né", "score": 1, "raw": "b' r"'\\xff'" '"}',
    ]
    (sample,) = json.loads(run.show("samples", "e0/a/0", "--json"))["samples"]
    assert [turn["versions"] for turn in sample["turns"]] == [[0, 1], [], [1], [1]]
    assert sample["turns"][1]["text"] == "\nno: \x1b[2J"
    assert sample["recorded"]["judge"]["score"] == 1


def test_what_was_dropped_rolled_back_or_interrupted_is_shown(run: Run) -> None:
    run.write([
        Version(0, 0),
        admitted(0, "a"),
        admitted(2, "b"),
        admitted(4, "gone"),
        Started(uids_of(0, 1, 2, 3, 4)),
        runs_of(*[(uid, 0, 0, run.tokenizer.encode(f"of {uid}")) for uid in range(4)]),
        Dropped(BOTH, "too old", "of step 0"),
        Cut(uids_of(2), "sync"),
        Version(1, 1),
        Started(uids_of(2)),
        run.text(2, 4, 1, " and more"),
        run.text(3, 4, 1, " and more"),
        Cut(uids_of(2, 3, 4), "the rollout manager restarted"),
        Restored(0, 0),
        Started(uids_of(2)),
        run.text(2, 4, 0, "!"),
        Reset(4, "its process died"),
    ])  # fmt: skip

    text = run.show("samples", "e0/a/1", "e0/b/0", "e0/b/1", "e0/gone/0")

    assert text.split("\n\n") == [
        "e0/a/1: dropped, too old\n  reward none, 4 tokens\nprompt\n  | 2+2=\n"
        "policy, version 0, 4 tokens\n  | of 1",
        "e0/b/0: is being generated\n"
        "  reward none, 5 tokens, 2 interruptions, 9 tokens rolled back\n"
        "prompt\n  | 3+3=\npolicy, version 0, 5 tokens\n  | of 2!",
        "e0/b/1: waits to be continued\n"
        "  reward none, 4 tokens, 1 interruption, 9 tokens rolled back\n"
        "prompt\n  | 3+3=\npolicy, version 0, 4 tokens\n  | of 3",
        "e0/gone/0: waits for an engine\n  reward none, 0 tokens, 1 interruption, 1 reset\n"
        "prompt\n  not in prompts.msgpack\nno tokens\n",
    ]


def scored_groups(
    tokenizer: ModelTokenizer,
    of_a: Sequence[float] = (0.0, 1.0),
    of_b: Sequence[float] = (2.0, -1.0),
) -> list[Event]:
    """Two groups with these rewards, of steps 1 and 2, and a sample without tokens."""
    events: list[Event] = [Version(0, 0)]
    for first, name, rewards in ((0, "a", of_a), (2, "b", of_b)):
        uids = uids_of(first, first + 1)
        events += [
            admitted(first, name),
            Started(uids),
            runs_of(*[(uid, 0, 0, tokenizer.encode("x")) for uid in uids.tolist()]),
            Finished(uids, ["stop", "length"]),
            Scored(uids, np.asarray(rewards)),
            Leased(first // 2, uids),
        ]
    return [*events, admitted(4, "c", 1)]


@pytest.mark.parametrize(
    ("choice", "ids"),
    [
        (["--best", "1"], ["e0/b/0"]),
        (["--best", "3"], ["e0/b/0", "e0/a/1", "e0/a/0"]),
        (["--worst", "2"], ["e0/b/1", "e0/a/0"]),
        (["--worst", "1", "--step", "1"], ["e0/a/0"]),
        (["--best", "9", "--step", "2"], ["e0/b/0", "e0/b/1"]),
        (["--step", "1"], ["e0/a/1", "e0/a/0"]),
        (["--step", "3"], []),
        ([], ["e0/b/1", "e0/b/0", "e0/a/1"]),
        (["e0/a/1", "e0/c/0"], ["e0/a/1", "e0/c/0"]),
    ],
)
def test_samples_are_chosen_by_reward_step_and_id(
    run: Run, choice: list[str], ids: list[str]
) -> None:
    run.write(scored_groups(run.tokenizer))

    assert run.shown_ids(*choice) == ids


def test_of_equal_rewards_different_prompts_come_first(run: Run) -> None:
    run.write(scored_groups(run.tokenizer, (0.0, 0.0), (0.0, 0.0)))

    assert run.shown_ids("--worst", "2") == ["e0/b/1", "e0/a/1"]


def test_the_last_line_tells_what_was_chosen_of_how_many(run: Run) -> None:
    run.write(scored_groups(run.tokenizer))

    def last_line(*choice: str) -> str:
        return run.show("samples", *choice).splitlines()[-1]

    assert last_line("--worst", "1") == "the worst 1, of 4 samples with a reward"
    assert last_line("--best", "1", "--step", "2").startswith("the best 1 of step 2, of 2 samples")
    assert last_line() == (
        "the newest 3, of 4 samples with a completion; choose by id, --best N or --worst N"
    )
    assert last_line("--step", "7") == "no samples of step 7: there are steps 1 to 2"


def test_the_tokenizer_may_be_elsewhere_than_recorded(run: Run, tmp_path: Path) -> None:
    run.write(scored_groups(run.tokenizer))
    tokenizer_path(run.folder).rename(tmp_path / "moved")

    assert "policy.json does not exist, so the tokenizer is unknown: give" in run.error("samples")
    assert run.shown_ids("--best", "1", "--model", f"{tmp_path}/moved") == ["e0/b/0"]


def test_texts_that_left_the_ledger_are_said_to_be_no_longer_kept(run: Run) -> None:
    uids = uids_of(0, 1, 2)
    run.write(
        [
            Version(0, 0),
            admitted(0, "a", 3),
            Started(uids),
            runs_of(*[(uid, 0, 0, run.tokenizer.encode("x")) for uid in uids.tolist()]),
            Finished(uids, ["stop"] * 3),
            Scored(uids, np.asarray([1.0, 0.5, 0.0])),
            Leased(0, uids),
            Version(1, 1),
        ]
    )
    LedgerLog.open(run.ledger, "job").close()
    LedgerIndex(run.ledger).remove_oldest(0, Position(2, 0, 0))

    kept, gone = run.show("samples", "e0/a/0", "e0/a/1").split("\n\n")

    assert "policy, version 0, 1 token\n  | x" in kept
    assert gone.endswith("prompt\n  | 2+2=\nno longer kept, see rollout.ledger_gb\n")
    text = run.show("ledger", "--sample", "e0/a/0")
    assert "history\n  no longer kept, see rollout.ledger_gb; digest of the tokens: " in text


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["samples", "e0/a/7"], "has no sample 'e0/a/7'; did you mean e0/a/0 or e0/a/1?"),
        (["samples", "e0/a/0", "--best", "1"], "given by id need no --step, --best or --worst"),
    ],
)
def test_wrong_use_is_an_error(run: Run, wrong: list[str], message: str) -> None:
    run.write(scored_groups(run.tokenizer))

    assert message in run.error(*wrong)


def scored(run: Run, first_uid: int, name: str, *answers: str) -> list[Event]:
    """Two samples of a prompt with these texts, from admission to delivery: the first of all with
    the reward 0, the next with 0.1, and so on, of two parts."""
    uids = uids_of(first_uid, first_uid + 1)
    rewards = np.asarray([first_uid, first_uid + 1]) / 10
    return [
        admitted(first_uid, name),
        Started(uids),
        *(run.text(uid, 0, 0, text) for uid, text in zip(uids.tolist(), answers, strict=True)),
        Finished(uids, ["stop", "stop"]),
        RewardParts(uids, ["exact", "short"], np.asarray([1.0, np.nan, 0.0, rewards[1]])),
        Scored(uids, rewards),
        Leased(0, uids),
    ]


def dataset_rows(run: Run, data_format: str, *argv: str, **data: Any) -> list[dict[str, Any]]:
    """The rows that `umbra dataset` writes, and its lines in `run.capsys`."""
    config = config_with(
        run={"dir": str(run.folder)},
        data={"train": "x", "format": data_format, **data},
        rollout={"skip_special_tokens": True},  # the tokenizer here has no end token
    )
    record_settings(config, {})
    path = run.folder / "new" / "best.jsonl"
    assert main(["dataset", str(run.folder), "-o", str(path), *argv]) == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_parts_of_a_reward_are_shown(run: Run) -> None:
    run.write([Version(0, 0), *scored(run, 0, "a", f"4{END}", f"5{END}")])

    assert "  reward 0 (exact 1), 2 tokens" in run.show("samples", "e0/a/0")
    assert "  reward 0.1 (exact 0, short 0.1), 2 tokens" in run.show("samples", "e0/a/1")
    assert "reward 0.1 (exact 0, short 0.1), 2 tokens" in run.show("ledger", "--sample", "e0/a/1")
    (found,) = json.loads(run.show("samples", "e0/a/0", "--json"))["samples"]
    assert found["reward_parts"] == {"exact": 1.0, "short": None}


@pytest.mark.parametrize("chunk", [1, 2, 4096])
def test_the_best_samples_become_a_data_set_of_prompts_and_completions(
    run: Run, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(dataset_command, "_CHUNK", chunk)
    run.write([
        Version(0, 0),
        *scored(run, 0, "a", f"4{END}", f"5{END}"),
        *scored(run, 2, "b", f"6{END}", f"6{END}"),
    ])  # fmt: skip

    rows = dataset_rows(run, "text", "--best", "2")

    assert rows == [
        {"prompt": "3+3=", "completion": "6", "reward": 0.3, "step": 1, "sample_id": "e0/b/1",
         "reward_parts": {"exact": 0.0, "short": 0.3}, "versions": [0]},
        {"prompt": "2+2=", "completion": "5", "reward": 0.1, "step": 1, "sample_id": "e0/a/1",
         "reward_parts": {"exact": 0.0, "short": 0.1}, "versions": [0]},
    ]  # fmt: skip
    assert run.capsys.readouterr().out.splitlines()[1:] == [
        "  left out: 1 with the text of another sample of their prompt"
    ]


def test_a_data_set_of_chats_has_the_completion_as_the_assistants_message(run: Run) -> None:
    run.write([Version(0, 0), *scored(run, 0, "a", f"4{END}", f"5{END}")])

    (row,) = dataset_rows(run, "chat", "--min-reward", "0.05")

    assert row["prompt"] == [{"role": "user", "content": "2+2="}]
    assert row["completion"] == [{"role": "assistant", "content": "5"}]


def test_an_answer_that_a_chat_has_begun_is_whole_in_a_data_set(run: Run) -> None:
    chat = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "It is "}]
    tools = [{"name": "add"}]
    prompt: dict[str, Any] = {
        "id": "a",
        "prompt": "",
        "tokens": bytes(4),
        "row": {"messages": chat, "tools": tools, "chat_template_kwargs": {"short": True}},
    }
    write_prompts(run.folder / "prompts.msgpack", [prompt])
    run.write([Version(0, 0), *scored(run, 0, "a", f"4{END}", f"5{END}")])

    rows = dataset_rows(run, "chat", "--best", "2", continue_final_message=True)

    assert [(row["prompt"], row["tools"]) for row in rows] == [(chat[:1], tools)] * 2
    assert [row["chat_template_kwargs"] for row in rows] == [{"short": True}] * 2
    answers = [row["completion"] for row in rows]
    assert answers == [[{"role": "assistant", "content": f"It is {n}"}] for n in (5, 4)]


def test_truncated_completions_and_several_turns_are_not_in_a_data_set(run: Run) -> None:
    run.write([
        Version(0, 0),
        admitted(0, "a"),
        Started(BOTH),
        run.text(0, 0, 0, f"4{END}"),
        run.text(0, 2, -1, "no"),
        run.text(0, 4, 0, f"5{END}"),
        run.text(1, 0, 0, "4444"),
        Finished(BOTH, ["stop", "length"]),
        Scored(BOTH, np.asarray([1.0, 0.5])),
    ])  # fmt: skip
    record_settings(config_with(run={"dir": str(run.folder)}), {})

    assert run.error("dataset", "--best", "1").startswith(
        f"umbra: {run.folder} has no sample for a data set: 1 of several turns, or with an agent "
        "loop's own prompt; 1 truncated"
    )


def test_samples_without_rewards_make_no_data_set(run: Run) -> None:
    run.write([Version(0, 0), *scored(run, 0, "a", f"4{END}", f"5{END}")])
    config = config_with(
        "reward.function= train.advantage=none train.teacher_kl_coef=1",
        run={"dir": str(run.folder)},
        pools={"teacher": {"model_path": "t"}},
    )
    record_settings(config, {})

    assert "had no reward function" in run.error("dataset", "--best", "1")
