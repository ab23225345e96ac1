// The web page at `/`: web/index.html as it stands in the repository, in the program.
//
// The page's text is generated at build time (tools/embed_page.py). Both views are of static
// storage and may be used from every thread.
#pragma once

#include <string_view>

namespace fathom {

// The page, UTF-8; to be sent as `text/html; charset=utf-8`.
std::string_view page_html();

// The value of the Content-Security-Policy header that the page must be sent with: its own script
// and style by their hashes, requests to the same origin, and nothing else.
std::string_view page_csp();

}  // namespace fathom
