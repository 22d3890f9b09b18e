"""Pictures that commands draw, as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import ConfigError, show

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def picture_file(file: Path) -> Path:
    """The file that a picture is written to where a user names `file`: a PNG unless a suffix says otherwise.

    Raises `ConfigError` (param `plot`) for a name that no picture can have."""
    from matplotlib.backend_bases import FigureCanvasBase

    try:
        if not file.name or file.is_dir():
            raise ConfigError(
                f"plot={show(str(file))} is a directory; name a file, e.g. picture.png", param="plot"
            )
    except OSError as error:
        raise _unwritable(file, error) from error
    kinds = FigureCanvasBase.get_supported_filetypes()
    if file.suffix and file.suffix[1:].lower() not in kinds:
        raise ConfigError(
            f"plot={show(str(file))} must end in one of {', '.join(f'.{kind}' for kind in sorted(kinds))}",
            param="plot",
        )
    return file if file.suffix else file.with_name(f"{file.name}.png")


def save_figure(figure: Figure, file: Path) -> Path:
    """Write `figure` to `picture_file(file)`, which is returned, and close it. Raises `ConfigError` if it cannot."""
    from matplotlib import pyplot as plt

    try:
        written = picture_file(file)
        figure.savefig(written, dpi=120)
    except (OSError, ValueError) as error:
        raise _unwritable(file, error) from error
    finally:
        plt.close(figure)
    return written


def _unwritable(file: Path, error: Exception) -> ConfigError:
    return ConfigError(f"plot={show(str(file))} cannot be written: {error}", param="plot")
