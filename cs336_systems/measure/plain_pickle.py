"""Reads a pickle of plain data by an interpreter of our own, which can build nothing but plain data.

    value = read_plain_pickle(path, compact=lambda container: container)

A pickle is a program for a stack machine, and Python's own reader obeys it when it says "import os, call system". This
one knows the instructions for dicts, lists, tuples, strings, numbers, True, False and None, and refuses every other by
name and position before anything of it takes effect. The standard reader is not used underneath, so that there is
nothing to configure wrongly.

It also reads files larger than the memory that their contents would take: the file passes through a window, and each
dict or list, once filled, goes through `compact`, which may return something smaller in its place (a row number, say).
What is small enough to keep is up to `compact`. A byte of file may stand for many bytes of memory (an empty dict, a
reference to an earlier value, a number on the stack), so everything that is kept is counted while the file passes, and
a file that holds more than a snapshot could is refused before it fills the memory. What `compact` keeps it must count
itself; a PlainPickleError that it raises gets the file's name and position.
"""

from __future__ import annotations

import stat
import struct
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, BinaryIO

WINDOW_BYTES = 4 * 2**20
LONGEST_STRING = 2**16  # bytes; the longest path or line of a snapshot is far below
MAX_FILE_BYTES = 4 * 2**30
MAX_RETAINED = 4_000_000  # values kept at one time besides compacted ones, and values on the stack: some 100 MiB each
BYTES_PER_REFERENCE = 16  # of file for each further entry of the memo or of a container; events have 20 and more
MAX_TEXT_BYTES = 2**28  # of different strings in memory, where a character may take four bytes for one in the file
MAX_DEPTH = 64  # of containers in containers, where one has several items
PROTOCOLS = (2, 3, 4, 5)
RECALL = ord("j")  # the instruction of most bytes of a snapshot
USED = -1  # in place of an index: no longer being filled

_SHORT = struct.Struct("<H")
_INT = struct.Struct("<i")
_UNSIGNED = struct.Struct("<I")
_LONG = struct.Struct("<Q")
_FLOAT = struct.Struct(">d")
# What a file may not contain, in the words that tell a reader why.
REFUSED = {
    b"c": "GLOBAL (import a name)", b"\x93": "STACK_GLOBAL (import a name)", b"R": "REDUCE (call a function)",
    b"i": "INST (call a class)", b"o": "OBJ (call a class)", b"\x81": "NEWOBJ (make an object)",
    b"\x92": "NEWOBJ_EX (make an object)", b"b": "BUILD (set an object's state)", b"P": "PERSID (fetch by id)",
    b"Q": "BINPERSID (fetch by id)", b"\x82": "EXT1 (registered class)", b"\x83": "EXT2 (registered class)",
    b"\x84": "EXT4 (registered class)", b"\x97": "NEXT_BUFFER", b"\x98": "READONLY_BUFFER",
}  # fmt: skip


class PlainPickleError(ValueError):
    """The file is no pickle of plain data."""


def read_plain_pickle(
    path: Path, *, compact: Callable[[Any], Any] = lambda container: container, max_bytes: int = MAX_FILE_BYTES
) -> Any:
    """The value pickled in `path`, each filled dict and list replaced by what `compact` returns for it.

    Raises PlainPickleError, a ValueError, with the byte's position, on any instruction that is not about plain data, a
    truncated or malformed file, one larger than `max_bytes`, and one that keeps too many values, nests too deep, or
    holds too long a string. A list that grows further after it was compacted or used is refused, too, and so is a
    `path` that is not a regular file: reading a pipe would wait for ever.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise PlainPickleError(f"{path.name}: not a regular file")
    if found.st_size > max_bytes:
        raise PlainPickleError(f"{path.name}: {found.st_size:,} bytes, more than the {max_bytes:,} that are read")
    with open(path, "rb") as file:
        return _Interpreter(file, path.name, compact).run()


class _Interpreter:
    def __init__(self, file: BinaryIO, name: str, compact: Callable[[Any], Any]) -> None:
        self.file, self.name, self.compact = file, name, compact
        self.window, self.position, self.offset = b"", 0, 0  # offset: of the window's first byte in the file
        self.stack: list[Any] = []
        self.marks: list[int] = []  # lengths of the stack where marks were set
        self.memo: list[Any] = []  # picklers number what they remember from 0 up
        self.memo_of: dict[int, int] = {}  # id of a container in the memo -> its index there, or USED
        self.strings: dict[str, str] = {}  # each text once
        self.retained = 0  # containers, strings and numbers that are kept
        self.references = 0  # entries of containers that are kept
        self.text_bytes = 0  # of the different strings

    def run(self) -> Any:
        if not self._enough(2) or self.window[0] != 0x80:
            raise self._error("it does not begin as a pickle of protocol 2 or later")
        stack, memo = self.stack, self.memo
        while True:
            if len(self.window) - self.position < LONGEST_STRING + 16:
                self._refill()
            window, position = self.window, self.position
            if position + 5 <= len(window) and window[position] == RECALL:
                (index,) = _UNSIGNED.unpack_from(window, position + 1)
                if index < len(memo):
                    value = memo[index]
                    stack.append(value)
                    self.position = position + 5
                    if type(value) is dict or type(value) is list:
                        self.memo_of[id(value)] = USED
                    continue
            opcode = self._take(1)
            if opcode == b".":
                return self._pop()
            step = _STEPS.get(opcode)
            if step is None:
                what = REFUSED.get(opcode, f"unknown instruction {opcode!r}")
                raise self._error(f"{what} is not plain data: refused, and nothing of it was run", back=1)
            step(self)

    # The window

    def _refill(self) -> None:
        self.offset += self.position
        self.window = self.window[self.position :] + self.file.read(WINDOW_BYTES)
        self.position = 0
        if max(self.retained, len(self.stack)) > MAX_RETAINED:
            raise self._error(f"more than {MAX_RETAINED:,} values to keep")
        if len(self.memo) + self.references > MAX_RETAINED + self.offset // BYTES_PER_REFERENCE:
            raise self._error(f"more references than one for {BYTES_PER_REFERENCE} bytes")
        if self.text_bytes > MAX_TEXT_BYTES:
            raise self._error(f"more than {MAX_TEXT_BYTES:,} bytes of different strings")

    def _enough(self, count: int) -> bool:
        if len(self.window) - self.position < count:
            self._refill()
        return len(self.window) - self.position >= count

    def _take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.window):
            raise self._error("it ends in the middle")
        taken = self.window[self.position : end]
        self.position = end
        return taken

    def _error(self, why: str, back: int = 0) -> PlainPickleError:
        return PlainPickleError(f"{self.name}: byte {self.offset + self.position - back:,}: {why}")

    # The stack

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def _pop(self) -> Any:
        if not self.stack or (self.marks and len(self.stack) <= self.marks[-1]):
            raise self._error("the stack is empty where a value is needed")
        return self.stack.pop()

    def _top(self, kind: type) -> Any:
        if not self.stack or not isinstance(self.stack[-1], kind):
            raise self._error(f"items for a {kind.__name__} that is not there, or was complete before")
        return self.stack[-1]

    def _items(self) -> list[Any]:
        if not self.marks:
            raise self._error("items without a mark")
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def keep(self, value: Any) -> None:
        """Push a value that counts against the limit."""
        self.retained += 1
        self.stack.append(value)

    def hold(self, items: Collection[Any]) -> None:
        """Count the entries of a container that stays: a reference each, and a value for each number."""
        self.references += len(items)
        self.retained += sum(type(item) is int or type(item) is float for item in items)

    def filled(self, container: Any, items: Collection[Any]) -> None:
        """The container on top has got `items`: compact it, there and in the memo.

        It is nowhere else: it is in the memo once at most, and was not taken from there. So it is gone when compacted.
        """
        index = self.memo_of.get(id(container))
        if index == USED:
            raise self._error("items for a container that was used before")
        try:
            small = self.compact(container)
        except PlainPickleError as error:
            raise self._error(str(error)) from None
        if small is container:
            self.hold(items)
            return
        self.stack[-1] = small
        self.retained -= 1
        if index is not None:
            del self.memo_of[id(container)]
            self.memo[index] = small

    def remember(self, index: int) -> None:
        if not self.stack:
            raise self._error("nothing to remember")
        value = self.stack[-1]
        if index < len(self.memo):
            raise self._error(f"value {index} is remembered twice")
        if index > len(self.memo):
            raise self._error(f"value {index} is remembered before value {len(self.memo)}")
        if isinstance(value, dict | list):
            if id(value) in self.memo_of:
                raise self._error("a container is remembered twice")
            self.memo_of[id(value)] = index
        self.memo.append(value)

    # The instructions with arguments

    def text(self, count: int) -> None:
        if count > LONGEST_STRING:
            raise self._error(f"a string of {count:,} bytes, more than {LONGEST_STRING:,}")
        try:
            value = str(self._take(count), "utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise self._error("a string is not UTF-8") from error
        known = self.strings.get(value)
        if known is None:
            self.strings[value] = known = value
            self.retained += 1
            self.text_bytes += sys.getsizeof(value)
        self.stack.append(known)

    def long(self, count: int) -> None:
        if count > 255:
            raise self._error(f"an int of {count:,} bytes")
        self.push(int.from_bytes(self._take(count), "little", signed=True))

    def protocol(self) -> None:
        number = self._take(1)[0]
        if number not in PROTOCOLS:
            raise self._error(f"protocol {number}, not one of {', '.join(map(str, PROTOCOLS))}")

    def mark(self) -> None:
        if len(self.marks) >= MAX_DEPTH:
            raise self._error(f"containers nested more than {MAX_DEPTH} deep")
        self.marks.append(len(self.stack))

    def recall(self, index: int) -> None:
        if index >= len(self.memo):
            raise self._error(f"value {index} is used before it is there")
        value = self.memo[index]
        if isinstance(value, dict | list):
            self.memo_of[id(value)] = USED
        self.stack.append(value)

    def append(self) -> None:
        item = self._pop()
        values = self._top(list)
        values.append(item)
        self.filled(values, (item,))

    def appends(self) -> None:
        items = self._items()
        values = self._top(list)
        values.extend(items)
        self.filled(values, items)

    def set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._fill(self._top(dict), [key, value])

    def set_items(self) -> None:
        items = self._items()
        self._fill(self._top(dict), items)

    def _fill(self, values: dict[Any, Any], items: list[Any]) -> None:
        if len(items) % 2:
            raise self._error("a dict's key without its value")
        keys = items[::2]
        if not all(isinstance(key, str | int) for key in keys):
            raise self._error("a dict's key is neither a string nor an int")
        values.update(zip(keys, items[1::2]))
        self.filled(values, items)

    def tuple_of(self, count: int) -> None:
        self._keep_tuple(tuple(reversed([self._pop() for _ in range(count)])))

    def tuple_to_mark(self) -> None:
        self._keep_tuple(tuple(self._items()))

    def _keep_tuple(self, items: tuple[Any, ...]) -> None:
        self.hold(items)
        self.keep(items)

    def drop(self) -> None:
        self._pop()


_STEPS: dict[bytes, Callable[[_Interpreter], Any]] = {
    b"\x80": _Interpreter.protocol,
    b"\x95": lambda self: self._take(8),  # FRAME: a length that only says how much to read at once
    b"}": lambda self: self.keep({}),
    b"]": lambda self: self.keep([]),
    b")": lambda self: self.push(()),
    b"(": _Interpreter.mark,
    b"a": _Interpreter.append,
    b"e": _Interpreter.appends,
    b"s": _Interpreter.set_item,
    b"u": _Interpreter.set_items,
    b"\x85": lambda self: self.tuple_of(1),
    b"\x86": lambda self: self.tuple_of(2),
    b"\x87": lambda self: self.tuple_of(3),
    b"t": _Interpreter.tuple_to_mark,
    b"0": _Interpreter.drop,
    b"N": lambda self: self.push(None),
    b"\x88": lambda self: self.push(True),
    b"\x89": lambda self: self.push(False),
    b"K": lambda self: self.push(self._take(1)[0]),
    b"M": lambda self: self.push(_SHORT.unpack(self._take(2))[0]),
    b"J": lambda self: self.push(_INT.unpack(self._take(4))[0]),
    b"\x8a": lambda self: self.long(self._take(1)[0]),
    b"G": lambda self: self.push(_FLOAT.unpack(self._take(8))[0]),
    b"\x8c": lambda self: self.text(self._take(1)[0]),
    b"X": lambda self: self.text(_UNSIGNED.unpack(self._take(4))[0]),
    b"\x8d": lambda self: self.text(_LONG.unpack(self._take(8))[0]),
    b"\x94": lambda self: self.remember(len(self.memo)),
    b"q": lambda self: self.remember(self._take(1)[0]),
    b"r": lambda self: self.remember(_UNSIGNED.unpack(self._take(4))[0]),
    b"h": lambda self: self.recall(self._take(1)[0]),
    b"j": lambda self: self.recall(_UNSIGNED.unpack(self._take(4))[0]),
}
