"""A little SVG: enough for charts of rectangles, lines and words, in colours that follow the reader's light or dark.

Colours are names of PALETTE; each picture brings them as a style sheet of its own, and fetches nothing.
"""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

# Name: light, dark.
PALETTE = {
    "paper": ("#ffffff", "#14171c"),
    "panel": ("#f6f7f9", "#1c2026"),
    "ink": ("#1d2430", "#e8eaee"),
    "faint": ("#667085", "#98a2b3"),
    "rule": ("#dfe3e8", "#323842"),
    "compute": ("#2f6fdb", "#5b93f0"),
    "compute2": ("#7ca6ec", "#3763ad"),
    "push": ("#e07b1a", "#f0963c"),
    "push2": ("#f2b274", "#b86a1e"),
    "launch": ("#a85a10", "#d98a3d"),
    "pick": ("#123a80", "#bcd4ff"),
    "control": ("#8a63c9", "#b39ae6"),
    "landing": ("#c9ced6", "#474e5a"),
    "admission": ("#c2255c", "#f06595"),
    "step": ("#168f6a", "#3ecf9f"),
    "swap-in": ("#0c8599", "#3bc9db"),
    "swap-in2": ("#66c5d3", "#0b7285"),
    "good": ("#168f6a", "#3ecf9f"),
    "bad": ("#c92a2a", "#ff8787"),
}
FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def style() -> str:
    """The style sheet of every picture, and of a page that holds some."""
    light, dark = (";".join(f"--{name}:{pair[at]}" for name, pair in PALETTE.items()) for at in range(2))
    fills = "".join(f".f-{name}{{fill:var(--{name})}}.s-{name}{{stroke:var(--{name})}}" for name in PALETTE)
    return (
        f":root{{color-scheme:light dark;{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f"svg text{{font-family:{FONT};font-size:12px;fill:var(--ink)}}svg .small{{font-size:10.5px}}"
        "svg .title{font-size:15px;font-weight:600}svg .faint{fill:var(--faint)}"
        "svg .on{fill:var(--paper);font-size:9px}"
        f"svg .line{{fill:none;stroke-width:2}}svg .dashed{{stroke-dasharray:5 4}}{fills}"
    )


class Picture:
    """What is drawn, in user units of one pixel; later things lie on earlier ones."""

    def __init__(self, width: float, height: float, *, named: str) -> None:
        self._width, self._height, self._named = width, height, named
        self._parts: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, *, title: str = "", round_: float = 0.0
    ) -> None:
        """`title` is what a reader sees who rests on it."""
        corner = f' rx="{_n(round_)}"' if round_ else ""
        box = f'x="{_n(x)}" y="{_n(y)}" width="{_n(max(width, 0.0))}" height="{_n(height)}"{corner} class="f-{fill}"'
        self._parts.append(f"<rect {box}><title>{escape(title)}</title></rect>" if title else f"<rect {box}/>")

    def line(self, points: list[tuple[float, float]], stroke: str, *, width: float = 1.0, dashed: bool = False) -> None:
        """Through all points."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        kind = f"line s-{stroke}{' dashed' if dashed else ''}"
        self._parts.append(f'<polyline points="{path}" class="{kind}" style="stroke-width:{_n(width)}"/>')

    def dot(self, x: float, y: float, fill: str, *, title: str = "") -> None:
        """A point of a line."""
        self._parts.append(
            f'<circle cx="{_n(x)}" cy="{_n(y)}" r="4" class="f-{fill}"><title>{escape(title)}</title></circle>'
        )

    def text(self, x: float, y: float, words: str, *, kind: str = "", anchor: str = "start") -> None:
        """`kind` is title, small, faint, on (a colour), some of these, or none."""
        self._parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def inline(self) -> str:
        """For a page that has the style sheet."""
        box = f'viewBox="0 0 {_n(self._width)} {_n(self._height)}" width="{_n(self._width)}"'
        label = f'role="img" aria-label={quoteattr(self._named)}'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {box} {label}>{"".join(self._parts)}</svg>'

    def alone(self) -> str:
        """A file of its own, on paper of its own."""
        made = self.inline()
        at = made.index(">") + 1
        paper = f'<rect width="{_n(self._width)}" height="{_n(self._height)}" class="f-paper"/>'
        return f"{made[:at]}<style>{escape(style())}</style>{paper}{made[at:]}\n"


def _n(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")
