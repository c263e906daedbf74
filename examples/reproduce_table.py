"""Measure a table of the paper and set it beside the published numbers.

    python examples/reproduce_table.py                                  # every step on synthetic data, in a minute
    python examples/reproduce_table.py --preset laptop --tasks listops  # an hour or two: short training, real data
    python examples/reproduce_table.py --table table3 --preset paper    # as published; days on a GPU

``mgk reproduce`` is the command; this example calls it and reads what it wrote. A trial is one model on one task with
one seed. Each is measured once and stored, so that a second call goes on where the first was interrupted.
"""

# %%
import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

parser = argparse.ArgumentParser(description="Measure a table of the paper.")
parser.add_argument("--table", default="table1", help="table1 to table4; mgk reproduce --list shows all")
parser.add_argument("--preset", default="smoke", help="smoke, laptop or paper")
parser.add_argument("--tasks", default="listops", help="some of its tasks, separated by commas")
parser.add_argument("--seeds", type=int, help="runs of each model; the preset's number if not given")
parser.add_argument("--out", type=Path, help="folder of the results; a temporary one if not given")
options = parser.parse_args()
folder = options.out or Path(tempfile.mkdtemp(prefix="mgk-"))

# %% 1. The cost: how many trials there are, which of them are done, and how long the others will take here.
command = [sys.executable, "-m", "mgk", "reproduce", options.table, "--preset", options.preset]
command += ["--tasks", options.tasks, "--results", str(folder / "results"), "--runs", str(folder / "runs")]
command += ["--seeds", str(options.seeds)] if options.seeds else []
subprocess.run([*command, "--dry-run"], check=True)

# %% 2. The trials. Each trains a model in a process of its own and stores its test result with the recipe.
subprocess.run(command, check=True)

# %% 3. The table: our numbers, the paper's in brackets, and differences to the baseline with their 95% intervals.
tables = folder / "results" / "tables" / options.preset
print((tables / f"{options.table}.md").read_text(encoding="utf-8"))

# %% 4. The same as data. Every trial has its recipe, versions and machine beside its result.
table = json.loads((tables / f"{options.table}.json").read_text(encoding="utf-8"))
trials = sorted((folder / "results" / "trials" / options.preset).rglob("*.json"))
print(
    f"{table['title']}: {len(table['rows'])} rows from {len(trials)} trials in {folder / 'results' / 'trials'}"
)
