"""Self-contained HTML pages for `quaver memory` and `quaver report`.

`parts/` has the shared frame, style, and the scripts for elements and tables.
"""

from quaver.lab.html.assemble import PageFiles, embed_json, write_page

__all__ = ["PageFiles", "embed_json", "write_page"]
