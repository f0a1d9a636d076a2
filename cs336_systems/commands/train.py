"""`cs336-systems train`: train a byte-level language model in one process or on several ranks.

The ranks are spawned here or started by torchrun.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cs336_systems.commands import shared
from cs336_systems.commands.shared import ENDING, DeviceOption, ends_at_a_signal, one_line_errors

if TYPE_CHECKING:
    from cs336_systems.training import TrainingConfig
    from cs336_systems.training.loop import RunOptions, TrainingResult

SAMPLE_BYTES = 200  # of text that the trained model writes


def train(
    *,
    size: Annotated[
        str, typer.Option(help="nano, or a model of the handout: small, medium, large, xl, ...")
    ] = "nano",
    context_length: Annotated[int, typer.Option(help="Bytes of a sequence.")] = 128,
    wrapper: Annotated[
        str,
        typer.Option(
            help="none, naive, flat, overlap, bucketed, sharded-optimizer, zero1 or fsdp."
        ),
    ] = "none",
    ranks: Annotated[
        int | None, typer.Option(help="Processes to spawn; under torchrun its WORLD_SIZE.")
    ] = None,
    context_parallel: Annotated[
        int, typer.Option(help="Ranks that share each sequence, by ring attention.")
    ] = 1,
    tensor_parallel: Annotated[
        int, typer.Option(help="Ranks that split the matrices of each layer.")
    ] = 1,
    sequence_parallel: Annotated[
        bool,
        typer.Option("--sequence-parallel", help="These also share the positions between layers."),
    ] = False,
    replicas: Annotated[
        int, typer.Option(help="With fsdp: groups of ranks that each shard the whole model (HSDP).")
    ] = 1,
    attention: Annotated[
        str, typer.Option(help="Attention inside the model: sdpa, triton, hopper, ...")
    ] = "sdpa",
    autocast: Annotated[
        str | None, typer.Option(help="bfloat16, or float16 with a loss scale; else float32.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences a step, over all ranks.")] = 16,
    accumulation: Annotated[int, typer.Option(help="Micro-batches a step on each rank.")] = 1,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 300,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 2e-3,
    final_lr: Annotated[float, typer.Option(help="Learning rate of the last step.")] = 2e-4,
    optimizer: Annotated[
        str, typer.Option(help="adamw, or muon for the blocks' matrices.")
    ] = "adamw",
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 20,
    weight_decay: Annotated[float, typer.Option(help="The optimizer's.")] = 0.1,
    clip: Annotated[
        float, typer.Option(help="Largest norm of all gradients; 0: no clipping.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of weights and order of data.")] = 0,
    text: Annotated[
        Path | None,
        typer.Option(help="File to train on; default: Alice's Adventures in Wonderland."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the loss curve and the checkpoints.")
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(help="Steps between checkpoints, 100 with --out; 0: at the end only."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint in --out.")
    ] = False,
    log_every: Annotated[int, typer.Option(help="Steps between lines of progress.")] = 10,
    device: DeviceOption = "auto",
) -> None:
    """Train a language model on bytes; the losses are the same with every wrapper and --resume."""
    with (
        one_line_errors(
            learning_rate="--lr",
            final_learning_rate="--final-lr",
            warmup_steps="--warmup",
            clip_norm="--clip",
            num_ranks="--ranks",
            precision="--autocast",
            model="model",  # of --size and --context-length
        ),
        ends_at_a_signal("interrupted before the first step"),
    ):
        shared.wait_briefly(os.environ)
        from cs336_systems.config import MODEL_SIZES, Precision
        from cs336_systems.device import resolve_device
        from cs336_systems.distributed.spawn import is_torchrun
        from cs336_systems.training import TrainingConfig
        from cs336_systems.training.corpus import ALICE
        from cs336_systems.training.hyperparameters import NANO, byte_model
        from cs336_systems.training.loop import RunOptions

        _check_paths(text, out)
        sizes = {NANO.name: NANO, **MODEL_SIZES}
        if size not in sizes:
            raise ValueError(f"--size must be one of {', '.join(sizes)}, got {size!r}")
        config = TrainingConfig(
            model=byte_model(sizes[size], context_length),
            wrapper=wrapper,
            num_ranks=_num_ranks(ranks, wrapper, tensor_parallel),
            context_parallel=context_parallel,
            tensor_parallel=tensor_parallel,
            sequence_parallel=sequence_parallel,
            replicas=replicas,
            attention=attention,
            precision=Precision(autocast=autocast),  # type: ignore[arg-type]
            batch=batch,
            accumulation=accumulation,
            steps=steps,
            learning_rate=lr,
            optimizer=optimizer,
            final_learning_rate=final_lr,
            warmup_steps=warmup,
            weight_decay=weight_decay,
            clip_norm=clip or None,
            seed=seed,
        )
        options = RunOptions(
            text=ALICE if text is None else text,
            out=out,
            checkpoint_every=(100 if out is not None else 0)
            if checkpoint_every is None
            else checkpoint_every,
            resume=resume,
            log_every=log_every,
            sample_bytes=SAMPLE_BYTES,
            device=resolve_device(device),
        )

        # torchrun ends its ranks by SIGTERM while they wait in a collective, where no Python
        # handler would run.
        numbers = () if is_torchrun() else ENDING

        def left_behind() -> str:
            return f"interrupted: {_left_behind(options)}" if _is_first_rank() else ""

        with ends_at_a_signal(left_behind, numbers), shared.out_of_memory_in_one_line():
            result = _run(config, options)
    if result is not None:
        _summarise(config, options, result)


def _check_paths(text: Path | None, out: Path | None) -> None:
    """Raise ValueError if --text is no file, or if --out or a parent of it is a file.

    The system's own error would not say which option is meant.
    """
    if text is not None and text.is_dir():
        raise ValueError(f"--text {text} is a folder")
    if text is not None and not text.exists():
        raise ValueError(f"--text {text}: no such file")
    for folder in (out, *out.parents) if out is not None else ():
        if folder.exists() and not folder.is_dir():
            which = f"{out}: {folder}" if folder != out else out
            raise ValueError(f"--out {which} is a file, not a folder")


def _check_memory(config: TrainingConfig, options: RunOptions) -> None:
    """Raise ValueError if a rank is predicted to need more memory than the device has.

    Without this a rank on a CPU would be killed with no message.
    """
    from cs336_systems.accounting import model_peak_bytes
    from cs336_systems.bench.harness import predicted_overflow
    from cs336_systems.config import ModelCase
    from cs336_systems.device import get_device_info

    batch = config.rank_batch // config.accumulation
    case = ModelCase(
        model=config.model, batch=batch, attention=config.attention, precision=config.precision
    )
    # A lower bound for every wrapper: some divide the weights among the ranks, and context
    # parallelism divides the sequences.
    num_bytes = model_peak_bytes(case, "train_step") // config.num_ranks
    if why := predicted_overflow(num_bytes, get_device_info(options.device)):
        raise ValueError(
            f"{why}: take a smaller --batch, --context-length or --size, or more --accumulation"
        )


def _left_behind(options: RunOptions) -> str:
    """Return the text that says from where an interrupted run can continue."""
    from cs336_systems.distributed.checkpoint import checkpoints

    if options.out is None:
        return "nothing is kept without --out"
    found = checkpoints(options.out / "checkpoints")
    if found:
        return f"the same command with --resume goes on from {found[-1]}"
    return (
        f"{options.out} has no checkpoint yet (--checkpoint-every {options.checkpoint_every}): "
        "--resume begins again"
    )


def _num_ranks(ranks: int | None, wrapper: str, tensor_parallel: int) -> int:
    """Return the number of ranks: `ranks`, or torchrun's if it is None.

    Without either, it is `tensor_parallel`. ValueError if there are several ranks for each part of
    the model and no wrapper.
    """
    from cs336_systems.distributed.spawn import is_torchrun

    if ranks is None:
        ranks = _torchrun_number("WORLD_SIZE") if is_torchrun() else tensor_parallel
    if ranks > tensor_parallel and wrapper == "none":
        raise ValueError(f"--ranks {ranks} needs a --wrapper, such as fsdp")
    return ranks


def _is_first_rank() -> bool:
    """Return whether this process prints for the whole job: rank 0 does, or the only process."""
    return os.environ.get("RANK", "0") == "0"


def _torchrun_number(name: str, default: str = "") -> int:
    """Return torchrun's environment variable `name` as a number; ValueError if it is none."""
    value = os.environ.get(name, default)
    if not value.isdecimal():
        raise ValueError(f"{name} must be a non-negative number, got {value!r}")
    return int(value)


def _run(config: TrainingConfig, options: RunOptions) -> TrainingResult | None:
    """Train in this process, in spawned ranks, or as one rank of torchrun.

    Return None on a rank of torchrun that is not the first.
    """
    import torch

    from cs336_systems.config import FieldError
    from cs336_systems.distributed.spawn import RankError, is_torchrun, launch
    from cs336_systems.training import Corpus, train
    from cs336_systems.training.loop import print_now, train_rank

    # Errors of text, memory and folder are found here, before any rank starts.
    corpus = Corpus.load(options.text)
    try:
        corpus.check(config.model.context_length)
    except FieldError as error:
        raise FieldError(
            error.field, f"{error.problem} (a tenth of the text is held out)"
        ) from None
    _check_memory(config, options)
    if options.out is not None and not options.resume:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"--out {options.out} cannot be written: {error.strerror}") from None

    if config.wrapper == "none" and config.num_ranks == 1 and not is_torchrun():
        return train(config, options, log=print_now)

    # A launcher other than torchrun may leave LOCAL_WORLD_SIZE out: all ranks are then on this
    # host.
    local_ranks = (
        _torchrun_number("LOCAL_WORLD_SIZE", str(config.num_ranks))
        if is_torchrun()
        else config.num_ranks
    )
    own_gpus = options.device == "cuda" and local_ranks <= torch.cuda.device_count()
    try:
        results = launch(
            train_rank,
            config.num_ranks,
            config,
            options,
            backend="nccl" if own_gpus else "gloo",
            device=options.device,
        )
    except RankError as error:
        if error.is_argument_error:  # printed in one line, as in a single process
            raise error.field_error or ValueError(error.reason) from error
        typer.echo(f"error: {error}\n{_left_behind(options)}", err=True)
        raise typer.Exit(shared.EXIT_NOTHING_MEASURED) from None
    return results[0] if _is_first_rank() else None


def _summarise(config: TrainingConfig, options: RunOptions, result: TrainingResult) -> None:
    """Print the first, last and held-out losses, a sample of text, and where the files are."""
    first, last = result.losses[0], result.losses[-10:]
    ranks = "1 rank" if config.num_ranks == 1 else f"{config.num_ranks} ranks"
    typer.echo(
        f"{config.model.name}, {config.wrapper}, {ranks}: loss {first:.3f} at the first step, "
        f"{sum(last) / len(last):.3f} over the last {len(last)}, "
        f"{result.validation_loss:.3f} on held-out text (nats a byte)"
    )
    if result.sample:
        typer.echo(f"it writes: {result.sample.strip()}")
    if options.out is not None:
        typer.echo(
            f"losses: {options.out / 'losses.jsonl'}; "
            f"more text: cs336-systems generate --out {options.out}"
        )
