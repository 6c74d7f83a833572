"""Whether a picture of the curves could be written."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg

from mirror._src.cli.demo.options import OptionError


def require_writable(file: Path) -> None:
    """Refuses a picture file that could not be written, before anything is trained.

    Raises:
        OptionError: an unknown format, or no such folder.
    """
    known = FigureCanvasAgg.get_supported_filetypes()
    if file.suffix[1:].lower() not in known:
        raise OptionError(
            f"--plot {file}: the name's ending says the format, and {file.name!r} ends in none of "
            f"{', '.join(sorted(known))}. For example --plot {file.with_suffix('.png')}"
        )
    if file.is_dir() or not file.parent.is_dir():
        wrong = file if file.is_dir() else file.parent
        what = "is a folder" if file.is_dir() else "is no folder"
        raise OptionError(f"--plot {file}: {wrong} {what}. Name a file in a folder that exists.")
