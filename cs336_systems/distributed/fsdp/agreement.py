"""The check that all ranks gather and reduce the same units in the same order.

Ranks that differ would mix rows of different weights, or wait for each other until the time-out. So
the messages of about the first two steps are compared one by one, before they are sent. From then
on ranks compare a hash of all their messages, once a step. If ranks wait for each other in between,
the transport fails in the end. Each rank then writes an account of its messages into the store,
which works without the other ranks, and the error names the first difference.
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
# messages compared one by one, for each unit: a step sends about three messages a unit
COMPARED_ONE_BY_ONE = 6
REMEMBERED = 10_000  # messages that a rank keeps, to name the first difference
POLL_S = 0.02
# wait for the other ranks' accounts after a failed collective; a launcher soon ends this rank
PATIENCE_S = 1.5
RULE = "all ranks must run the same modules in the same order"

Message = tuple[int, int, int]  # index into ACTIONS, index of the unit, its weights as bits


@dataclass
class Account:
    """A rank's record of the messages that it has sent: how many, and the last ones."""

    num_messages: int
    recent: list[Message]
    is_all: bool  # True if the rank has stopped, so that nothing follows; False while it goes on

    def by_number(self) -> dict[int, Message]:
        """Return the messages in `recent` by their numbers among all messages, from 0."""
        return dict(
            enumerate(
                map(tuple, self.recent),  # type: ignore[arg-type]
                self.num_messages - len(self.recent),
            )
        )


class Agreement:
    """Records the messages of this rank, and compares them with those of the other ranks.

    Put `with agreement:` around a collective: if it fails because ranks have sent different
    messages, a RuntimeError that says so replaces the transport's error.
    """

    # number of the wrapper, in the store's keys: ranks wrap their models in the same order
    _numbers: ClassVar[Any] = count()

    def __init__(
        self,
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.group, self.device = group, device
        self.groups = [group] if replicas is None else [group, replicas]
        # numbers over both: the ranks of a replica are neighbours
        replica, num_replicas = (0, 1) if replicas is None else (replicas.rank(), replicas.size())
        self.rank = replica * group.size() + group.rank()
        self.num_ranks = num_replicas * group.size()
        self.members = range(replica * group.size(), (replica + 1) * group.size())
        self.names: list[str] = []  # of the units
        self._key = f"fsdp {next(self._numbers)}, account of rank"
        self._recent: deque[Message] = deque(maxlen=REMEMBERED)
        self._num_messages = self._digest = 0
        # all ranks' digests, and on a GPU the event after which they may be read
        self._under_way: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._surprised = False  # a unit has run that was not expected
        self._departure: Message | None = None  # this step's first message after a surprise
        self._is_told = False  # an error of the transport has been explained already

    def surprise(self) -> None:
        """Note that this rank runs another unit than in the previous pass; other ranks may not."""
        self._surprised = True

    def send(self, action: str, unit: int, weights: int = 0) -> None:
        """Record a message that all ranks must send now: `action` ("gathers", "reduces") of `unit`.

        `weights` tells by bits which weights of the unit are reduced. In about the first two steps
        it also compares the message with those of the other ranks, and raises RuntimeError naming
        the units if they differ.
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
            # Written now: this message may end another rank, and its end this one.
            with suppress(RuntimeError):  # the store may be gone
                self._write(is_all=False)
        self._surprised = False

    def end_step(self) -> None:
        """Compare all messages so far with the other ranks; raise RuntimeError if they differ.

        On a GPU a difference is raised one step later, since the host does not wait.
        """
        self._departure = None
        if self.num_ranks == 1:
            return
        self._judge()
        self._start_comparing()
        if self.device.type != "cuda":
            self._judge()

    def _start_comparing(self) -> None:
        """Start gathering all ranks' digests; `_judge` reads them."""
        everyone = torch.full((1,), self._digest, dtype=torch.int64, device=self.device)
        with self:
            for group in self.groups:
                own, everyone = everyone, everyone.new_empty(group.size() * everyone.numel())
                all_gather_flat(everyone, own, group)

        # Copied into pinned memory: otherwise the host would wait for the GPU here, in every step.
        event = None
        if self.device.type == "cuda":
            pinned = torch.empty(self.num_ranks, dtype=torch.int64, pin_memory=True)
            everyone = pinned.copy_(everyone, non_blocking=True)
            event = torch.cuda.current_stream(self.device).record_event()
        self._under_way = everyone, event

    def _judge(self) -> None:
        """Read the digests under way, if any; raise RuntimeError if they differ between ranks."""
        if self._under_way is None:
            return
        (everyone, event), self._under_way = self._under_way, None
        if event is not None:
            event.synchronize()
        if len(set(everyone.tolist())) == 1:
            return

        # All ranks come here, since all see the same digests: they can exchange their accounts.
        accounts: list[Any] = [self._account(is_all=True)]
        for group in self.groups:
            lists: list[Any] = [None] * group.size()
            dist.all_gather_object(lists, accounts, group=group)
            accounts = [account for some in lists for account in some]
        difference = self._difference(dict(enumerate(accounts)))
        raise RuntimeError(
            f"{RULE}: {difference or f'they parted more than {REMEMBERED} messages ago'}"
        )

    # After a collective that failed

    def __enter__(self) -> None:
        """Begin a block around a collective."""
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Explain a collective's error: raise RuntimeError from it if ranks sent other messages.

        Otherwise add a note with this rank's last message. What the transport says of a rank that
        does not answer is a RuntimeError in many words. Other errors pass unchanged, and so does a
        lack of memory.
        """
        if self._is_told or not self._recent:
            return
        if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
            return
        self._is_told = True
        if (difference := self._difference(self._exchange())) is not None:
            raise RuntimeError(f"{RULE}: {difference}") from error
        if self._departure is not None:
            raise RuntimeError(
                f"{RULE}: rank {self.rank} {self._words(self._departure)}, "
                "unlike in the step before, "
                "and another rank ended or did not follow"
            ) from error
        last = self._words(self._recent[-1])
        error.add_note(f"Rank {self.rank} waited for others; FSDP's last message there {last}.")

    def _account(self, is_all: bool) -> Account:
        """Return this rank's account; `is_all` says that nothing follows."""
        return Account(self._num_messages, list(self._recent), is_all)

    def _write(self, is_all: bool) -> dist.Store:
        """Write this rank's account into the group's store; return the store."""
        store = self.group.get_group_store()
        store.set(f"{self._key} {self.rank}", json.dumps(asdict(self._account(is_all))))
        return store

    def _exchange(self) -> dict[int, Account]:
        """Write this rank's account, and return all accounts that ranks have written, by rank.

        Waits up to PATIENCE_S for complete accounts, or until a difference is found.
        """
        accounts = {self.rank: self._account(is_all=True)}
        with suppress(RuntimeError):  # the store may be gone
            store, until = self._write(is_all=True), time.monotonic() + PATIENCE_S
            while time.monotonic() < until:
                missing = [
                    one for one in self.members if one not in accounts or not accounts[one].is_all
                ]
                if not missing or self._difference(accounts) is not None:
                    break
                for rank in missing:
                    if store.check([f"{self._key} {rank}"]):
                        accounts[rank] = Account(**json.loads(store.get(f"{self._key} {rank}")))
                time.sleep(POLL_S)
        return accounts

    def _difference(self, accounts: dict[int, Account]) -> str | None:
        """Describe the first message in which another rank differs from this one, or return None.

        `accounts` are those known, by rank.
        """
        own = accounts[self.rank].by_number()
        for rank, account in sorted(accounts.items()):
            other = account.by_number()
            # A complete account also differs by messages that only one of the two ranks has sent.
            known = own.keys() | other.keys() if account.is_all else own.keys() & other.keys()
            begin = max(min(own, default=0), min(other, default=0))
            for number in sorted(number for number in known if number >= begin):
                if own.get(number) != other.get(number):
                    return (
                        f"rank {self.rank} {self._words(own.get(number))}, "
                        f"rank {rank} {self._words(other.get(number))}; "
                        "where that is the same, it is for other weights"
                    )
        return None

    def _words(self, message: Message | None) -> str:
        """Return a message in words, such as "gathers 'layers.0'"."""
        return f"{ACTIONS[message[0]]} {self.names[message[1]]!r}" if message else "nothing more"
