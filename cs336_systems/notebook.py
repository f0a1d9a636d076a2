"""Functions that the notebooks share: small figures, and checks that answer in one line.

show(figure, "Peak memory by sequence length")    # a third of the size of plt.show()'s PNG
check((split([4, 4], 8), [[1, 0]], "both fit"))   # prints "right", or what is wrong
"""

from io import BytesIO
from pathlib import Path
from typing import Any


def show(figure: Any, description: str) -> None:
    """Display a matplotlib figure as a PNG of 256 colours, and close it.

    Notebook outputs are kept in the repository, so they must be small.
    """
    from matplotlib import pyplot
    from PIL import Image

    drawn = BytesIO()
    figure.savefig(drawn, format="png", bbox_inches="tight")
    pyplot.close(figure)
    # The default method drops rare colours, and a legend's markers are small; this one keeps them.
    method, dither = Image.Quantize.MAXCOVERAGE, Image.Dither.NONE
    _display(Image.open(drawn).convert("RGB").quantize(256, method, dither=dither), description)


def show_published(path: Path, description: str) -> None:
    """Display a figure of the report, the image file `path`, at half its size."""
    from PIL import Image

    drawn = Image.open(path).convert("RGB")
    _display(drawn.resize((drawn.width // 2, drawn.height // 2)).quantize(256), description)


def _display(picture: Any, description: str) -> None:
    """Display a PIL picture as an optimized PNG with `description` as its alternative text."""
    from IPython.display import Image, display

    png = BytesIO()
    picture.save(png, "png", optimize=True)
    display(Image(png.getvalue(), alt=description))


def check(*cases: tuple[Any, Any, str]) -> None:
    """Print "right" if found and expected of each (found, expected, hint) agree.

    Otherwise print the first difference with its hint. Floats, alone or in lists, agree to within
    rounding.
    """
    for found, expected, hint in cases:
        if not _agrees(found, expected):
            print(f"not yet: {found}, but expected {expected}. {hint}")
            return
    print("right")


def _agrees(found: Any, expected: Any) -> bool:
    """Return whether two values agree: floats to within 1e-6 relative, lists element by element."""
    if isinstance(expected, list | tuple):
        return (
            isinstance(found, list | tuple)
            and len(found) == len(expected)
            and all(map(_agrees, found, expected))
        )
    if isinstance(expected, float):
        return isinstance(found, float | int) and abs(found - expected) <= 1e-6 * max(
            1.0, abs(expected)
        )
    return bool(found == expected)
