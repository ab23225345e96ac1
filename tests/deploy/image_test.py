#!/usr/bin/env python3
"""The runtime image of deploy/Dockerfile installs every library that the program links.

    image_test.py PROGRAM SOURCE_DIR
"""
import os
import re
import subprocess
import sys

PROGRAM, SOURCE = sys.argv[1:]


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def package_of(library):
    """The Debian package of a file, whichever of its names dpkg knows (/lib is a link to /usr/lib)."""
    for path in (library, os.path.realpath(library), library.removeprefix("/usr")):
        found = subprocess.run(["dpkg-query", "-S", path], capture_output=True, text=True)
        if found.returncode == 0:
            return found.stdout.split(":")[0]
    raise AssertionError(f"no package has {library}")


def with_dependencies(packages):
    known, waiting = set(), list(packages)
    while waiting:
        package = waiting.pop()
        if package in known:
            continue
        known.add(package)
        shown = subprocess.run(["dpkg-query", "-W", "-f", "${Pre-Depends}, ${Depends}\n", package],
                               capture_output=True, text=True)
        waiting += [word.split()[0].split(":")[0]
                    for word in re.split(r"[,|\n]", shown.stdout) if word.strip()]
    return known


with open(os.path.join(SOURCE, "deploy/Dockerfile")) as file:
    runtime = file.read().split("\nFROM ")[-1].replace("\\\n", " ")
installed = re.search(r"--no-install-recommends +([^&]*)&&", runtime).group(1).split()
linked = re.findall(r"=> (/\S+)", output("ldd", PROGRAM))
# A build under a sanitizer links what an image never has.
linked = [path for path in linked if not re.search(r"lib(a|ub|t|l)san\.so", path)]
assert len(linked) > 5, linked
needed = {package_of(path) for path in linked}
missing = needed - with_dependencies(installed)
assert not missing, f"deploy/Dockerfile does not install {sorted(missing)}"
unneeded = set(installed) - needed
assert not unneeded, f"deploy/Dockerfile installs {sorted(unneeded)}, which nothing links"
print(f"{len(linked)} libraries of {len(needed)} packages")
