"""Drawing: escaped SVG text, and axes of time that may change their scale once.

Rule 1: every text and attribute is escaped here, by `Markup.format`; nothing else makes markup.
Rule 2: colours are classes, which the page's style sheet fills in for light, dark and print.
"""

import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ftrun.cli.screen.text import duration

_NARROW, _WIDE = set("ijlftIr.,:;|!'()[]- /\\\u00b7\u2009"), set("mwMW@%\u2026")
_GAP = 18.0
_TICK_PX = 76.0


class Drawing:
    """One picture with a title and a description for screen readers."""

    def __init__(self, width: float, height: float, *, name: str, title: str, about: str) -> None:
        self._size = (width, height)
        self._name = name
        self._parts = [
            Markup('<title id="{0}-t">{1}</title><desc id="{0}-d">{2}</desc>').format(
                name, title, about
            )
        ]

    def rect(
        self, x: float, y: float, width: float, height: float, style: str, tip: str = ""
    ) -> None:
        shape = Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"').format(
            style, _px(x), _px(y), _px(max(width, 0.0)), _px(height)
        )
        tail = Markup("><title>{}</title></rect>").format(tip) if tip else Markup("/>")
        self._parts.append(shape + tail)

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        self._parts.append(
            Markup('<line class="{}" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(
                style, _px(x1), _px(y1), _px(x2), _px(y2)
            )
        )

    def path(self, points: Sequence[tuple[float, float]], style: str) -> None:
        text = "M" + " L".join(f"{_px(x)},{_px(y)}" for x, y in points)
        self._parts.append(Markup('<path class="{}" d="{}"/>').format(style, text))

    def shape(self, outline: str, style: str) -> None:
        """A path that is written already."""
        self._parts.append(Markup('<path class="{}" d="{}"/>').format(style, outline))

    def text(self, x: float, y: float, words: str, style: str = "", anchor: str = "start") -> None:
        self._parts.append(
            Markup('<text class="{}" x="{}" y="{}" text-anchor="{}">{}</text>').format(
                style, _px(x), _px(y), anchor, words
            )
        )

    def markup(self, style_sheet: str = "") -> Markup:
        """`style_sheet` is for a file of its own; a page has one already."""
        width, height = self._size
        style = Markup("<style>{}</style>").format(style_sheet) if style_sheet else Markup("")
        head = Markup(
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" width="{0}" '
            'height="{1}" role="img" aria-labelledby="{2}-t {2}-d">'
        ).format(_px(width), _px(height), self._name)
        return head + style + Markup("").join(self._parts) + Markup("</svg>")


def _px(value: float) -> str:
    return f"{min(max(value, -1e6), 1e6):.1f}".removesuffix(".0")


def width_of(words: str, size: float = 12.0) -> float:
    """In pixels, in a font that runs wide (DejaVu Sans): others need less."""
    return size * sum(_em(one) for one in words)


def _em(one: str) -> float:
    if one in _NARROW:
        return 0.4
    if one in _WIDE or one.isupper():
        return 0.98 if one in _WIDE else 0.74
    return 1.0 if unicodedata.east_asian_width(one) in "WF" else 0.645


def fit(words: str, room: float, size: float = 12.0) -> str:
    if width_of(words, size) <= room:
        return words
    used = width_of("\u2026", size)
    for index, one in enumerate(words):
        used += size * _em(one)
        if used > room:
            return f"{words[:index].rstrip()}\u2026" if index > 2 else ""
    return words


@dataclass(frozen=True, slots=True)
class _Piece:
    begin_s: float
    end_s: float
    left: float
    right: float

    def x(self, t_s: float) -> float:
        part = (t_s - self.begin_s) / (self.end_s - self.begin_s)
        return self.left + min(max(part, 0.0), 1.0) * (self.right - self.left)


class Axis:
    """Seconds to pixels; where one part would be too small to see, in two scales.

    The scale may change at `turn_s`, where a quick part follows a long one.
    """

    def __init__(
        self, begin_s: float, end_s: float, *, left: float, right: float, turn_s: float = 0.0
    ) -> None:
        end_s = max(end_s, begin_s + 1e-6)
        self.is_broken = begin_s < turn_s < end_s and turn_s - begin_s > 4 * (end_s - turn_s)
        self.turn_s = turn_s
        if self.is_broken:
            middle = left + 0.36 * (right - left)
            self._pieces = [
                _Piece(begin_s, turn_s, left, middle - _GAP / 2),
                _Piece(turn_s, end_s, middle + _GAP / 2, right),
            ]
        else:
            self._pieces = [_Piece(begin_s, end_s, left, right)]

    @property
    def gap(self) -> tuple[float, float]:
        """Where the scale changes: from here to there, in pixels."""
        return self._pieces[0].right, self._pieces[-1].left

    def spans(self, begin_s: float, end_s: float) -> list[tuple[float, float]]:
        """The stretches of x that these seconds cover."""
        found = [
            (piece.x(begin_s), piece.x(end_s))
            for piece in self._pieces
            if end_s >= piece.begin_s and begin_s <= piece.end_s
        ]
        real = [(a, b) for a, b in found if b > a]
        return real or found[-1:]

    def draw(self, drawing: Drawing, top: float, bottom: float) -> None:
        for number, piece in enumerate(self._pieces):
            zero_s = self.turn_s if number else 0.0
            for at_s, words in ticks(piece.begin_s - zero_s, piece.end_s - zero_s,
                                     piece.right - piece.left):  # fmt: skip
                x = piece.x(at_s + zero_s)
                is_near_gap = self.is_broken and abs(x - self.gap[1 - number]) < 30 and not number
                drawing.line(x, top, x, bottom, "grid")
                if not is_near_gap:
                    plus = "+" if number and at_s else ""
                    anchor = "start" if number and at_s == 0 else "middle"
                    drawing.text(x, bottom + 15, plus + words, "tick", anchor)
        if self.is_broken:
            left, right = self.gap
            drawing.rect(left, top, right - left, bottom - top, "gap")
            for x in (left, right):
                drawing.line(x, top, x, bottom, "cut")


def ticks(begin: float, end: float, width: float) -> Iterable[tuple[float, str]]:
    if not (math.isfinite(begin) and math.isfinite(end)) or end <= begin:
        return
    step = nice((end - begin) / max(width / _TICK_PX, 1.0), seconds=True)
    first = math.ceil(begin / step - 1e-9)
    for index in range(first, math.floor(end / step + 1e-9) + 1):
        yield index * step, _tick_words(index * step, step)


def _tick_words(value: float, step: float) -> str:
    if value == 0:
        return "0"
    if step >= 1:
        return f"{value:.0f} s" if abs(value) < 120 else duration(value)
    if step < 1e-3:
        return f"{value * 1e3:.3g} ms"
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value * 1000:.0f} ms" if abs(value) < 1 else f"{value:.{digits}f} s"


def nice(least: float, *, seconds: bool = False) -> float:
    """The next round number: 1, 2 or 5 times a power of ten; of minutes and hours beyond that."""
    if least <= 0 or not math.isfinite(least):
        return 1.0
    if seconds and least > 20:
        for unit in (30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200):
            if unit >= least:
                return float(unit)
        return 86400.0 * nice(least / 86400.0)
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * 0.999)
