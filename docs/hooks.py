"""What MkDocs does not do by itself: formulas without scripts, and pages of the files that the guide links to."""

from __future__ import annotations

import html
import json
import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files, InclusionLevel

if TYPE_CHECKING:
    from collections.abc import Callable

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = "repository"  # the folder of the site that pages of files and folders go to
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sh": "bash", ".sbatch": "bash", ".toml": "toml"}
_WIDE = ("zoo.md", "results.md")  # pages of a table that needs all the width there is
_LONGEST = 200_000  # characters of a file that a page shows


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file or folder outside of docs/ that a page links to, and for those that these link to."""
    waiting = [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    seen = set()
    while waiting:
        place, text = waiting.pop()
        for target in _linked(place, text):
            if target in seen or target.startswith("docs/"):
                continue
            seen.add(target)
            content = _page(target)
            page = File.generated(config, _source(target), content=content)
            page.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(page)
            waiting.append((target, content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links that leave docs/ to the pages that `on_files` made, and those of such pages back."""
    if page.file.src_uri in _WIDE:
        page.meta["hide"] = ["navigation", "toc"]
    place = _place(page.file.src_uri)
    here = posixpath.dirname(page.file.src_uri)

    def redirect(match: re.Match[str]) -> str:
        target = _target(place, match[2])
        if target is None or (place.startswith("docs/") and target.startswith("docs/")):
            return match[0]
        source = target.removeprefix("docs/") if target.startswith("docs/") else _source(target)
        return match[1] + posixpath.relpath(source, here or ".") + match[3]

    return _outside_of_code(markdown, lambda text: _LINK.sub(redirect, text))


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put MathML in the place of TeX."""

    def formula(match: re.Match[str]) -> str:
        display = "block" if match[1] == "div" else "inline"
        made = convert(html.unescape(match[2]).strip(), display=display)
        # Hats and bars sit close upon their letters, and a hat is a circumflex.
        return made.replace("<mover>", '<mover accent="true">').replace("&#x0005E;", "&#x002C6;")

    return _FORMULA.sub(formula, content)


def _place(source: str) -> str:
    """Return the path in the repository of what a page shows."""
    if source.startswith(f"{PAGES}/"):
        shown = source.removeprefix(f"{PAGES}/")
        return shown if (ROOT / shown).is_file() else shown.removesuffix(".md")
    return f"docs/{source}"


def _source(target: str) -> str:
    """Return the path of the page that shows a file or a folder of the repository."""
    return f"{PAGES}/{target}" if target.endswith(".md") else f"{PAGES}/{target}.md"


def _target(place: str, link: str) -> str | None:
    """Return the path in the repository that a link leads to; none if it leads out of it or to nothing."""
    if re.match(r"[a-z]+:", link):
        return None
    folder = place if (ROOT / place).is_dir() else posixpath.dirname(place)
    path = posixpath.normpath(posixpath.join(folder, link))
    return path if (ROOT / path).exists() and not path.startswith("..") else None


def _linked(place: str, text: str) -> list[str]:
    found: list[str] = []

    def collect(part: str) -> str:
        found.extend(match[2] for match in _LINK.finditer(part))
        return part

    _outside_of_code(text, collect)
    return [target for link in found if (target := _target(place, link)) is not None]


def _page(target: str) -> str:
    path = ROOT / target
    if path.is_dir():
        names = sorted(name for name in os.listdir(path) if not name.startswith((".", "__")))
        return f"# {target}\n\n" + "".join(f"* [{name}]({name})\n" for name in names)
    text = path.read_text()
    if path.suffix == ".md":
        return text
    if path.suffix == ".ipynb":
        return _notebook(text)
    shown = text if len(text) < _LONGEST else text[:_LONGEST] + "\n…"
    return f"# {path.name}\n\n`{target}`\n\n````{_LANGUAGES.get(path.suffix, 'text')}\n{shown.rstrip()}\n````\n"


def _notebook(text: str) -> str:
    """Return a notebook as it reads, without what its cells gave."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    return "\n\n".join(source if kind == "markdown" else f"```python\n{source}\n```" for kind, source in cells) + "\n"


def _outside_of_code(text: str, change: Callable[[str], str]) -> str:
    """Apply a function to what is not in a fenced block."""
    parts = re.split(r"(^(?P<fence>`{3,}).*?^(?P=fence)$)", text, flags=re.MULTILINE | re.DOTALL)
    # Each block comes with its fence as a group of its own.
    return "".join(part if index % 3 == 1 else change(part) for index, part in enumerate(parts) if index % 3 != 2)
