"""Notebooks from the examples: the docstring and the title of each ``# %%`` cell become text, the rest code.

python tools/notebooks.py            # write examples/*.ipynb
python tools/notebooks.py --check    # fail if one is out of date
python tools/notebooks.py --run      # run each with Jupyter; needs nbclient and ipykernel
"""

import argparse
import ast
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"
SET_UP = """import importlib.util
import os
import sys

if importlib.util.find_spec("mgk") is None:  # on a hosted service
    %pip install --quiet "mgk[train]"
sys.argv = sys.argv[:1]  # the options below keep their defaults
for name in ("CLICOLOR_FORCE", "FORCE_COLOR"):  # which Jupyter sets: a command prints lines here, no moving bar
    os.environ.pop(name, None)"""


def notebook(script: str) -> dict[str, Any]:
    """The notebook of a script in the form of JSON (nbformat 4.5)."""
    docstring = ast.get_docstring(ast.parse(script)) or ""
    title, _, rest = docstring.partition("\n")
    _, *parts = re.split(r"^# %%", script, flags=re.MULTILINE)
    cells = [("markdown", f"# {title.rstrip('.')}\n{rest}".strip()), ("code", SET_UP)]
    for part in parts:
        heading, _, code = part.partition("\n")
        if heading.strip():
            number, sentences = re.fullmatch(r" (\d+\.) (.*)", heading).groups()  # type: ignore[union-attr]
            cells.append(("markdown", f"**{number}** {sentences}"))
        cells.append(("code", code.strip()))
    return {
        "cells": [_cell(number, kind, text) for number, (kind, text) in enumerate(cells)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _cell(number: int, kind: str, text: str) -> dict[str, Any]:
    cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True)}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def text_of(script: Path) -> str:
    """What the notebook file of a script has to hold."""
    return json.dumps(notebook(script.read_text(encoding="utf-8")), indent=1, ensure_ascii=False) + "\n"


def run(file: Path) -> None:
    """Run a notebook in a folder of its own; a cell that raises is an error."""
    import nbformat
    from nbclient import NotebookClient

    found = nbformat.read(file, as_version=4)
    nbformat.validate(found)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(found, timeout=1800, resources={"metadata": {"path": folder}}).execute()
    outputs = [output for cell in found.cells for output in cell.get("outputs", [])]
    print(f"{file.name}: {len(found.cells)} cells, {len(outputs)} outputs", flush=True)


def main() -> None:
    """Write, check or run the notebooks."""
    parser = argparse.ArgumentParser(description="Notebooks from the examples.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if one is out of date")
    parser.add_argument("--run", action="store_true", help="run each notebook")
    options = parser.parse_args()
    old = []
    for script in sorted(EXAMPLES.glob("*.py")):
        file, text = script.with_suffix(".ipynb"), text_of(script)
        if options.check and (not file.is_file() or file.read_text(encoding="utf-8") != text):
            old.append(file.name)
        elif not options.check:
            file.write_text(text, encoding="utf-8")
        if options.run:
            run(file)
    if old:
        sys.exit(f"out of date, run make notebooks: {', '.join(old)}")


if __name__ == "__main__":
    main()
