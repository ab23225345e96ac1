#!/usr/bin/env python3
"""Which version cmake/Version.cmake finds, and which notes tools/release_notes.sh prints of a tag.

    version_test.py CMAKE SOURCE_DIR
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

CMAKE, SOURCE = sys.argv.pop(1), sys.argv.pop(1)


class Version(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        os.mkdir(os.path.join(self.folder, "cmake"))
        for file in ("cmake/commit.txt", ".gitattributes"):
            shutil.copy(os.path.join(SOURCE, file), os.path.join(self.folder, file))
        with open(os.path.join(self.folder, "cmake/commit.txt")) as file:
            if not file.read().startswith("$Format:"):
                self.skipTest("these sources are a tarball's: git has filled in cmake/commit.txt")

    def git(self, *arguments):
        return subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false",
             *arguments], cwd=self.folder, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self, text):
        with open(os.path.join(self.folder, "file"), "w") as file:
            file.write(text)
        self.git("add", ".")
        self.git("commit", "-q", "-m", text)
        return self.git("rev-parse", "HEAD")

    def version(self, folder=None):
        folder = folder or self.folder
        source = os.path.join(self.folder, "version.cc")
        script = os.path.join(SOURCE, "cmake/Version.cmake")
        common = [CMAKE, f"-DSOURCE_DIR={folder}", "-DPROJECT_VERSION=0.1.0",
                  "-DCUDA_VERSION=13.0.1"]
        subprocess.run([*common, f"-DOUTPUT={source}", "-P", script], check=True)
        with open(source) as file:
            version, commit, cuda = re.findall(r'return "([^"]*)"', file.read())
        self.assertEqual(cuda, "13.0.1")
        os.remove(source)
        printed = subprocess.run([*common, "-P", script], check=True, capture_output=True, text=True)
        self.assertEqual(printed.stdout.strip(), version)
        return version, commit

    def test_tags_commits_and_changes(self):
        self.git("init", "-q")
        first = self.commit("1")
        self.assertEqual(self.version(), ("0.1.0", first))
        self.git("tag", "other-tag")
        self.assertEqual(self.version(), ("0.1.0", first))
        self.git("tag", "v0.2.0")
        self.assertEqual(self.version(), ("0.2.0", first))
        self.commit("2")
        third = self.commit("3")
        self.assertEqual(self.version(), (f"0.2.0+2.g{third[:7]}", third))
        with open(os.path.join(self.folder, "file"), "w") as file:
            file.write("changed")
        self.assertEqual(self.version(), (f"0.2.0+2.g{third[:7]}", third + ", changed"))

    def test_a_tarball_knows_its_commit(self):
        self.assertEqual(self.version(), ("0.1.0", "unknown"))
        self.git("init", "-q")
        self.commit("1")
        self.git("tag", "v0.3.0")
        second = self.commit("2")
        with tempfile.TemporaryDirectory() as folder:
            archive = os.path.join(folder, "a.tar")
            self.git("archive", "-o", archive, "HEAD")
            subprocess.run(["tar", "xf", archive, "-C", folder], check=True)
            self.assertEqual(self.version(folder), (f"0.3.0+1.g{second[:7]}", second))


class ReleaseNotes(unittest.TestCase):
    def notes(self, tag, changelog, status=0):
        with tempfile.NamedTemporaryFile("w", suffix=".md") as file:
            file.write(changelog)
            file.flush()
            done = subprocess.run([os.path.join(SOURCE, "tools/release_notes.sh"), tag, file.name],
                                  capture_output=True, text=True)
        self.assertEqual(done.returncode, status, done.stderr)
        return done.stdout

    def test_the_section_of_the_tag(self):
        changelog = ("# Changes\n\n## Unreleased\n\n* new\n\n## [0.2.0] - 2026-11-23\n\n* a\n\n"
                     "### Sub\n\n* b\n\n## v0.1.0\n\n* first\n")
        self.assertEqual(self.notes("v0.2.0", changelog), "* a\n\n### Sub\n\n* b\n")
        self.assertEqual(self.notes("v0.1.0", changelog), "* first\n")
        self.assertEqual(self.notes("v0.2", changelog, status=1), "")


if __name__ == "__main__":
    unittest.main()
