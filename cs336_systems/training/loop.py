"""The training loop of one rank: micro-batches, synchronisation, clipping, schedule, loss curve, checkpoints.

    result = train(config)                                              # this process, alone
    launch(train_rank, 2, replace(config, wrapper="fsdp", num_ranks=2), RunOptions())      # two ranks

Everything that a step depends on is in the weights, the optimizer's state, the loss scale of float16 and the number of
the step: the data of a step follows from its number, and nothing else is random. So a resumed run has the losses that
it would have had.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.model import cross_entropy
from cs336_systems.training.checkpoints import Checkpoints, group_of_one
from cs336_systems.training.config import TrainingConfig
from cs336_systems.training.corpus import ALICE, Corpus
from cs336_systems.training.schedule import learning_rate
from cs336_systems.training.wrappers import Trainee, build_trainee

VALIDATION_SEQUENCES = 64
LOSSES_FILE = "losses.jsonl"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What does not change the losses."""

    text: Path = ALICE
    out: Path | None = None  # folder of losses and checkpoints; None: neither is written
    checkpoint_every: int = 0  # steps; 0: none
    resume: bool = False  # from the newest checkpoint in `out`
    log_every: int = 10  # steps between looks at the losses, each of which waits for the device
    stop_after: int | None = None  # end after this many steps of `steps`, as if interrupted
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.checkpoint_every < 0:
            raise ValueError(f"checkpoint_every must not be negative, got {self.checkpoint_every}")
        if self.log_every < 1:
            raise ValueError(f"log_every must be at least 1, got {self.log_every}")
        if self.out is None and (self.checkpoint_every or self.resume):
            raise ValueError("out must be given to write or resume from checkpoints")


@dataclass(kw_only=True)
class TrainingResult:
    """What a run leaves; the same on every rank."""

    losses: list[float] = field(default_factory=list)  # of each step, the mean over its batch in nats a byte
    step_ms: list[float] = field(default_factory=list)  # means over `log_every` steps, without the first ones
    validation_loss: float = math.nan  # of held-out text, when all steps are done
    first_step: int = 0  # after a resume, the first that this run did itself


def train_rank(rank: int, num_ranks: int, config: TrainingConfig, options: RunOptions) -> TrainingResult:
    """`train` as a function of a rank, for `launch`."""
    if num_ranks != config.num_ranks:
        raise ValueError(f"config.num_ranks must be the number of ranks, {num_ranks}, got {config.num_ranks}")
    return train(config, options, log=print_progress if rank == 0 else None)


def train(
    config: TrainingConfig,
    options: RunOptions | None = None,
    *,
    log: Callable[[TrainingConfig, int, float, float], None] | None = None,
) -> TrainingResult:
    """Run this rank's part; with a wrapper other than none the default process group must be up.

    `log` is called with the config, the steps done, the mean loss and the tokens a second since the last call.
    """
    options = RunOptions() if options is None else options
    with group_of_one() if options.out is not None else nullcontext():
        return _train(config, options, log)


def check_text(config: TrainingConfig, options: RunOptions) -> Corpus:
    """The text of `options`; ValueError if it is too short for `config`, OSError if it cannot be read."""
    corpus = Corpus.load(options.text)
    corpus.check(config.model.context_length)
    return corpus


def _train(
    config: TrainingConfig, options: RunOptions, log: Callable[[TrainingConfig, int, float, float], None] | None
) -> TrainingResult:
    rank = dist.get_rank() if config.wrapper != "none" else 0
    device = torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
    corpus = check_text(config, options)  # before a model is built for sequences that it does not have
    trainee = build_trainee(config, device)
    result = TrainingResult()
    checkpoints = None
    if options.out is not None:
        checkpoints = Checkpoints(options.out, trainee, config, text=options.text, text_sha256=corpus.sha256())
    if checkpoints is not None:
        result.first_step = checkpoints.resume() if options.resume else checkpoints.begin()
        result.losses = _read_losses(checkpoints.out, result.first_step, tell=rank == 0)
    pending: list[Tensor] = []
    last = config.steps if options.stop_after is None else min(config.steps, options.stop_after)
    mark = time.perf_counter()
    for step in range(result.first_step, last):
        pending.append(_step(trainee, corpus, config, step, rank, device))
        done = step + 1
        save = bool(options.checkpoint_every) and (done % options.checkpoint_every == 0 or done == last)
        if done % options.log_every and done != last and not save:
            continue
        losses = _mean_over_ranks(pending, config)
        now = time.perf_counter()
        if log is not None:
            rate = len(losses) * config.batch * config.model.context_length / (now - mark)
            log(config, done, sum(losses) / len(losses), rate)
        if step >= result.first_step + options.log_every:
            result.step_ms.append(1e3 * (now - mark) / len(losses))
        result.losses += losses
        _append_losses(options.out, rank, done - len(losses), losses)
        pending.clear()
        if save and checkpoints is not None:
            checkpoints.save(done)
        mark = time.perf_counter()
    if last == config.steps:
        result.validation_loss = _validate(trainee, corpus, config, device)
    return result


def print_progress(config: TrainingConfig, done: int, loss: float, tokens_per_s: float) -> None:
    """One line."""
    rate = learning_rate(config, done - 1)
    print(f"step {done:>6}  loss {loss:.4f}  lr {rate:.2e}  {tokens_per_s:,.0f} bytes/s", flush=True)


def _step(
    trainee: Trainee, corpus: Corpus, config: TrainingConfig, step: int, rank: int, device: torch.device
) -> Tensor:
    """One optimizer step; the mean loss of this rank's sequences, still on the device."""
    for group in trainee.optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    trainee.optimizer.zero_grad(set_to_none=True)
    first = step * config.batch + rank * config.rank_batch
    size = config.rank_batch // config.accumulation
    total = torch.zeros((), device=device)
    for micro in range(config.accumulation):
        positions = range(first + micro * size, first + (micro + 1) * size)
        tokens, targets = corpus.sequences(positions, context_length=config.model.context_length, seed=config.seed)
        is_last = micro == config.accumulation - 1
        with nullcontext() if is_last else trainee.no_sync():
            with _precision(trainee, device):
                loss = cross_entropy(trainee.module(tokens.to(device)), targets.to(device)) / config.accumulation
            (loss if trainee.scaler is None else trainee.scaler.scale(loss)).backward()
        total += loss.detach()
    trainee.finish()
    if trainee.scaler is not None and not trainee.scaler.unscale(trainee.optimizer):
        return total  # float16 overflowed on some rank: all leave this step out
    if config.clip_norm is not None:
        trainee.clip(config.clip_norm)
    trainee.optimizer.step()
    return total


def _validate(trainee: Trainee, corpus: Corpus, config: TrainingConfig, device: torch.device) -> float:
    """Mean loss of held-out sequences, computed by every rank alike (sharded weights need all of them)."""
    tokens, targets = corpus.validation_sequences(config.model.context_length, VALIDATION_SEQUENCES)
    total, size = 0.0, config.rank_batch // config.accumulation
    with torch.no_grad(), _precision(trainee, device):
        for some, wanted in zip(tokens.split(size), targets.split(size)):
            total += len(some) * cross_entropy(trainee.module(some.to(device)), wanted.to(device)).item()
    return total / len(tokens)


def _precision(trainee: Trainee, device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if trainee.autocast is None else torch.autocast(device.type, dtype=trainee.autocast)


def _mean_over_ranks(pending: list[Tensor], config: TrainingConfig) -> list[float]:
    losses = torch.stack(pending).double()
    if config.num_ranks > 1:
        dist.all_reduce(losses)
    return (losses / config.num_ranks).tolist()


# The loss curve, one JSON object a line


def _append_losses(out: Path | None, rank: int, first_step: int, losses: list[float]) -> None:
    if out is None or rank:
        return
    path = out / LOSSES_FILE
    text = "".join(json.dumps({"step": first_step + index, "loss": loss}) + "\n" for index, loss in enumerate(losses))
    cut_off = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with open(path, "a") as file:
        file.write(("\n" if cut_off else "") + text)


def _read_losses(out: Path, num_steps: int, *, tell: bool) -> list[float]:
    """The first `num_steps` losses; the last written of each step counts, since a resumed run repeats some.

    The checkpoint is what a run goes on from: a loss whose line was cut off or lost is NaN, and `tell` says so.
    """
    if num_steps == 0:
        return []
    losses: dict[int, float] = {}
    path = out / LOSSES_FILE
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
            losses[int(entry["step"])] = float(entry["loss"])
        except (ValueError, TypeError, KeyError, OverflowError):
            continue
    missing = num_steps - len(losses.keys() & set(range(num_steps)))
    if missing and tell:
        note = f"note: {path} has no loss of {missing} of the {num_steps} steps that are done, which count as nan"
        print(f"{note}: lines are damaged or lost", file=sys.stderr, flush=True)
    return [losses.get(step, math.nan) for step in range(num_steps)]
