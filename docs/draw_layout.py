"""Draw docs/layout.svg: the scripts and packages of this project, and which module imports which.

    python docs/draw_layout.py

Every module is a box. Within a package a line leads from a module down to each one that it imports; between packages an
arrow at the right says how many imports there are:

    +- scripts -------------------------+
    |  [train_gpt2.py]  [infer.py]  ... |--.       a band: its title, then rows of boxes
    +-----------------------------------+  | 31    the gutter: arrows with numbers of imports
    +- training/ -----------------------+  |
    |  [resume]  [plan]  ...            |<-'
    |      |        |                   |
    |  [checkpoint]  [step]  ...        |
    +-----------------------------------+

tests/test_structure.py compares the picture with the code.
"""

import ast
from collections import Counter
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "layout.svg"

# The bands of the picture and what each is for, from top to bottom: imports lead down only.
BANDS = {
    "scripts": "what you run",
    "training": "one training run, from its settings to its checkpoints",
    "tokens": "text to shards, shards to batches",
    "model": "the network",
    "system": "the machine, files, the Hub",
}

# Sizes in pixels.
WIDTH, GUTTER, MARGIN = 1000, 150, 16  # of the picture; of the strip for arrows at its right; around everything
BOX_HEIGHT, ROW_STEP, TITLE_HEIGHT, BAND_GAP = 24, 52, 34, 14
CHARACTER_WIDTH = 7.3  # of every character, as the font is monospaced
ARROW_STEP = 17  # from one arrow in the gutter to the next

STYLE = """
  text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #1f2933 }
  .title { font-weight: bold; font-size: 13px } .note { fill: #52606d }
  .band { fill: #f5f7fa; stroke: #cbd2d9 } .box { fill: #ffffff; stroke: #7b8794 }
  .import { stroke: #9aa5b1; fill: none } .between { stroke: #2a6fb0; fill: none; stroke-width: 1.5 }
"""


class Box(NamedTuple):
    """Where a module is drawn: the centre of its upper edge, and its width."""

    x: float
    y: float
    width: float


# ------------------------------------------------------------------------- what is drawn


def find_modules() -> dict[str, Path]:
    """{"training.step": path} of every script and module of a package, and {"model": path}."""
    modules = {path.stem: path for path in ROOT.glob("*.py")}
    for package in BANDS:
        for path in (ROOT / package).glob("*.py"):
            if path.stem != "__init__":
                modules[f"{package}.{path.stem}"] = path
    return dict(sorted(modules.items()))


def band_of(module: str) -> str:
    """The band in which a module is drawn. model.py has a band of its own, as scripts and packages import it."""
    # "training.step" has a dot; the name of a script has none.
    package, dot, _ = module.partition(".")
    if dot or module == "model":
        return package
    return "scripts"


def find_imports(module: str, modules: dict[str, Path]) -> set[str]:
    """The modules of the project that a module imports at its top level. Imports inside of functions are left out, as
    they are not needed to import it."""
    # Visit the statements of the module, and those inside of an `if`. For `from a import b`, note both a and a.b.
    found = set()
    statements = list(ast.parse(modules[module].read_text()).body)
    while statements:
        statement = statements.pop()
        if isinstance(statement, ast.If):  # if TYPE_CHECKING:
            statements += statement.body + statement.orelse
        elif isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            found |= {f"{statement.module}.{alias.name}" for alias in statement.names} | {statement.module}

    # b may be a module of package a, or a name in module a: keep what is a module of the project.
    return found & modules.keys()


def arrange_rows(names: list[str], imports: dict[str, set[str]]) -> list[list[str]]:
    """The modules of a band in rows, each module below all those that import it."""
    # The level of a module is 0 if none of the band imports it, otherwise one below the lowest module that does. Push
    # modules down until nothing moves; that takes no more passes than there are modules in the longest chain.
    level = dict.fromkeys(names, 0)
    for _ in names:
        for name in names:
            for imported in imports[name] & level.keys():
                level[imported] = max(level[imported], level[name] + 1)

    # One row a level, and more where a level is too wide.
    rows = [[name for name in names if level[name] == i] for i in range(max(level.values()) + 1)]
    return [part for row in rows for part in break_row(row)]


def break_row(row: list[str]) -> list[list[str]]:
    """A row, or more of them if its boxes do not fit beside each other."""
    # Start another row whenever the next box would be too much.
    parts = [[]]
    for name in row:
        if sum(box_width(other) + 12 for other in [*parts[-1], name]) > WIDTH - GUTTER - 2 * MARGIN:
            parts.append([])
        parts[-1].append(name)
    return parts


def box_width(module: str) -> float:
    """The width of a module's box: its label, and space at both ends."""
    return CHARACTER_WIDTH * len(label_of(module)) + 16


def label_of(module: str) -> str:
    """A script by the name of its file, a module of a package by its own name."""
    return module.partition(".")[2] or f"{module}.py"


# ------------------------------------------------------------------------- the drawing


def draw() -> str:
    """The picture as SVG."""
    modules = find_modules()
    imports = {name: find_imports(name, modules) for name in modules}

    # Bands from top to bottom: `y` is the upper edge of the next one.
    drawn = []
    boxes = {}  # {module: Box}
    middles = {}  # {band: y}, where arrows between bands begin and end
    y = MARGIN
    for band, purpose in BANDS.items():
        # The height of the band follows from its rows.
        rows = arrange_rows([name for name in modules if band_of(name) == band], imports)
        height = TITLE_HEIGHT + ROW_STEP * (len(rows) - 1) + BOX_HEIGHT + 14
        middles[band] = y + height / 2

        # Its background, its title with what it is for, and the places of its boxes.
        title = {"scripts": "scripts", "model": "model.py"}.get(band, f"{band}/")
        drawn.append(f'<rect class="band" x="{MARGIN}" y="{y}" width="{WIDTH - GUTTER}" height="{height}" rx="6"/>')
        note = f'<tspan class="note" font-weight="normal"> {escape(purpose)}</tspan>'
        drawn.append(f'<text class="title" x="{MARGIN + 12}" y="{y + 21}">{title}{note}</text>')
        for i, row in enumerate(rows):
            boxes |= place_row(row, y + TITLE_HEIGHT + ROW_STEP * i)
        y += height + BAND_GAP

    # Lines within the bands first, so that boxes lie over them; then boxes, then arrows between bands.
    for name, imported_names in imports.items():
        for imported in sorted(imported_names):
            if band_of(imported) == band_of(name):
                drawn.append(draw_import(name, imported, boxes))
    drawn += [draw_box(name, box) for name, box in boxes.items()]
    drawn += draw_between(imports, middles)

    # The SVG document: what is drawn, with the styles and the tip of an arrow that it refers to.
    view = f'viewBox="0 0 {WIDTH + MARGIN} {y}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {view} width="{WIDTH + MARGIN}" height="{y}">'
    background = '<rect width="100%" height="100%" fill="#ffffff"/>'
    arrow = '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    tip = '<path d="M0 0 L8 4 L0 8 z" fill="#2a6fb0"/></marker>'
    defs = f"<style>{STYLE}</style><defs>{arrow}{tip}</defs>"
    return "\n".join([head, defs, background, *drawn, "</svg>\n"])


def place_row(row: list[str], y: float) -> dict[str, Box]:
    """The boxes of a row, evenly spread over the width of the band."""
    # The space before, between and after the boxes.
    widths = [box_width(name) for name in row]
    free_width = WIDTH - GUTTER - sum(widths)
    space = free_width / (len(row) + 1)

    # From left to right: `x` is the left edge of the next box.
    boxes = {}
    x = MARGIN + space
    for name, width in zip(row, widths, strict=True):
        boxes[name] = Box(round(x + width / 2, 1), y, round(width, 1))
        x += width + space
    return boxes


def draw_box(name: str, box: Box) -> str:
    """A rectangle with the label of its module. data-module is what tests/test_structure.py looks for."""
    left = round(box.x - box.width / 2, 1)
    rect = f'<rect class="box" x="{left}" y="{box.y}" width="{box.width}" height="{BOX_HEIGHT}" rx="4"/>'
    text = f'<text x="{box.x}" y="{box.y + 16}" text-anchor="middle">{label_of(name)}</text>'
    return f'<g data-module="{name}">{rect}{text}</g>'


def draw_import(name: str, imported: str, boxes: dict[str, Box]) -> str:
    """A line from the lower edge of a module to the upper edge of one that it imports."""
    # A Bezier curve that leaves and arrives vertically.
    start, end = boxes[name], boxes[imported]
    y1, y2 = start.y + BOX_HEIGHT, end.y
    bend = (y2 - y1) / 2
    curve = f"M{start.x} {y1} C{start.x} {y1 + bend} {end.x} {y2 - bend} {end.x} {y2}"
    return f'<path class="import" data-from="{name}" data-to="{imported}" d="{curve}"/>'


def draw_between(imports: dict[str, set[str]], middles: dict[str, float]) -> list[str]:
    """Arrows at the right: from each band to those that it imports, with the number of imports."""
    # {(band, imported band): number of imports}
    pairs = [(band_of(name), band_of(imported)) for name, found in imports.items() for imported in found]
    counts = Counter((start, end) for start, end in pairs if start != end)

    # From the highest band down, each band's arrows from short to long.
    bands = list(BANDS)
    drawn = []
    edge = MARGIN + WIDTH - GUTTER
    for i, (start, end) in enumerate(sorted(counts, key=lambda pair: [bands.index(band) for band in pair])):
        # Each arrow has a height of its own at both ends, and a vertical line beside that of the arrow before it.
        y1 = round(middles[start] + 6 * bands.index(end) - 8, 1)
        y2 = round(middles[end] + 6 * bands.index(start) - 12, 1)
        x = edge + 10 + ARROW_STEP * (i % 7)

        # Out of the band, down the gutter, and back into the other band; the number stands at the first corner.
        curve = f"M{edge} {y1} H{x} V{y2} H{edge + 2}"
        label = f'<text class="note" x="{x + 3}" y="{y1 - 3}">{counts[start, end]}</text>'
        drawn.append(
            f'<path class="between" marker-end="url(#arrow)" data-from="{start}" data-to="{end}" '
            f'data-count="{counts[start, end]}" d="{curve}"/>{label}'
        )
    return drawn


if __name__ == "__main__":
    PICTURE.write_text(draw())
