"""What a check is, and the adapters that it is given.

    @check("fsdp", num_ranks=2)
    def gathers_whole_parameters(adapters, rank, num_ranks):
        \"\"\"`fsdp_gather_full_params` returns every parameter whole, in float32, by its name.\"\"\"
        ...
        assert names == expected, f"the names are {names}, not {expected}"

A check passes when it returns. It fails with the message of its AssertionError, in one line, or with whatever the code
under test raises. The first line of its docstring says what is required.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

TIME_LIMIT_S = 180.0  # a compiled backward takes a minute on a slow host; what hangs costs this once a problem
HUNG = "has not ended"  # the message of such a check begins so


class Skipped(Exception):  # noqa: N818 - a reason, not an error
    """This machine cannot run the check; the message says why."""


class NotImplementedYet(Exception):  # noqa: N818
    """An adapter is missing or raises NotImplementedError."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that a problem requires, or, `beyond` the handout, one that is reported without points."""

    problem: str
    name: str
    function: Callable[..., None]  # (adapters), or (adapters, rank, num_ranks) in every rank of a gloo group
    num_ranks: int = 1
    beyond: bool = False

    @property
    def id(self) -> str:
        return f"{self.problem}.{self.name}"

    @property
    def requires(self) -> str:
        return (self.function.__doc__ or "").partition("\n")[0]


CHECKS: dict[str, Check] = {}


def check(problem: str, name: str = "", *, num_ranks: int = 1, beyond: bool = False) -> Callable[[Any], Any]:
    """Register the decorated function as a check of `problem`, under its own name if no other is given."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        new = Check(
            problem=problem, name=name or function.__name__, function=function, num_ranks=num_ranks, beyond=beyond
        )
        assert new.id not in CHECKS, new.id
        CHECKS[new.id] = new
        return function

    return decorate


class Adapters:
    """The module under test. Its functions are called with keywords only where the course's tests do so."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The result of the adapter `name`; NotImplementedYet where there is none."""
        function = getattr(self.module, name, None)
        if function is None:
            raise NotImplementedYet(f"{name} is missing")
        try:
            return function(*args, **kwargs)
        except NotImplementedError as error:
            raise NotImplementedYet(f"{name} is not implemented") from error
