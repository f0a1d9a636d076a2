"""Checkpoints of distributed training: atomic, checked, and resumed on any number of ranks.

    save_checkpoint(folder, step, model, optimizer, position={"batch": 130})
    progress = load_checkpoint(folder, model, optimizer)    # the newest one
    progress.step, progress.position

    folder/step-00000130/rank-0.bin     # chunks of tensors as plain bytes, a file for each rank
    folder/step-00000130/index.json     # file, place and CRC-32 of each chunk; optimizer settings;
                                        # step and position in the data

A chunk is a box of a tensor: some rows where FSDP has cut, some columns where tensor parallelism
has, some of both. A rank writes the box that it has, and reads the chunks that overlap with its own
box. Nothing is unpickled. A checksum finds every byte that changed on disk.

The phases of saving are

- claim: rank 0 locks the folder and makes a hidden one in it;
- share out: if several ranks have the same box, one of them is chosen to write it;
- write: each rank writes its file;
- complete: rank 0 adds the index, gives the folder its name, in one step, and removes old
  checkpoints, which it hides first.

A process that is killed, or finds the disk full, at any point leaves earlier checkpoints as they
were.

`model` is any handle of the model: a wrapper, the module inside it, a compiled module, a module
with wrapped ones inside. Names are those of the unwrapped model. A parameter that FSDP has cut is
recognised by a mark of its own. `optimizer` is any torch optimizer over the model's parameters, a
ShardedOptimizer or a Zero1Optimizer.

A checkpoint holds the parameters and buffers of the state dict, the optimizer's state and settings,
each rank's random generators, the step and the position in the data. If ranks may have different
values (of buffers, and of parameters that neither FSDP has cut nor the optimizer updates), rank 0's
are saved. A process without a process group saves and loads alone.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.config import FieldError
from cs336_systems.distributed.collectives import Group, num_ranks, rank_in
from cs336_systems.distributed.training_state import Part, TrainingState

INDEX = "index.json"
FORMAT = 4
ROWS_FORMAT = 3  # of earlier versions, whose chunks are rows; they can be read
STEP_FOLDER = re.compile(r"step-\d{8,}")
T = TypeVar("T")
# name of a part, where its box begins, and its size: an empty one may begin where another does
Place = tuple[str, tuple[int, ...], tuple[int, ...]]


class CheckpointError(ValueError):
    """Raised if a checkpoint is absent, damaged, in use or of another kind; the message says which.

    The other kinds are another format, another model and another optimizer.
    """


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far training had come when a checkpoint was saved."""

    step: int  # optimizer steps done
    position: dict[str, Any]  # in the data, as the caller gave it to `save_checkpoint`


def checkpoints(folder: Path | str) -> list[Path]:
    """Return the folders of the complete checkpoints in `folder`, the oldest step first."""
    found = [path for path in Path(folder).glob("step-*") if STEP_FOLDER.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Lock `folder` until the block or the process ends.

    Raises CheckpointError if another process holds the lock. On a file system without locks the
    block runs without one.
    """
    with open(folder / ".lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{folder} is in use by another run") from None
        except OSError:  # a file system without locks
            pass
        yield


@contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """Add `path` to an OSError in this block that names no file, as that of a full disk does."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def on_all_ranks(call: Callable[[], Any], group: Group = None) -> list[Any]:
    """Make `call` on every rank, and return the results of all ranks; collective.

    An error on one rank is raised on all ranks, so that no rank waits for it; a note names the
    rank. Other ranks get the same error if it is a FieldError, or a ValueError or OSError of
    Python's own classes or of this file, else a RuntimeError with its text.
    """
    try:
        result = call()
    except Exception as error:
        # Other classes may not be picklable, or unknown on the other ranks.
        is_known = isinstance(error, ValueError | OSError) and type(error).__module__ in (
            "builtins",
            FieldError.__module__,
            __name__,
        )
        rank, size = _rank_and_size(group)
        if size > 1:
            error.add_note(f"on rank {rank}")
        told = error if is_known else RuntimeError(f"rank {rank}: {type(error).__name__}: {error}")
        _gather_objects((None, told), group)
        raise
    outcomes = _gather_objects((result, None), group)
    for _, failed in outcomes:
        if failed is not None:
            raise failed
    return [result for result, _ in outcomes]


def _gather_objects(own: Any, group: Group) -> list[Any]:
    """Return the objects `own` of all ranks, in rank order; collective."""
    everyone = [own] * _rank_and_size(group)[1]
    if len(everyone) > 1:
        dist.all_gather_object(everyone, own, group=group)
    return everyone


def together(call: Callable[[], T], group: Group = None) -> T:
    """Make `call` on every rank, and return this rank's result; raise any rank's error on all.

    Unlike that of `on_all_ranks` the result is not sent, so it need not be picklable.
    """
    kept: list[T] = []
    on_all_ranks(lambda: kept.append(call()), group)
    return kept[0]


def on_rank_0(call: Callable[[], Any], group: Group = None) -> None:
    """Make `call` on rank 0 only; an error there is raised on all ranks."""
    on_all_ranks(call if _rank_and_size(group)[0] == 0 else lambda: None, group)


# The index

Count = Annotated[int, msgspec.Meta(ge=0)]


class Chunk(TypedDict):
    """A box of a tensor, and its place in a file."""

    starts: list[Count]  # of the box, in each dimension of the tensor
    sizes: list[Count]
    file: Annotated[str, msgspec.Meta(pattern=r"^rank-\d+\.bin$")]
    start: Count  # byte in the file
    length: Count  # bytes
    crc32: int


class Entry(TypedDict):
    """A tensor, and the chunks that make it up."""

    dtype: str  # "float32", without "torch."
    size: list[Count]  # of the whole tensor
    chunks: list[Chunk]


class Settings(TypedDict):
    """The optimizer's class, and its groups without their tensors."""

    kind: str  # name of the optimizer's class
    groups: list[dict[str, Any]]  # hyper-parameters of each group
    names: list[list[str]]  # of each group's parameters


class Content(TypedDict):
    """The content of the index, without format and checksum."""

    step: Count
    position: dict[str, Any]
    num_ranks: Annotated[int, msgspec.Meta(ge=1)]
    optimizer: Settings | None
    tensors: dict[str, Entry]


def write_index(path: Path, content: dict[str, Any]) -> None:
    """Write `content` and its checksum to the file `path`, and flush it to disk."""
    with open(path, "w") as file:
        json.dump(
            {"format": FORMAT, "crc32": _content_crc32(content), "content": content},
            file,
            allow_nan=False,
        )
        file.flush()
        os.fsync(file.fileno())


def read_index(path: Path) -> dict[str, Any]:
    """Return the content of the index of the checkpoint in the folder `path`.

    Raises CheckpointError if the index is missing or damaged, has another format, or if its chunks
    leave gaps in a tensor, overlap or do not fit into the files. Chunks themselves are not read.
    """
    file = path / INDEX
    try:
        # the index itself: format, checksum, types
        _num_bytes(file)
        sealed = json.loads(file.read_text())
        if sealed["format"] not in (ROWS_FORMAT, FORMAT):
            raise CheckpointError(
                f"it has format {sealed['format']!r}, this code reads {ROWS_FORMAT} and {FORMAT}"
            )
        content = sealed["content"]
        if sealed["crc32"] != _content_crc32(content):
            raise CheckpointError("its checksum is not that of its content")
        if sealed["format"] == ROWS_FORMAT:
            _rows_to_boxes(content)
        msgspec.convert(content, Content)
        for name, entry in content["tensors"].items():
            _check_chunks(path, name, entry)
    except (CheckpointError, msgspec.ValidationError, OSError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}") from None
    return content


def _rows_to_boxes(content: dict[str, Any]) -> None:
    """Rewrite the chunks of ROWS_FORMAT, which have "first" and "rows", in place."""
    for entry in content["tensors"].values():
        for chunk in entry["chunks"]:
            first, rows = chunk.pop("first"), chunk.pop("rows")
            numbers = len(entry["size"]) - 1  # of further dimensions; -1: a number
            chunk["starts"] = [first, *[0] * numbers][: numbers + 1]
            chunk["sizes"] = [rows, *entry["size"][1:]][: numbers + 1]


def _check_chunks(path: Path, name: str, entry: dict[str, Any]) -> None:
    """Raise CheckpointError unless the chunks fill the tensor once, and are within their files."""
    size, itemsize = entry["size"], getattr(torch, entry["dtype"]).itemsize
    boxes: list[list[tuple[int, int]]] = []
    for chunk in entry["chunks"]:
        box = [(start, start + extent) for start, extent in zip(chunk["starts"], chunk["sizes"])]
        is_inside = all(high <= extent for (_, high), extent in zip(box, size))
        if not len(chunk["starts"]) == len(chunk["sizes"]) == len(size) or not is_inside:
            raise CheckpointError(f"a chunk of {name!r} lies outside of its shape {tuple(size)}")
        if any(_overlap(box, other) is not None for other in boxes):
            raise CheckpointError(f"two chunks of {name!r} overlap")
        boxes.append(box)
        is_cut = chunk["start"] + chunk["length"] > _num_bytes(path / chunk["file"])
        if is_cut or chunk["length"] != math.prod(chunk["sizes"]) * itemsize:
            raise CheckpointError(f"{chunk['file']} has not the bytes of {name!r}: it is cut off")
    filled = sum(math.prod(chunk["sizes"]) for chunk in entry["chunks"])
    if filled != math.prod(size):
        raise CheckpointError(
            f"its chunks of {name!r} have {filled} elements, and its shape is {tuple(size)}"
        )


Box = Sequence[tuple[int, int]]  # (first, end) in each dimension


def _overlap(one: Box, other: Box) -> list[tuple[int, int]] | None:
    """Return the box that two boxes have in common; None if there is no element in it."""
    both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other)]
    return both if all(low < high for low, high in both) else None


def _content_crc32(content: Any) -> int:
    """Return the CRC-32 of `content` as JSON with sorted keys."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _num_bytes(path: Path) -> int:
    """Return the size of the file `path`; raise CheckpointError unless it is a regular file.

    Reading a pipe would wait for ever.
    """
    if not path.is_file():
        raise CheckpointError(f"{path.name} is missing or no regular file")
    return path.stat().st_size


# Saving


def save_checkpoint(
    folder: Path | str,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    position: dict[str, Any] | None = None,
    keep: int = 2,
    process_group: Group = None,
) -> Path:
    """Write a checkpoint to `folder`/step-<step>, and return that path; collective.

    Args:
        step: optimizer steps done; equal on all ranks.
        position: the place in the data, a dictionary that JSON can hold; rank 0's is saved.
        keep: all but the newest `keep` checkpoints are removed afterwards.
        process_group: the ranks that save together. None: all ranks.

    An error on one rank is raised on all.

    Raises:
        ValueError: a negative step, `keep` below 1, ranks with different steps, or an optimizer
            with parameters that are not the model's, settings that JSON cannot hold, or a state
            that cannot be sharded.
        TypeError: `step` is not an int, or `position` is not a dictionary that JSON can hold (for
            NaN and infinity ValueError).
        FileExistsError: a checkpoint of this step exists.
        CheckpointError: another process saves into `folder`.
        OSError: the checkpoint cannot be written.
    """
    # all ranks must save the same step
    steps = on_all_ranks(lambda: _checked_step(step, position, keep), process_group)
    for other, its_step in enumerate(steps):
        if its_step != steps[0]:
            raise ValueError(
                f"ranks must save one step, rank 0 saves {steps[0]}, rank {other} saves {its_step}"
            )

    rank, size = _rank_and_size(process_group)
    folder = Path(folder)
    final = folder / f"step-{step:08d}"
    aside = folder / f".{final.name}.partial"
    parts: dict[str, Part] = {}

    def prepare() -> tuple[TrainingState, dict[str, Any]]:
        """Collect the model's parts and the index's content, before anything is written."""
        state = TrainingState(model, optimizer)
        content = {
            "step": step,
            "position": position or {},
            "num_ranks": size,
            "optimizer": state.settings(),
        }
        parts.update(state.model_parts() | _generators(rank))
        # through JSON, as it will be read: keys become strings
        return state, json.loads(json.dumps(content, allow_nan=False))

    def describe() -> dict[Place, int]:
        """Collect the optimizer's parts; return the bytes of all parts by name and place."""
        parts.update(state.optimizer_parts())
        of_all = {name: part for name, part in parts.items() if rank == 0 or not part.is_own}
        return {
            (name, part.starts, tuple(part.tensor.shape)): part.tensor.nbytes
            for name, part in of_all.items()
        }

    with ExitStack() as held, errors_name(folder):
        state, content = together(prepare, process_group)
        on_rank_0(lambda: _claim(held, final, aside), process_group)
        mine = _share_out(on_all_ranks(describe, process_group))[rank]
        written = on_all_ranks(
            lambda: _write(aside / f"rank-{rank}.bin", parts, mine), process_group
        )
        on_rank_0(lambda: _complete(aside, final, content, written, keep), process_group)
    return final


def _checked_step(step: int, position: dict[str, Any] | None, keep: int) -> int:
    """Return `step`; raise TypeError or ValueError if one of the three arguments is bad."""
    if not isinstance(step, int):
        raise TypeError(f"step must be an int, got {step!r}")
    if not isinstance(position, dict | None):
        raise TypeError(f"position must be a dictionary, got {position!r}")
    if step < 0 or keep < 1:
        raise ValueError(f"step must not be negative, and keep at least 1, got {step} and {keep}")
    return step


def _claim(held: ExitStack, final: Path, aside: Path) -> None:
    """Lock the parent of `final`, and make the hidden folder `aside` in it.

    Closing `held` unlocks the parent, and removes `aside` if it is still there. Raises
    FileExistsError if `final` exists, CheckpointError if another process holds the lock.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    held.enter_context(folder_lock(final.parent))
    if final.exists():
        raise FileExistsError(f"{final} exists")
    for left_over in final.parent.glob(".step-*.partial"):  # left by a process that was killed
        shutil.rmtree(left_over)
    aside.mkdir()
    held.callback(shutil.rmtree, aside, ignore_errors=True)


def _share_out(descriptions: list[dict[Place, int]]) -> list[list[str]]:
    """Return the names of the parts that each rank writes, by rank.

    `descriptions` are the ranks' dictionaries from places to bytes. If several ranks have the same
    box, the one with the fewest bytes so far writes it.
    """
    names: list[list[str]] = [[] for _ in descriptions]
    loads = [0] * len(descriptions)
    for key, num_bytes in {
        key: size for sizes in descriptions for key, size in sizes.items()
    }.items():
        writer = min(
            (rank for rank, sizes in enumerate(descriptions) if key in sizes), key=loads.__getitem__
        )
        names[writer].append(key[0])
        loads[writer] += num_bytes
    return names


def _write(
    path: Path, parts: dict[str, Part], names: list[str]
) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Write one chunk for each of `names` into the file `path`, and flush it to disk.

    Returns (name, dtype and size of the whole tensor, chunk) of each, as the index holds them.
    """
    written = []
    with open(path, "xb") as file:
        for name in names:
            tensor, shape, starts = parts[name].tensor, parts[name].shape, parts[name].starts
            data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            chunk = {
                "starts": [*starts] or [0] * len(shape),
                "sizes": [*tensor.shape],
                "file": path.name,
                "start": file.tell(),
            }
            entry = {"dtype": str(tensor.dtype).removeprefix("torch."), "size": [*shape]}
            file.write(data)
            written.append(
                (name, entry, chunk | {"length": data.nbytes, "crc32": zlib.crc32(data)})
            )
        file.flush()
        os.fsync(file.fileno())
    return written


def _complete(
    aside: Path, final: Path, content: dict[str, Any], written: list[list[Any]], keep: int
) -> None:
    """Write the index of all ranks' chunks, rename `aside` to `final`, remove old checkpoints."""
    tensors: dict[str, Any] = {}
    for name, entry, chunk in (one for chunks in written for one in chunks):
        tensors.setdefault(name, {**entry, "chunks": []})["chunks"].append(chunk)
    write_index(aside / INDEX, content | {"tensors": tensors})

    # The rename is atomic: a checkpoint has its name only when it is complete.
    _sync_folder(aside)
    os.rename(aside, final)
    _sync_folder(final.parent)

    # hidden first, so that a half-removed checkpoint is never taken for a complete one
    for old in checkpoints(final.parent)[:-keep]:
        shutil.rmtree(old.rename(final.parent / f".{old.name}.partial"))


# Loading


def load_checkpoint(
    folder: Path | str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    process_group: Group = None,
) -> Progress:
    """Load the newest checkpoint of `folder` into `model` and `optimizer`; return the progress.

    Collective. `folder` may be a checkpoint itself. The number of ranks may differ from that at
    saving: a rank takes the random generators of the rank of its own number, modulo the ranks that
    saved. Raises CheckpointError if there is no checkpoint, or if it is damaged, of another format,
    or of another model or optimizer. Errors in the index are found before anything is loaded; a
    damaged chunk leaves the weights half loaded.
    """

    def find() -> tuple[Path, dict[str, Any], TrainingState]:
        """Return the checkpoint's folder, its index and the state to load into."""
        found = [Path(folder)] if (Path(folder) / INDEX).exists() else checkpoints(folder)
        if not found:
            raise CheckpointError(f"{folder} holds no complete checkpoint")
        return found[-1], read_index(found[-1]), TrainingState(model, optimizer)

    # all ranks must find the same checkpoint
    path, content, state = together(find, process_group)
    seen = on_all_ranks(lambda: (path.name, _content_crc32(content)), process_group)
    for rank, other in enumerate(seen):
        if other != seen[0]:
            names = f"rank 0 finds {seen[0][0]}, rank {rank} {other[0]}"
            raise CheckpointError(
                f"{folder} must be one folder with the same content for all ranks: {names}"
            )

    def prepare() -> dict[str, Part]:
        """Return the parts to read; CheckpointError if model or optimizer is another one."""
        try:
            parts = state.parts_to_load(content["optimizer"], content["tensors"])
        except ValueError as error:
            raise CheckpointError(f"{path} {error}") from None
        return parts

    parts = together(prepare, process_group)
    generators = _generators(_rank_and_size(process_group)[0] % content["num_ranks"])
    generators = {name: part for name, part in generators.items() if name in content["tensors"]}

    def read() -> None:
        """Read this rank's parts, those of the model in place."""
        for name, part in (parts | generators).items():
            _read(path, name, part, content["tensors"][name])

    on_all_ranks(read, process_group)
    together(lambda: state.take(parts, content["optimizer"]), process_group)

    # the random generators last, when all else is loaded
    for name, part in generators.items():
        (torch.cuda.set_rng_state if ".cuda." in name else torch.set_rng_state)(part.tensor)
    return Progress(step=content["step"], position=content["position"])


def _read(path: Path, name: str, part: Part, entry: dict[str, Any]) -> None:
    """Fill `part` from the chunks that overlap with it; raise CheckpointError if one is damaged.

    `path` is the checkpoint's folder, `entry` that of the tensor `name` in the index.
    """
    target, starts = part.tensor.detach(), part.starts or (0,) * part.tensor.ndim
    own = [(start, start + extent) for start, extent in zip(starts, target.shape)]
    for chunk in entry["chunks"]:
        box = [(start, start + extent) for start, extent in zip(chunk["starts"], chunk["sizes"])]
        both = _overlap(own, box)
        if both is None:
            continue

        # the whole chunk is read, since the checksum is that of the chunk
        with open(path / chunk["file"], "rb") as file:
            file.seek(chunk["start"])
            data = bytearray(file.read(chunk["length"]))
        if zlib.crc32(data) != chunk["crc32"]:
            raise CheckpointError(
                f"{path / chunk['file']} is damaged: "
                f"{name!r} at {chunk['starts']} has another checksum"
            )

        # copy what chunk and part have in common
        values = torch.frombuffer(data, dtype=getattr(torch, entry["dtype"]))
        inside, outside = (
            tuple(slice(low - first, high - first) for (low, high), (first, _) in zip(both, whole))
            for whole in (own, box)
        )
        target[inside].copy_(values.view(chunk["sizes"])[outside])


# Small helpers


def _rank_and_size(group: Group) -> tuple[int, int]:
    """Return (rank in `group`, number of ranks); (0, 1) without an initialised process group."""
    return (rank_in(group), num_ranks(group)) if dist.is_initialized() else (0, 1)


def _generators(rank: int) -> dict[str, Part]:
    """Return the states of this process's random generators, under names with `rank`."""
    states = {f"generator.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"generator.cuda.{rank}"] = torch.cuda.get_rng_state()
    return {name: Part(value, tuple(value.shape)) for name, value in states.items()}


def _sync_folder(path: Path) -> None:
    """Flush the folder's entries to disk, so that a rename survives a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
