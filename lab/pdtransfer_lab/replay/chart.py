"""A picture of a replay: times to the first token and between tokens, as shares of the requests and over time."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from pdtransfer.errors import ConfigError, WorldError

from ..plan.serving_figures import ServingFigures

SUFFIXES = (".png", ".svg", ".pdf")
_BINS = 60  # of the time axis
_BLUE, _RED, _GREEN, _FAINT = "#2f6fdb", "#c2255c", "#168f6a", "#667085"
_STYLE = {
    "svg.hashsalt": "pdtransfer",
    "font.size": 9,
    "axes.grid": True,
    "grid.color": "#dfe3e8",
    "axes.axisbelow": True,
}


def check_chart(path: Path) -> None:
    """Raises ConfigError or WorldError where no chart can be written there: before anything is replayed for it."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"plot = '{path}': must end with {', '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"plot = '{path}': {path.absolute().parent} is not a directory")
    if find_spec("matplotlib") is None:
        raise WorldError("--plot draws with matplotlib, which is not installed: pip install './lab[report]'")


def write_chart(figures: ServingFigures, path: Path, title: str) -> None:
    """Draws it."""
    with import_module("matplotlib").rc_context(_STYLE):
        figure = import_module("matplotlib.figure").Figure(figsize=(10, 6.5), layout="constrained")
        figure.suptitle(title)
        axes = figure.subplots(2, 2)
        slo = figures.slo
        # Copies: a view would keep the figures from growing for as long as the drawing lives.
        at_s, ttft_s = np.array(figures.at_s), np.array(figures.ttft_s)
        _shares(axes[0][0], ttft_s, slo.ttft_s, "time to the first token, s", _BLUE)
        _shares(axes[0][1], 1e3 * np.array(figures.itl_s), _ms(slo.itl_s), "mean time between tokens, ms", _GREEN)
        _over_time(axes[1][0], at_s, ttft_s, slo.ttft_s)
        _rate(axes[1][1], at_s, figures)
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _shares(axes: Any, values: Any, limit: float | None, label: str, colour: str) -> None:
    """Which share of the requests took no longer."""
    if len(values):
        # A million points are one line: a thousand draw the same.
        shares = np.linspace(0, 1, 1_001)
        axes.plot(np.quantile(values, shares), shares, color=colour)
    if limit is not None:
        axes.axvline(limit, color=_RED, linestyle="--", linewidth=1, label="SLO")
        axes.legend(loc="lower right")
    axes.set(xlabel=label, ylabel="share of answered requests", ylim=(0, 1.02))


def _over_time(axes: Any, at_s: Any, ttft_s: Any, limit: float | None) -> None:
    if len(at_s):
        last = max(float(at_s.max()), 1e-9)
        bin_of = np.minimum((at_s * (_BINS / last)).astype(np.int64), _BINS - 1)
        bins = sorted(set(bin_of.tolist()))
        for percent, colour in ((50, _BLUE), (95, _FAINT)):
            values = [float(np.percentile(ttft_s[bin_of == bin_index], percent)) for bin_index in bins]
            axes.plot([bin_index * last / _BINS for bin_index in bins], values, color=colour, label=f"p{percent}")
        axes.legend(loc="upper right")
    if limit is not None:
        axes.axhline(limit, color=_RED, linestyle="--", linewidth=1)
    axes.set(xlabel="time of arrival, s", ylabel="time to the first token, s")


def _rate(axes: Any, at_s: Any, figures: ServingFigures) -> None:
    """Arrivals and ends a second."""
    ends_s = at_s + np.array(figures.total_s)
    if len(at_s):
        last = max(float(ends_s.max()), 1e-9)
        for values, colour, name in ((at_s, _BLUE, "arrive"), (ends_s, _GREEN, "end")):
            counts, edges = np.histogram(values, bins=_BINS, range=(0, last))
            axes.plot(edges[:-1], counts * _BINS / last, color=colour, label=name, linewidth=1)
        axes.legend(loc="upper right")
    axes.set(xlabel="time, s", ylabel="answered requests a second")
