"""MkDocs hooks that add generated pages, and copies of the repository's files to which pages link.

A page may link to any file in the repository, such as `../launch/README.md`. The link works in the repository and on
the site, which contains a copy of the file under `repository/`.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools.docs import reference

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)]*)?\)")


def target_of(page: str, link: str) -> str:
    """Return the target of a link as a path in the repository. page: the page's path on the site."""
    folder = posixpath.dirname(page.removeprefix("repository/") if page.startswith("repository/") else f"docs/{page}")
    return posixpath.normpath(posixpath.join(folder, link))


def path_in_site(target: str) -> str:
    return target.removeprefix("docs/") if target.startswith("docs/") else f"repository/{target}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, text in reference.PAGES.items():
        files.append(File.generated(config, path, content=text()))
    pending = [file for file in files if file.is_documentation_page()]
    while pending:
        page = pending.pop()
        for _, link, _ in LINK.findall(page.content_string):
            target = target_of(page.src_uri, link)
            path = path_in_site(target)
            if (ROOT / target).is_file() and files.get_file_from_path(path) is None:
                file = File.generated(config, path, content=(ROOT / target).read_text(encoding="utf-8"))
                files.append(file)
                pending += [file] if file.is_documentation_page() else []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links as paths on the site, and remove links to folders."""
    folder = posixpath.dirname(page.file.src_uri)

    def resolve(match: re.Match[str]) -> str:
        text, link, anchor = match.groups("")
        target = target_of(page.file.src_uri, link)
        if (ROOT / target).is_dir():
            return text
        return f"[{text}]({posixpath.relpath(path_in_site(target), folder or '.')}{anchor})"

    return LINK.sub(resolve, markdown)
