"""Draws the sample pictures of ``docs/data.md``: Pathfinder, the connected ones above, the others below."""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from mgk.data.pathfinder import DIFFICULTIES, draw

COLUMNS, ZOOM = 6, 3


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the sample pictures of the documentation.")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="(default: %(default)s)")
    folder = parser.parse_args().out
    for difficulty in DIFFICULTIES:
        block, rows = draw(0, 0, difficulty), []
        for label in (1, 0):
            images = block.images[block.labels == label][:COLUMNS]
            rows.append(np.concatenate([np.pad(image, 1, constant_values=128) for image in images], 1))
        sheet = np.concatenate(rows).repeat(ZOOM, 0).repeat(ZOOM, 1)
        Image.fromarray(sheet).save(folder / f"pathfinder_{difficulty}.png", optimize=True)


if __name__ == "__main__":
    main()
