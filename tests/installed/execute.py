"""Executes a notebook: python execute.py NOTEBOOK OUTPUT [times that each cell runs]"""

import copy
import sys

import nbclient
import nbformat

given, made, *times = sys.argv[1:]
notebook = nbformat.read(given, as_version=4)
count = int(times[0]) if times else 1
cells = []
for cell in notebook.cells:
    for number in range(count if cell.cell_type == "code" else 1):
        cells.append(copy.deepcopy(cell))
        cells[-1].id = f"{cell.id}-{number}"
notebook.cells = cells
nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
nbformat.write(notebook, made)
