// The web page at `/`: web/index.html, embedded at build time (tools/embed_page.py).
//
// Both views have static storage duration. Any thread may call.
#pragma once

#include <string_view>

namespace fathom {

// Returns the page in UTF-8; send it as `text/html; charset=utf-8`.
std::string_view page_html();

// Returns the Content-Security-Policy that the page needs: its own script and style by hash,
// requests to the same origin, nothing else.
std::string_view page_csp();

}  // namespace fathom
