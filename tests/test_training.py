"""Training: data by position, the schedule, that a model learns, and that wrappers and resuming
change no loss.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cs336_systems.config import ModelConfig, Precision
from cs336_systems.distributed.checkpoint import checkpoints, folder_lock, save_checkpoint
from cs336_systems.distributed.spawn import TORCHRUN_VARIABLES, RankError
from cs336_systems.training import (
    Corpus,
    TrainingConfig,
    TrainingResult,
    folder,
    learning_rate,
    loop,
    train,
)
from cs336_systems.training.corpus import ALICE
from cs336_systems.training.hyperparameters import NANO, byte_model
from cs336_systems.training.loop import RunOptions, train_rank
from tests.command_line import interrupt, invoke, start
from tests.processes import wait_until

SMALL = ModelConfig(
    name="tiny", d_model=32, d_ff=64, num_layers=2, num_heads=2, vocab_size=256, context_length=32
)
SHORT = TrainingConfig(model=SMALL, batch=8, steps=6, warmup_steps=2)


@pytest.fixture(scope="module")
def whole() -> TrainingResult:
    """The run that those which were interrupted are compared with."""
    return train(SHORT)


# Corpus


def test_the_text_is_the_whole_book():
    corpus = Corpus.load()
    text = bytes(torch.cat([corpus.training, corpus.validation]).tolist()).decode("ascii")
    assert text.lstrip().startswith("ALICE'S ADVENTURES IN WONDERLAND")
    assert text.rstrip().endswith("THE END")
    assert len(corpus.validation) == round(0.1 * len(text))


def test_sequences_follow_from_their_positions_alone():
    corpus = Corpus.load()
    together, targets = corpus.sequences(range(100, 108), context_length=64, seed=3)
    assert together.shape == targets.shape == (8, 64) and torch.equal(
        together[:, 1:], targets[:, :-1]
    )
    apart = [
        corpus.sequences([position], context_length=64, seed=3)[0]
        for position in reversed(range(100, 108))
    ]
    assert torch.equal(together, torch.cat(apart[::-1]))
    assert not torch.equal(
        together, corpus.sequences(range(100, 108), context_length=64, seed=4)[0]
    )


def test_an_epoch_sees_every_window_once_and_the_next_sees_others():
    corpus = Corpus(
        training=torch.arange(101, dtype=torch.uint8), validation=torch.zeros(9, dtype=torch.uint8)
    )
    num_windows = 100 // 8 - 1
    epochs = [
        corpus.sequences(range(n * num_windows, (n + 1) * num_windows), context_length=8, seed=0)[0]
        for n in (0, 1)
    ]
    for tokens in epochs:
        # no byte twice, so no window twice
        assert tokens.flatten().unique().numel() == num_windows * 8
    assert set(epochs[0][:, 0].tolist()) != set(epochs[1][:, 0].tolist())
    assert not torch.equal(epochs[0][:, 0].sort().indices, epochs[1][:, 0].sort().indices)


def test_a_text_too_short_is_refused(tmp_path):
    path = tmp_path / "short.txt"
    for size, message in (
        (0, f"^text must not be empty, got {path}$"),
        (60, "text must have more than 64 bytes to train on for context_length=32, got 54"),
        (200, "text must have more than 32 bytes to hold out for context_length=32, got 20"),
    ):
        path.write_bytes(b"x" * size)
        with pytest.raises(ValueError, match=message):
            Corpus.load(path).check(32)


# Schedule and config


def test_the_rate_warms_up_and_falls_to_the_last():
    config = TrainingConfig(steps=101, warmup_steps=10, learning_rate=1.0, final_learning_rate=0.1)
    rates = [learning_rate(config, step) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)
    assert all(later < earlier for earlier, later in zip(rates[10:], rates[11:]))
    assert learning_rate(replace(config, steps=5, warmup_steps=0), 0) == 1.0


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (TrainingConfig, {"steps": 0}, "TrainingConfig.steps must be a positive int, got 0"),
        (
            TrainingConfig,
            {"wrapper": "zero9"},
            "TrainingConfig.wrapper must be one of none, .*, got 'zero9'",
        ),
        (
            TrainingConfig,
            {"num_ranks": 2},
            "TrainingConfig.wrapper must be one that shares 2 ranks' work, got 'none'",
        ),
        (
            TrainingConfig,
            {"accumulation": 3},
            r"TrainingConfig.batch must be a multiple of .* = 3, got 16",
        ),
        (
            TrainingConfig,
            {"context_parallel": 3},
            "TrainingConfig.context_parallel must be a divisor of 1 ranks",
        ),
        (
            TrainingConfig,
            {
                "wrapper": "fsdp",
                "num_ranks": 4,
                "context_parallel": 4,
                "model": byte_model(NANO, 20),
            },
            "TrainingConfig.context_parallel must be a divisor of half the context length 20, got 4",
        ),
        (
            TrainingConfig,
            {"wrapper": "zero1", "num_ranks": 2, "tensor_parallel": 2},
            "TrainingConfig.wrapper must be another one for tensor_parallel",
        ),
        (
            TrainingConfig,
            {"wrapper": "fsdp", "num_ranks": 4, "tensor_parallel": 3},
            "TrainingConfig.tensor_parallel must be a divisor of 4 ranks, got 3",
        ),
        (
            TrainingConfig,
            {"num_ranks": 8, "tensor_parallel": 8},
            "TrainingConfig.tensor_parallel must be a divisor of 4 heads and d_ff 384, got 8",
        ),
        (
            TrainingConfig,
            {"wrapper": "fsdp", "num_ranks": 4, "tensor_parallel": 2, "context_parallel": 2},
            "TrainingConfig.tensor_parallel must be 1 with context_parallel 2",
        ),
        (
            TrainingConfig,
            {"optimizer": "sgd"},
            "TrainingConfig.optimizer must be one of adamw, muon, got 'sgd'",
        ),
        (
            TrainingConfig,
            {"optimizer": "muon", "wrapper": "zero1", "num_ranks": 2},
            "TrainingConfig.optimizer must be adamw with tensor_parallel or zero1",
        ),
        (
            TrainingConfig,
            {"sequence_parallel": True},
            "TrainingConfig.sequence_parallel must be False without tensor_parallel",
        ),
        (
            TrainingConfig,
            {"wrapper": "overlap", "num_ranks": 4, "replicas": 2},
            "TrainingConfig.replicas must be 1 without the wrapper fsdp",
        ),
        (
            TrainingConfig,
            {"wrapper": "fsdp", "num_ranks": 4, "replicas": 3},
            "TrainingConfig.replicas must be 1 .* else a divisor of 4 ranks, got 3",
        ),
        (
            TrainingConfig,
            {"learning_rate": math.nan},
            "learning_rate must be finite and not negative, got nan",
        ),
        (
            TrainingConfig,
            {"model": replace(NANO, vocab_size=100)},
            "TrainingConfig.model must be of vocab_size 256",
        ),
        (RunOptions, {"log_every": 0}, "log_every must be at least 1, got 0"),
        (RunOptions, {"resume": True}, "out must be given to write or resume from checkpoints"),
    ],
)
def test_bad_configs_and_options_are_refused_by_field(kind, fields, message):
    with pytest.raises(ValueError, match=message):
        kind(**fields)


# Learning


@pytest.mark.slow
def test_nano_learns_more_than_letter_pairs_in_ninety_steps():
    """About the loss of knowing the last byte alone, the entropy of pairs, after a third of the
    default run.
    """
    corpus = Corpus.load().training.long()
    pairs = torch.zeros(256, 256, dtype=torch.float64)
    pairs.index_put_(
        (corpus[:-1], corpus[1:]), torch.ones(len(corpus) - 1, dtype=torch.float64), accumulate=True
    )
    conditional = pairs / pairs.sum(1, keepdim=True).clamp(min=1)
    pair_entropy = -(pairs / pairs.sum() * conditional.clamp(min=1e-12).log()).sum().item()
    result = train(TrainingConfig(model=byte_model(NANO, 64), steps=90))
    assert result.losses[0] > 5.0
    assert sum(result.losses[-10:]) / 10 < pair_entropy + 0.1
    assert result.validation_loss < pair_entropy + 0.15


def test_accumulation_changes_no_loss_but_by_rounding(whole):
    parts = train(replace(SHORT, accumulation=4))
    assert whole.losses == pytest.approx(parts.losses, rel=1e-5)
    assert whole.validation_loss == pytest.approx(parts.validation_loss, rel=1e-5)


def test_clipping_and_autocast_reach_the_step(whole):
    plain, unclipped = whole.losses, train(replace(SHORT, clip_norm=None)).losses
    assert plain[0] == unclipped[0] and plain != unclipped
    low = train(replace(SHORT, precision=Precision(autocast="bfloat16"))).losses
    assert low != plain
    assert low == pytest.approx(plain, rel=0.02)


# Resuming


def test_a_run_resumes_to_the_losses_it_would_have_had(tmp_path, whole):
    """From its newest checkpoint; where that is damaged or was not finished, from the one before,
    or from none.
    """
    options = RunOptions(out=tmp_path, checkpoint_every=2, log_every=1, resume=True)
    assert train(SHORT, replace(options, resume=False, stop_after=5)).losses == whole.losses[:5]
    folder = tmp_path / "checkpoints"
    names = [path.name for path in checkpoints(folder)]
    assert names == ["step-00000004", "step-00000005"]
    shutil.copytree(folder, tmp_path / "kept")
    index = folder / names[1] / "index.json"
    index.write_text(index.read_text()[:20])
    told = f"damaged.*; to go on from {names[0]}, remove .*{names[1]} or rename it"
    with pytest.raises(ValueError, match=told):  # its steps are not given up without a word
        train(SHORT, options)
    # for the reader: once a damaged line of it kept a run from going on
    written = tmp_path / "losses.jsonl"
    written.write_text(written.read_text()[:-8])
    for unfinished, first_step in (((), 5), (names[1:], 4), (names, 0)):
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "kept", folder)
        for name in unfinished:
            (folder / name).rename(folder / f".{name}.partial")
        resumed = train(SHORT, options)
        assert resumed.first_step == first_step and resumed.losses == whole.losses
        assert resumed.validation_loss == whole.validation_loss
        entries = [json.loads(line) for line in written.read_text().splitlines()]
        assert entries == [{"step": step, "loss": loss} for step, loss in enumerate(whole.losses)]
        assert not list(folder.glob(".*.partial"))


def test_a_run_whose_losses_are_no_numbers_can_be_saved_and_resumed(tmp_path):
    """A checkpoint has them, as JSON, which has no NaN."""
    config = replace(SHORT, learning_rate=1e30, final_learning_rate=1e30, clip_norm=None)
    before = train(config, RunOptions(out=tmp_path, stop_after=4, checkpoint_every=4)).losses
    assert math.isnan(before[3])
    after = train(config, RunOptions(out=tmp_path, resume=True))
    assert after.first_step == 4 and str(after.losses[:4]) == str(before)


def test_a_run_of_an_earlier_version_keeps_its_losses(tmp_path, monkeypatch):
    """Its checkpoints have none: nan was written over all that the file of losses held."""
    monkeypatch.setattr(folder, "save_checkpoint", lambda *args, position, **options: save_checkpoint(
        *args, position={"loss_scale": position["loss_scale"]}, **options
    ))  # fmt: skip
    train(SHORT, RunOptions(out=tmp_path, stop_after=4, checkpoint_every=4))
    written = (tmp_path / "losses.jsonl").read_text()
    with pytest.raises(
        ValueError, match="has the losses of 0 steps, and 4 are done: an earlier version wrote it"
    ):
        train(SHORT, RunOptions(out=tmp_path, resume=True))
    assert (tmp_path / "losses.jsonl").read_text() == written


def test_a_run_killed_while_it_claims_its_folder_leaves_no_half_of_a_config(tmp_path, monkeypatch):
    """Half of a config.json once kept the folder from being resumed and from being used anew."""

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            train(SHORT, RunOptions(out=tmp_path, stop_after=1))
    assert not (tmp_path / "config.json").exists()
    assert len(train(SHORT, RunOptions(out=tmp_path, stop_after=1)).losses) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        "config.json",
        "losses.jsonl",
    ]


def test_folders_of_other_runs_are_refused(tmp_path):
    """D15: of two runs in one folder one died in FileNotFoundError, and both wrote losses until
    then.

    Another text was once trained on without a word; a copy of the run's is its own.
    """
    out, copy, other = tmp_path / "run", tmp_path / "copy.txt", tmp_path / "other.txt"
    copy.write_bytes(ALICE.read_bytes())
    other.write_bytes(ALICE.read_bytes()[::-1])

    def refused(
        message: str, config: TrainingConfig = SHORT, resume: bool = True, **options: Any
    ) -> None:
        with pytest.raises(ValueError, match=message):
            train(config, RunOptions(out=out, resume=resume, **options))

    refused("out must hold a run, got .*run")
    train(SHORT, RunOptions(out=out, stop_after=1))
    refused("out must hold no other run, got .*run: resume it or name another folder", resume=False)
    with folder_lock(out):
        refused(f"^{out} is in use by another run$")
    train(SHORT, RunOptions(out=out, resume=True, checkpoint_every=6, text=copy))
    refused("text must be the one of .*run to resume it, got .*other.txt", text=other)
    refused(
        "steps must be at least those of .*step-00000006 to resume it, got 5",
        replace(SHORT, steps=5),
    )
    refused(
        "learning_rate must be 0.002 to resume .*run, got 0.1", replace(SHORT, learning_rate=0.1)
    )
    config = out / "config.json"
    assert (
        json.loads(config.read_text())["text_sha256"]
        == hashlib.sha256(ALICE.read_bytes()).hexdigest()
    )
    config.write_text(config.read_text()[:40])
    refused("config.json is damaged: JSONDecodeError: ")
    config.write_text(100_000 * "[")
    refused("config.json is damaged: RecursionError: ")


def test_a_run_that_goes_on_for_more_steps_says_what_they_change(tmp_path, capsys):
    options = RunOptions(out=tmp_path, checkpoint_every=2, stop_after=4)
    train(SHORT, options)
    train(SHORT, replace(options, resume=True))
    assert "steps" not in capsys.readouterr().err
    for _ in range(2):  # told where it changes
        train(replace(SHORT, steps=9), replace(options, resume=True))
    (note,) = capsys.readouterr().err.splitlines()
    assert note == "note: steps was 6 and is 9: the learning rate follows the new schedule"
    assert json.loads((tmp_path / "config.json").read_text())["steps"] == 9


# Command line


QUICK = ("--batch", "2", "--context-length", "16", "--device", "cpu")
TWO_RANKS = ("--wrapper", "naive", "--ranks", "2", "--batch", "2", "--device", "cpu")


run_cli = partial(invoke, "train")


def test_the_command_says_what_it_trains_and_lets_the_model_write(tmp_path):
    out = tmp_path / "run"
    result = run_cli("--steps", "2", *QUICK, "--out", str(out))
    assert result.exit_code == 0, result.output
    first, step, summary, *_, last = result.output.splitlines()
    assert re.fullmatch(
        r"nano: 918,656 parameters, 2 steps of 32 tokens \(2 × 16\), none, 1 rank, cpu with \d+ threads? a rank",
        first,
    )
    assert re.fullmatch(
        r"step +2/2  loss \d.\d{4}  lr 2.00e-04  [\d,]+ tokens/s  0:00:00 left", step
    )
    assert summary.startswith("nano, none, 1 rank: loss") and "\nit writes: " in result.output
    assert last == f"losses: {out}/losses.jsonl; more text: cs336-systems generate --out {out}"
    losses = [json.loads(line) for line in (out / "losses.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in losses] == [0, 1]

    # A finished run writes on
    options = ["--out", str(out), "--prompt", "The Queen ", "--length", "20", "--device", "cpu"]
    texts = [invoke("generate", *options, *seed).output for seed in ([], [], ["--seed", "1"])]
    assert texts[0].startswith("The Queen ") and len(texts[0]) > 20
    assert texts[0] == texts[1] != texts[2]
    refused = invoke("generate", "--out", tmp_path)
    assert (
        refused.exit_code == 2
        and refused.output == f"error: --out must hold a run, got {tmp_path}\n"
    )
    index = out / "checkpoints" / "step-00000002" / "index.json"
    index.write_text(index.read_text().replace('"position"', '"Position"'))
    refused = invoke("generate", *options)
    assert refused.exit_code == 2
    assert refused.output == f"error: {index} is damaged: its checksum is not that of its content\n"


def test_a_full_disk_ends_a_run_in_one_line(tmp_path, monkeypatch):
    """D15. The losses' file is a device that is always full."""
    (tmp_path / "losses.jsonl").symlink_to("/dev/full")
    result = run_cli("--steps", "2", *QUICK, "--out", str(tmp_path))
    assert result.exit_code == 2
    said = f"error: [Errno 28] No space left on device: '{tmp_path}/losses.jsonl'"
    assert result.output.splitlines()[-1] == said


def killed_at_step_three(
    rank: int, num_ranks: int, config: TrainingConfig, options: RunOptions
) -> TrainingResult:
    step = loop._step

    def step_or_die(trainee: Any, corpus: Any, config: Any, number: int, *others: Any) -> Any:
        if rank == 1 and number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(trainee, corpus, config, number, *others)

    loop._step = step_or_die
    return train_rank(rank, num_ranks, config, options)


@pytest.mark.slow
def test_a_killed_rank_says_from_where_the_run_can_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr("cs336_systems.training.loop.train_rank", killed_at_step_three)
    way = [
        "--steps",
        "4",
        "--checkpoint-every",
        "2",
        "--wrapper",
        "naive",
        "--ranks",
        "2",
        "--out",
        str(tmp_path),
    ]
    result = run_cli(*QUICK, *way)
    assert result.exit_code == 1
    *_, died, hint = result.output.splitlines()
    assert "died (signal SIGKILL)" in died
    assert (
        hint == f"the same command with --resume goes on from {tmp_path}/checkpoints/step-00000002"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "giant"], "error: --size must be one of nano, small, "),
        (["--autocast", "int8"], "error: --autocast must be one of float16, bfloat16, got 'int8'"),
        (
            ["--attention", "hopper", "--device", "cpu"],
            "error: backend 'hopper' cannot be used: hopper kernels ",
        ),
        (["--lr", "-1"], "error: --lr must be finite and not negative, got -1.0"),
        (["--context-length", "0"], "error: --context-length must be a positive int, got 0"),
        (["--ranks", "2"], "error: --ranks 2 needs a --wrapper, such as fsdp\n"),
        (
            ["--out", "/proc/x", "--device", "cpu"],
            "error: --out /proc/x cannot be written: No such file ",
        ),
        (["--text", "missing.txt"], "error: --text missing.txt: no such file\n"),
        (
            ["--text", str(Path(__file__).parent)],
            f"error: --text {Path(__file__).parent} is a folder\n",
        ),
        (
            ["--text", "/dev/null", "--device", "cpu"],
            "error: --text must not be empty, got /dev/null\n",
        ),
        (["--out", __file__], f"error: --out {__file__} is a file, not a folder\n"),
        (
            ["--context-length", "100000", "--device", "cpu"],
            "error: --text must have more than 200000 bytes to ",
        ),
        (["--wrapper", "fsdp", "--ranks", "2", "--text", "."], "error: --text . is a folder\n"),
        (
            [*TWO_RANKS, "--attention", "nothing"],
            "error: --attention must be one of reference, compiled, ",
        ),
        ([*TWO_RANKS, "--out", __file__], f"error: --out {__file__} is a file, not a folder\n"),
    ],
)
def test_the_command_refuses_bad_arguments_in_one_line(arguments, message, capfd):
    """Every rank once printed its traceback before it; an existing file was not even told in one
    line.
    """
    result = run_cli(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(message) and result.stderr.count("\n") == 1
    assert "Traceback" not in capfd.readouterr().err


def test_a_field_that_a_rank_refuses_is_told_by_its_option(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        told = ("learning_rate", "must be 0.002 to resume run, got 1.0", "")
        raise RankError("rank 0 of 2 failed", 0, is_argument_error=True, field_error=told)

    monkeypatch.setattr("cs336_systems.distributed.spawn.launch", refuse)
    refused = run_cli(*TWO_RANKS)
    assert refused.exit_code == 2
    assert refused.stderr == "error: --lr must be 0.002 to resume run, got 1.0\n"


def test_a_short_text_is_said_to_be_held_out_in_part(tmp_path):
    """50 bytes were said to be 45."""
    (tmp_path / "short.txt").write_text(50 * "a")
    result = run_cli("--text", str(tmp_path / "short.txt"), "--device", "cpu")
    assert result.stderr.endswith(
        "for context_length=128, got 45 (a tenth of the text is held out)\n"
    )


@pytest.fixture
def torchrun_variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The five variables that make a rank of a job, here of one rank; torchrun itself sets more."""
    for name, value in zip(TORCHRUN_VARIABLES, ("0", "1", "0", "127.0.0.1", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return monkeypatch


def test_a_launcher_in_torchruns_manner_need_not_count_the_ranks_of_a_host(torchrun_variables):
    result = run_cli("--steps", "1", *QUICK, "--wrapper", "naive")
    assert result.exit_code == 0, result.output
    assert "nano, naive, 1 rank: loss" in result.output


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_a_variable_of_torchrun_that_is_no_number_is_named(torchrun_variables, name):
    torchrun_variables.setenv(name, "two")
    result = run_cli("--device", "cpu")
    assert result.exit_code == 2
    assert result.output == f"error: {name} must be a non-negative number, got 'two'\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks", [[], ["--wrapper", "fsdp", "--ranks", "2"]], ids=["one process", "two ranks"]
)
def test_ctrl_c_says_from_where_the_run_can_go_on(tmp_path, ranks):
    """Once it ended without a word, and whether anything had been kept was to be found out."""
    out = tmp_path / "run"
    arguments = [
        "train",
        *QUICK,
        "--steps",
        "100000",
        "--out",
        str(out),
        "--checkpoint-every",
        "3",
        *ranks,
    ]
    process = start(arguments, start_new_session=True)
    wait_until(lambda: checkpoints(out / "checkpoints"), process)
    errors = interrupt(process)
    newest = checkpoints(out / "checkpoints")[-1]
    assert process.returncode == 130
    assert (
        errors.splitlines()[-1]
        == f"interrupted: the same command with --resume goes on from {newest}"
    )
    assert "Traceback" not in errors


@pytest.mark.parametrize("out", [False, True])
def test_an_interrupted_run_without_a_checkpoint_says_so(tmp_path, monkeypatch, out):
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cs336_systems.training.train", interrupted)
    result = run_cli("--device", "cpu", *(["--out", str(tmp_path)] if out else []))
    assert result.exit_code == 130
    said = f"{tmp_path} has no checkpoint yet (--checkpoint-every 100): --resume begins again"
    assert result.output == f"interrupted: {said if out else 'nothing is kept without --out'}\n"
