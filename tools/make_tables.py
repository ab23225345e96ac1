#!/usr/bin/env python3
"""Makes the documents' tables of measured figures from the reports in bench/results.

usage: make_tables.py [--check] [DOCUMENT…]      default: README.md and docs/**/*.md

A document has a table between two lines,

  <!-- table: NAME -->
  <!-- end -->

and bench/tables/NAME.md says what stands there: Markdown in which figures are

  {{ROW}}             the row's median as it is: 470.8
  {{ROW|,.0f}}        by Python's format
  {{ROW*0.001|.2f}}   times a number, first
  {{ROW/ROW|.2f}}     one row, or a number, over another: blanks around, as names have slashes
  {{ROW#spread}}      (largest - smallest) / median of its repeats, in per cent
  {{ROW#repeats}} {{ROW#commit}} {{ROW#date}} {{ROW#device}} {{ROW#driver}} {{ROW#command}}

Rows and their names: tools/gpu_report_rows.py. ROW is a name, or CHIP@NAME for the row of
gpu_report_CHIP.json where several reports have one of that name. The tables of docs/scaling.md are
computed instead, by tools/scaling_tables.py, and those of CPUs by tools/cpu_tables.py; they have no
file in bench/tables. --check changes nothing and fails where
a document is not what the files give, or a table is in no document.
"""

import argparse
import glob
import json
import pathlib
import re
import sys

import cpu_tables
import scaling_tables

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN = re.compile(r"^<!-- table: ([A-Za-z0-9_-]+) -->\n", re.MULTILINE)
END = "<!-- end -->"
COMPUTED = {**scaling_tables.TABLES, **cpu_tables.TABLES}
NUMBER = re.compile(r"[\d.]+")
FIGURE = re.compile(r"\{\{(.+?)\}\}")


class TableError(Exception):
    """Says what is wrong with which file."""


def read_rows(root):
    """All reports' rows as CHIP@NAME, and as NAME those that stand in one report only."""
    rows, files = {}, {}
    for path in sorted(glob.glob(str(root / "bench/results/gpu_report_*.json"))):
        chip = pathlib.Path(path).stem.removeprefix("gpu_report_")
        for name, row in json.loads(pathlib.Path(path).read_text(encoding="utf-8"))["rows"].items():
            rows[f"{chip}@{name}"] = row
            files.setdefault(name, []).append(chip)
    for name, chips in files.items():
        if len(chips) == 1:
            rows[name] = rows[f"{chips[0]}@{name}"]
    return rows


def figure(text, rows):
    body, _, form = text.strip().partition("|")
    body, form = body.strip(), form.strip()

    def row(name):
        name = name.strip()
        if name in rows:
            return rows[name]
        several = sorted(other for other in rows if other.endswith(f"@{name}"))
        raise TableError(f"{name} is one of {', '.join(several)}" if several else f"no row {name}")

    name, mark, field = body.rpartition("#")
    if mark:
        chosen = row(name)
        if field == "spread":
            if "min" not in chosen:
                return "–"
            return f"{100 * (chosen['max'] - chosen['min']) / chosen['value']:.1f} %"
        if field not in ("repeats", "commit", "date", "device", "driver", "command"):
            raise TableError(f"{body}: no field {field}")
        return str(chosen.get(field, "–"))
    if " / " in body:
        above, below = body.split(" / ")
        dividend = float(above) if NUMBER.fullmatch(above) else row(above)["value"]
        value = dividend / row(below)["value"]
    elif "*" in body:
        name, factor = body.rsplit("*", 1)
        value = row(name)["value"] * float(factor)
    else:
        value = row(body)["value"]
    return format(value, form) if form else f"{value:g}"


def table(name, rows, root):
    if name in COMPUTED:
        return COMPUTED[name](root)
    path = root / "bench/tables" / f"{name}.md"
    if not path.exists():
        raise TableError(f"no {path.relative_to(root)}")
    try:
        return FIGURE.sub(lambda match: figure(match.group(1), rows),
                          path.read_text(encoding="utf-8")).rstrip("\n") + "\n"
    except (TableError, ValueError, ZeroDivisionError) as failure:
        raise TableError(f"{path.relative_to(root)}: {failure}") from failure


def rendered(text, rows, root, used):
    """The document with its tables made anew; their names are added to `used`."""
    parts, at = [], 0
    for match in BEGIN.finditer(text):
        end = text.find(END, match.end())
        following = BEGIN.search(text, match.end())
        if end < 0 or (following and following.start() < end):
            raise TableError(f"table {match.group(1)} has no {END}")
        used.append(match.group(1))
        parts += [text[at:match.end()], table(match.group(1), rows, root)]
        at = end
    return "".join(parts) + text[at:]


def run(root, documents, check):
    """The documents that differ from what the files give; writes them unless `check`."""
    rows, used, changed = read_rows(root), [], []
    every = [path for path in (root / "README.md", *sorted((root / "docs").rglob("*.md")))
             if path.exists()]
    for path in documents or every:
        text = path.read_text(encoding="utf-8")
        try:
            new = rendered(text, rows, root, used)
        except TableError as failure:
            raise TableError(f"{path}: {failure}") from failure
        if new != text:
            changed.append(path)
            if not check:
                path.write_text(new, encoding="utf-8")
    if not documents:
        for path in sorted((root / "bench/tables").glob("*.md")):
            if path.stem not in used:
                raise TableError(f"{path.relative_to(root)} is in no document")
        computed = set(COMPUTED)
        if computed & set(used) and computed - set(used):
            raise TableError(f"{min(computed - set(used))} is in no document")
    return changed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--root", type=pathlib.Path, default=ROOT)
    parser.add_argument("documents", nargs="*", type=pathlib.Path)
    flags = parser.parse_args()
    try:
        changed = run(flags.root, flags.documents, flags.check)
    except TableError as failure:
        sys.exit(str(failure))
    for path in changed:
        print(f"{path}: " + ("not what bench/results gives; run tools/make_tables.py"
                             if flags.check else "written"))
    if flags.check and changed:
        sys.exit(1)


if __name__ == "__main__":
    main()
