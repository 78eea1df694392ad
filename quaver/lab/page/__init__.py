"""Self-contained HTML pages: what the pages of `quaver memory` and `quaver report` share.

`parts/` has the frame of a page, its style, and the script for elements and tables.
"""

from quaver.lab.page.assemble import Parts, embedded_json, write_page

__all__ = ["Parts", "embedded_json", "write_page"]
