"""Draws ``docs/images/packages.svg``: the packages of mgk and who imports whom, from the import graph.

``python docs/hooks/package_graph.py`` writes it; a test fails when it is out of date. Layers come from the contract in
``pyproject.toml``, arrows from the imports, those at the top of a module and those inside of functions alike.
"""

import tomllib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "images" / "packages.svg"
WIDTH, BOX, HEIGHT, GAP = 900, 150, 36, 34


def layers() -> list[list[str]]:
    """The packages of each layer, the highest first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    contract = next(item for item in settings["contracts"] if item["name"] == "Layers")
    return [[name.strip() for name in line.split("|")] for line in contract["layers"]]


def imports(packages: Sequence[str]) -> dict[str, list[str]]:
    """The packages that each one imports."""
    graph = grimp.build_graph("mgk", include_external_packages=False, exclude_type_checking_imports=True)
    for package in packages:
        if graph.find_children(f"mgk.{package}"):
            graph.squash_module(f"mgk.{package}")
    found = {name: sorted(graph.find_modules_directly_imported_by(f"mgk.{name}")) for name in packages}
    return {name: [other[4:] for other in others if other[4:] in packages] for name, others in found.items()}


def picture(rows: Sequence[Sequence[str]], arrows: Mapping[str, Sequence[str]]) -> str:
    """The drawing: a box for each package, a line to each one that it imports."""
    places = {}
    for level, row in enumerate(rows):
        for index, name in enumerate(row):
            places[name] = (WIDTH * (index + 1) / (len(row) + 1), level * (HEIGHT + GAP) + HEIGHT)
    height = len(rows) * (HEIGHT + GAP) + HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        "<title>The packages of mgk and their imports</title>",
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    order = list(places)
    for name, others in arrows.items():
        x, y = places[name]
        for other in others:
            to_x, to_y = places[other]
            span = abs(order.index(other) - order.index(name))
            bend = (
                (-1 if (order.index(name) + span) % 2 else 1) * 34 * (span - 1)
            )  # so that long lines pass beside boxes
            middle = (x + to_x) / 2 + bend
            parts.append(
                f'<path d="M{x:.0f} {y + HEIGHT / 2:.0f} Q{middle:.0f} {(y + to_y) / 2:.0f}'
                f' {to_x:.0f} {to_y - HEIGHT / 2:.0f}" fill="none" stroke="#9aa4b5"/>'
            )
    for name, (x, y) in places.items():
        parts += [
            f'<rect x="{x - BOX / 2:.0f}" y="{y - HEIGHT / 2:.0f}" width="{BOX}" height="{HEIGHT}" rx="6"'
            ' fill="#e8ecf6" stroke="#3f51b5"/>',
            f'<text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle" font-size="15">{escape(name)}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def current() -> str:
    """The drawing of the packages as they are."""
    rows = layers()
    return picture(rows, imports([name for row in rows for name in row]))


if __name__ == "__main__":
    PICTURE.write_text(current(), encoding="utf-8")
