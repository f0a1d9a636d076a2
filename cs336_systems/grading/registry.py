"""What a check is, and the adapters that it is given.

    @check("fsdp", num_ranks=2)
    def gathers_whole_parameters(adapters, rank, num_ranks):
        \"\"\"`fsdp_gather_full_params` returns every parameter whole, by its name.\"\"\"
        ...
        assert names == expected, f"the names are {names}, not {expected}"

A check passes when it returns. It fails with the message of its AssertionError, in one line, or
with whatever the code under test raises. The first paragraph of its docstring says what is
required.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

# A compiled backward takes a minute on a slow host. A hang costs this limit once per problem.
TIME_LIMIT_S = 180.0
HUNG = "has not ended"  # beginning of the message of a check that hangs


class Skipped(Exception):  # noqa: N818 - a reason, not an error
    """Raised if this machine cannot run the check; the message says why."""


class NotImplementedYet(Exception):  # noqa: N818
    """Raised if an adapter is missing or raises NotImplementedError."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One requirement of a problem, or with `beyond` a check that is reported without points."""

    problem: str
    name: str
    # takes (adapters), or (adapters, rank, num_ranks) in every rank of a gloo group
    function: Callable[..., None]
    num_ranks: int = 1
    beyond: bool = False
    needs: str = ""  # id of the check that must pass before this one earns points

    @property
    def id(self) -> str:
        return f"{self.problem}.{self.name}"

    @property
    def requires(self) -> str:
        """Return the first paragraph of the check's docstring as one line."""
        return " ".join(inspect.cleandoc(self.function.__doc__ or "").partition("\n\n")[0].split())


CHECKS: dict[str, Check] = {}


def check(
    problem: str,
    name: str = "",
    *,
    num_ranks: int = 1,
    beyond: bool = False,
    needs: str = "",
) -> Callable[[Any], Any]:
    """Register the decorated function as a check of `problem`, by default under its own name.

    `needs` names a check of the same problem that must pass before this one earns points. An
    optimizer that shards nothing trains like the unsharded one, for example, and must earn nothing
    by that.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        new = Check(
            problem=problem,
            name=name or function.__name__,
            function=function,
            num_ranks=num_ranks,
            beyond=beyond,
            needs=f"{problem}.{needs}" if needs else "",
        )
        assert new.id not in CHECKS, new.id
        CHECKS[new.id] = new
        return function

    return decorate


class Adapters:
    """The functions of the adapters file under test, called by name.

    Keywords are passed only where the course's own tests pass them.
    """

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the adapter `name`; NotImplementedYet if there is none yet.

        AssertionError if an adapter whose name begins with get_ returns None.
        """
        function = getattr(self.module, name, None)
        if function is None:
            raise NotImplementedYet(f"{name} is missing")
        try:
            result = function(*args, **kwargs)
        except NotImplementedError as error:
            raise NotImplementedYet(f"{name} is not implemented") from error
        if result is None and name.startswith("get_"):
            raise AssertionError(f"{name} returns None")
        return result
