"""All ranks gather and reduce the same units in the same order: what compares that, and says where
they parted.

Ranks that part would mix rows of different weights, or wait for each other until the time-out. So
the messages of about two steps are compared one by one, before they are sent, and from then on a
number that stands for all there were, once a step. Where ranks wait for each other in between, the
transport fails in the end: each rank then tells the others through the store, which needs no other
rank, what it was at.
"""

from __future__ import annotations

import json
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.distributed.collectives import all_gather_flat

ACTIONS = ("gathers", "reduces")
COMPARED_ONE_BY_ONE = 6  # times the number of units: a step sends about three messages a unit
REMEMBERED = 10_000  # messages, to name the place where ranks parted
POLL_S = 0.02
# for the other ranks' accounts, after a collective has failed; then a launcher ends this rank
PATIENCE_S = 1.5
RULE = "all ranks must run the same modules in the same order"

Message = tuple[int, int, int]  # place in ACTIONS, place in the names of the units, weights as bits


@dataclass
class Account:
    """What a rank has sent: the number of messages, and the last ones."""

    num_messages: int
    recent: list[Message]
    is_all: bool  # whether nothing follows: written where the rank stopped, not while it went on

    def by_number(self) -> dict[int, Message]:
        """The messages that are known, by their places among all."""
        return dict(enumerate(map(tuple, self.recent), self.num_messages - len(self.recent)))  # type: ignore[arg-type]


class Agreement:
    """What this rank has sent, compared with the others.

    `with agreement:` around a collective replaces the transport's error, where ranks have parted,
    by one that says so.
    """

    _numbers: ClassVar[Any] = count()  # ranks wrap their models in the same order

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.num_ranks = group.rank(), group.size()
        self.names: list[str] = []  # of the units
        self._key = f"fsdp {next(self._numbers)}, account of rank"
        self._recent: deque[Message] = deque(maxlen=REMEMBERED)
        self._num_messages = self._digest = 0
        # all ranks' digests, and when they come
        self._under_way: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._surprised = False
        self._departure: Message | None = None  # in this step
        self._is_told = False

    def surprise(self) -> None:
        """Note that this rank runs other units than in the pass before: the others may not."""
        self._surprised = True

    def send(self, action: str, unit: int, weights: int = 0) -> None:
        """Note a message that all ranks must send now; RuntimeError naming the units where the
        first ones differ.
        """
        if self.num_ranks == 1:
            return
        message = (ACTIONS.index(action), unit, weights)
        self._recent.append(message)
        self._num_messages += 1
        self._digest = hash((self._digest, message))
        if self._num_messages <= COMPARED_ONE_BY_ONE * len(self.names):
            self._start_comparing()
            self._judge()
        elif self._surprised and self._departure is None:
            self._departure = message
            with suppress(RuntimeError):  # of a store that is gone
                # now: what it sends may end another rank, and that this one
                self._write(is_all=False)
        self._surprised = False

    def end_step(self) -> None:
        """Compare all messages so far; RuntimeError as of `send`, on a GPU a step later: the host
        does not wait.
        """
        self._departure = None
        if self.num_ranks == 1:
            return
        self._judge()
        self._start_comparing()
        if self.device.type != "cuda":
            self._judge()

    def _start_comparing(self) -> None:
        own = torch.full((1,), self._digest, dtype=torch.int64, device=self.device)
        everyone = own.new_empty(self.num_ranks)
        with self:
            all_gather_flat(everyone, own, self.group)
        event = None
        # into pinned memory: else the host would wait for the GPU here, in every step
        if self.device.type == "cuda":
            pinned = torch.empty(self.num_ranks, dtype=torch.int64, pin_memory=True)
            everyone = pinned.copy_(everyone, non_blocking=True)
            event = torch.cuda.current_stream(self.device).record_event()
        self._under_way = everyone, event

    def _judge(self) -> None:
        if self._under_way is None:
            return
        (everyone, event), self._under_way = self._under_way, None
        if event is not None:
            event.synchronize()
        if len(set(everyone.tolist())) == 1:
            return
        # all ranks are here, since all see the same digests
        accounts: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(accounts, self._account(is_all=True), group=self.group)
        difference = self._difference(dict(enumerate(accounts)))
        raise RuntimeError(
            f"{RULE}: {difference or f'they parted more than {REMEMBERED} messages ago'}"
        )

    # After a collective that failed

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Raise RuntimeError in place of a transport's error if ranks have parted; else add what
        this rank was at.
        """
        if error is None or self._is_told or not self._recent:
            return
        if not (isinstance(error, dist.DistError) or "gloo/" in str(error)):
            return
        self._is_told = True
        if (difference := self._difference(self._exchange())) is not None:
            raise RuntimeError(f"{RULE}: {difference}") from error
        if self._departure is not None:
            raise RuntimeError(
                f"{RULE}: rank {self.rank} {self._words(self._departure)}, unlike in the step before, "
                "and another rank ended or did not follow"
            ) from error
        last = self._words(self._recent[-1])
        error.add_note(f"Rank {self.rank} waited for others; FSDP's last message there {last}.")

    def _account(self, is_all: bool) -> Account:
        return Account(self._num_messages, list(self._recent), is_all)

    def _write(self, is_all: bool) -> dist.Store:
        store = self.group.get_group_store()
        store.set(f"{self._key} {self.rank}", json.dumps(asdict(self._account(is_all))))
        return store

    def _exchange(self) -> dict[int, Account]:
        """The accounts of the ranks that have written one, by the store."""
        accounts = {self.rank: self._account(is_all=True)}
        with suppress(RuntimeError):  # of a store that is gone
            store, until = self._write(is_all=True), time.monotonic() + PATIENCE_S
            while time.monotonic() < until:
                missing = [
                    one
                    for one in range(self.num_ranks)
                    if one not in accounts or not accounts[one].is_all
                ]
                if not missing or self._difference(accounts) is not None:
                    break
                for rank in missing:
                    if store.check([f"{self._key} {rank}"]):
                        accounts[rank] = Account(**json.loads(store.get(f"{self._key} {rank}")))
                time.sleep(POLL_S)
        return accounts

    def _difference(self, accounts: dict[int, Account]) -> str | None:
        """Words for the first message in which another rank differs from this one; None if none is
        known to.
        """
        own = accounts[self.rank].by_number()
        for rank, account in sorted(accounts.items()):
            other = account.by_number()
            known = own.keys() | other.keys() if account.is_all else own.keys() & other.keys()
            begin = max(min(own, default=0), min(other, default=0))
            for number in sorted(number for number in known if number >= begin):
                if own.get(number) != other.get(number):
                    return (
                        f"rank {self.rank} {self._words(own.get(number))}, "
                        f"rank {rank} {self._words(other.get(number))}; where that is the same, it is for other weights"
                    )
        return None

    def _words(self, message: Message | None) -> str:
        return f"{ACTIONS[message[0]]} {self.names[message[1]]!r}" if message else "nothing more"
