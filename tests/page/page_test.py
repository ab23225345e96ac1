#!/usr/bin/env python3
"""A click-through of the web page in headless Chromium.

    page_test.py [--server URL] [--pictures FOLDER] [unittest's arguments]

ClickThrough runs against the server at URL (without one, against the scripted server); all others but
Documents always run against the scripted server. --pictures saves what they see. With both, Documents
saves the documents' pictures, page.png and live.png, of a server with the bundled model.
"""
import argparse
import pathlib
import sys
import unittest

from access_test import Access  # noqa: F401
from answers_test import Answers  # noqa: F401
from click_through_test import ClickThrough  # noqa: F401
from conversations_test import Conversations  # noqa: F401
from documents_test import Documents  # noqa: F401
from engine_view_test import EngineView  # noqa: F401
from errors_test import Errors  # noqa: F401
from page_case import ARGUMENTS
from rendering_test import Rendering  # noqa: F401

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--server")
    parser.add_argument("--pictures")
    _, rest = parser.parse_known_args(namespace=ARGUMENTS)
    if ARGUMENTS.pictures:
        pathlib.Path(ARGUMENTS.pictures).mkdir(parents=True, exist_ok=True)
    unittest.main(argv=[sys.argv[0], *rest])
