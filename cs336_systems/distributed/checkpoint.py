"""Checkpoints of distributed training: atomic, checked, and resumed on any number of ranks.

    save_checkpoint(folder, step, model, optimizer, position={"batch": 130})
    progress = load_checkpoint(folder, model, optimizer)     # the newest; progress.step, progress.position

    folder/step-00000130/rank-0.bin      # chunks of tensors as plain bytes, a file for each rank that wrote some
    folder/step-00000130/index.json      # file, place and CRC-32 of each chunk; settings; the position in the data

torch.distributed.checkpoint plans which rank writes which chunk, and which chunks a rank must read for its rows. The
files are written and read here, because torch's own index is a pickle, and runs what a hostile file asks for. Here
nothing is unpickled, and a byte that changed on disk is found by its checksum.

Phases of saving: aside (all ranks write into a hidden folder), complete (rank 0 adds the index), rename (the folder
gets its name, in one step), remove (old checkpoints are hidden first). A process that is killed, or finds the disk
full, at any point leaves the checkpoints before as they were.

`model` is an FSDP, a plain module, or a wrapper with the plain one in `.module`; `optimizer` is any torch optimizer
over its parameters, a ShardedOptimizer or a Zero1Optimizer. Saved are the state dict, the optimizer's state and
settings, each rank's random generators, the step and the position in the data. A process without a process group saves
and loads alone.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from cs336_systems.distributed.collectives import num_ranks, rank_in
from cs336_systems.distributed.training_state import TrainingState

INDEX = "index.json"
FORMAT = 2
STEP_FOLDER = re.compile(r"step-\d{8,}")
DATA_FILE = re.compile(r"rank-\d+\.bin")


class CheckpointError(ValueError):
    """A checkpoint is absent, damaged, in use or not ours; the message says which."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where training stood."""

    step: int  # optimizer steps done
    position: dict[str, Any]  # in the data: the caller's, as JSON


def checkpoints(folder: Path | str) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""
    return sorted(path for path in Path(folder).glob("step-*") if STEP_FOLDER.fullmatch(path.name))


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold `folder` until the block or the process ends; CheckpointError if somebody else holds it."""
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
    """Let an OSError say where it happened: that of a full disk does not."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


# The index


def write_index(path: Path, content: dict[str, Any]) -> None:
    """Write `content` with its own checksum to `path`, on disk when this returns."""
    with open(path, "w") as file:
        json.dump({"format": FORMAT, "crc32": _content_crc32(content), "content": content}, file, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())


def read_index(path: Path) -> tuple[dict[str, Any], Metadata]:
    """The index of the checkpoint in `path`, as it was written and as torch's planner wants it; or CheckpointError."""
    file = path / INDEX
    metadata = Metadata(state_dict_metadata={}, storage_data={}, planner_data={})
    try:
        _num_bytes(file)
        sealed = json.loads(file.read_text())
        if sealed["format"] != FORMAT:
            raise CheckpointError(f"it has format {sealed['format']!r}, this code reads {FORMAT}")
        content = sealed["content"]
        if sealed["crc32"] != _content_crc32(content):
            raise CheckpointError("its checksum is not that of its content")
        for name, entry in content["tensors"].items():
            size, dtype = torch.Size(entry["size"]), getattr(torch, entry["dtype"])
            elements = sum(math.prod(chunk["sizes"]) for chunk in entry["chunks"])
            if elements != math.prod(size):
                raise CheckpointError(f"it has {elements} elements of {name!r}, whose shape is {tuple(size)}")
            chunks = []
            for chunk in entry["chunks"]:
                if not DATA_FILE.fullmatch(chunk["file"]):
                    raise CheckpointError(f"it names {chunk['file']!r}, which is no file of a checkpoint")
                is_cut = chunk["start"] + chunk["length"] > _num_bytes(path / chunk["file"])
                if is_cut or chunk["length"] != math.prod(chunk["sizes"]) * dtype.itemsize:
                    raise CheckpointError(f"{chunk['file']} has not the bytes of {name!r}: it is cut off")
                chunks.append(ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"])))
                metadata.storage_data[MetadataIndex(name, chunks[-1].offsets)] = chunk
            metadata.state_dict_metadata[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError) as error:
        kind = "" if isinstance(error, CheckpointError | OSError) else f"{type(error).__name__}: "
        raise CheckpointError(f"{file} is damaged: {kind}{error}") from None
    return content, metadata


def _content_crc32(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _num_bytes(path: Path) -> int:
    """CheckpointError unless `path` is a regular file: a pipe would be waited on for ever."""
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
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Write `folder`/step-<step> and remove all but the newest `keep` checkpoints; collective.

    Raises on every rank ValueError for a negative step, keep below 1, a position that is no JSON and an optimizer whose
    state cannot be sharded, FileExistsError where the step is there already, CheckpointError while another process
    saves into `folder`, and OSError where it cannot be written.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"step must not be negative, and keep at least 1, got {step} and {keep}")
    rank, size = _rank_and_size(process_group)
    state = TrainingState(model, optimizer)
    content = {"step": step, "position": position or {}, "num_ranks": size, "optimizer": state.settings()}
    try:
        json.dumps(content, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"position and settings must be JSON, got {position!r} ({error})") from error
    writer = _Writer(Path(folder), content, keep)
    with writer.lock, errors_name(writer.folder):
        tensors = state.model_tensors() | state.optimizer_tensors() | _generators(rank)
        _on_all_ranks(dcp.save, tensors, storage_writer=writer, process_group=process_group)
    return writer.final


class _Writer(dcp.FileSystemWriter):
    """Writes what torch's planner asks for; `prepare_global_plan` and `finish` run on rank 0 alone."""

    def __init__(self, folder: Path, content: dict[str, Any], keep: int) -> None:
        super().__init__(folder)
        self.folder, self.content, self.keep = folder, content, keep
        self.final = folder / f"step-{content['step']:08d}"
        self.aside = folder / f".{self.final.name}.partial"
        self.lock = ExitStack()  # on rank 0: holds the folder, and at its end removes what is still aside

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock.enter_context(folder_lock(self.folder))
        if self.final.exists():
            raise FileExistsError(f"{self.final} exists")
        for left_over in self.folder.glob(".step-*.partial"):  # of a process that was killed
            shutil.rmtree(left_over)
        self.aside.mkdir()
        self.lock.callback(shutil.rmtree, self.aside, ignore_errors=True)
        return [replace(plan, storage_data=f"rank-{rank}.bin") for rank, plan in enumerate(plans)]

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        # aside
        results = []
        with open(self.aside / plan.storage_data, "xb") as file:
            for item in plan.items:
                tensor: Any = planner.resolve_data(item)
                data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                place = {"file": plan.storage_data, "start": file.tell(), "length": data.nbytes}
                place["crc32"] = zlib.crc32(data)
                file.write(data)
                results.append(WriteResult(index=item.index, size_in_bytes=data.nbytes, storage_data=place))
            file.flush()
            os.fsync(file.fileno())
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        # complete
        places = {result.index: result.storage_data for written in results for result in written}
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata), "tensors only"
            chunks = [
                {"offsets": [*chunk.offsets], "sizes": [*chunk.sizes], **places[MetadataIndex(name, chunk.offsets)]}
                for chunk in entry.chunks
            ]
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "size": [*entry.size], "chunks": chunks}
        write_index(self.aside / INDEX, self.content | {"tensors": tensors})
        _sync_folder(self.aside)
        # rename
        os.rename(self.aside, self.final)
        _sync_folder(self.folder)
        # remove
        for old in checkpoints(self.folder)[: -self.keep]:
            shutil.rmtree(old.rename(self.folder / f".{old.name}.partial"))


# Loading


def load_checkpoint(
    folder: Path | str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> Progress:
    """Load the newest checkpoint of `folder` (or `folder` itself, if it is one) in place; collective.

    A rank takes up the random generators of the rank of the same number, modulo the ranks that saved. Raises
    CheckpointError where there is none, or where it is damaged, not ours or of another model or optimizer. What is
    wrong in the index is found before anything is loaded; a damaged chunk leaves the weights half loaded.
    """
    found = [Path(folder)] if (Path(folder) / INDEX).exists() else checkpoints(folder)
    if not found:
        raise CheckpointError(f"{folder} holds no complete checkpoint")
    path = found[-1]
    content, metadata = read_index(path)
    state = TrainingState(model, optimizer)
    try:
        tensors = state.tensors_to_load(content["optimizer"], metadata.state_dict_metadata)
    except ValueError as error:
        raise CheckpointError(f"{path} {error}") from None
    generators = _generators(_rank_and_size(process_group)[0] % content["num_ranks"])
    generators = {name: value for name, value in generators.items() if name in content["tensors"]}
    reader = _Reader(path, metadata)
    _on_all_ranks(dcp.load, tensors | generators, storage_reader=reader, process_group=process_group)
    state.take(tensors, content["optimizer"])
    for name, value in generators.items():
        (torch.cuda.set_rng_state if ".cuda." in name else torch.set_rng_state)(value)
    return Progress(step=content["step"], position=content["position"])


class _Reader(dcp.FileSystemReader):
    """Reads the chunks that torch's planner asks for, each against its checksum."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.folder, self.metadata = folder, metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        for item in plan.items:
            name, place = item.storage_index.fqn, self.metadata.storage_data[item.storage_index]
            path = self.folder / place["file"]
            with open(path, "rb") as file:
                file.seek(place["start"])
                data = bytearray(file.read(place["length"]))
            if zlib.crc32(data) != place["crc32"]:
                raise CheckpointError(f"{path} is damaged: {name!r} at {place['offsets']} has another checksum")
            flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            entry: Any = self.metadata.state_dict_metadata[name]
            chunk = flat.view(entry.properties.dtype).view(place["sizes"])
            rows = tuple(slice(start, start + size) for start, size in zip(item.storage_offsets, item.lengths))
            target = planner.resolve_tensor(item)
            target.copy_(chunk[rows])
            planner.commit_tensor(item, target)
        return _done(None)


# Small helpers


def _on_all_ranks(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Let torch save or load; what one rank raises is raised on all, in place of torch's account of every rank."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a process alone is no mistake
            call(*args, **kwargs)
    except dcp.CheckpointException as failed:
        error = failed.failures[min(failed.failures)][0]
        raise error from (None if isinstance(error, OSError | ValueError) else failed)


def _rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    return (rank_in(group), num_ranks(group)) if dist.is_initialized() else (0, 1)


def _generators(rank: int) -> dict[str, Tensor]:
    """The random generators of this process, under the names of `rank`."""
    states = {f"generator.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"generator.cuda.{rank}"] = torch.cuda.get_rng_state()
    return states


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return future
