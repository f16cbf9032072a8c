"""What all pictures share: their file, and how panels look."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from wallfacer_dt.command.options import OptionError

INK = "#222222"
FAINT = "#8a8a8a"
# Told apart by colour-blind readers too (Okabe and Ito).
WITHIN, BETWEEN = "#0072B2", "#D55E00"


def check_file(path: Path) -> None:
    """Refuse (OptionError) a file that no picture can be, or a folder, beside which matplotlib would write one."""
    if not path.absolute().parent.is_dir():
        raise OptionError(f"--picture: there is no folder {path.parent}")
    if path.is_dir():
        raise OptionError(f"--picture: {path} is a folder; name a file in it")
    formats = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in formats:
        raise OptionError(f"--picture: {path.name} must end in one of {', '.join(sorted(formats))}")


def save(figure: Figure, path: Path) -> None:
    """Write it; OptionError where that cannot be."""
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise OptionError(f"--picture: {error}") from error


def tidy(axes: Axes, title: str) -> None:
    """Give a panel its title and plain spines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9, color=FAINT)
    axes.set_title(title, color=INK, loc="left")
