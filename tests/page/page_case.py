"""A test with the page in a browser, and one with the scripted server behind it."""
import argparse
import pathlib
import re
import time
import unittest

from browser import Browser
from scripted_server import ScriptedServer

# page_test.py fills it: the server to click through, the folder for pictures.
ARGUMENTS = argparse.Namespace(server=None, pictures=None)


class PageTest(unittest.TestCase):
    expected_errors = r"$^"  # of the console: a failed request is logged there

    def open(self, url, **options):
        self.page = Browser(url, **options)
        self.addCleanup(self.page.close)
        self.page.wait(lambda: self.page.all(".dot.ready"), "the model's name")

    def tearDown(self):
        bad = [line for line in self.page.console() if not re.search(self.expected_errors, line)]
        self.assertEqual(bad, [], "the console must be silent: no policy violation, no error")

    def picture(self, name):
        if ARGUMENTS.pictures:
            time.sleep(0.4)
            self.page.picture(pathlib.Path(ARGUMENTS.pictures) / name)


class ScriptedTest(PageTest):
    """For what a small model can't be made to show."""

    def setUp(self):
        self.server = ScriptedServer()
        self.addCleanup(self.server.close)
        self.open(self.server.url)
