"""Storage of distributed checkpoints in which nothing can run: torch's files of tensors, and an index in JSON.

torch.distributed.checkpoint keeps its index, `.metadata`, as a pickle, which runs what a hostile file asks for. Here it
is `index.json`, checked before it is used; only tensors are kept, and torch reads them with weights_only.
"""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

INDEX = "index.json"
FORMAT = 1
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
}


class CheckpointError(ValueError):
    """A checkpoint is absent, damaged or not ours; the message says which."""


class IndexedWriter(FileSystemWriter):
    """Writes tensors as FileSystemWriter does, and the index as JSON."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for per_rank in results for result in per_rank}
        tensors: dict[str, Any] = {}
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise TypeError(f"a checkpoint holds tensors only, got something else under {name!r}")
            chunks = []
            for chunk in entry.chunks:
                place = places[MetadataIndex(name, chunk.offsets)]
                chunks.append(
                    {
                        "offsets": list(chunk.offsets),
                        "sizes": list(chunk.sizes),
                        "file": place.relative_path,
                        "start": place.offset,
                        "length": place.length,
                    }
                )
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "size": list(entry.size), "chunks": chunks}
        write_json(Path(self.path) / INDEX, {"format": FORMAT, "tensors": tensors})


class IndexedReader(FileSystemReader):
    """Reads what IndexedWriter wrote; CheckpointError on an index that is not sound."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / INDEX
        index = read_json(path)
        bytes_of: dict[str, int] = {}  # files already looked at
        metadata = Metadata(state_dict_metadata={}, storage_data={}, planner_data={})
        try:
            if index["format"] != FORMAT:
                raise CheckpointError(f"it has format {index['format']!r}, this code reads {FORMAT}")
            for name, entry in index["tensors"].items():
                self._add(metadata, str(name), entry, bytes_of)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is no index of a checkpoint ({type(error).__name__}: {error})") from error
        metadata.planner_data = {name: (name,) for name in metadata.state_dict_metadata}
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def _add(self, metadata: Metadata, name: str, entry: dict[str, Any], bytes_of: dict[str, int]) -> None:
        chunks = []
        for chunk in entry["chunks"]:
            file = chunk["file"]
            if not isinstance(file, str) or Path(file).name != file or file[:1] == "." or not file.isprintable():
                raise CheckpointError(f"the index names {file!r}, which is no file of the checkpoint's own folder")
            offsets, sizes = _sizes(chunk["offsets"]), _sizes(chunk["sizes"])
            start, length = _sizes([chunk["start"], chunk["length"]])
            if file not in bytes_of:
                bytes_of[file] = regular_file_bytes(Path(self.path) / file)
            if start + length > bytes_of[file]:
                raise CheckpointError(
                    f"the index has {length} bytes from {start} on in {file} of {name!r}, the file has {bytes_of[file]}"
                )
            chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
            place = _StorageInfo(relative_path=file, offset=start, length=length)
            metadata.storage_data[MetadataIndex(name, offsets)] = place
        size, dtype = _sizes(entry["size"]), DTYPES[entry["dtype"]]
        for chunk in chunks:
            self._check_chunk(name, size, chunk, metadata.storage_data[MetadataIndex(name, chunk.offsets)], dtype)
        parts = {chunk.offsets: math.prod(chunk.sizes) for chunk in chunks if math.prod(chunk.sizes)}
        if sum(parts.values()) != math.prod(size):
            covered = sum(parts.values())
            raise CheckpointError(f"the index has {covered} elements of {name!r}, whose shape is {tuple(size)}")
        metadata.state_dict_metadata[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype), size=size, chunks=chunks
        )

    def _check_chunk(
        self, name: str, size: torch.Size, chunk: ChunkStorageMetadata, place: _StorageInfo, dtype: torch.dtype
    ) -> None:
        """CheckpointError for a part outside of its tensor, or larger than its bytes in the file.

        So nothing is left as it was in silence, and no memory is taken for what is not there.
        """
        offsets, sizes = chunk.offsets, chunk.sizes
        inside = len(offsets) == len(sizes) == len(size) and all(
            offset + length <= whole for offset, length, whole in zip(offsets, sizes, size)
        )
        if not inside:
            raise CheckpointError(
                f"the index has {tuple(sizes)} at {tuple(offsets)} of {name!r}, whose shape is {tuple(size)}"
            )
        if math.prod(sizes) * dtype.itemsize > place.length:
            raise CheckpointError(f"the index has {place.length} bytes for {tuple(sizes)} of {name!r} in {dtype}")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to `path`, on disk when this returns."""
    with open(path, "w") as file:
        json.dump(content, file, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; CheckpointError if there is none."""
    regular_file_bytes(path)
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def regular_file_bytes(path: Path) -> int:
    """The size of `path`; CheckpointError if it is missing, or no regular file: a pipe would be waited on for ever."""
    try:
        found = path.stat()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint is not complete") from None
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is no regular file")
    return found.st_size


def _sizes(values: Any) -> torch.Size:
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise CheckpointError(f"the index has {values!r} where sizes must be")
    return torch.Size(values)
