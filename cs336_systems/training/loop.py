"""The training loop of one rank: micro-batches, clipping, schedule, losses, checkpoints.

    result = train(config)    # this process, alone
    config = replace(config, wrapper="fsdp", num_ranks=2)
    launch(train_rank, 2, config, RunOptions())    # two ranks

Everything that a step depends on is in the weights, the optimizer's state, the loss scale of
float16 and the number of the step: the data of a step follows from its number, and nothing else is
random. So a resumed run has the losses that it would have had.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.accounting import num_parameters
from cs336_systems.config import FieldError
from cs336_systems.model.generation import generate
from cs336_systems.training.corpus import ALICE, Corpus
from cs336_systems.training.folder import RunFolder
from cs336_systems.training.hyperparameters import TrainingConfig, learning_rate
from cs336_systems.training.wrappers import Trainee, build_trainee

VALIDATION_SEQUENCES = 64
PROMPT = "\n"  # what the sample of a finished run follows

Log = Callable[[str], None]
print_now: Log = partial(print, flush=True)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run beside its config: text, folder, logging, sample and device.

    Of these only the text changes the losses, and the device their rounding.
    """

    text: Path = ALICE
    out: Path | None = None  # folder of losses and checkpoints; None: neither is written
    checkpoint_every: int = 0  # steps; 0: only when all are done
    resume: bool = False  # from the newest checkpoint in `out`
    log_every: int = 10  # steps between looks at the losses, each of which waits for the device
    sample_bytes: int = 0  # length of the text that is generated when all steps are done
    stop_after: int | None = None  # end after this many steps of `steps`, as if interrupted
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, least in (("checkpoint_every", 0), ("log_every", 1)):
            if getattr(self, name) < least:
                raise FieldError(name, f"must be at least {least}, got {getattr(self, name)}")
        if self.out is None and (self.checkpoint_every or self.resume):
            raise FieldError("out", "must be given to write or resume from checkpoints")


@dataclass(kw_only=True)
class TrainingResult:
    """Losses, times and sample of a run; all but the times are the same on every rank."""

    # of each step, the mean over its batch in nats a byte
    losses: list[float] = field(default_factory=list)
    # means over `log_every` steps, without the first ones
    step_ms: list[float] = field(default_factory=list)
    validation_loss: float = math.nan  # of held-out text, when all steps are done
    sample: str = ""  # what the model writes, when all steps are done
    first_step: int = 0  # after a resume, the first that this run did itself


def train_rank(
    rank: int, num_ranks: int, config: TrainingConfig, options: RunOptions
) -> TrainingResult:
    """Return `train`'s result on rank `rank`, for `launch`; rank 0 prints its progress.

    Raises ValueError unless `num_ranks` is that of `config`.
    """
    if num_ranks != config.num_ranks:
        raise ValueError(
            f"config.num_ranks must be the number of ranks, {num_ranks}, got {config.num_ranks}"
        )
    return train(config, options, log=print_now if rank == 0 else None)


def train(
    config: TrainingConfig, options: RunOptions | None = None, *, log: Log | None = None
) -> TrainingResult:
    """Train this rank's part of the run `config`, and return its result.

    With a wrapper or several ranks the default process group must be up. `log` is called with a line
    at the start and at every look at the losses. Raises ValueError if the text is too short for the
    model's context, or if the run's folder does not fit the run.
    """
    options = RunOptions() if options is None else options
    corpus = Corpus.load(options.text)
    corpus.check(config.model.context_length)  # before a model is built in vain
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if options.device == "cuda"
        else torch.device("cpu")
    )
    rank = dist.get_rank() if config.num_ranks > 1 else 0
    trainee = build_trainee(config, device)
    folder = (
        None
        if options.out is None
        else RunFolder(options.out, config, options.text, corpus.sha256())
    )
    result = TrainingResult()

    with nullcontext() if folder is None else folder.lock:
        if folder is not None:
            result.losses = folder.begin(trainee, resume=options.resume)
        done = result.first_step = len(result.losses)
        if log is not None:
            log(_what_is_trained(config, device, result.first_step))

        # Steps after which a checkpoint is written, and after which the losses are looked at.
        last = config.steps if options.stop_after is None else min(config.steps, options.stop_after)
        saves = {config.steps}
        if options.checkpoint_every:
            saves |= {last, *range(0, last, options.checkpoint_every)}
        looks = {last, *range(0, last, options.log_every)} | (
            saves if folder is not None else set()
        )

        # The losses of the steps between two looks stay on the device.
        for look in sorted(step for step in looks if done < step <= last):
            start = time.perf_counter()
            sums = [_step(trainee, corpus, config, step, rank) for step in range(done, look)]
            losses = _mean_over_ranks(sums, config)
            seconds = (time.perf_counter() - start) / len(losses)  # a step

            if log is not None:
                log(_progress(config, look, sum(losses) / len(losses), seconds))
            if look > result.first_step + options.log_every:
                result.step_ms.append(1e3 * seconds)
            result.losses += losses
            if folder is not None:
                folder.write_losses(done, losses)
                if look in saves:
                    folder.save(trainee, result.losses)
            done = look

    if last == config.steps:
        result.validation_loss = _validate(trainee, corpus, config)
        trainee.make_whole()
        with trainee.autocast():
            result.sample = write_text(trainee.module, PROMPT, options.sample_bytes, device=device)
    return result


def _what_is_trained(config: TrainingConfig, device: torch.device, first_step: int) -> str:
    """Return the first line of the log: model, steps, batch, wrapper, ranks and device."""
    ranks = "1 rank" if config.num_ranks == 1 else f"{config.num_ranks} ranks"
    count = torch.get_num_threads()
    threads = f" with {count} thread{'s' * (count > 1)} a rank" if device.type == "cpu" else ""
    steps = (
        f"{config.steps} steps" if not first_step else f"steps {first_step + 1} to {config.steps}"
    )
    if first_step >= config.steps:
        steps = f"nothing left of {config.steps} steps"
    split = config.tensor_parallel
    tensor = f" of which {split} split each matrix" if split > 1 else ""
    return (
        f"{config.model.name}: {num_parameters(config.model):,} parameters, "
        f"{steps} of {config.step_tokens:,} tokens "
        f"({config.batch} × {config.model.context_length}), "
        f"{config.wrapper}, {ranks}{tensor}, {device.type}{threads}"
    )


def _progress(config: TrainingConfig, done: int, loss: float, seconds: float) -> str:
    """Return a line of the log after `done` steps: loss, learning rate, speed and time left."""
    left = timedelta(seconds=round(seconds * (config.steps - done)))
    return (
        f"step {done:>6}/{config.steps}  loss {loss:.4f}  "
        f"lr {learning_rate(config, done - 1):.2e}  "
        f"{config.step_tokens / seconds:,.0f} tokens/s  {left} left"
    )


def _step(trainee: Trainee, corpus: Corpus, config: TrainingConfig, step: int, rank: int) -> Tensor:
    """Do one optimizer step, and return the mean loss of this rank's sequences.

    The loss stays on the device, so that nothing waits for it.
    """
    for group in trainee.optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    trainee.optimizer.zero_grad(set_to_none=True)

    # This rank's sequences of the step, in micro-batches; the last one synchronises gradients.
    first = step * config.batch + rank // config.ranks_a_batch * config.rank_batch
    size = config.rank_batch // config.accumulation
    total = torch.zeros((), device=trainee.device)
    for micro in range(config.accumulation):
        positions = range(first + micro * size, first + (micro + 1) * size)
        tokens, targets = corpus.sequences(
            positions, context_length=config.model.context_length, seed=config.seed
        )
        with nullcontext() if micro == config.accumulation - 1 else trainee.no_sync():
            loss = trainee.loss(tokens, targets) / config.accumulation
            trainee.scaler.scale(loss).backward()
        total += loss.detach()

    # Gradients become means over ranks, are unscaled, then clipped.
    trainee.finish()
    trainee.scaler.unscale_(trainee.optimizer)
    if config.clip_norm is not None:
        trainee.clip(config.clip_norm)
    # If float16 overflowed on any rank, all ranks skip the step.
    trainee.scaler.step(trainee.optimizer)
    trainee.scaler.update()
    return total


def _validate(trainee: Trainee, corpus: Corpus, config: TrainingConfig) -> float:
    """Return the mean loss of held-out sequences, which every rank computes alike.

    Sharded weights need all ranks.
    """
    tokens, targets = corpus.validation_sequences(config.model.context_length, VALIDATION_SEQUENCES)
    size = config.rank_batch // config.accumulation
    with torch.no_grad():
        pairs = zip(tokens.split(size), targets.split(size))
        total = sum(len(some) * trainee.loss(some, wanted).item() for some, wanted in pairs)
    return _mean_over_ranks([torch.tensor(total / len(tokens), device=trainee.device)], config)[0]


def write_text(
    model: Any,
    prompt: str,
    num_bytes: int,
    *,
    device: torch.device,
    temperature: float = 0.8,
    top_p: float | None = None,
    seed: int = 0,
) -> str:
    """Return `num_bytes` bytes that a byte-level `model` writes after `prompt`, as text.

    The text is the same on every rank. Bytes that are no text, and characters that cannot be
    printed, are shown as U+FFFD. See `generate` for `temperature` and `top_p`.
    """
    tokens = torch.tensor(list(prompt.encode()), dtype=torch.int64, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    new = generate(model, tokens, num_bytes, temperature, top_p, generator=generator)
    text = bytes(new.tolist()).decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _mean_over_ranks(pending: list[Tensor], config: TrainingConfig) -> list[float]:
    """Return the means over all ranks of `pending` losses, scalars on the device."""
    losses = torch.stack(pending).double()
    if config.num_ranks > 1:
        dist.all_reduce(losses)
    return (losses / config.num_ranks).tolist()
