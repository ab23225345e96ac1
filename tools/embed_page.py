#!/usr/bin/env python3
"""Turns web/index.html into a C++ source: the page's text and the policy that it is sent under.

    embed_page.py web/index.html OUTPUT.cc

The Content-Security-Policy names the page's one script and one style by the base64 of their SHA-256,
so a browser runs them and nothing else, whatever a model writes.
"""
import base64
import hashlib
import pathlib
import re
import sys

# A string literal longer than this is beyond what compilers promise to take (C++20, annex B).
LITERAL_BYTES = 60_000
DELIMITER = "fathom_page"


def element(html: str, name: str) -> str:
    """The text inside the one <name> element of the page."""
    found = re.findall(rf"<{name}>(.*?)</{name}>", html, re.DOTALL)
    if len(found) != 1 or len(re.findall(rf"<{name}\b", html)) != 1:
        sys.exit(f"index.html: wants exactly one <{name}> without attributes, has {len(found)}")
    return found[0]


def source_hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def policy(html: str) -> str:
    # A comment that speaks of these elements is not one.
    markup = re.sub(r"<!--.*?-->", "", html, flags=re.DOTALL)
    return "; ".join([
        "default-src 'none'",
        f"script-src {source_hash(element(markup, 'script'))}",
        f"style-src {source_hash(element(markup, 'style'))}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ])


def literals(text: str) -> str:
    """text as adjacent raw string literals, cut at line ends."""
    parts, part, size = [], [], 0
    for line in text.splitlines(keepends=True):
        if size + len(line.encode()) > LITERAL_BYTES:
            parts.append("".join(part))
            part, size = [], 0
        part.append(line)
        size += len(line.encode())
    parts.append("".join(part))
    return "\n".join(f'R"{DELIMITER}({part}){DELIMITER}"' for part in parts)


def main() -> int:
    page, output = map(pathlib.Path, sys.argv[1:])
    html = page.read_text(encoding="utf-8")
    if f"){DELIMITER}\"" in html:
        sys.exit(f"index.html: may not contain ){DELIMITER}\"")
    output.write_text(f"""// Written by tools/embed_page.py from web/index.html.
#include "server/page/page.h"

namespace fathom {{

std::string_view page_html() {{
  static constexpr std::string_view kHtml =
{literals(html)};
  return kHtml;
}}

std::string_view page_csp() {{
  return {literals(policy(html))};
}}

}}  // namespace fathom
""", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
