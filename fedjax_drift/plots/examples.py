"""A picture of examples as the model gets them: decoded, and shifted by client and round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data.federated import GivenData
from fedjax_drift.plots.canvas import FilePath, finished, new_figure
from fedjax_drift.plots.style import DEFAULT, AnyStyle
from fedjax_drift.spec import Count, checked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN_CLIENTS = 5
MOST_IMAGES = 600


@checked
def examples(
    data: GivenData,
    clients: Sequence[int | str] | None = None,
    rounds: Sequence[int] = (0,),
    each: Count = 6,
    path: FilePath = None,
    *,
    style: AnyStyle = DEFAULT,
) -> Figure:
    """Plots training images as the model gets them, with their labels. A row is a client.

    All images have the same scale of grey or colour, from the smallest to the largest value.

    Args:
      data: a federation of images [H, W], [H, W, 1] or [H, W, 3], usually one that is shifted
        (`FederatedData.shifted`).
      clients: ids or names. Default: five clients, evenly spaced.
      rounds: the rounds, from left to right.
      each: the number of examples of a client in each round, >= 1: its first ones.
      path: as in `curves`.
      style: only its ``figsize`` has an effect.

    Raises:
      ValueError: the examples are not images, a client or a round is out of range, or there are more than 600 images.
    """
    shape = data.x.shape[1:]
    if len(shape) not in (2, 3) or len(shape) == 3 and shape[2] not in (1, 3):
        checks.refuse("examples needs images [H, W], [H, W, 1] or [H, W, 3]", f"examples of {[*shape]}")
    if clients is None:
        N = data.num_clients
        clients = np.unique(np.linspace(0, N - 1, min(N, SHOWN_CLIENTS)).astype(int)).tolist()
    if not len(clients) or not len(rounds) or len(clients) * len(rounds) * each > MOST_IMAGES:
        checks.refuse(
            f"examples needs 1 to {MOST_IMAGES} images", f"{len(clients)} clients x {len(rounds)} rounds x {each}"
        )
    shown = [[[a[:each] for a in data.examples(client, t)] for t in rounds] for client in clients]
    low, high = (f([f(x) for row in shown for x, _ in row]) for f in (np.min, np.max))
    width, height = (len(rounds) * (each + 0.3), len(clients) * 1.35 + 0.3)
    figure = new_figure(max(3.0, 0.75 * width), max(1.5, 0.75 * height), style)
    parts = figure.subfigures(1, len(rounds), squeeze=False)[0]
    for column, (part, t) in enumerate(zip(parts, rounds, strict=True)):
        if len(rounds) > 1:
            part.suptitle(f"Round {t}")
        for row, axes in enumerate(part.subplots(len(clients), each, squeeze=False)):
            images, labels = shown[row][column]
            for j, ax in enumerate(axes):
                ax.set(xticks=[], yticks=[])
                if j >= len(images):
                    ax.set_axis_off()
                    continue
                ax.imshow((images[j] - low) / (high - low or 1), cmap="gray", vmin=0, vmax=1)
                ax.set_xlabel(labels[j] if labels[j].ndim == 0 else "")
            if column == 0:
                client = clients[row]
                axes[0].set_ylabel(client if isinstance(client, str) else f"client {client}")
    return finished(figure, path)
