#!/usr/bin/env python3
"""Turns web/index.html into a C++ source: the page's text and the policy that it is sent under.

    embed_page.py web/index.html KATEX.js OUTPUT.cc

KaTeX (Debian's libjs-katex) goes where the page has its marker, unless KATEX.js is "". The Content-Security-Policy names the page's one script and one style by the base64 of their SHA-256,
so a browser runs them and nothing else, whatever a model writes.
"""
import base64
import hashlib
import pathlib
import re
import sys

# A string literal longer than this is beyond what compilers promise to take (C++20, annex B).
LITERAL_BYTES = 60_000
KATEX_MARKER = "/*{KaTeX}*/"
KATEX_LICENCE = "/* KaTeX, Copyright (c) 2013-2020 Khan Academy and other contributors, MIT licence. */"


def assemble(html: str, katex: str) -> str:
    """The page as it is sent: with KaTeX's file, if there is one, in its script."""
    if html.count(KATEX_MARKER) != 1:
        sys.exit(f"index.html: wants exactly one {KATEX_MARKER}")
    if not katex:
        return html
    library = pathlib.Path(katex).read_text(encoding="utf-8")
    if re.search(r"</script|<!--", library, re.IGNORECASE):
        sys.exit(f"{katex}: can't stand within a <script>")
    return html.replace(KATEX_MARKER, f"{KATEX_LICENCE}\n{library.strip()}\n")


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
    if element(markup, "script") not in html:
        sys.exit("index.html: the script may not contain a comment of HTML")
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
    """text as adjacent string literals of ASCII: compilers refuse some of KaTeX's characters."""
    escapes = {ord("\\"): "\\\\", ord('"'): '\\"', ord("\n"): "\\n", ord("?"): "\\?"}
    # Three octal digits end an escape whatever follows.
    escaped = [escapes.get(byte) or (chr(byte) if 0x20 <= byte < 0x7F else f"\\{byte:03o}")
               for byte in text.encode()]
    parts = ("".join(escaped[at:at + LITERAL_BYTES]) for at in range(0, len(escaped), LITERAL_BYTES))
    return "\n".join(f'    "{part}"' for part in parts)


def main() -> int:
    page, katex, output = sys.argv[1:]
    html = assemble(pathlib.Path(page).read_text(encoding="utf-8"), katex)
    pathlib.Path(output).write_text(f"""// Written by tools/embed_page.py from web/index.html.
#include "server/page/page.h"

namespace fathom {{

std::string_view page_html() {{
  static constexpr char kHtml[] =
{literals(html)};
  return {{kHtml, sizeof(kHtml) - 1}};
}}

std::string_view page_csp() {{
  return {literals(policy(html))};
}}

}}  // namespace fathom
""", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
