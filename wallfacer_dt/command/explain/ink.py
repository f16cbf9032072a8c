"""What all panels of the picture share."""

from matplotlib.axes import Axes

INK = "#222222"
FAINT = "#8a8a8a"
# Told apart by colour-blind readers too (Okabe and Ito).
WITHIN, BETWEEN = "#0072B2", "#D55E00"


def tidy(axes: Axes, title: str) -> None:
    """Give a panel its title and plain spines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9, color=FAINT)
    axes.set_title(title, color=INK, loc="left")
