"""Write the sample of ``explain``'s output into docs/python-api.md, from the page's own example."""

from __future__ import annotations

import contextlib
import io
import re

from benchmarks.lib.places import DOCS

PAGE = DOCS / "python-api.md"
SAMPLE = re.compile(r"(<!-- explain -->\n```text\n)(.*?)(```\n<!-- /explain -->)", re.DOTALL)


def blocks(page: str) -> list[str]:
    """The Python of the page, in order."""
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def printed(page: str) -> str:
    """What the example of ``explain``, which is the second block, prints."""
    scope: dict[str, object] = {}
    first, second = blocks(page)[:2]
    exec(compile(first, PAGE.name, "exec"), scope)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(second, PAGE.name, "exec"), scope)
    return out.getvalue()


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    said = printed(text)
    PAGE.write_text(SAMPLE.sub(lambda m: m[1] + said.rstrip() + "\n" + m[3], text), encoding="utf-8")
