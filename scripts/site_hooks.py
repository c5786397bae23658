"""What mkdocs does for this project beside its configuration: pages from outside docs/, and links.

DESIGN.md, CHANGELOG.md, CONTRIBUTING.md and SECURITY.md stand at the top of the repository and are
pages of the site too. Links to files that are no pages go to the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
FROM_THE_TOP = {
    "DESIGN.md": "design/overview.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "README.md": "index.md",
}
_LINK = re.compile(r"(!?\[[^\]\n]*\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def on_config(config: Any) -> Any:
    """Adds the design notes to the navigation, in their order."""
    names = (path.name for path in (ROOT / "docs" / "design").glob("*.md"))
    notes = sorted(names, key=lambda name: (name != "README.md", name))
    for part in config.nav:
        if "Explanation" in part:
            part["Explanation"].append({"Design notes": [f"design/{name}" for name in notes]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages from the top of the repository."""
    for name, page in FROM_THE_TOP.items():
        if page != "index.md":
            text = (ROOT / name).read_text(encoding="utf-8")
            files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turns links to files of the repository into links to pages, or to the repository."""
    generated = page.file.generated_by is not None
    folder = "" if generated else posixpath.dirname(f"docs/{page.file.src_uri}")

    def told(match: re.Match[str]) -> str:
        before, target, anchor, after = match[1], match[2], match[3] or "", match[4]
        if ":" in target or target.startswith("/"):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        known = FROM_THE_TOP.get(path) or path.removeprefix("docs/")
        is_here = path.startswith("docs/") or path in FROM_THE_TOP
        found = files.get_file_from_path(known) if is_here else None
        if found is not None and not found.inclusion.is_excluded():
            back = posixpath.relpath(known, posixpath.dirname(page.file.src_uri) or ".")
            return f"{before}{back}{anchor}{after}"
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        if not (ROOT / path).exists():
            return match[0]  # mkdocs says that it is not there
        return f"{before}{config.repo_url.rstrip('/')}/{kind}/main/{path}{anchor}{after}"

    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else _LINK.sub(told, part) for part in parts)
