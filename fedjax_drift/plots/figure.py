"""The type of the figures. Only this module of the package imports matplotlib, when the first figure is created."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class Picture(Figure):
    """A figure that a notebook shows without ``%matplotlib inline`` if it is the last expression of a cell.

    pyplot does not know the figure. So the inline backend does not show it a second time.
    """

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()
